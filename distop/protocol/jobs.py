"""The records of jobs: who runs one (claim) and how it ended (outcome), as frozen values with their JSON forms.

What a checkpoint is to the attempts that follow: something to go on from, or given up.

Where a job ends without a result, what it left is removed before its end is reported. If that report does not come
through, the next attempt must not go on from what was removed. So its checkpoint is given up before the cleanup, under
the claim's fence: whoever follows cleans up, for which the checkpoint may still be needed, and starts over.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.field_checks import checked
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import MAX_ERROR_TEXT, SCHEMA_VERSION, dumps, loads, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping


MAX_OUTCOME_BYTES = 64 * 1024


class JobState(StrEnum):
    """The states of a job that ended (``<root>.<partition>.state``); until then the key is absent."""

    SUCCESS = "success"
    FAILED = "failed"


ERRORS_TOLD = 5
"""Attempts whose errors a claim tells of: the first, and the last ones."""
ERROR_TOLD = 500
"""Characters of each."""


@frozen
class Tried:
    """What went wrong in one attempt of a job."""

    attempt: int
    executor: str
    text: str

    def to_json(self) -> dict[str, Any]:
        return {"attempt": self.attempt, "executor": self.executor, "text": shorten(self.text, ERROR_TOLD)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tried:
        return checked(cls(int(data.get("attempt", 0)), data.get("executor", ""), data.get("text", "")))


def told(before: tuple[Tried, ...], last: Tried) -> tuple[Tried, ...]:
    """A job's story with one more attempt, bounded: of many attempts the first and the last ones are told."""
    story = (*before, last)
    return story if len(story) <= ERRORS_TOLD else (story[0], *story[len(story) - ERRORS_TOLD + 1 :])


@frozen
class Claim:
    """``distOpClaim…``: who runs a job (``incarnation``, or ``actor``: somebody's own worker loop), or that it waits to
    be claimed again (neither, ``retry_at``). ``failures`` counts unexpected errors and lost holders; the limit counts
    them.
    """

    executor: str
    incarnation: str
    attempt: int
    failures: int
    retry_at: str = ""
    error: str = ""
    """The last unexpected error, for people; bounded by :data:`MAX_ERROR_TEXT`."""
    losses: int = 0
    """How many of the failures were lost executors."""
    tried: tuple[Tried, ...] = ()
    """What went wrong in the attempts before, as :func:`told` bounds it."""
    actor: str = ""
    """Who runs it without being an executor: live while the claim's revision changes within ``duration`` seconds, as
    whoever looks measures them.
    """
    duration: float = 0.0
    grant: str = ""
    """What tells this claim by an actor from all others, also after it was extended."""
    since: str = ""
    """When it was granted by the actor's clock, for people."""
    permit: int = -1
    """The permit that it has, where no more than so many jobs of its operation run at once."""

    @property
    def waiting(self) -> bool:
        """Nobody runs the job; it may be claimed when due."""
        return not self.incarnation and not self.actor

    @property
    def holder(self) -> str:
        """Who runs it, told from all others: an incarnation, or an actor's grant."""
        return self.incarnation or self.grant

    def encode(self) -> bytes:
        data: dict[str, Any] = {"v": SCHEMA_VERSION, "executor": self.executor}
        if self.incarnation:
            data["incarnation"] = self.incarnation
        if self.actor:
            data |= {"actor": self.actor, "duration": self.duration, "grant": self.grant, "since": self.since}
        data["attempt"] = self.attempt
        data["failures"] = self.failures
        if self.retry_at:
            data["retry_at"] = self.retry_at
        if self.error:
            data["error"] = shorten(self.error, MAX_ERROR_TEXT)
        if self.losses:
            data["losses"] = self.losses
        if self.tried:
            data["errors"] = [one.to_json() for one in self.tried]
        if self.permit >= 0:
            data["permit"] = self.permit
        return dumps(data)

    @classmethod
    def decode(cls, value: bytes) -> Claim:
        data = loads(value)
        return checked(
            cls(
                data.get("executor", ""),
                data.get("incarnation", ""),
                int(data.get("attempt", 1)),
                int(data.get("failures", 0)),
                data.get("retry_at", ""),
                data.get("error", ""),
                int(data.get("losses", 0)),
                tuple(map(Tried.from_json, data.get("errors") or ())),
                data.get("actor", ""),
                float(data.get("duration", 0.0)),
                data.get("grant", ""),
                data.get("since", ""),
                int(data.get("permit", -1)),
            )
        )


@frozen
class Outcome:
    """``<root>.<partition>.outcome``: how a job ended."""

    name: str
    executor: str
    incarnation: str
    attempt: int
    started: str
    finished: str
    result: Any = None
    error: str = ""
    tried: tuple[Tried, ...] = ()
    """Of a job that failed after several attempts: what went wrong in each."""
    grant: str = ""
    """Of a job that an actor returned: its claim's. One that is written for an actor that is gone has none."""
    fence: int = 0
    """Of the attempt that an executor has run: with the incarnation it tells where that attempt staged its output."""

    @property
    def holder(self) -> str:
        """As :attr:`Claim.holder`."""
        return self.incarnation or self.grant

    def encode(self) -> bytes:
        """JSON of at most :data:`MAX_OUTCOME_BYTES`; raises InvalidArgument where the result is too large."""
        data: dict[str, Any] = {
            "v": SCHEMA_VERSION,
            "name": self.name,
            "executor": self.executor,
            "incarnation": self.incarnation,
            "attempt": self.attempt,
            "started": self.started,
            "finished": self.finished,
        }
        if self.result is not None:
            data["result"] = self.result
        if self.error:
            data["error"] = shorten(self.error, MAX_ERROR_TEXT)
        if self.grant:
            data["grant"] = self.grant
        if self.fence:
            data["fence"] = self.fence
        value = dumps({**data, "errors": [one.to_json() for one in self.tried]} if self.tried else data)
        if len(value) > MAX_OUTCOME_BYTES and self.tried:
            value = dumps(data)  # the result is worth more
        if len(value) > MAX_OUTCOME_BYTES:
            raise InvalidArgument(
                f"the outcome of partition {self.name} has {len(value)} bytes; at most {MAX_OUTCOME_BYTES} are kept: "
                "put large results into a file and return its path"
            )
        return value

    @classmethod
    def decode(cls, value: bytes) -> Outcome:
        data = loads(value)
        return checked(
            cls(
                data.get("name", ""),
                data.get("executor", ""),
                data.get("incarnation", ""),
                int(data.get("attempt", 1)),
                data.get("started", ""),
                data.get("finished", ""),
                data.get("result"),
                data.get("error", ""),
                tuple(map(Tried.from_json, data.get("errors") or ())),
                data.get("grant", ""),
                int(data.get("fence", 0)),
            )
        )


_GIVEN_UP = "distop:given_up"
MAX_BYTES = MAX_OUTCOME_BYTES
"""Of a checkpoint as its author saves it, in JSON."""
MARGIN = 64
"""Bytes that one takes more when it is given up."""


def given_up(checkpoint: Any) -> dict[str, Any]:
    """The checkpoint (any JSON value) as it is stored from then on."""
    return {_GIVEN_UP: for_cleanup(checkpoint)}


def for_cleanup(stored: Any) -> Any:
    """What a cleanup gets: what was saved last, given up or not."""
    return stored[_GIVEN_UP] if _is_given_up(stored) else stored


def to_go_on_from(stored: Any) -> Any:
    """What an attempt goes on from; None: it starts over."""
    return None if _is_given_up(stored) else stored


def _is_given_up(stored: Any) -> bool:
    return isinstance(stored, dict) and stored.keys() == {_GIVEN_UP}

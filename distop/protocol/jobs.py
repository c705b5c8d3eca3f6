"""The records of jobs: claims, outcomes and checkpoints, with their JSON forms.

If a job ends without a result, its output is removed before the end is reported. If that report fails, the next attempt
must not continue from what was removed. So the checkpoint is given up before the cleanup, under the claim's fence. The
next attempt cleans up, for which it may need the checkpoint, and starts over.
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


MOST_ERRORS = 5
"""Maximum number of attempts whose errors a claim lists: the first, and the last ones."""
LONGEST_ERROR = 500
"""Maximum characters of each of these errors."""


@frozen
class Tried:
    """The error of one attempt of a job."""

    attempt: int
    executor: str
    text: str

    def to_json(self) -> dict[str, Any]:
        return {"attempt": self.attempt, "executor": self.executor, "text": shorten(self.text, LONGEST_ERROR)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tried:
        return checked(cls(int(data.get("attempt", 0)), data.get("executor", ""), data.get("text", "")))


def bounded_errors(before: tuple[Tried, ...], last: Tried) -> tuple[Tried, ...]:
    """The errors of a job with one more: the first, and the last few."""
    errors = (*before, last)
    return errors if len(errors) <= MOST_ERRORS else (errors[0], *errors[len(errors) - MOST_ERRORS + 1 :])


@frozen
class Claim:
    """``distOpClaim…``: who runs a job, or that it waits to be claimed again.

    The holder is an ``incarnation``, or an ``actor`` (a user's own worker loop). A waiting claim has neither, and
    ``retry_at``. ``failures`` counts unexpected errors and lost holders, for the limit of attempts.
    """

    executor: str
    incarnation: str
    attempt: int
    failures: int
    retry_at: str = ""
    error: str = ""
    """The last unexpected error, for people; at most :data:`MAX_ERROR_TEXT` characters."""
    losses: int = 0
    """The failures that were lost executors."""
    tried: tuple[Tried, ...] = ()
    """The errors of former attempts, bounded by :func:`bounded_errors`."""
    actor: str = ""
    """The holder, if it is not an executor.

    Its claim is live while its revision changes within ``duration`` seconds, measured by the observer.
    """
    duration: float = 0.0
    grant: str = ""
    """Identifies this claim of an actor, also after extensions."""
    since: str = ""
    """When it was granted, by the actor's clock, for people."""
    permit: int = -1
    """Its permit, if the number of the operation's running jobs is limited; -1: none."""

    @property
    def waiting(self) -> bool:
        """No one runs the job; it may be claimed when it is due."""
        return not self.incarnation and not self.actor

    @property
    def holder(self) -> str:
        """The identity of the holder: an incarnation, or an actor's grant."""
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
    """The error of each attempt, for a job that failed after several attempts."""
    grant: str = ""
    """The grant of the claim, for a job that an actor returned; "" if written on behalf of a lost actor."""
    fence: int = 0
    """The fence of an executor's attempt. With the incarnation it identifies the attempt's staged output."""

    @property
    def holder(self) -> str:
        """As :attr:`Claim.holder`."""
        return self.incarnation or self.grant

    def encode(self) -> bytes:
        """JSON of at most :data:`MAX_OUTCOME_BYTES`. Raises InvalidArgument if the result is too large."""
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
            value = dumps(data)  # the result is more important than former errors
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
"""Maximum bytes of a checkpoint as saved, in JSON."""
MARGIN = 64
"""Additional bytes of a checkpoint that is given up."""


def given_up(checkpoint: Any) -> dict[str, Any]:
    """A checkpoint (any JSON value) in the form that is stored once it is given up."""
    return {_GIVEN_UP: for_cleanup(checkpoint)}


def for_cleanup(stored: Any) -> Any:
    """The last saved checkpoint for a cleanup, given up or not."""
    return stored[_GIVEN_UP] if _is_given_up(stored) else stored


def to_go_on_from(stored: Any) -> Any:
    """The checkpoint that an attempt continues from; None: it starts over."""
    return None if _is_given_up(stored) else stored


def _is_given_up(stored: Any) -> bool:
    return isinstance(stored, dict) and stored.keys() == {_GIVEN_UP}

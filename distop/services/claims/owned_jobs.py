"""What :meth:`Client.own_jobs` gives, and what is handed back with :meth:`Client.return_job`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, TypeAlias

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import MAX_ERROR_TEXT, loads, shorten
from distop.protocol.keys import check_type_name
from distop.protocol.texts import check_encodable, shown
from distop.schemas.argument_schema import encode_argument
from distop.storage.result_files import check_no_pointer

LONGEST_DURATION = 30 * 86_400.0
SHORTEST_DURATION = 0.1
"""Seconds."""


@frozen
class OfferedJob:
    """A job that could be claimed. ``op``: its operation, ``table/type[/object]/instance``."""

    op: str
    type: str
    table: str
    object: str
    """"" where the type has no objects."""
    partition: str
    """The partition's name; ``all`` for an operation on ``@cluster``."""
    ordinal: int
    arg: Any
    attempt: int
    """Which attempt this is, or would be: from 1."""
    failures: int
    """How many of those before broke, or were lost; the limit counts them."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The partition as it was planned, with its files."""


@frozen
class OwnedJob(OfferedJob):
    """A job that was claimed. Whoever shows the ``token`` may extend and return it, from any process."""

    token: str = ""
    duration: float = 0.0
    """Seconds for which nobody else takes it, from the call on; as long as it is extended, it stays."""


@frozen
class Complete:
    """The job is done. ``result``: JSON, at most 64 KiB with all else that is told of it."""

    result: Any = None


@frozen
class Abort:
    """A verdict: the job has failed, and is not tried again. With ``fail_fast`` its operation then fails, and what
    waits for it (L24).
    """

    message: str
    result: Any = None


@frozen
class Retry:
    """It broke: tried again later, with back-off, until the type's limit of failures."""

    error: str = ""


@frozen
class Release:
    """Given back as it was: not held against the job, and due at once."""


Outcome: TypeAlias = Complete | Abort | Retry | Release


def checked(outcome: object) -> Outcome:
    """The outcome with texts that are texts and a result that is JSON. Raises InvalidArgument."""
    if isinstance(outcome, Complete):
        return Complete(_json(outcome.result))
    if isinstance(outcome, Abort):
        return Abort(_text(outcome.message, "the message of a verdict"), _json(outcome.result))
    if isinstance(outcome, Retry):
        return Retry(_text(outcome.error, "the error of a job"))
    if isinstance(outcome, Release):
        return outcome
    raise InvalidArgument(
        f"a job is returned with distop.Complete, Abort, Retry or Release, not with {type(outcome).__name__}"
    )


def _json(value: Any) -> Any:
    plain = loads(encode_argument(value)) if value is not None else None
    check_no_pointer(plain)
    return plain


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a text, not {shown(value)}")
    check_encodable(value, what)
    return shorten(value, MAX_ERROR_TEXT)


def check_actor(actor: Any) -> str:
    """The name of an actor. Raises InvalidArgument."""
    if not isinstance(actor, str) or not 0 < len(actor) <= 200:
        raise InvalidArgument(f"an actor has a name of 1 to 200 characters, not {shown(actor)}")
    check_encodable(actor, "the name of an actor")
    return actor


def check_duration(duration: Any) -> float:
    """Seconds of a claim. Raises InvalidArgument."""
    ok = isinstance(duration, int | float) and not isinstance(duration, bool)
    if not ok or not SHORTEST_DURATION <= duration <= LONGEST_DURATION:
        raise InvalidArgument(
            f"the duration of a claim is a number of seconds from {SHORTEST_DURATION:g} to {LONGEST_DURATION:g}, "
            f"not {shown(duration)}"
        )
    return float(duration)


def check_count(count: Any, what: str) -> int:
    """How many jobs at most. Raises InvalidArgument."""
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 1_000_000:
        raise InvalidArgument(f"{what} is a whole number of jobs from 0 to a million, not {shown(count)}")
    return count


def check_types(types: Any) -> dict[str, int | None]:
    """Type → how many jobs of it at most (None: as many as of all). Raises InvalidArgument."""
    if isinstance(types, str) or not isinstance(types, Iterable):
        raise InvalidArgument(
            f"types must be a list of names, such as [{shown(types)}], or a mapping from name to the maximum number of "
            'jobs, such as {"noop": 5}'
        )
    given = types.items() if isinstance(types, Mapping) else ((name, None) for name in types)
    limits = {check_type_name(name): most for name, most in given}
    if not limits:
        raise InvalidArgument("name at least one type of jobs to own")
    return {
        name: None if most is None else check_count(most, f"the maximum number of jobs of {name}")
        for name, most in limits.items()
    }

"""The results of :meth:`Client.own_jobs`, and the outcomes for :meth:`Client.return_job`."""

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
    """The object that the operation works on; "" if its type has none."""
    partition: str
    """The partition's name; ``all`` for an operation on ``@cluster``."""
    ordinal: int
    arg: Any
    attempt: int
    """Which attempt this is, or would be: from 1."""
    failures: int
    """Number of previous attempts that failed or were lost; the limit counts them."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The partition as it was planned, with its files."""


@frozen
class OwnedJob(OfferedJob):
    """A claimed job. The ``token`` allows any process to extend and return it."""

    token: str = ""
    duration: float = 0.0
    """Seconds from the call for which no other claimant takes it; extending it renews them."""


@frozen
class Complete:
    """The job succeeded.

    ``result``: JSON; at most 64 KiB together with the rest of the outcome.
    """

    result: Any = None


@frozen
class Abort:
    """A verdict: the job failed, and is not retried.

    With ``fail_fast`` its operation then fails, and so do operations that wait for its success (L24).
    """

    message: str
    result: Any = None


@frozen
class Retry:
    """The attempt failed: the job is retried with back-off, up to the type's limit."""

    error: str = ""


@frozen
class Release:
    """The job is released: due at once, and not counted as a failure."""


OwnedOutcome: TypeAlias = Complete | Abort | Retry | Release


def checked(outcome: object) -> OwnedOutcome:
    """The outcome with checked texts and a JSON result. Raises InvalidArgument."""
    if isinstance(outcome, Complete):
        return Complete(_json(outcome.result))
    if isinstance(outcome, Abort):
        return Abort(_text(outcome.message, "the message of a verdict"), _json(outcome.result))
    if isinstance(outcome, Retry):
        return Retry(_text(outcome.error, "the error of a job"))
    if isinstance(outcome, Release):
        return outcome
    raise InvalidArgument(
        f"the outcome of a job must be a distop.Complete, Abort, Retry or Release, not {type(outcome).__name__}"
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
    """The checked name of an actor. Raises InvalidArgument."""
    if not isinstance(actor, str) or not 0 < len(actor) <= 200:
        raise InvalidArgument(f"the name of an actor must have 1 to 200 characters, not {shown(actor)}")
    check_encodable(actor, "the name of an actor")
    return actor


def check_duration(duration: Any) -> float:
    """The checked duration of a claim in seconds. Raises InvalidArgument."""
    ok = isinstance(duration, int | float) and not isinstance(duration, bool)
    if not ok or not SHORTEST_DURATION <= duration <= LONGEST_DURATION:
        raise InvalidArgument(
            f"the duration of a claim must be a number of seconds from {SHORTEST_DURATION:g} to {LONGEST_DURATION:g}, "
            f"not {shown(duration)}"
        )
    return float(duration)


def check_count(count: Any, what: str) -> int:
    """The checked maximum number of jobs. Raises InvalidArgument."""
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 1_000_000:
        raise InvalidArgument(f"{what} must be a whole number from 0 to a million, not {shown(count)}")
    return count


def check_types(types: Any) -> dict[str, int | None]:
    """The checked limits: type → maximum number of its jobs (None: only the total is limited).

    Raises InvalidArgument.
    """
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

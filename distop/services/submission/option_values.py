"""Checks and converts the option values of a start, without etcd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol import trace_context
from distop.protocol.caller_values import LONGEST_DELAY, delay_seconds, seconds, text
from distop.protocol.frozen import frozen
from distop.protocol.identity import COMPUTED
from distop.protocol.json_codec import rfc3339
from distop.protocol.records import OperationRef
from distop.protocol.schedule import ON, SHORTEST, Series
from distop.protocol.texts import check_encodable, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.operation_options import Options

MOST_TIMES = 1_000_000_000
"""Maximum attempts of a job, and maximum operations of a series."""
LONGEST_SUBMITTER = 1_000
"""Maximum characters of a submitter."""
MAX_LABELS = 20
"""Maximum labels in ``where``."""
MAX_LABEL = 200
"""Maximum characters of a label's name, or of its value."""
LONGEST_ID = 200
"""Maximum characters of an operation's id, and of a request id."""
FAILURE_POLICIES = ("fail_fast", "collect_all")
DUPLICATE_POLICIES = ("join", "refuse", "replace", "combine")


@frozen
class After:
    """An operation to wait for, and how it must end: with "success", or with any "end"."""

    ref: OperationRef
    on: str = "success"


@frozen
class Every:
    """Repeats an operation (P3).

    ``seconds``: the interval, from the end of an operation to the start of the next one, or (``since="start"``) from
    start to start. ``jitter``: a random delay of at most this many seconds. ``on``: the ends after which it is
    repeated, "success", "failure" or "any"; it is never repeated after a cancel. ``until``: the end of the series, a
    time with its zone. ``times``: the number of operations in all.
    """

    seconds: float
    jitter: float = 0.0
    since: str = "end"
    on: str = "any"
    until: datetime | str | None = None
    times: int | None = None


def times(value: Any, what: str) -> int:
    """The value, which must be a whole number from 1 to :data:`MOST_TIMES`.

    Raises InvalidArgument.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"{what} a whole number of at least 1, not {shown(value)}")
    if value > MOST_TIMES:
        raise InvalidArgument(f"{what} a whole number of at most {MOST_TIMES}, not {shown(value)}")
    return value


def refuse_unowned(type_name: str, options: Options, where: Mapping[str, str] | None = None) -> None:
    """Raise InvalidArgument for limits and executor labels on an operation of a type without code.

    Actors take no jobs of such an operation, and executors have no code for it: it would never end.
    """
    given = {"max_jobs": options.max_jobs, "max_jobs_per_executor": options.max_jobs_per_executor, "where": where}
    if named := [name for name, value in given.items() if value]:
        raise InvalidArgument(
            f"{type_name} has no code that executors run, and workers cannot own jobs of operations with limits or "
            f"labels: leave out {' and '.join(named)}"
        )


def whole(what: str, least: int, most: int) -> Callable[[Any], int]:
    """A check of whole numbers within these bounds."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidArgument(f"{what} must be a whole number from {least} to {most}, not {shown(value)}")
        return value

    return check


def one_of(what: str, allowed: Sequence[str]) -> Callable[[Any], str]:
    """A check that a text is one of ``allowed``."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise InvalidArgument(f"{what} must be one of {', '.join(allowed)}, not {shown(value)}")
        return value

    return check


def request_id(value: Any) -> str:
    """Check a request id that a caller chose. Raises InvalidArgument."""
    if not (isinstance(value, str) and 0 < len(value) <= LONGEST_ID):
        raise InvalidArgument(f"a request id must be a text of 1 to {LONGEST_ID} characters")
    return text(value, "the request id")


def traceparent(value: Any) -> str:
    """Check a trace context. Raises InvalidArgument."""
    found = trace_context.parse(value)
    if found is None:
        raise InvalidArgument(f"a traceparent has the form 00-<32 hex digits>-<16>-<2>, which {shown(value)} has not")
    return str(found)


def own_id(value: Any) -> str:
    """Check an operation's id that a caller chose. Raises InvalidArgument."""
    if not (isinstance(value, str) and 0 < len(value) <= LONGEST_ID):
        raise InvalidArgument(f"an id must be a text of 1 to {LONGEST_ID} characters")
    if value.startswith(COMPUTED):
        raise InvalidArgument(
            f"the id {shown(value)} starts with {COMPUTED}, which is reserved for computed ids: choose another id"
        )
    K.encode(value)
    return value


def switch(what: str) -> Callable[[Any], bool]:
    """A check of a Boolean."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise InvalidArgument(f"{what} must be True or False, not {shown(value)}")
        return value

    return check


def budget(value: Any) -> str:
    """The number of jobs that may fail: a count, or a share such as "2%"; "": the failure policy decides.

    Raises InvalidArgument.
    """
    wrong = InvalidArgument(
        f'the number of jobs that may fail must be a count such as 5, or a share such as "2%", not {shown(value)}'
    )
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1_000_000:
        return str(value)
    if not isinstance(value, str) or not value.isascii() or len(value) > 20:
        raise wrong
    text = value.strip()
    if text.endswith("%"):
        number = text[:-1].strip()
        try:
            share = Decimal(number)
        except InvalidOperation:
            raise wrong from None
        if not number.replace(".", "", 1).isdigit() or not 0 <= share <= 100:
            raise wrong
        return f"{number}%"
    if text and not (text.isdigit() and int(text) <= 1_000_000):
        raise wrong
    return str(int(text)) if text else ""


def selector(where: Any) -> dict[str, str]:
    """The labels that an executor must have. Raises InvalidArgument."""
    if not isinstance(where, Mapping):
        raise InvalidArgument(
            f'where must map labels of executors to values, such as {{"zone": "a"}}, not {shown(where)}'
        )
    if len(where) > MAX_LABELS:
        raise InvalidArgument(f"where has {len(where)} labels; at most {MAX_LABELS} are allowed")
    for name, value in where.items():
        for part in (name, value):
            if not isinstance(part, str) or not 0 < len(part) <= MAX_LABEL:
                raise InvalidArgument(
                    f"a label in where must be a name and a value, texts of 1 to {MAX_LABEL} characters, not "
                    f"{shown(name)}: {shown(value)}"
                )
            check_encodable(part, "a label in where")
    return dict(sorted(where.items()))


def due_time(not_before: datetime | str | None, delay: float | None) -> str:
    """The start time in RFC 3339 and UTC; "": at once, or a time in the past.

    Raises InvalidArgument for an invalid time, or one without a time zone.
    """
    if not_before is not None and delay is not None:
        raise InvalidArgument("give either a start time or a delay, not both")
    now = time.time()
    if delay is not None:
        wait = delay_seconds(delay)
        return rfc3339(now + wait) if wait else ""
    if not_before is None:
        return ""
    try:
        when = datetime.fromisoformat(not_before) if isinstance(not_before, str) else not_before
        zoned = when.tzinfo is not None
        due = when.timestamp()
        written = rfc3339(due)
    except (ValueError, AttributeError, OverflowError, TypeError):
        raise InvalidArgument(
            f"{shown(not_before)} is not a start time: write it as 2026-01-31T18:00:00+01:00, or give a datetime"
        ) from None
    if not zoned:
        raise InvalidArgument(f"the time {shown(not_before)} has no time zone: add one, such as Z or +01:00")
    return written if due > now else ""


def every(value: Any) -> Every:
    """How an operation is repeated; a number is the interval in seconds. Raises InvalidArgument."""
    one = value if isinstance(value, Every) else Every(seconds(value, "the interval of a series"))
    interval, jitter = seconds(one.seconds, "the interval of a series"), seconds(one.jitter, "the jitter of a series")
    if not SHORTEST <= interval <= LONGEST_DELAY:
        raise InvalidArgument(
            f"the interval of a series must be from {SHORTEST:g} s to a hundred years "
            f"({LONGEST_DELAY:.0f} s), not {interval:g} s"
        )
    if not 0 <= jitter <= LONGEST_DELAY:
        raise InvalidArgument(
            f"the jitter of a series must be from 0 s to a hundred years ({LONGEST_DELAY:.0f} s), not {jitter:g} s"
        )
    for given, allowed, what in ((one.since, ("end", "start"), "since"), (one.on, tuple(ON), "on")):
        if given not in allowed:
            raise InvalidArgument(f"{what} must be one of {', '.join(allowed)}, not {shown(given)}")
    if one.times is not None:
        times(one.times, "the times of a series must be")
    if one.until is not None and not due_time(one.until, None):
        raise InvalidArgument(f"the series would have no operation: its end {one.until} has passed")
    return replace(one, seconds=interval, jitter=jitter)


def series(one: Every, due: str) -> Series:
    """The series of an operation that starts at ``due``, or at once."""
    until = due_time(one.until, None) if one.until is not None else ""
    left = one.times - 1 if one.times is not None else None
    return Series(one.seconds, one.jitter, one.since, one.on, until, left, due or rfc3339(time.time()))


def predecessors(given: Any) -> tuple[After, ...]:
    """The operations to wait for, each once. Raises InvalidArgument, also for one with two different ``on``."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument(f"after must be a list of operations, such as [{shown(given)}]")
    found: dict[OperationRef, After] = {}
    for item in given:
        one = after_one(item)
        if found.setdefault(one.ref, one) != one:
            raise InvalidArgument(f'give {one.ref} only once: to wait for either its "success" or its "end"')
    return tuple(found.values())


def after_one(item: Any) -> After:
    """One operation to wait for, from a name, handle, OperationRef or After. Raises InvalidArgument."""
    if isinstance(item, After):
        if item.on not in ("success", "end"):
            raise InvalidArgument(f'{shown(item.on)} is not an event to wait for: use "success" or "end"')
        return After(after_one(item.ref).ref, item.on)
    if isinstance(item, OperationRef):
        return After(item)
    ref = getattr(item, "ref", item)
    if not isinstance(ref, str):
        raise InvalidArgument(
            f"{shown(item)} is not an operation to wait for: give its name, table/type/instance, or its handle"
        )
    return After(OperationRef.parse(ref))

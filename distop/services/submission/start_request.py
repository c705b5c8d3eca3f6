"""What a caller asks a start for, checked as far as it can be without etcd."""

from __future__ import annotations

import getpass
import os
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from distop.clock import time, uuid
from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol.behavior_declaration import check_time_limit
from distop.protocol.frozen import frozen
from distop.protocol.identity import COMPUTED, MADE
from distop.protocol.json_codec import rfc3339
from distop.protocol.operation_labels import labels as check_labels
from distop.protocol.operation_options import DEFAULT, Options
from distop.protocol.records import CLUSTER_TABLE, MAX_ARGUMENT_BYTES, OperationRef
from distop.protocol.schedule import ON, SHORTEST, Series
from distop.protocol.texts import check_encodable, check_encoded, shown
from distop.services.submission.option_checks import changes, selector

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.store.client import EtcdClient

LONGEST_DELAY = 100 * 365.25 * 86_400
"""Seconds."""
LONGEST_WAIT = 1e12
"""Seconds. A whole number above it counts as this: not every int is a float."""
MOST_TIMES = 1_000_000_000
"""Of attempts of a job, and of operations of a series."""
LONGEST_SUBMITTER = 1_000
"""Characters."""
_POLICIES = ("fail_fast", "collect_all")
_DUPLICATES = ("join", "refuse", "replace", "combine")
FOLLOW = "follow"
"""What the next operation of a series does: it runs after one of its id that runs, and leaves the id to another series.
"""

PREPARED = "prepared:"
"""Before the external id of a prepared operation, in its request id."""


@frozen
class After:
    """An operation that another one shall wait for, and what has to become of it: "success", or any "end"."""

    ref: OperationRef
    on: str = "success"


@frozen
class Every:
    """That an operation comes again (P3): ``seconds`` after its end, or (``since="start"``) on a grid of its
    beginnings; up to ``jitter`` seconds later. ``on``: after which ends, "success", "failure" or "any"; never after a
    cancel. ``until`` a time with its zone, or so many ``times`` in all.
    """

    seconds: float
    jitter: float = 0.0
    since: str = "end"
    on: str = "any"
    until: datetime | str | None = None
    times: int | None = None


@frozen
class Request:
    """What the caller asks for, checked as far as it can be without etcd."""

    type: str
    table: str
    arg: bytes
    partitions: tuple[str, ...] | None
    request_id: str
    own_id: bool
    """The caller chose the request id: the same call may have been made before."""
    failure_policy: str | None
    retry_attempts: int | None
    submitter: str
    by: str = ""
    """Who starts it, where that is another one than the submitter."""
    rerun_of: str = ""
    """The operation of whose partitions these are some."""
    not_before: str = ""
    """RFC 3339: it begins then, or later."""
    after: tuple[After, ...] = ()
    hold: str = ""
    """It does not begin while this hold is there."""
    options: Options = DEFAULT
    where: Mapping[str, str] = field(default_factory=dict)
    """The labels that an executor must have."""
    labels: Mapping[str, str] = field(default_factory=dict)
    series: Series | None = None
    id: str = ""
    """The caller's own id; "": as the behavior computes it."""
    one_off: bool = False
    """It has no id."""
    on_duplicate: str = ""
    """What is done where an operation of its id goes on; "": it is joined."""
    time_limit: float | None = None
    """Seconds for one attempt of a job at most; None: what behavior and executor allow."""

    @property
    def keyed(self) -> bool:
        """The operation is found by a key of the request id (``protocol.identity``)."""
        return self.own_id and not self.request_id.startswith(MADE)

    @property
    def waits(self) -> bool:
        """It may have to wait before it begins."""
        return bool(self.not_before or self.after or self.hold)


def acting(etcd: EtcdClient) -> str:
    """Who acts through this client, as far as it knows: its etcd user, where it has one, else :func:`whoami`. etcd does
    not tell who wrote a key: a record says what its writer says.
    """
    user = etcd.config.username
    return _told(user) if user else whoami()


def _told(name: str) -> str:
    return name[:LONGEST_SUBMITTER].encode(errors="replace").decode()


_NAMED_BY = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""The variables that ``getpass`` asks before it reads the users' file."""


def whoami() -> str:
    """Who submits, where the caller does not say: ``user@host``."""
    return _who(os.getuid(), *map(os.environ.get, _NAMED_BY))


@lru_cache(maxsize=4)
def _who(*_: object) -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return _told(f"{user}@{socket.gethostname()}")


def text(value: Any, what: str, longest: int | None = None) -> str:
    """The value, which must be a text of at most ``longest`` characters.

    Raises InvalidArgument.
    """
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a text, not {shown(value)}")
    if longest is not None and len(value) > longest:
        raise InvalidArgument(f"{what} has {len(value)} characters; at most {longest} are allowed")
    check_encodable(value, what)
    return value


def seconds(value: Any, what: str) -> float:
    """The value, which must be a number of seconds, 0 or more. Raises InvalidArgument."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise InvalidArgument(f"{what} must be a number of seconds, 0 or more, not {shown(value)}")
    return LONGEST_WAIT if isinstance(value, int) and value > LONGEST_WAIT else value


def times(value: Any, what: str) -> int:
    """The value, which must be a whole number from 1 to :data:`MOST_TIMES`.

    Raises InvalidArgument.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"{what} a whole number of at least 1, not {shown(value)}")
    if value > MOST_TIMES:
        raise InvalidArgument(f"{what} a whole number of at most {MOST_TIMES}, not {shown(value)}")
    return value


def request(
    type_name: str,
    table: str,
    arg: bytes,
    partitions: Sequence[str] | None,
    request_id: str | None,
    failure_policy: str | None,
    retry_attempts: int | None,
    submitter: str,
    labels: Mapping[str, str] | None = None,
    *,
    not_before: datetime | str | None = None,
    delay: float | None = None,
    after: Iterable[Any] | None = None,
    every: Every | float | None = None,
    where: Mapping[str, str] | None = None,
    id: str | None = None,  # noqa: A002
    one_off: bool = False,
    on_duplicate: str | None = None,
    time_limit: float | None = None,
    **options: Any,
) -> Request:
    """``not_before``: a time with its zone; one that has passed is now. ``delay``: seconds from now. ``after``:
    operations (their names, handles, or :class:`After`). ``every``: seconds, or :class:`Every`. ``where`` and
    ``options``: see ``services.submission.option_checks``. ``id``, ``one_off``, ``on_duplicate``, ``time_limit``: as in
    :class:`Request`. Raises InvalidArgument.
    """
    K.check_type_name(text(type_name, "the operation type"))
    K.encode(text(table, "the name of a table"))
    names = _names(partitions)
    if names is not None and table == CLUSTER_TABLE:
        raise InvalidArgument(f"an operation on {CLUSTER_TABLE} has one job for everything: name no partitions")
    if failure_policy is not None and (not isinstance(failure_policy, str) or failure_policy not in _POLICIES):
        raise InvalidArgument(f"the failure policy {shown(failure_policy)} must be one of {', '.join(_POLICIES)}")
    if retry_attempts is not None:
        times(retry_attempts, "the number of attempts must be")
    if time_limit is not None:
        time_limit = check_time_limit(time_limit, "the time limit of a job")
    if request_id is not None:
        if not (isinstance(request_id, str) and 0 < len(request_id) <= 200):
            raise InvalidArgument("a request id is a text of 1 to 200 characters")
        text(request_id, "the request id")
        check_not_derived(request_id)
    text(submitter, "the submitter", LONGEST_SUBMITTER)
    check_encoded(arg, "the argument")
    _check_id(id, one_off, on_duplicate)
    own = request_id is not None
    identity = request_id if request_id is not None else f"{MADE}{uuid.uuid4()}"
    return Request(
        *(type_name, table, arg, names, identity, own, failure_policy, retry_attempts, submitter),
        not_before=(due := due_time(not_before, delay)),
        after=_after(after),
        options=DEFAULT.altered(changes(**options)),
        where=selector(where),
        labels=check_labels(labels),
        series=_series(every, due),
        id=id or "",
        one_off=one_off,
        on_duplicate=on_duplicate or "",
        time_limit=time_limit,
    )


def derived(wanted: Request, request_id: str) -> Request:
    """The request with a request id of distop's own. Callers cannot choose ids of this form."""
    return replace(wanted, request_id=request_id, own_id=True)


def check_not_derived(request_id: str, what: str = "the request id") -> None:
    """Raises InvalidArgument for an id of the form ``prepared:<external id>`` or ``<operation>#<next, or a number>``.

    Its caller would be taken for the operation that distop starts under it, or the other way round.
    """
    named, _, follows = request_id.rpartition("#")
    taken = request_id.startswith(PREPARED)
    if not taken and (follows == "next" or (follows.isascii() and follows.isdigit())):
        with suppress(InvalidArgument):
            K.check_type_name(OperationRef.parse(named).type)
            taken = True
    if taken:
        raise InvalidArgument(
            f"{what} {shown(request_id)} is of a form that distop keeps for itself (prepared:…, OPERATION#next, "
            "OPERATION#1): choose another one"
        )


def started_by(who: str, wanted: Request) -> Request:
    """The request, of which ``who`` is the one that acts: told beside the submitter, where that is another one."""
    return replace(wanted, by=who) if who != wanted.submitter else wanted


def _check_id(id_: str | None, one_off: bool, on_duplicate: str | None) -> None:
    if id_ is not None:
        if not (isinstance(id_, str) and 0 < len(id_) <= 200):
            raise InvalidArgument("an id is a text of 1 to 200 characters")
        if id_.startswith(COMPUTED):
            raise InvalidArgument(
                f"the id {shown(id_)} begins with {COMPUTED}, as those do that are computed: choose another"
            )
        K.encode(id_)
    if not isinstance(one_off, bool):
        raise InvalidArgument(f"one_off is True or False, not {shown(one_off)}")
    if on_duplicate is not None and (not isinstance(on_duplicate, str) or on_duplicate not in _DUPLICATES):
        raise InvalidArgument(
            f"what becomes of a duplicate is one of {', '.join(_DUPLICATES)}, and not {shown(on_duplicate)}"
        )
    if one_off and (id_ is not None or on_duplicate is not None):
        raise InvalidArgument("a one-off has no id, and so no duplicates: leave out one_off, or the others")


def due_time(not_before: datetime | str | None, delay: float | None) -> str:
    """When something shall begin, as RFC 3339 in UTC; "" for at once, or a time that has passed. Raises
    InvalidArgument for what is no time, or one without a zone.
    """
    if not_before is not None and delay is not None:
        raise InvalidArgument("give either a time to begin at, or a delay, not both")
    now = time.time()
    if delay is not None:
        wait = seconds(delay, "the delay")
        if wait > LONGEST_DELAY:
            raise InvalidArgument(f"the delay of {wait:g} s is longer than a hundred years")
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
            f"{shown(not_before)} is no time to begin at: write it as 2026-01-31T18:00:00+01:00, or give a datetime"
        ) from None
    if not zoned:
        raise InvalidArgument(f"the time {shown(not_before)} has no zone: add one, such as Z or +01:00")
    return written if due > now else ""


def _series(every: Every | float | None, due: str) -> Series | None:
    if every is None:
        return None
    one = every if isinstance(every, Every) else Every(seconds(every, "the interval of a series"))
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
    for value, allowed, what in ((one.since, ("end", "start"), "since"), (one.on, tuple(ON), "on")):
        if value not in allowed:
            raise InvalidArgument(f"{what} is {shown(value)}, and must be one of {', '.join(allowed)}")
    if one.times is not None:
        times(one.times, "the times of a series are")
    until = due_time(one.until, None) if one.until is not None else ""
    if one.until is not None and not until:
        raise InvalidArgument(f"the series would be over already: {one.until} has passed")
    left = one.times - 1 if one.times is not None else None
    return Series(interval, jitter, one.since, one.on, until, left, due or rfc3339(time.time()))


def _after(given: Iterable[Any] | None) -> tuple[After, ...]:
    """Each once; the same operation with another ``on`` is refused."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument(f"after is a list of operations, such as [{shown(given)}]")
    found: dict[OperationRef, After] = {}
    for item in given:  # each of them an operation, and once
        one = after_one(item)
        if found.setdefault(one.ref, one) != one:
            raise InvalidArgument(f'{one.ref} is to be waited for once: either for its "success", or for its "end"')
    return tuple(found.values())


def after_one(item: Any) -> After:
    """Raises InvalidArgument for what is no operation to wait for."""
    if isinstance(item, After):
        if item.on not in ("success", "end"):
            raise InvalidArgument(f'{shown(item.on)} is no end to wait for: "success", or any "end"')
        return After(after_one(item.ref).ref, item.on)
    if isinstance(item, OperationRef):
        return After(item)
    ref = getattr(item, "ref", item)
    if not isinstance(ref, str):
        raise InvalidArgument(
            f"{shown(item)} is no operation to wait for: give its name, table/type/instance, or its handle"
        )
    return After(OperationRef.parse(ref))


def _names(partitions: Sequence[str] | None) -> tuple[str, ...] | None:
    if partitions is None:
        return None
    if isinstance(partitions, str):
        raise InvalidArgument(f"partitions is a list of names, such as [{shown(partitions)}]")
    if not isinstance(partitions, Iterable):
        raise InvalidArgument(f"partitions is a list of names, not {shown(partitions)}")
    names = tuple(partitions)
    if not names:
        raise InvalidArgument("the list of partitions is empty: name some, or leave it out for all of them")
    if not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument("a partition's name must be a text that is not empty")
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InvalidArgument(f"the partition {shown(twice)} is named twice")
    check_encodable("".join(names), "a partition's name")
    size = sum(len(name.encode()) + 3 for name in names)
    if size > MAX_ARGUMENT_BYTES:
        raise InvalidArgument(f"the names of {len(names)} partitions take {size} bytes; at most 512 KiB are allowed")
    return names

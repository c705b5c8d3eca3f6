"""The request for a start, checked as far as possible without etcd."""

from __future__ import annotations

import getpass
import os
import socket
from contextlib import suppress
from dataclasses import field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from distop.clock import uuid
from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol.caller_values import text
from distop.protocol.frozen import frozen
from distop.protocol.identity import MADE
from distop.protocol.operation_options import DEFAULT, Options
from distop.protocol.policy import REQUEST
from distop.protocol.records import CLUSTER_TABLE, OperationRef
from distop.protocol.texts import check_encoded, shown
from distop.runtime import caller_trace
from distop.services.submission.option_values import LONGEST_SUBMITTER, due_time, series

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.schedule import Series
    from distop.services.submission.option_values import After
    from distop.services.submission.start_options import StartOptions
    from distop.store.client import EtcdClient

FOLLOW = "follow"
"""The duplicate policy of the next operation of a series: it runs after a running one of its id, and yields to another
series.
"""

PREPARED = "prepared:"
"""Prefix of a prepared operation's request id; the external id follows."""


@frozen
class Request:
    """The request for a start, checked as far as possible without etcd."""

    type: str
    table: str
    arg: bytes
    request_id: str
    own_id: bool
    """The caller chose the request id: the same call may have been made before."""
    submitter: str
    partitions: tuple[str, ...] | None = None
    failure_policy: str | None = None
    retry_attempts: int | None = None
    by: str = ""
    """The user who starts it, if not the submitter."""
    rerun_of: str = ""
    """The operation that it reruns."""
    not_before: str = ""
    """The earliest start time (RFC 3339)."""
    after: tuple[After, ...] = ()
    options: Options = DEFAULT
    where: Mapping[str, str] = field(default_factory=dict)
    """The labels that an executor must have."""
    labels: Mapping[str, str] = field(default_factory=dict)
    series: Series | None = None
    id: str = ""
    """The caller's id; "": computed by the behavior."""
    one_off: bool = False
    """Whether it starts without an id."""
    on_duplicate: str = ""
    """The duplicate policy for an active id; "": join."""
    time_limit: float | None = None
    """Maximum seconds for one attempt of a job; None: the limits of the behavior and the executor."""
    traceparent: str = ""
    """The caller's trace context; "": none."""

    @property
    def keyed(self) -> bool:
        """Whether the request id has a key, by which the operation is found (``protocol.identity``)."""
        return self.own_id and not self.request_id.startswith(MADE)

    @property
    def waits(self) -> bool:
        """Whether it may have to wait before it starts."""
        return bool(self.not_before or self.after)


def acting(etcd: EtcdClient) -> str:
    """The user who acts through this client: its etcd user, or else :func:`whoami`.

    etcd does not record who wrote a key, so each record contains the name that its writer reports.
    """
    user = etcd.config.username
    return _shortened_name(user) if user else whoami()


def _shortened_name(name: str) -> str:
    return name[:LONGEST_SUBMITTER].encode(errors="replace").decode()


_NAMED_BY = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""The variables that ``getpass`` asks before it reads the users' file."""


def whoami() -> str:
    """The default submitter: ``user@host``."""
    return _who(os.getuid(), *map(os.environ.get, _NAMED_BY))


@lru_cache(maxsize=4)
def _who(*_: object) -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return _shortened_name(f"{user}@{socket.gethostname()}")


_LIMITS = tuple(one.name for one in fields(Options))


def request(type_name: str, table: str, arg: bytes, options: StartOptions, who: str) -> Request:
    """The checked request for a start.

    ``who``: the acting user, recorded besides the submitter if they differ. Raises InvalidArgument.
    """
    K.check_type_name(text(type_name, "the operation type"))
    K.encode(text(table, "the name of a table"))
    check_encoded(arg, "the argument")
    given = options.checked()
    if "partitions" in given and table == CLUSTER_TABLE:
        raise InvalidArgument(f"an operation on {CLUSTER_TABLE} has a single job: leave out the partitions")
    if options.request_id is not None:
        check_not_derived(options.request_id)
    submitter = given.pop("submitter", who)
    due = due_time(given.pop("not_before", None), given.pop("delay", None))
    every = given.pop("every", None)
    limits = {name: given.pop(name) for name in _LIMITS if name in given}
    given.setdefault("request_id", f"{MADE}{uuid.uuid4()}")
    given.setdefault("traceparent", caller_trace.traceparent())
    return Request(
        *(type_name, table, arg),
        **given,
        own_id=options.request_id is not None,
        submitter=submitter,
        by=who if who != submitter else "",
        not_before=due,
        options=DEFAULT.altered(limits) if limits else DEFAULT,
        series=series(every, due) if every is not None else None,
    )


def derived(wanted: Request, request_id: str) -> Request:
    """The request with a reserved request id, which callers cannot choose."""
    return replace(wanted, request_id=request_id, own_id=True)


def check_not_derived(request_id: str, what: str = "the request id") -> None:
    """Raises InvalidArgument for an id of the form ``prepared:<external id>``, ``policy:<digest>`` or
    ``<operation>#<next, or a number>``.

    Its caller would be taken for the operation that distop starts under it, or the other way round.
    """
    named, _, follows = request_id.rpartition("#")
    taken = request_id.startswith((PREPARED, REQUEST))
    if not taken and (follows == "next" or (follows.isascii() and follows.isdigit())):
        with suppress(InvalidArgument):
            K.check_type_name(OperationRef.parse(named).type)
            taken = True
    if taken:
        raise InvalidArgument(
            f"{what} {shown(request_id)} has a form reserved for distop (prepared:…, policy:…, OPERATION#next, "
            "OPERATION#1): choose another one"
        )

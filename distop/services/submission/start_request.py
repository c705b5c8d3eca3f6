"""What a caller asks a start for, checked as far as it can be without etcd."""

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
from distop.protocol.frozen import frozen
from distop.protocol.identity import MADE
from distop.protocol.operation_options import DEFAULT, Options
from distop.protocol.records import CLUSTER_TABLE, OperationRef
from distop.protocol.texts import check_encoded, shown
from distop.services.submission.option_values import LONGEST_SUBMITTER, due_time, series, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.schedule import Series
    from distop.services.submission.option_values import After
    from distop.services.submission.start_options import StartOptions
    from distop.store.client import EtcdClient

FOLLOW = "follow"
"""What the next operation of a series does: it runs after one of its id that runs, and leaves the id to another series.
"""

PREPARED = "prepared:"
"""Before the external id of a prepared operation, in its request id."""


@frozen
class Request:
    """What the caller asks for, checked as far as it can be without etcd."""

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
    """Who starts it, where that is another one than the submitter."""
    rerun_of: str = ""
    """The operation of whose partitions these are some."""
    not_before: str = ""
    """RFC 3339: it begins then, or later."""
    after: tuple[After, ...] = ()
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
        return bool(self.not_before or self.after)


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


_LIMITS = tuple(one.name for one in fields(Options))


def request(type_name: str, table: str, arg: bytes, options: StartOptions, who: str) -> Request:
    """What is asked for. ``who``: the one that acts; it is told beside the submitter, where that is another one.

    Raises InvalidArgument.
    """
    K.check_type_name(text(type_name, "the operation type"))
    K.encode(text(table, "the name of a table"))
    check_encoded(arg, "the argument")
    given = options.checked()
    if "partitions" in given and table == CLUSTER_TABLE:
        raise InvalidArgument(f"an operation on {CLUSTER_TABLE} has one job for everything: name no partitions")
    if options.request_id is not None:
        check_not_derived(options.request_id)
    submitter = given.pop("submitter", who)
    due = due_time(given.pop("not_before", None), given.pop("delay", None))
    every = given.pop("every", None)
    limits = {name: given.pop(name) for name in _LIMITS if name in given}
    given.setdefault("request_id", f"{MADE}{uuid.uuid4()}")
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

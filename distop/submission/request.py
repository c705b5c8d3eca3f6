"""What a caller asks a start for, checked as far as it can be without etcd."""

from __future__ import annotations

import getpass
import math
import os
import socket
from collections.abc import Iterable
from dataclasses import field
from typing import TYPE_CHECKING, Any

from distop.clock import uuid
from distop.core import keys as K
from distop.core.frozen import frozen
from distop.core.labels import labels as check_labels
from distop.core.model import CLUSTER_TABLE, MAX_ARGUMENT_BYTES
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_POLICIES = ("fail_fast", "collect_all")


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
    rerun_of: str = ""
    """The operation of whose partitions these are some."""
    labels: Mapping[str, str] = field(default_factory=dict)


def whoami() -> str:
    """Who submits, where the caller does not say: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def text(value: Any, what: str) -> str:
    """The value, which must be a text. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a text, not {value!r}")
    return value


def seconds(value: Any, what: str) -> float:
    """The value, which must be a number. Raises InvalidArgument."""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise InvalidArgument(f"{what} must be a number of seconds, not {value!r}")
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
) -> Request:
    """Raises InvalidArgument."""
    K.check_type_name(text(type_name, "the operation type"))
    K.encode(text(table, "the name of a table"))
    names = _names(partitions)
    if names is not None and table == CLUSTER_TABLE:
        raise InvalidArgument(f"an operation on {CLUSTER_TABLE} has one job for everything: name no partitions")
    if failure_policy is not None and (not isinstance(failure_policy, str) or failure_policy not in _POLICIES):
        raise InvalidArgument(f"the failure policy {failure_policy!r} must be one of {', '.join(_POLICIES)}")
    if retry_attempts is not None and (
        not isinstance(retry_attempts, int) or isinstance(retry_attempts, bool) or retry_attempts < 1
    ):
        raise InvalidArgument(f"the number of attempts must be a whole number of at least 1, not {retry_attempts!r}")
    if request_id is not None and not (isinstance(request_id, str) and 0 < len(request_id) <= 200):
        raise InvalidArgument("a request id is a text of 1 to 200 characters")
    text(submitter, "the submitter")
    own = request_id is not None
    identity = request_id if request_id is not None else str(uuid.uuid4())
    found = check_labels(labels)
    return Request(type_name, table, arg, names, identity, own, failure_policy, retry_attempts, submitter, labels=found)


def _names(partitions: Sequence[str] | None) -> tuple[str, ...] | None:
    if partitions is None:
        return None
    if isinstance(partitions, str):
        raise InvalidArgument(f"partitions is a list of names, such as [{partitions!r}]")
    if not isinstance(partitions, Iterable):
        raise InvalidArgument(f"partitions is a list of names, not {partitions!r}")
    names = tuple(partitions)
    if not names:
        raise InvalidArgument("the list of partitions is empty: name some, or leave it out for all of them")
    if not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument("a partition's name must be a text that is not empty")
    if len(set(names)) < len(names):
        twice = next(name for n, name in enumerate(names) if name in names[:n])
        raise InvalidArgument(f"the partition {twice!r} is named twice")
    try:
        size = sum(len(name.encode()) + 3 for name in names)
    except UnicodeEncodeError:
        raise InvalidArgument("a partition's name holds a lone surrogate, which is no character") from None
    if size > MAX_ARGUMENT_BYTES:
        raise InvalidArgument(f"the names of {len(names)} partitions take {size} bytes; at most 512 KiB are allowed")
    return names

"""Where operations put what they write besides a table: each place is derived from names and fences alone.

Below a shared directory every namespace has a folder of its own (``space``, see store/spaces.py), and in it ``stage``,
``plans``, ``results`` and ``certificates``: so nobody sweeps what operations of the same name have written elsewhere.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from distop.errors import UnsafePath
from distop.protocol.frozen import frozen
from distop.protocol.keys import encode
from distop.protocol.records import OperationRef
from distop.storage.deletion import Place, check_own, delete_or_log, make_new, names

if TYPE_CHECKING:
    from distop.protocol.records import TableRecord
    from distop.runtime.logs import Log

STAGE, RESULTS = "stage", "results"


@frozen
class Attempt:
    """What tells an attempt at a job from all others. ``incarnation``: of the executor that ran it."""

    op: str
    partition: int
    fence: int
    incarnation: str

    @classmethod
    def of_outcome(cls, op: str, partition: int, fence: Any, incarnation: Any) -> Attempt | None:
        """The attempt whose outcome this is, as it is recorded; None where no executor has run the job."""
        number = isinstance(fence, int) and not isinstance(fence, bool) and fence > 0
        if not number or not incarnation or not isinstance(incarnation, str):
            return None
        return cls(op, partition, fence, incarnation)


def operation_path(op: str) -> str:
    """An operation as a relative path: one folder each for table, type, object, instance. Characters are escaped
    as in keys, except dots inside (Hadoop's paths and percent signs do not go well together); so the first folder of
    digits alone after the type is the instance."""
    ref = OperationRef.parse(op)
    parts = [folder(ref.table), folder(ref.type), str(ref.instance)]
    if ref.object:
        digits = ref.object.isascii() and ref.object.isdigit()
        parts.insert(2, f"%{ord(ref.object[0]):02X}{ref.object[1:]}" if digits else folder(ref.object))
    return "/".join(parts)


def folder(name: str) -> str:
    """A name as one path component, reversible, never hidden and never ``..``."""
    text = encode(name)
    head = 3 if text.startswith("%2E") else 0
    return text[:head] + text[head:].replace("%2E", ".")


def shared_of(configured: str, space: str, table: TableRecord | None) -> Place | None:
    """The folder of a namespace (``space``) in the shared directory: that is as configured, else
    ``<table location>/_distop`` where that is a folder, else there is none.
    """
    if configured:
        return Place(configured.rstrip("/") or configured, space)
    if table is None or not table.folder:
        return None
    return Place(table.folder.rstrip("/"), f"_distop/{space}" if space else "_distop")


def attempt_path(attempt: Attempt) -> str:
    """An attempt as a relative path."""
    return f"{operation_path(attempt.op)}/{attempt.partition:06d}/{attempt.fence}-{folder(attempt.incarnation)}"


def staging(shared: Place) -> Place:
    """The shared directory as what is staged goes there: only where nobody else may change it."""
    return Place(shared.anchor, shared.path, own=True)


def stage_of(shared: Place, attempt: Attempt) -> Place:
    """Where an attempt stages its output."""
    return staging(shared).below(f"{STAGE}/{attempt_path(attempt)}")


class Stages:
    """The stages of the attempts of one run, each made by the attempt on its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: set[Place] = set()

    def make(self, place: Place, *, again: bool) -> None:
        """Make a stage, unless that was done. ``again``: an earlier process may have made it for the same attempt, and
        then it stays. Raises FileExistsError where somebody else did, UnsafePath, and OSError.
        """
        with self._lock:
            found = again or place in self._made
            try:
                make_new(place)
            except FileExistsError:
                if not found:
                    raise
                check_own(place)
            self._made.add(place)


def result_of(shared: Place, attempt: Attempt) -> Place:
    """Where the result of an attempt stands that is too large for etcd: a file of that attempt's own."""
    name = f"{attempt.partition:06d}-{attempt.fence}-{folder(attempt.incarnation)}.json"
    return shared.below(f"{RESULTS}/{operation_path(attempt.op)}/{name}")


def series_of(shared: Place, op: str) -> Place:
    """Where the operations of one table, type and object stage theirs: a folder for each instance."""
    return shared.below(f"{STAGE}/{operation_path(op).rpartition('/')[0]}")


def instances(series: Place, last: int) -> list[int]:
    """The instances up to ``last`` that have a folder in a place. Raises UnsafePath and OSError."""
    found = {int(name) for name in names(series) if name.isascii() and name.isdigit() and name == str(int(name))}
    return sorted(n for n in found if n <= last)


def remove_stages(shared: Place, op: str, log: Log) -> None:
    """Remove what an operation, and those of the same table, type and object before it, have staged. What cannot be
    removed is logged, and left for the next operation.
    """
    series = series_of(shared, op)
    try:
        found = instances(series, OperationRef.parse(op).instance)
    except (OSError, UnsafePath) as error:
        log.warning("Could not list %s: %s", series.location, error)
        return
    for instance in found:
        delete_or_log(series, str(instance), log)

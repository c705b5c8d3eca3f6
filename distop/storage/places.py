"""The locations of operations' files outside of tables, derived from names and fences only.

In the shared directory every namespace has its own folder (``space``, see store/cluster_identity.py) with ``stage``,
``plans``, ``results`` and ``certificates``. So no cleanup removes files of operations of the same name in another
namespace.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from distop.clock import uuid
from distop.errors import InvalidArgument, UnsafePath, describe
from distop.protocol.frozen import frozen
from distop.protocol.keys import encode
from distop.protocol.records import OperationRef
from distop.storage.deletion import Place, check_own, make_new
from distop.storage.files import local_path
from distop.storage.opened_stores import has_store, store_of
from distop.storage.store_errors import ObjectExists

if TYPE_CHECKING:
    from distop.protocol.records import TableRecord
    from distop.runtime.logs import Log

STAGE, RESULTS = "stage", "results"
IN_TABLE = "data/distop-staged"
"""The folder below a table with staged files at their final place."""
TABLE_MARKER = "distop-in-table"
"""A file in a stage that may have files in the table. It is written before the first of them."""
COMPLETION = "completion"
"""The folder beside those of partitions with the stages of completions."""


@frozen
class Attempt:
    """The unique identity of one attempt at a job. ``incarnation``: of the executor that ran it."""

    op: str
    partition: int
    fence: int
    incarnation: str

    @classmethod
    def of_outcome(cls, op: str, partition: int, fence: Any, incarnation: Any) -> Attempt | None:
        """The attempt of a recorded outcome; None if no executor has run the job."""
        number = isinstance(fence, int) and not isinstance(fence, bool) and fence > 0
        if not number or not incarnation or not isinstance(incarnation, str):
            return None
        return cls(op, partition, fence, incarnation)


def operation_path(op: str) -> str:
    """An operation as a relative path: one folder each for table, type, object and instance.

    Characters are escaped like in keys, except inner dots, because Hadoop's paths have problems with percent signs. The
    first folder of only digits after the type is the instance.
    """
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
    """The folder of a namespace (``space``) in the shared directory.

    The shared directory is the configured one, else ``<table location>/_distop`` if the table has a folder, on a disk
    or in an object store, else None.
    """
    if configured:
        return Place(configured.rstrip("/") or configured, space)
    if table is None or not table.folder or not has_store(table.folder):
        return None
    return shared_below(table.folder, space)


def shared_below(folder: str, space: str) -> Place:
    """The folder of a namespace in the default shared directory of a table, whose folder this is."""
    return Place(folder.rstrip("/"), f"_distop/{space}" if space else "_distop")


def attempt_path(attempt: Attempt) -> str:
    """An attempt as a relative path."""
    return f"{operation_path(attempt.op)}/{attempt.partition:06d}/{attempt.fence}-{folder(attempt.incarnation)}"


def staging(shared: Place) -> Place:
    """The shared directory for staged output, which must not be changeable by other users."""
    return Place(shared.anchor, shared.path, own=True)


def stage_of(shared: Place, attempt: Attempt) -> Place:
    """The folder of an attempt's staged output."""
    return staging(shared).below(f"{STAGE}/{attempt_path(attempt)}")


def completion_stage(shared: Place, op: str) -> Place:
    """A new place for staged output of a completion of an operation."""
    return staging(shared).below(f"{STAGE}/{operation_path(op)}/{COMPLETION}/{uuid.uuid4().hex}")


def table_data(stage: Place, shared: Place, space: str, folder: str) -> Place:
    """The folder for those files of a stage that are already at their final place, below a table.

    Its path below the table follows from the stage's path alone. ``folder``: the table's. Raises UnsafePath if the
    place is not a stage in the shared directory.
    """
    inner = stage.path.removeprefix(f"{shared.path}/" if shared.path else "").removeprefix(f"{STAGE}/")
    if stage.anchor != shared.anchor or stage != shared.below(f"{STAGE}/{inner}"):
        raise UnsafePath(f"{stage.location} is not a stage in {shared.location}")
    return Place(folder, f"{IN_TABLE}/{space}/{inner}" if space else f"{IN_TABLE}/{inner}")


def make_table_data(stage: Place, data: Place) -> None:
    """Create the folder of a stage in a table, after the marker in the stage by which cleanups find it.

    An earlier call of the same attempt may have created both. Raises FileExistsError if something else is there
    already, UnsafePath if other users may change it, and OSError.
    """
    store = store_of(stage)
    try:
        store.put_new(TABLE_MARKER, b"")
        own = False
    except ObjectExists:
        own = True
    try:
        # All readers of the table must be able to read its data files.
        make_stage(data, 0o755)
    except FileExistsError:
        if not own:
            raise
    check_own(data)


def keep_table_data(stage: Place) -> None:
    """Remove the marker by which cleanups find the folder of a stage in a table: it belongs to the table now."""
    store_of(stage).delete_many([TABLE_MARKER])


class Stages:
    """The stages of the attempts of one run, each created on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: set[Place] = set()

    def make(self, place: Place, *, again: bool) -> None:
        """Create a stage if this run has not done so. Raises FileExistsError, UnsafePath, and OSError.

        ``again``: an earlier process may have created it for the same attempt; then it is reused. Otherwise an existing
        folder is not the attempt's own (FileExistsError).
        """
        with self._lock:
            found = again or place in self._made
            try:
                make_stage(place)
            except FileExistsError:
                if not found:
                    raise
                check_own(place)
            self._made.add(place)


def make_stage(place: Place, mode: int = 0o700) -> None:
    """Create a folder for a stage; in an object store, check that there is no object below it.

    ``mode``: of the folder, on a disk. Raises FileExistsError if something is there already, UnsafePath, and OSError.
    """
    if local_path(place.anchor) is not None:
        make_new(place, mode)
    elif any(store_of(place).list()):
        raise FileExistsError(
            f"{place.location} exists already, but only its attempt may create it: remove it; its content is not used"
        )


def result_key(attempt: Attempt) -> str:
    """The path in the shared directory of an attempt's result that is too large for etcd."""
    name = f"{attempt.partition:06d}-{attempt.fence}-{folder(attempt.incarnation)}.json"
    return f"{RESULTS}/{operation_path(attempt.op)}/{name}"


def result_of(shared: Place, attempt: Attempt) -> Place:
    """The file of an attempt's result that is too large for etcd."""
    return shared.below(result_key(attempt))


def series_of(shared: Place, op: str) -> Place:
    """The stage folder of all operations of one table, type and object, with one folder per instance."""
    return shared.below(f"{STAGE}/{operation_path(op).rpartition('/')[0]}")


def instances(series: Place, last: int) -> list[int]:
    """The instances up to ``last`` that have a folder in a place. Raises InvalidArgument and OSError."""
    names = store_of(series).list_folder().folders
    found = {int(name) for name in names if name.isascii() and name.isdigit() and name == str(int(name))}
    return sorted(n for n in found if n <= last)


def remove_place(place: Place) -> None:
    """Remove everything at a place, on a disk without following links. Raises InvalidArgument and OSError."""
    store_of(place.parent).delete_folder(place.name)


def remove_place_or_log(place: Place, log: Log) -> None:
    """Remove everything at a place like :func:`remove_place`, but log errors; the next call retries."""
    try:
        remove_place(place)
    except (OSError, InvalidArgument) as error:
        log.warning("Cannot remove %s; retrying later: %s", place.location, describe(error))

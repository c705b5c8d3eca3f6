"""Files in the shared directory (a local path or a URL that pyarrow knows), and the file lists of plans there."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from distop import deletion
from distop.core.codec import dumps, loads
from distop.core.model import OperationRef
from distop.core.plan import MAX_CHUNK_BYTES, PartitionPlan, Pinned, files_of
from distop.deletion import Place
from distop.errors import InvalidArgument, UnsafePath
from distop.files import local_path, read, write
from distop.places import folder, instances, operation_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.core.model import TableRecord

_RESULTS = "results"
L = TypeVar("L", PartitionPlan, Pinned)
"""What has a list of files."""


def shared_of(configured: str, space: str, table: TableRecord | None) -> Place | None:
    """The folder of an etcd cluster and namespace (``space``) in the shared directory: that is as configured, else
    ``<table location>/_distop`` where that is a folder, else there is none.
    """
    if configured:
        return Place(configured.rstrip("/") or configured, space)
    if table is None or not table.folder:
        return None
    return Place(table.folder.rstrip("/"), f"_distop/{space}" if space else "_distop")


def spill(partitions: Iterable[PartitionPlan], shared: Place | None, op: str) -> list[PartitionPlan]:
    """Partitions whose file lists alone would pass a chunk's limit get them written to the shared directory. Each
    planning writes files of its own name, so that a planner that was replaced cannot change a plan."""
    kept: list[PartitionPlan] = []
    for partition in partitions:
        # The first condition spares most partitions the encoding: no path is that long.
        number = max(len(listed.files) for listed in partition.lists())
        if number > 16 and len(dumps(partition.to_json())) > MAX_CHUNK_BYTES:
            if shared is None:
                raise InvalidArgument(
                    f"partition {partition.name} has {number} files, too many for etcd: "
                    "give the executors a --shared-dir"
                )
            place = f"{_plans(op)}/{partition.partition:06d}"
            beside = tuple(_spilled(p, shared, place) for p in partition.beside)
            partition = replace(_spilled(partition, shared, place), beside=beside)
        kept.append(partition)
    return kept


def _spilled(listed: L, shared: Place, place: str) -> L:
    path = f"{place}-{uuid.uuid4().hex}.json"
    files = [list(f) for f in listed.files]
    write(
        f"{shared.location}/{path}",
        dumps({"files": files, "folders": dict(listed.folders)} if listed.folders else files),
    )
    return replace(listed, files=(), folders={}, files_at=path)


def result_path(shared: Place, op: str, partition: int, fence: int, incarnation: str) -> str:
    """Where the result of an attempt stands that is too large for etcd: a file of that attempt's own."""
    return f"{shared.location}/{_RESULTS}/{operation_path(op)}/{partition:06d}-{fence}-{folder(incarnation)}.json"


def _plans(op: str) -> str:
    """Where the file lists of all plannings of an operation stand, below the shared directory."""
    return f"plans/{operation_path(op)}"


def with_results(shared: Place, ops: Iterable[str]) -> list[str]:
    """The operations whose results stand in files: of those of one table, type and object up to the newest of ``ops``.
    Raises UnsafePath and OSError.
    """
    newest: dict[str, OperationRef] = {}
    for op in ops:
        ref, folder_of = OperationRef.parse(op), operation_path(op).rpartition("/")[0]
        if folder_of not in newest or newest[folder_of].instance < ref.instance:
            newest[folder_of] = ref
    found = []
    for place, ref in newest.items():
        numbers = instances(shared.below(f"{_RESULTS}/{place}"), ref.instance)
        found += [str(replace(ref, instance=n)) for n in numbers]
    return found


def remove_results(shared: Place, op: str) -> None:
    """Remove the results of an operation that stand in files; none there is fine. Raises UnsafePath and OSError."""
    deletion.delete(shared.below(_RESULTS), operation_path(op))


def remove_plans(shared: Place, op: str) -> None:
    """Remove the file lists of all plannings of an operation; none there is fine. Raises UnsafePath and OSError."""
    deletion.delete(shared, _plans(op))


def with_files(partition: PartitionPlan, shared: Place | None, op: str) -> PartitionPlan:
    """The partition with its file lists, read from the shared directory where the plan of ``op`` left it there. Raises
    UnsafePath where the plan names a file that is no list of this operation, and OSError.
    """
    if not partition.files_at:
        return partition
    if shared is None:
        raise InvalidArgument(f"the files of partition {partition.name} are in a shared directory, and there is none")
    beside = tuple(_listed(one, shared, op) for one in partition.beside)
    return replace(_listed(partition, shared, op), beside=beside)


def _listed(spilled: L, shared: Place, op: str) -> L:
    if not spilled.files_at:
        return spilled
    where, _, name = spilled.files_at.rpartition("/")
    if where != _plans(op):
        raise UnsafePath(f"the plan of {op} names {spilled.files_at!r}, which is no list of files of this operation")
    place = shared.below(where)
    local = local_path(shared.anchor)
    told = loads(read(place.below(name).location if local is None else str(deletion.regular_file(place, name))))
    if isinstance(told, list):
        return replace(spilled, files=files_of(told))
    return replace(spilled, files=files_of(told["files"]), folders=told["folders"])

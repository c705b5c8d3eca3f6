"""Files in the shared directory (a local path or a URL that pyarrow knows), and the file lists of plans there."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.json_codec import dumps, loads
from distop.protocol.plan import MAX_CHUNK_BYTES, PartitionPlan, Pinned, files_of
from distop.protocol.records import OperationRef, TableRecord
from distop.storage import deletion
from distop.storage.confinement import TableFiles, looked_once, table_of
from distop.storage.places import RESULTS, instances, operation_path
from distop.storage.storage_urls import check_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distop.storage.deletion import Place

_PLANS = "plans"
MAX_LIST_BYTES = 1 << 30
"""Of one file list: some millions of files."""
L = TypeVar("L", PartitionPlan, Pinned)
"""What has a list of files."""


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
    told = {"files": files, "folders": dict(listed.folders)} if listed.folders else files
    deletion.write(shared, path, dumps(told))
    return replace(listed, files=(), folders={}, files_at=path)


def _plans(op: str) -> str:
    """Where the file lists of all plannings of an operation stand, below the shared directory."""
    return f"{_PLANS}/{operation_path(op)}"


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
        numbers = instances(shared.below(f"{RESULTS}/{place}"), ref.instance)
        found += [str(replace(ref, instance=n)) for n in numbers]
    return found


def remove_results(shared: Place, op: str) -> None:
    """Remove the results of an operation that stand in files; none there is fine. Raises UnsafePath and OSError."""
    deletion.delete(shared.below(RESULTS), operation_path(op))


def remove_plans(shared: Place, op: str) -> None:
    """Remove the file lists of all plannings of an operation; none there is fine. Raises UnsafePath and OSError."""
    deletion.delete(shared, _plans(op))


def below_folder(table: TableRecord, paths: Sequence[str]) -> None:
    """Raises InvalidArgument for a file that does not lie below the table's folder; of a table of a catalog none is
    judged.
    """
    from distop.tables import folders_of, of_catalog  # what reads data is loaded by who reads

    if not of_catalog(table):
        TableFiles(*folders_of(table)).check(paths, below=True)


def with_files(
    partition: PartitionPlan,
    shared: Place | None,
    op: str,
    table: TableRecord | None = None,
    belong: Callable[[TableRecord, Sequence[str]], None] = below_folder,
) -> PartitionPlan:
    """The partition with its file lists, read from the shared directory where the plan of ``op`` left it there.

    A plan and a file list are data. ``belong`` raises InvalidArgument for files that are not the table's. Raises
    UnsafePath where the plan names a file that is no list of this operation, InvalidArgument where one leads elsewhere
    than a table may lie, or out of its ``table``, OSError, and what ``belong`` raises.
    """
    if partition.files_at:
        if shared is None:
            raise InvalidArgument(
                f"the files of partition {partition.name} are in a shared directory: give the executors a --shared-dir"
            )
        beside = tuple(_listed(one, shared, op) for one in partition.beside)
        partition = replace(_listed(partition, shared, op), beside=beside)
    with looked_once():
        _check_lists(partition, op, table, belong)
    return partition


def _check_lists(
    partition: PartitionPlan,
    op: str,
    table: TableRecord | None,
    belong: Callable[[TableRecord, Sequence[str]], None],
) -> None:
    from distop.tables import has_source  # what reads data is loaded by who reads

    for listed in partition.lists():
        paths = [path for path, _, _ in listed.files]
        check_paths((listed.source, *listed.folders, *paths))
        record = listed.table if isinstance(listed, Pinned) else table
        if record is not None and (listed.source or paths):
            belong(record, (listed.source,) if listed.source else paths)
            if listed.source and not has_source(record):
                raise InvalidArgument(
                    f"the plan of {op} has metadata for {record.name}, and tables of format {record.format} have none"
                )
        if listed.source:
            TableFiles(table_of(listed.source)).check(paths)


def _listed(spilled: L, shared: Place, op: str) -> L:
    if not spilled.files_at:
        return spilled
    where, _, name = spilled.files_at.rpartition("/")
    if where != _plans(op):
        raise UnsafePath(f"the plan of {op} names {spilled.files_at!r}, which is no list of files of this operation")
    text = deletion.read_regular(shared.below(where), name, MAX_LIST_BYTES)
    if len(text) > MAX_LIST_BYTES:
        raise InvalidArgument(f"the file list {spilled.files_at} has more than {MAX_LIST_BYTES} bytes")
    told = loads(text)
    if isinstance(told, list):
        return replace(spilled, files=files_of(told))
    return replace(spilled, files=files_of(told["files"]), folders=told["folders"])

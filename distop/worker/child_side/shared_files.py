"""Files in the shared directory (a local path or a URL): file lists of plans, and results."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.json_codec import dumps, loads
from distop.protocol.plan import MAX_CHUNK_BYTES, PartitionPlan, Pinned, files_of
from distop.protocol.records import OperationRef, TableRecord
from distop.storage.confinement import TableFiles, resolve_once, table_of
from distop.storage.files import TooLarge
from distop.storage.opened_stores import store_of
from distop.storage.places import RESULTS, STAGE, instances, operation_path, remove_place
from distop.storage.storage_urls import check_paths
from distop.storage.store_check import publishing_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distop.storage.deletion import Place

_PLANS = "plans"
MAX_LIST_BYTES = 1 << 30
"""Maximum bytes of one file list: some millions of files."""
_INCOMPLETE = 3600.0
"""Seconds after which a file that is not complete belongs to a killed process."""
L = TypeVar("L", PartitionPlan, Pinned)
"""A type with a list of files."""


def spill(partitions: Iterable[PartitionPlan], shared: Place | None, op: str) -> list[PartitionPlan]:
    """Write file lists that exceed a chunk's limit to the shared directory; returns the changed partitions.

    Each planning uses new file names, so a planner that was replaced cannot change a plan. Raises InvalidArgument if a
    list is too large and there is no shared directory.
    """
    result: list[PartitionPlan] = []
    for partition in partitions:
        # The first condition avoids the encoding of most partitions: no path is that long.
        number = max(len(listed.files) for listed in partition.lists())
        if number > 16 and len(dumps(partition.to_json())) > MAX_CHUNK_BYTES:
            if shared is None:
                raise InvalidArgument(
                    f"partition {partition.name} has {number} files, too many for etcd: start the executors with "
                    "--shared-dir"
                )
            place = f"{_plans(op)}/{partition.partition:06d}"
            beside = tuple(_spilled(p, shared, place) for p in partition.beside)
            partition = replace(_spilled(partition, shared, place), beside=beside)
        result.append(partition)
    return result


def _spilled(listed: L, shared: Place, place: str) -> L:
    path = f"{place}-{uuid.uuid4().hex}.json"
    files = [list(f) for f in listed.files]
    content = {"files": files, "folders": dict(listed.folders)} if listed.folders else files
    publishing_store(shared).put(path, dumps(content))
    return replace(listed, files=(), folders={}, files_at=path)


def _plans(op: str) -> str:
    """The folder in the shared directory with the file lists of all plannings of an operation."""
    return f"{_PLANS}/{operation_path(op)}"


def operations_with_files(shared: Place, ops: Sequence[str]) -> list[str]:
    """The operations with result files or stages: ``ops``, and earlier ones of the same table, type and object.

    All of ``ops`` are among them, because they may have files in their table.

    Also removes files that killed processes have left incomplete. Raises InvalidArgument and OSError.
    """
    store_of(shared).delete_incomplete(older_than=_INCOMPLETE)
    newest: dict[str, OperationRef] = {}
    for op in ops:
        ref, folder_of = OperationRef.parse(op), operation_path(op).rpartition("/")[0]
        if folder_of not in newest or newest[folder_of].instance < ref.instance:
            newest[folder_of] = ref
    found = []
    for place, ref in newest.items():
        numbers = {n for kind in (RESULTS, STAGE) for n in instances(shared.below(f"{kind}/{place}"), ref.instance)}
        found += [str(replace(ref, instance=n)) for n in sorted(numbers)]
    return list(dict.fromkeys((*found, *ops)))


def remove_results(shared: Place, op: str) -> None:
    """Remove the result files of an operation, if there are any. Raises InvalidArgument and OSError."""
    remove_place(shared.below(f"{RESULTS}/{operation_path(op)}"))


def remove_plans(shared: Place, op: str) -> None:
    """Remove the file lists of all plannings of an operation, if there are any. Raises InvalidArgument and OSError."""
    remove_place(shared.below(_plans(op)))


def check_below_folder(table: TableRecord, paths: Sequence[str]) -> None:
    """Raises InvalidArgument for a file outside the table's folder. Does not check tables of a catalog."""
    from distop.tables import folders_of, of_catalog  # imported late: few processes read data

    if not of_catalog(table):
        TableFiles(*folders_of(table)).check(paths, below=True)


def with_files(
    partition: PartitionPlan,
    shared: Place | None,
    op: str,
    table: TableRecord | None = None,
    check_files: Callable[[TableRecord, Sequence[str]], None] = check_below_folder,
) -> PartitionPlan:
    """The partition with its file lists, which are read from the shared directory if they were spilled.

    Plans and file lists are not trusted. ``check_files`` raises InvalidArgument for files that do not belong to the
    table. Raises UnsafePath if the plan names a file that is not a list of this operation, InvalidArgument for a path
    that no table may have or that is outside ``table``, OSError, and the errors of ``check_files``.
    """
    if partition.files_at:
        if shared is None:
            raise InvalidArgument(
                f"the file list of partition {partition.name} is in the shared directory: start the executors with "
                "--shared-dir"
            )
        beside = tuple(_read_list(one, shared, op) for one in partition.beside)
        partition = replace(_read_list(partition, shared, op), beside=beside)
    with resolve_once():
        _check_lists(partition, op, table, check_files)
    return partition


def _check_lists(
    partition: PartitionPlan,
    op: str,
    table: TableRecord | None,
    check_files: Callable[[TableRecord, Sequence[str]], None],
) -> None:
    from distop.tables import has_source  # imported late: few processes read data

    for listed in partition.lists():
        paths = [path for path, _, _ in listed.files]
        check_paths((listed.source, *listed.folders, *paths))
        record = listed.table if isinstance(listed, Pinned) else table
        if record is not None and (listed.source or paths):
            check_files(record, (listed.source,) if listed.source else paths)
            if listed.source and not has_source(record):
                raise InvalidArgument(
                    f"the plan of {op} has a metadata file for table {record.name}, but format {record.format} has none"
                )
        if listed.source:
            TableFiles(table_of(listed.source)).check(paths)


def _read_list(spilled: L, shared: Place, op: str) -> L:
    if not spilled.files_at:
        return spilled
    where, _, name = spilled.files_at.rpartition("/")
    if where != _plans(op):
        raise UnsafePath(f"the plan of {op} names {spilled.files_at!r}, which is not a file list of this operation")
    try:
        text = store_of(shared.below(where)).get(name, limit=MAX_LIST_BYTES).data
    except TooLarge:
        raise InvalidArgument(f"the file list {spilled.files_at} is larger than {MAX_LIST_BYTES} bytes") from None
    content = loads(text)
    if isinstance(content, list):
        return replace(spilled, files=files_of(content))
    return replace(spilled, files=files_of(content["files"]), folders=content["folders"])

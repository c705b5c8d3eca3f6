"""Files in the shared directory (a local path or a URL that pyarrow knows), and the file lists of plans there."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from distop.core.codec import dumps, loads
from distop.core.model import OperationRef
from distop.core.plan import MAX_CHUNK_BYTES, PartitionPlan, Pinned, files_of
from distop.errors import InvalidArgument
from distop.files import local_path, open_filesystem, read, write
from distop.shared_folder import RESULTS, folder, operation_path, result_path, shared_of
from distop.storage_urls import check_paths

if TYPE_CHECKING:
    from collections.abc import Iterable

_PLANS = "plans"
L = TypeVar("L", PartitionPlan, Pinned)
"""What has a list of files."""


def spill(partitions: Iterable[PartitionPlan], shared: str, op: str) -> list[PartitionPlan]:
    """Partitions whose file lists alone would pass a chunk's limit get them written to the shared directory. Each
    planning writes files of its own name, so that a planner that was replaced cannot change a plan."""
    kept: list[PartitionPlan] = []
    for partition in partitions:
        # The first condition spares most partitions the encoding: no path is that long.
        number = max(len(listed.files) for listed in partition.lists())
        if number > 16 and len(dumps(partition.to_json())) > MAX_CHUNK_BYTES:
            if not shared:
                raise InvalidArgument(
                    f"partition {partition.name} has {number} files, too many for etcd: "
                    "give the executors a --shared-dir"
                )
            place = f"{_plans(op)}/{partition.partition:06d}"
            beside = tuple(_spilled(p, shared, place) for p in partition.beside)
            partition = replace(_spilled(partition, shared, place), beside=beside)
        kept.append(partition)
    return kept


def _spilled(listed: L, shared: str, place: str) -> L:
    path = f"{place}-{uuid.uuid4().hex}.json"
    files = [list(f) for f in listed.files]
    write(f"{shared}/{path}", dumps({"files": files, "folders": dict(listed.folders)} if listed.folders else files))
    return replace(listed, files=(), folders={}, files_at=path)


def _plans(op: str) -> str:
    """Where the file lists of all plannings of an operation stand, below the shared directory."""
    return f"{_PLANS}/{operation_path(op)}"


def with_results(shared: str, ops: Iterable[str]) -> list[str]:
    """The operations whose results stand in files: of those of one table, type and object up to the newest of ``ops``.
    Raises OSError.
    """
    newest: dict[str, OperationRef] = {}
    for op in ops:
        ref, folder_of = OperationRef.parse(op), operation_path(op).rpartition("/")[0]
        if folder_of not in newest or newest[folder_of].instance < ref.instance:
            newest[folder_of] = ref
    found = []
    for place, ref in newest.items():
        numbers = {int(name) for name in _names(f"{shared}/{RESULTS}/{place}") if name.isascii() and name.isdigit()}
        found += [str(replace(ref, instance=n)) for n in sorted(numbers) if n <= ref.instance]
    return found


def remove_results(shared: str, op: str) -> None:
    """Remove the results of an operation that stand in files; none there is fine. Raises OSError."""
    _remove(f"{shared}/{RESULTS}/{operation_path(op)}")


def remove_plans(shared: str, op: str) -> None:
    """Remove the file lists of all plannings of an operation; none there is fine. Raises OSError."""
    _remove(f"{shared}/{_plans(op)}")


def _names(location: str) -> list[str]:
    """What is in a folder; nothing where there is none."""
    path = local_path(location)
    if path is not None:
        try:
            return [one.name for one in Path(path).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
    from pyarrow import fs

    filesystem, inner = open_filesystem(location)
    return [info.base_name for info in filesystem.get_file_info(fs.FileSelector(inner, allow_not_found=True))]


def _remove(location: str) -> None:
    path = local_path(location)
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
        return
    from pyarrow import fs

    filesystem, inner = open_filesystem(location)
    if filesystem.get_file_info(inner).type == fs.FileType.Directory:
        filesystem.delete_dir(inner)


def with_files(partition: PartitionPlan, shared: str) -> PartitionPlan:
    """The partition with its file lists, read from the shared directory where the plan left it there.

    Raises InvalidArgument where it leads elsewhere than a table may lie: a plan and a file list are data.
    """
    if partition.files_at:
        beside = tuple(_listed(one, shared) for one in partition.beside)
        partition = replace(_listed(partition, shared), beside=beside)
    for listed in partition.lists():
        check_paths((listed.source, *listed.folders, *(path for path, _, _ in listed.files)))
    return partition


def _listed(spilled: L, shared: str) -> L:
    if not spilled.files_at.startswith(f"{_PLANS}/") or ".." in spilled.files_at.split("/"):
        raise InvalidArgument(f"the plan names a file list outside of the shared directory's plans: {spilled.files_at}")
    told = loads(read(f"{shared}/{spilled.files_at}"))
    if isinstance(told, list):
        return replace(spilled, files=files_of(told))
    return replace(spilled, files=files_of(told["files"]), folders=told["folders"])

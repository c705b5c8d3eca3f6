"""Run files: an executor's records of its runs, on its own disk.

Each run has one small file. It is written and synced before the run starts, and removed when no job of the run has data
on this node any more. It holds all that a cleanup needs, because the operation may be gone from etcd by then. Behaviors
that neither clean up nor resume need no run files: their jobs leave only their private directories.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.json_codec import UNREADABLE, dumps, loads
from distop.protocol.keys import decode, decode_object
from distop.protocol.records import OperationRef
from distop.storage.files import write_whole
from distop.storage.places import folder, operation_path
from distop.worker.daemon_side.requests import JobItem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


@dataclass(slots=True, eq=False)
class LocalRun:
    """One run. ``left``: its jobs that may have data on this node."""

    name: str
    """The name of its file."""
    op: OperationRef
    incarnation: str
    arg: Any
    table: Mapping[str, Any] | None
    left: dict[int, JobItem] = field(default_factory=dict)

    def encode(self) -> bytes:
        return dumps(
            {
                "v": 1,
                "op": str(self.op),
                "incarnation": self.incarnation,
                "arg": self.arg,
                "table": self.table,
                "items": [[item.partition, item.attempt, item.fence] for item in self.left.values()],
            }
        )

    @classmethod
    def decode(cls, name: str, value: bytes) -> LocalRun:
        """Decode a run file.

        Raises ValueError, KeyError or TypeError if it is damaged, for example after a crash during its write.
        """
        data = loads(value)
        items = [JobItem(partition, int(attempt), int(fence)) for partition, attempt, fence in data["items"]]
        op = OperationRef.parse(data["op"])
        return cls(name, op, data["incarnation"], data["arg"], data["table"], {item.ordinal: item for item in items})


class WorkDirectoryUnusable(OSError):
    """A run file could not be written to the work directory, so no job of the run was started."""


class RunFiles:
    """The folder of the run files, in the work directory. All methods block, and raise OSError."""

    def __init__(self, work_dir: Path) -> None:
        self._folder = work_dir / "runs"
        self._ops = work_dir / "ops"

    def names(self) -> list[str]:
        """The names of the run files. Raises InvalidArgument if the work directory cannot be used."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return sorted(path.name for path in self._folder.iterdir())
        except OSError as error:
            raise InvalidArgument(f"the work directory {self._folder} cannot be used: {error.strerror}") from None

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file, and sync it."""
        write_whole(self._folder / name, data)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        (self._folder / name).unlink(missing_ok=True)

    def operations(self) -> Iterator[OperationRef]:
        """The operations that have a private directory in the work directory."""
        for path in sorted(self._ops.glob("*/*/*")):
            for inner in [path] if path.name.isdigit() else sorted(path.iterdir()) if path.is_dir() else []:
                table, type_name, *obj, instance = inner.relative_to(self._ops).parts
                with contextlib.suppress(InvalidArgument, ValueError):
                    named = decode_object(obj[0].replace(".", "%2E")) if obj else ""
                    ref = OperationRef(decode(table.replace(".", "%2E")), type_name, named, int(instance))
                    if self._ops / operation_path(str(ref)) == inner:
                        yield ref


class LocalJobs:
    """The runs of one incarnation, and unsettled runs of earlier ones (``former``)."""

    def __init__(self, files: RunFiles, incarnation: str) -> None:
        self._files = files
        self._incarnation = incarnation
        self._number = 0
        self._mine: dict[tuple[OperationRef, int], LocalRun] = {}
        self.former: list[LocalRun] = []
        self.cleaning: dict[OperationRef, asyncio.Future[None]] = {}
        """Operations with a cleanup in progress on this node: their runs wait for its end."""

    def load(self) -> None:
        """Read the run files of earlier incarnations.

        Unreadable files are removed: their runs were never started. Raises InvalidArgument if the work directory cannot
        be used.
        """
        for name in self._files.names():
            try:
                if not name.endswith(".json"):
                    raise ValueError(name)
                self.former.append(LocalRun.decode(name, self._files.read(name)))
            except (OSError, InvalidArgument, *UNREADABLE):
                self._files.remove(name)

    def operations(self) -> list[OperationRef]:
        """The operations that have a private directory on this node."""
        return list(self._files.operations())

    async def begin(
        self, op: OperationRef, arg: Any, table: Mapping[str, Any] | None, items: Sequence[JobItem]
    ) -> None:
        """Write and sync the file of a run before the run starts. Raises WorkDirectoryUnusable."""
        self._number += 1
        name = f"{folder(self._incarnation)}-{self._number}.json"
        run = LocalRun(name, op, self._incarnation, arg, table, {item.ordinal: item for item in items})
        try:
            await asyncio.to_thread(lambda: self._files.write(name, run.encode()))
        except OSError as error:
            raise WorkDirectoryUnusable(error.errno, f"the work directory cannot be used: {error}") from error
        for item in items:
            self._mine[op, item.ordinal] = run
        for former in list(self.former):
            if former.op == op and (again := former.left.keys() & run.left.keys()):
                self.settled(former, list(again))  # this run takes over their data

    def ended(self, op: OperationRef, partition: int) -> None:
        """Handle a job of this incarnation that has no data on this node any more."""
        run = self._mine.pop((op, partition), None)
        if run is not None:
            self.settled(run, [partition])

    def released(self, op: OperationRef, partition: int) -> None:
        """Handle a job that this executor no longer holds, and whose data stay on this node for a later attempt."""
        run = self._mine.pop((op, partition), None)
        if run is not None and run not in self.former:
            self.former.append(run)

    def running(self, run: LocalRun, partition: int) -> bool:
        """Whether the job belongs to a run of this incarnation that has not ended."""
        return self._mine.get((run.op, partition)) is run

    def settled(self, run: LocalRun, partitions: Sequence[int]) -> None:
        """Drop jobs of a run that have no data on this node any more; with the last one its file is removed."""
        for partition in partitions:
            run.left.pop(partition, None)
        if not run.left:
            self._files.remove(run.name)
            if run in self.former:
                self.former.remove(run)

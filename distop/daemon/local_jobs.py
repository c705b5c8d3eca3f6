"""What an executor keeps on its own disk about the jobs that it runs: one small file for each run, written and synced
before the run starts, and removed when nothing of it is left here.

A file holds all that a cleanup takes, because the operation may be gone from etcd by the time that it is read. A job of
a behavior that neither cleans up nor resumes leaves nothing but its private directory, and is not written down.
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
    """One run: ``left`` are the jobs of which something may be here."""

    name: str
    """Of its file."""
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
        """Raises ValueError, KeyError or TypeError for what is no such record, as after a crash in the middle."""
        data = loads(value)
        items = [JobItem(partition, int(attempt), int(fence)) for partition, attempt, fence in data["items"]]
        op = OperationRef.parse(data["op"])
        return cls(name, op, data["incarnation"], data["arg"], data["table"], {item.ordinal: item for item in items})


class WorkDirectoryUnusable(OSError):
    """A run could not be written down in the work directory, so nothing of it was started."""


class RunFiles:
    """Where runs are written down: a folder of the work directory. All of it blocks, and raises OSError."""

    def __init__(self, work_dir: Path) -> None:
        self._folder = work_dir / "runs"
        self._ops = work_dir / "ops"

    def names(self) -> list[str]:
        """The files that are there. Raises InvalidArgument where the work directory cannot be used."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return sorted(path.name for path in self._folder.iterdir())
        except OSError as error:
            raise InvalidArgument(f"the work directory {self._folder} cannot be used: {error.strerror}") from None

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """A whole file, on the disk when this returns."""
        write_whole(self._folder / name, data)

    def remove(self, name: str) -> None:
        """A file, if it is there."""
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
    """The runs of one incarnation, and what former ones left (``former``)."""

    def __init__(self, files: RunFiles, incarnation: str) -> None:
        self._files = files
        self._incarnation = incarnation
        self._number = 0
        self._mine: dict[tuple[OperationRef, int], LocalRun] = {}
        self.former: list[LocalRun] = []
        self.cleaning: dict[OperationRef, asyncio.Future[None]] = {}
        """Operations of which something is being cleaned up here: their runs start afterwards."""

    def load(self) -> None:
        """Read what former incarnations left. What cannot be read was never started: it is removed. Raises
        InvalidArgument where the work directory cannot be used.
        """
        for name in self._files.names():
            try:
                if not name.endswith(".json"):
                    raise ValueError(name)
                self.former.append(LocalRun.decode(name, self._files.read(name)))
            except (OSError, InvalidArgument, *UNREADABLE):
                self._files.remove(name)

    def operations(self) -> list[OperationRef]:
        """The operations that have a private directory here."""
        return list(self._files.operations())

    async def begin(
        self, op: OperationRef, arg: Any, table: Mapping[str, Any] | None, items: Sequence[JobItem]
    ) -> None:
        """Write a run down before it starts; on the disk when this returns. Raises WorkDirectoryUnusable."""
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
                self.settled(former, list(again))  # what they left is this run's

    def ended(self, op: OperationRef, partition: int) -> None:
        """Nothing of a job is left here."""
        run = self._mine.pop((op, partition), None)
        if run is not None:
            self.settled(run, [partition])

    def released(self, op: OperationRef, partition: int) -> None:
        """A job is not ours any more, and something of it is left here, from which it may go on."""
        run = self._mine.pop((op, partition), None)
        if run is not None and run not in self.former:
            self.former.append(run)

    def running(self, run: LocalRun, partition: int) -> bool:
        """The job belongs to a run of this incarnation that has not ended."""
        return self._mine.get((run.op, partition)) is run

    def settled(self, run: LocalRun, partitions: Sequence[int]) -> None:
        """Nothing of these jobs of a run is left here; of a run without any, the file goes."""
        for partition in partitions:
            run.left.pop(partition, None)
        if not run.left:
            self._files.remove(run.name)
            if run in self.former:
                self.former.remove(run)

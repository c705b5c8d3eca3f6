"""What an executor keeps on its own disk about the jobs that it runs: one small file for each run, written and synced
before the run starts, and removed when nothing of it is left here.

A file holds all that a cleanup takes, because the operation may be gone from etcd by the time that it is read. A job of
a behavior that neither cleans up nor resumes leaves nothing but its private directory, and is not written down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.core.codec import dumps, loads
from distop.core.keys import decode, decode_object
from distop.core.model import OperationRef
from distop.errors import InvalidArgument
from distop.worker.model import JobItem
from distop.worker.shared import folder, operation_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


@dataclass(slots=True, eq=False)
class LocalRun:
    """One run: ``left`` are the jobs of which something may be here."""

    path: Path
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
    def decode(cls, path: Path, value: bytes) -> LocalRun:
        """Raises ValueError, KeyError or TypeError for what is no such record, as after a crash in the middle."""
        data = loads(value)
        items = [JobItem(partition, int(attempt), int(fence)) for partition, attempt, fence in data["items"]]
        op = OperationRef.parse(data["op"])
        return cls(path, op, data["incarnation"], data["arg"], data["table"], {item.ordinal: item for item in items})


class LocalJobs:
    """The runs of one incarnation, and what former ones left (``former``)."""

    def __init__(self, work_dir: Path, incarnation: str) -> None:
        self._folder = work_dir / "runs"
        self._ops = work_dir / "ops"
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
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"the work directory {self._folder} cannot be used: {error.strerror}") from None
        for path in sorted(self._folder.iterdir()):
            try:
                if path.suffix != ".json":
                    raise ValueError(path)
                self.former.append(LocalRun.decode(path, path.read_bytes()))
            except (OSError, ValueError, KeyError, TypeError, InvalidArgument):
                path.unlink(missing_ok=True)

    def operations(self) -> Iterator[OperationRef]:
        """The operations that have a private directory here."""
        for path in sorted(self._ops.glob("*/*/*")):
            for inner in [path] if path.name.isdigit() else sorted(path.iterdir()) if path.is_dir() else []:
                table, type_name, *obj, instance = inner.relative_to(self._ops).parts
                with contextlib.suppress(InvalidArgument, ValueError):
                    named = decode_object(obj[0].replace(".", "%2E")) if obj else ""
                    ref = OperationRef(decode(table.replace(".", "%2E")), type_name, named, int(instance))
                    if self._ops / operation_path(str(ref)) == inner:
                        yield ref

    async def begin(
        self, op: OperationRef, arg: Any, table: Mapping[str, Any] | None, items: Sequence[JobItem]
    ) -> None:
        """Write a run down before it starts; on the disk when this returns. Raises OSError."""
        self._number += 1
        path = self._folder / f"{folder(self._incarnation)}-{self._number}.json"
        run = LocalRun(path, op, self._incarnation, arg, table, {item.ordinal: item for item in items})
        await asyncio.to_thread(_write, run)
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
            run.path.unlink(missing_ok=True)
            if run in self.former:
                self.former.remove(run)


def _write(run: LocalRun) -> None:
    scratch = run.path.with_suffix(".new")
    with scratch.open("wb") as file:
        file.write(run.encode())
        file.flush()
        os.fdatasync(file.fileno())
    scratch.replace(run.path)
    directory = os.open(run.path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

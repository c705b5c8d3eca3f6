"""A fake JobContext for unit tests of a behavior's methods."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.behavior import JobContext, Progress
from distop.errors import InvalidArgument
from distop.protocol.jobs import MAX_BYTES
from distop.protocol.json_codec import dumps, loads
from distop.protocol.texts import did_you_mean
from distop.storage.deletion import Place
from distop.storage.places import Attempt, Stages, stage_of
from distop.worker.child_side.context_arguments import ended_operation, follow_up, status_text, table_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import SparkSession

    from distop.behavior import PartitionPlan, TableRecord
    from distop.protocol.work_done import WorkDone

INCARNATION = "test"


class MemoryProgress(Progress):
    """Checkpoints in memory, without a rate limit.

    ``saved`` holds all of them, in order.
    """

    def __init__(self, value: Any = None) -> None:
        self.saved: list[Any] = [] if value is None else [value]

    def load(self) -> Any:
        return self.saved[-1] if self.saved else None

    def save(self, value: Any, *, force: bool = False) -> bool:
        """Raises InvalidArgument if the value is not JSON or larger than 64 KiB, as in an executor."""
        try:
            text = dumps(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"a checkpoint must be a JSON value: {error}") from error
        if len(text) > MAX_BYTES:
            raise InvalidArgument(f"a checkpoint has {len(text)} bytes: at most {MAX_BYTES} are allowed")
        self.saved.append(loads(text))
        return True


class FakeContext(JobContext):
    """A JobContext without an executor, to call single methods of a behavior.

    ``folder``: a directory for all files (``tmp_path`` of pytest). ``table``, ``partition`` and ``attempt``: of the
    job. ``checkpoint``: the checkpoint of an earlier attempt. ``tables``: other registered tables. ``history``: history
    records by operation. ``spark``: a session; None: one is started on first use, and shared in the process.

    :meth:`cancel` asks the code to stop. ``statuses``, ``works``, ``progress.saved``, ``follow_ups`` and
    ``registrations`` hold the published statuses, the reported work, the saved checkpoints, the requested operations,
    and the tables to register.
    """

    def __init__(
        self,
        folder: Path | str,
        table: TableRecord | None = None,
        partition: PartitionPlan | None = None,
        *,
        attempt: int = 1,
        checkpoint: Any = None,
        tables: Iterable[TableRecord] = (),
        history: Mapping[str, Mapping[str, Any]] | None = None,
        spark: SparkSession | None = None,
        operation: str = "",
    ) -> None:
        self.work_dir = Path(folder)
        self.table = table
        self.partition = partition
        self.attempt = attempt
        self.operation = operation or f"{table.name if table is not None else '@cluster'}/test/1"
        self.space = ""
        self.shared = shared = Place(str(self.work_dir), "shared")
        self.shared_dir = shared.location
        self.log = logging.LoggerAdapter(logging.getLogger("distop.testing"), {})
        self.progress: MemoryProgress = MemoryProgress(checkpoint)
        self.tables = {one.name: one for one in tables}
        self.history = dict(history or {})
        self.statuses: list[str] = []
        self.works: list[WorkDone] = []
        self.follow_ups: list[Mapping[str, Any]] = []
        self.registrations: list[TableRecord] = []
        self._spark = spark
        self._stages = Stages()
        self._cancelled = False

    def cancel(self) -> None:
        """Ask the running code to stop."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            from distop.testing.in_process_child import spark_for

            self._spark = spark_for(None).session(self.operation, self.operation, self.operation)
        return self._spark

    @property
    def stage(self) -> str:
        if self.partition is None:
            raise InvalidArgument("a batch has one stage for each partition: use stage_of(partition)")
        return self.stage_of(self.partition)

    @property
    def stage_place(self) -> Place:
        if self.partition is None:
            raise InvalidArgument("a batch has one stage for each partition, so it has no stage_place")
        return self.stage_place_of(self.partition)

    def stage_of(self, partition: PartitionPlan) -> str:
        place = self.stage_place_of(partition)
        self._stages.make(place, again=True)
        return place.location

    def stage_place_of(self, partition: PartitionPlan) -> Place:
        shared = Place(str(self.work_dir), "shared")
        return stage_of(shared, Attempt(self.operation, partition.partition, self.attempt, INCARNATION))

    def other_table(self, name: str) -> TableRecord:
        name = table_name(name)
        if name not in self.tables:
            raise InvalidArgument(
                f"there is no table {name!r}{did_you_mean(name, self.tables)}: pass it to FakeContext(tables=…)"
            )
        return self.tables[name]

    def registered_tables(self) -> Sequence[TableRecord]:
        own = [self.table] if self.table is not None else []
        return [*own, *self.tables.values()]

    def history_record(self, op: str) -> Mapping[str, Any]:
        op = ended_operation(op)
        if op not in self.history:
            raise InvalidArgument(f"there is no history record of {op}: pass it to FakeContext(history=…)")
        return self.history[op]

    def status(self, text: str) -> None:
        self.statuses.append(status_text(text))

    def _report_work(self, done: WorkDone) -> None:
        self.works.append(done)

    def start_operation(
        self,
        type_name: str,
        table: str,
        arg: Any = None,
        *,
        partitions: Sequence[str] | None = None,
        delay: float | None = None,
    ) -> None:
        asked = follow_up(self.operation, type_name, table, arg, partitions, delay)
        self.follow_ups.append({**asked.to_json(), "delay": delay})

    def register_table(self, record: TableRecord) -> None:
        self.registrations.append(record)

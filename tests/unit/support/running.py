"""Runs the code of executors' child processes in the test's process, with a behavior that is not installed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from distop.protocol.plan import PartitionPlan
from distop.testing.in_process_child import spark_for
from distop.worker.child_side.call_handlers import Call
from distop.worker.child_side.environment import Environment
from distop.worker.child_side.outbox import Outbox
from distop.worker.child_side.runner import Run
from distop.worker.daemon_side.requests import JobEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import Behavior, TableRecord

OP = "t/sample/1"
INCARNATION = "inc-1"


class NoArg(BaseModel):
    """The argument of a behavior that takes none."""


class Sent(Outbox):
    """Records the messages of the child to its daemon. ``progress``: saved checkpoints."""

    def __init__(self) -> None:
        self.on_status: Callable[[str], None] = lambda _: None
        """Called with each status of a job."""
        self.ends: dict[int, JobEnded] = {}
        self.messages: list[Mapping[str, Any]] = []
        self.progress: dict[int, Any] = {}
        self.history: Mapping[str, Any] = {}
        """The history records by operation."""
        self.saves = True
        """Whether checkpoints are saved."""

    def send(self, message: Any) -> None:
        self.messages.append(message)
        if message["t"] == "status":
            self.on_status(message["text"])

    def ended(self, run: int, partition: int, kind: Any, result: bytes, error: str, started: float) -> None:
        assert partition not in self.ends, f"job {partition} has ended twice"
        self.ends[partition] = JobEnded(partition, kind, json.loads(result), error, started, started)

    def flush(self) -> None:
        pass

    def ask(self, message: Any, timeout: float) -> Any:
        if message["t"] == "history":
            return {"record": self.history[message["op"]]}
        assert message["t"] == "progress"
        if self.saves:
            self.progress[message["partition"]] = message["value"]
        return self.saves


class Child:
    """A child with one behavior. Partition ``i`` has the attempt ``i + 1`` and the fence ``100 + i``.

    ``spark``: the session of its jobs; None: they start one.
    """

    def __init__(
        self,
        behavior: Behavior,
        folder: Path,
        arg: Any = None,
        *,
        op: str = OP,
        table: TableRecord | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        self.sent = Sent()
        self.deaths: list[str] = []
        config = {
            "shared_dir": str(folder / "shared"),
            "space": "",
            "spark_master": "local[1]",
            "executor": "ex",
            "ttl": 10.0,
            "spark_conf": {},
            "verifier_urls": [],
            "trusted_spark_catalogs": [],
            "serves": {},
            "behaviors": {},
        }
        self.env = Environment(config, folder / "work", self.sent)
        self.env._behaviors[behavior.type_name] = behavior
        if spark is not None:
            self.env.spark = spark_for(spark)
        self._type, self._arg = behavior.type_name, arg
        self._op, self._table = op, table

    def run(
        self,
        jobs: Sequence[str | PartitionPlan],
        *,
        batch: bool = True,
        cleanup: bool = False,
        progress: Mapping[str, Any] | None = None,
        limit: float = 0.0,
        grace: float = 0.0,
    ) -> Run:
        """A run of partitions; its ``run()`` starts it. ``limit``, ``grace``: of the time of a job (0: none).

        ``jobs``: partitions of the plan, or their names if they have no files.
        """
        message = {
            "run": 1,
            **self._of_operation(jobs, progress or {}),
            "batch": batch,
            "cleanup": cleanup,
            "careful": False,
            "cancelled": [],
            "deadline": 0.0,
            "limit": limit,
            "grace": grace,
        }
        return Run(self.env, message, self.deaths.append)

    def ends(self, jobs: Sequence[str | PartitionPlan], **settings: Any) -> dict[str, JobEnded]:
        """Run partitions; returns the ends of their jobs by partition name."""
        self.run(jobs, **settings).run()
        names = [one if isinstance(one, str) else one.name for one in jobs]
        return {name: self.sent.ends[i] for i, name in enumerate(names)}

    def clean(self, jobs: Sequence[str | PartitionPlan]) -> None:
        """Clean up jobs that are not running."""
        Call(self.env, {"t": "cleanup", "call": 2, **self._of_operation(jobs, {})}, self.deaths.append).run()

    def complete(self, verdict: str = "success") -> Mapping[str, Any]:
        """Complete an operation without jobs; returns the message to the daemon."""
        counts = {"verdict": verdict, "total": 0, "success": 0, "failed": 0, "following": None}
        Call(self.env, {"t": "complete", "call": 3, **self._of_operation("", {}), **counts}, self.deaths.append).run()
        return self.sent.messages[-1]

    def _of_operation(self, jobs: Sequence[str | PartitionPlan], progress: Mapping[str, Any]) -> dict[str, Any]:
        plans = [PartitionPlan(i, one) if isinstance(one, str) else one for i, one in enumerate(jobs)]
        items = [(one.to_json(), i + 1, 100 + i, progress.get(one.name)) for i, one in enumerate(plans)]
        return {
            "op": self._op,
            "type": self._type,
            "arg": self._arg,
            "table": self._table.to_json() if self._table is not None else None,
            "items": items,
            "incarnation": INCARNATION,
        }


def kinds(ends: Mapping[str, JobEnded]) -> str:
    """A short text of the ends of jobs, such as ``a:success b:error``."""
    return " ".join(f"{name}:{ends[name].kind}" for name in sorted(ends))

"""Operation types for tests of the worker: the argument chooses an action for each partition."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from distop.behavior import Behavior, JobFailed, OperationFailed, PartitionPlan, Pinned, Planned
from distop.errors import FatalError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distop.behavior import JobContext, Summary, TableRecord


class SampleArg(BaseModel):
    """``does``: partition name → action; ``diary``: a file to which all calls are logged."""

    model_config = ConfigDict(extra="forbid")

    does: dict[str, str] = Field(default_factory=dict)
    diary: str = ""
    names: list[str] = Field(default_factory=list)
    files: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    """The table options that planning returns."""
    sought: dict[str, str] = Field(default_factory=dict)
    """What jobs read: the ``variable`` of the environment, the Spark setting ``read``."""


class SampleResult(BaseModel):
    """A result that is a pydantic model."""

    partition: str
    attempt: int


class Sample(Behavior):
    """Runs the actions of its argument."""

    type_name = "sample"
    Arg = SampleArg
    staged_output = "keep"
    conflicts_with = ("other",)

    def partitions(self, table: TableRecord, arg: SampleArg, ctx: JobContext) -> Planned:
        write(arg, "plan")
        act(arg.does.get("plan", ""), PartitionPlan(0, "plan"), ctx)
        if "die" in arg.does:
            os._exit(3)
        if "once" in arg.does and not (ctx.work_dir / "once").exists():
            (ctx.work_dir / "once").touch()
            while True:
                time.sleep(0.05)
        if "wrong" in arg.does:
            raise InvalidArgument("the location is wrong")
        if "error" in arg.does:
            raise RuntimeError("no listing today")
        files = tuple((f"{table.location}/{'x' * 200}/{i}", i, i) for i in range(arg.files))
        beside: tuple[Pinned, ...] = ()
        if other := arg.does.get("beside"):
            beside = (Pinned(ctx.other_table(other), "v9", files),)
        partitions = [PartitionPlan(7, name, len(files), files, beside=beside) for name in arg.names]
        return Planned(partitions, "v1", arg.options)

    def start_or_resume_job(self, arg: SampleArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        write(arg, f"start {partition.name}")
        action = arg.does.get(partition.name, "")
        if action:
            act(action, partition, ctx)
        if action == "files":
            others = {other.table.name: len(other.files) for other in partition.beside}
            return {"files": len(partition.files), **others}
        if action == "options":
            assert ctx.table is not None
            return dict(ctx.table.options)
        if action == "environment":
            with open(f"/proc/{os.getppid()}/environ") as file:
                guardian = [entry.partition("=")[0] for entry in file.read().split("\0")]
            return {"child": [n for n in os.environ if n.startswith("DISTOP_")], "guardian": guardian}
        if action == "stage":
            return {"stage": ctx.stage, "work_dir": str(ctx.work_dir)}  # type: ignore[attr-defined]
        if action == "large":
            return "x" * 70_000
        if action == "object":
            return object()
        if action == "nan":
            return float("nan")
        if action == "progress":
            return {"loaded": ctx.progress.load(), "saved": [ctx.progress.save({"at": n}) for n in range(2)]}
        if action == "spark":
            row = ctx.spark.sql("select current_timezone() as zone, count(*) as n from range(10)").first()
            return {"zone": row["zone"], "n": row["n"], "pool": pool(ctx), "fair": has_pool(ctx, pool(ctx))}
        if action == "variables":
            names = (arg.sought["variable"], "DISTOP_PASSWORD", "DISTOP_SPARK_CONF")
            return {name: len(os.environ.get(name, "")) for name in names}
        if action == "spark-setting":
            return {"value": ctx.spark.conf.get(arg.sought["read"])}
        if action == "spark-python":
            rows = ctx.spark.sparkContext.parallelize(range(2), 2)
            return {"paths": sorted(rows.map(python_worker).collect())}
        if action in ("spark-quote", "spark-quote-variable"):
            text = f"[{ctx.spark.conf.get(arg.sought['read'])}]"
            if action == "spark-quote-variable":
                text = f"{os.environ[arg.sought['variable']]} " * 300  # too long: an error is cut within the variable
            ctx.log.error("it says %s", text)
            ctx.status(f"with {text}")
            ctx.spark.sql(f"select raise_error('{text}')").collect()
        if action == "spark-user":
            jvm: Any = ctx.spark.sparkContext._jvm
            return {"option": jvm.java.lang.System.getProperty("of.the.user")}
        return SampleResult(partition=partition.name, attempt=ctx.attempt)

    def is_fatal(self, error: BaseException) -> bool:
        return isinstance(error, ZeroDivisionError) or super().is_fatal(error)

    def cancel_job_and_cleanup(self, arg: SampleArg, partition: PartitionPlan, ctx: JobContext) -> None:
        write(arg, f"clean {partition.name}")
        action = arg.does.get(partition.name, "")
        if action == "checkpoint":
            write(arg, f"checkpoint {ctx.progress.load()}")
        if action == "unclean":
            raise OSError("it cannot be removed")
        if action.startswith("clean-"):
            act(action.removeprefix("clean-"), partition, ctx)

    def complete_operation(
        self, arg: SampleArg, table: TableRecord | None, summary: Summary, ctx: JobContext
    ) -> dict[str, Any]:
        write(arg, "complete")
        act(arg.does.get("complete", ""), PartitionPlan(0, "complete"), ctx)
        rows = [(row.partition, row.name, row.success) for row in summary.outcomes()]
        report = {"verdict": summary.verdict, "rows": rows}
        if "plan" in arg.does:
            planned = [[p.partition, p.name, len(p.files)] for p in summary.partitions()]
            return {"version": summary.version, "whole": summary.whole, "planned": planned}
        if "table" in arg.does:
            return dict(table.options) if table is not None else {}
        if "follow" in arg.does:
            ctx.start_operation("sample", "t", SampleArg(names=["a"]), partitions=["a"])
        if "no" in arg.does:
            raise OperationFailed("the answer is no", report)
        if "large" in arg.does:
            return {"text": "x" * 600_000}
        return report


class Batches(Sample):
    """The same, with all jobs in one batch."""

    type_name = "batches"

    def run_batch(
        self, arg: SampleArg, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        write(arg, "batch " + " ".join(p.name for p in partitions))
        for partition in partitions:
            action = arg.does.get(partition.name)
            if action == "break":
                raise RuntimeError(f"{partition.name} breaks the batch")
            if action == "forget":
                continue
            try:
                yield partition, self.start_or_resume_job(arg, partition, ctx)
            except Exception as error:
                yield partition, error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "fail": lambda: JobFailed("the answer is no", {"why": "told to"}),
    "fail-unclean": lambda: JobFailed("the answer is no"),
    "error": lambda: RuntimeError("something went wrong"),
    "hopeless": lambda: FatalError("no retry mends this"),
    "known": lambda: ZeroDivisionError("nor this"),
    "wrong": lambda: InvalidArgument("this cannot work"),
    "exit": lambda: SystemExit(1),
    "memory": MemoryError,
}
"""Actions that raise an error."""


def act(action: str, partition: PartitionPlan, ctx: JobContext) -> None:
    """Run an action of a job, a planning or a completion."""
    if action.endswith("-once"):
        # Only the first time on any node: the file is kept in the table's folder.
        done = Path(ctx.table.location if ctx.table is not None else ctx.work_dir, f"{action}-{partition.name}")
        if done.exists():
            return
        done.touch()
        action = action.removesuffix("-once")
    if action in ERRORS:
        raise ERRORS[action]()
    if action == "die":
        os._exit(3)
    if action == "last-words":
        try:
            raise OSError("the disk is on fire")
        except OSError:
            traceback.print_exc()
        os._exit(3)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "status":
        ctx.status("half way")
    if action == "statuses":
        heard = Path(ctx.work_dir, "heard")
        ctx.status("half way")
        ctx.status("nearly there")
        while not heard.exists():
            time.sleep(0.005)
    if action == "wait":
        while True:
            ctx.check_cancelled()
            time.sleep(0.005)
    if action == "deaf":
        Path(ctx.work_dir, f"deaf-{partition.name}").touch()
        while True:
            time.sleep(0.05)
    if action == "regex":
        re.match("^(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock practically forever
    if action == "hold":
        while not Path(ctx.work_dir, "go").exists():
            time.sleep(0.005)
    if action == "company":
        # In the same session, but in its own process group.
        company = subprocess.Popen(["sleep", "600"], process_group=0)
        Path(ctx.work_dir, "company").write_text(str(company.pid))
        time.sleep(600)
    if action == "spark-use":
        ctx.spark.range(1).count()
    if action == "spark-wait":
        Path(ctx.work_dir, "spark-wait").write_text(str(pool(ctx)))
        ctx.spark.range(0, 2, 1, 2).selectExpr("java_method('java.lang.Thread', 'sleep', 100000L)").collect()
    if action == "spark-die":
        jvm: Any = gateway_of(ctx)
        jvm.proc.kill()
        jvm.proc.wait()
        ctx.spark.range(1).count()

    if action == "spark-memory":
        gateway = gateway_of(ctx)
        hoard = gateway.jvm.java.util.ArrayList()
        while True:
            hoard.add(gateway.jvm.java.nio.ByteBuffer.allocate(200_000_000))
    if action == "spark-unusable":
        ctx.spark.range(1).count()
        # Spark's folder for shuffle files: the context still works, but all stages with a shuffle fail.
        for folder in Path(ctx.work_dir).parents[3].glob("spark/local/*"):
            shutil.rmtree(folder)
    if action in ("spark-unusable", "spark-shuffle"):
        ctx.spark.range(0, 100, 1, 2).repartition(3).count()
    if action == "spark-error":
        ctx.spark.sql("select no_such_column from range(1)").count()


def python_worker(_: int) -> str:
    """Runs in a Python worker of Spark; returns its working directory and its import path."""
    time.sleep(1)
    return f"{Path.cwd()} {os.pathsep.join(sys.path)}"


def gateway_of(ctx: JobContext) -> Any:
    """The gateway to a working JVM."""
    from pyspark import SparkContext  # slow to import, and most actions do not need it

    ctx.spark.range(1).count()
    return SparkContext._gateway


def pool(ctx: JobContext) -> str | None:
    """The scheduler pool of the calling thread's Spark jobs."""
    return ctx.spark.sparkContext.getLocalProperty("spark.scheduler.pool")


def has_pool(ctx: JobContext, name: str | None) -> bool:
    """Whether Spark's scheduler has this pool; a FIFO scheduler has no pools."""
    return bool(ctx.spark.sparkContext._jsc.sc().getPoolForName(name).isDefined())


def write(arg: SampleArg, line: str) -> None:
    """Append a line to the diary; it is complete even if the process dies next."""
    if arg.diary:
        with open(arg.diary, "a") as file:
            file.write(line + "\n")

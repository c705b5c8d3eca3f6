"""Operation types that write data, for tests with faults, and functions that check their data.

Each job writes its rows one by one into a file in its stage, and logs each row with the time in a journal. The journal
shows whether two attempts at one job ran at the same time; the files show whether the outputs in outcomes are complete.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from distop.behavior import Behavior, PartitionPlan, Planned
from distop.protocol.behavior_declaration import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distop.behavior import JobContext, TableRecord
    from tests.support.replay import Written


class WritingArg(BaseModel):
    """``does``: partition name → its fault. ``hold``: jobs end once this file exists."""

    model_config = ConfigDict(extra="forbid")

    jobs: int = 4
    rows: int = 5
    pause: float = 0.02
    journal: str
    hold: str = ""
    does: dict[str, str] = Field(default_factory=dict)


class Writing(Behavior):
    """Writes the rows of its partition, slowly."""

    type_name = "writing"
    Arg = WritingArg
    staged_output = "keep"
    failure_policy = "collect_all"
    retry = Retry(attempts=5, initial=0.1, maximum=1.0)

    def partitions(self, table: TableRecord, arg: WritingArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(n, f"p={n}") for n in range(arg.jobs)])

    def start_or_resume_job(self, arg: WritingArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        action = arg.does.get(partition.name, "")
        note(arg.journal, partition.partition, ctx.attempt, "begin")
        if action == "deaf":
            while True:
                note(arg.journal, partition.partition, ctx.attempt, "row")
                time.sleep(0.02)
        stage = Path(ctx.stage)
        file = stage / "rows.txt"
        with file.open("w") as out:
            for row in range(arg.rows):
                ctx.check_cancelled()
                note(arg.journal, partition.partition, ctx.attempt, "row")
                out.write(f"{partition.name} {row}\n")
                out.flush()
                time.sleep(arg.pause)
            while arg.hold and not Path(arg.hold).exists():
                ctx.check_cancelled()
                note(arg.journal, partition.partition, ctx.attempt, "row")
                time.sleep(0.02)
        return {"file": str(file), "rows": arg.rows, "sha256": digest(file)}


class SparkWriting(Writing):
    """The same in PySpark's Python workers, with all jobs in one batch."""

    type_name = "sparkwriting"
    retry = Retry(attempts=2, initial=0.1, maximum=1.0)

    def run_batch(
        self, arg: WritingArg, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        spark = ctx.spark
        for partition in partitions:
            break_spark(arg.does.get(partition.name, ""), spark)
        work = [(p.partition, p.name, ctx.stage_of(p)) for p in partitions]
        settings = (arg.rows, arg.pause, arg.journal, ctx.attempt, arg.hold)
        written = spark.sparkContext.parallelize(work, len(work)).map(lambda item: write_rows(item, settings)).collect()
        by_ordinal = {p.partition: p for p in partitions}
        for ordinal, result in written:
            yield by_ordinal[ordinal], result


def write_rows(item: tuple[int, str, str], settings: tuple[int, float, str, int, str]) -> tuple[int, dict[str, Any]]:
    """Write the rows of one partition, in a Python worker of Spark."""
    (ordinal, name, stage), (rows, pause, journal, attempt, hold) = item, settings
    file = Path(stage) / "rows.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as out:
        for row in range(rows):
            note(journal, ordinal, attempt, "row")
            out.write(f"{name} {row}\n")
            out.flush()
            time.sleep(pause)
        while hold and not Path(hold).exists():
            note(journal, ordinal, attempt, "row")
            time.sleep(0.02)
    return ordinal, {"file": str(file), "rows": rows, "sha256": digest(file)}


def break_spark(action: str, spark: Any) -> None:
    """Make the batch's JVM or Spark context fail."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    if action == "kill-jvm":
        gateway.proc.kill()
    elif action == "hang-jvm":
        os.kill(java_of(gateway.proc.pid), signal.SIGSTOP)
    elif action == "stop-context":
        spark.stop()
    elif action == "memory":
        # Allocates buffers until the small JVM of the test has no memory.
        hoard = gateway.jvm.java.util.ArrayList()
        while True:
            hoard.add(gateway.jvm.java.nio.ByteBuffer.allocate(50_000_000))
    elif action == "lose-directories":
        spark.range(1).count()
        shutil.rmtree(spark.conf.get("spark.local.dir"))
        spark.range(0, 8, 1, 2).repartition(2).count()
    elif action == "error":
        raise RuntimeError("this partition breaks the batch")


def java_of(pid: int) -> int:
    """The java process: the given process or a child of it, since spark-submit is a script that executes java."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
            if pid in (int(folder.name), parent) and b"java" in command.partition(b"\0")[0]:
                return int(folder.name)
    return pid


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def note(journal: str, partition: int, attempt: int, what: str) -> None:
    """Append a line to the journal; it is complete even if the process dies next."""
    line = json.dumps([partition, attempt, what, boottime()])
    with open(journal, "a") as file:
        file.write(line + "\n")


class Journal:
    """The journal of an operation: events with partition, attempt and time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[tuple[int, int, str, float]]:
        if not self.path.exists():
            return []
        return [tuple(json.loads(line)) for line in self.path.read_text().splitlines()]

    def attempts(self, partition: int) -> dict[int, tuple[float, float]]:
        """Attempt → the times of its first and last line."""
        found: dict[int, tuple[float, float]] = {}
        for number, attempt, _, when in self.lines():
            if number == partition:
                first, last = found.get(attempt, (when, when))
                found[attempt] = (min(first, when), max(last, when))
        return found

    def overlaps(self, allowed: Callable[[int, int, float, float], bool] | None = None) -> list[str]:
        """Attempts that wrote after a later attempt at the same job had started.

        ``allowed``: whether such a line is allowed; takes partition, attempt, start of the later attempt, and the
        line's time.
        """
        times: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for partition, attempt, _, when in self.lines():
            times[partition][attempt].append(when)
        found = []
        for partition, attempts in sorted(times.items()):
            for (earlier, written), (later, follows) in itertools.pairwise(sorted(attempts.items())):
                first = min(follows)
                late = [when for when in written if when >= first]
                if allowed is not None:
                    late = [when for when in late if not allowed(partition, earlier, first, when)]
                if late:
                    text = f"partition {partition}: {earlier} wrote until {max(late):.3f}, {later} from {first:.3f}"
                    found.append(text)
        return found

    def resumed(self) -> int:
        """The number of attempts that resumed from a checkpoint: they log ``from N``, where N is not 0."""
        return sum(1 for *_, what, _ in self.lines() if what.startswith("from ") and what != "from 0")

    def lost_checkpoints(self) -> list[str]:
        """Attempts that started before the last acknowledged checkpoint (``saved N``) of their job.

        Checkpoints of later attempts do not count: an attempt on a suspended machine may log its start late.
        """
        found, saved = [], defaultdict[int, dict[int, int]](dict)
        for partition, attempt, what, _ in self.lines():
            word, _, number = what.partition(" ")
            if word == "saved":
                saved[partition][attempt] = max(saved[partition].get(attempt, 0), int(number))
            elif word == "from":
                rows = max((rows for by, rows in saved[partition].items() if by <= attempt), default=0)
                if int(number) < rows:
                    found.append(f"partition {partition}: {attempt} started {what}, but {rows} rows were saved")
        return found


def output_error(outcome: Mapping[str, Any], rows: int) -> str:
    """The error in the output of a successful outcome, or "".

    The output is one file with ``rows`` rows, or segments: files of which only the first rows count.
    """
    result, found = outcome["result"], list[str]()
    segments = result["segments"] if "segments" in result else [(result["file"], rows)]
    for name, count in segments:
        file = Path(name)
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) < count:
            return f"{file} has {len(lines)} rows of {count}"
        found += lines[:count]
    if found != [f"{outcome['name']} {row}" for row in range(rows)]:
        return f"the rows are {found}, and should be {rows} of {outcome['name']}"
    last = Path(segments[-1][0])
    if outcome["incarnation"] not in last.parent.name:
        return f"{last} is the output of another attempt"
    if "sha256" in result and digest(last) != result["sha256"]:
        return f"{last} differs from the written file"
    return ""


def assert_data(written: Written, journal: Journal, jobs: int, rows: int, *, overlaps: bool = False) -> None:
    """Check that each job has one state and one outcome with a complete output, and that no attempts overlap.

    ``overlaps``: attempts may overlap.
    """
    assert {p: len(w) for p, w in written.outcomes.items()} == dict.fromkeys(range(jobs), 1)
    assert {p: len(w) for p, w in written.states.items()} == dict.fromkeys(range(jobs), 1)
    for partition, (text,) in written.outcomes.items():
        outcome = json.loads(text)
        if outcome.get("result") is None:
            assert outcome.get("error"), outcome
            continue
        assert outcome["name"] == f"p={partition}"
        assert not output_error(outcome, rows)
    if not overlaps:
        assert not journal.overlaps()

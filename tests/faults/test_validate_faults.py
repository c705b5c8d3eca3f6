"""validate under faults, with real daemons: whatever struck it, its report, its outcomes and its certificate are those
of a run that nothing disturbed, and the table is as it was. The audit of etcd's history follows (conftest.py).

What footers and manifests decide needs no JVM, so that a killed child is cheap; what is counted by a scan needs one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from distop.protocol.records import OperationRef, TableRecord
from tests.faults.striking import Strikes
from tests.faults.test_index_faults import holder
from tests.support.daemons import SPARK
from tests.support.lake import MAVEN, Folder, jar
from tests.support.metastore import Metastore
from tests.support.needs import need
from tests.support.replay import Written

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop import Operation, Result
    from tests.support.daemons import Daemon, Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(400), pytest.mark.rotating]

PARTITIONS = ("a", "b", "c")
DECIDED: dict[str, Any] = {
    "checks": [{"not_null": "id"}, {"range": {"column": "id", "min": 1, "max": 1_000}}],
    "sample": 0,
}
"""Without a scan: certified."""
SCANNED: dict[str, Any] = {
    "checks": [{"not_null": "id"}, {"check": "id < 1000"}, {"matches": {"column": "w", "pattern": "w"}}]
}
"""By one, and certified."""
VIOLATED: dict[str, Any] = {"checks": [{"check": "id % 10 < 2"}, {"not_null": "id"}], "sample": 5}
KEYS: dict[str, Any] = {"checks": [{"unique": "id"}, {"unique": "w"}], "sample": 4}
"""By one job over all partitions: the second is violated."""

PLAN = ["partitions.before", "partitions.after"]
COMPLETION = [f"{name}.{when}" for name in ("completion", "certification.certify") for when in ("before", "after")]
LIST = ["file_lists.write.before", "file_lists.write.after"]
"""The one file that it writes: of Iceberg tables there is none."""
REPORT = ["batch.before", "result.before", "result.after", "batch.after"]
SOME = ["partitions.after", "result.before", "result.after", "file_lists.write.after", "completion.after"]
SCAN = [(SCANNED, f"scan.count.{when}") for when in ("before", "after")]
SAMPLES = [(VIOLATED, f"batch.fetch.{when}") for when in ("before", "after")]
OF_KEYS = [(KEYS, f"KeyChecks.run.{when}") for when in ("before", "after")]

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "w", StringType(), required=False),
    NestedField(3, "p", StringType(), required=False),
)
BY_P = PartitionSpec(PartitionField(source_id=3, field_id=1000, transform=IdentityTransform(), name="p"))


def rows(n: int) -> dict[str, pa.Array]:
    """Three rows that no other partition has, but for the text of the first."""
    return {"id": pa.array([10 * n + i for i in (1, 2, 3)], pa.int64()), "w": pa.array(["w", f"w{n}2", f"w{n}3"])}


class Subject:
    """The tables of one format, and what is done to them. ``options``: of the daemons; ``most``: so many of these can
    run at once.
    """

    most = 2
    options: tuple[str, ...] = ()
    lists = 1
    """Files that a certificate comes with."""
    written: tuple[str, ...] = ("p=d",)
    """The partitions to which ``append`` adds."""

    def __init__(self, group: Daemons, folder: Path, strikes: Strikes) -> None:
        self.group = group
        self.folder = folder
        self.strikes = strikes
        self.records: dict[str, TableRecord] = {}

    def create(self, name: str, *strikes: str) -> None:
        """A table of three partitions with three rows each, registered."""
        self.records[name] = self.made(name)
        self.group.client.add_table(self.records[name], check=False)
        self.strikes.aim(name, *strikes)

    def made(self, name: str) -> TableRecord:
        for n, p in enumerate(PARTITIONS):
            path = self.folder / name / f"p={p}" / "f.parquet"
            path.parent.mkdir(parents=True)
            pq.write_table(pa.table(rows(n)), path)
        return TableRecord(name, "parquet", str(self.folder / name))

    def append(self, name: str) -> None:
        """What a writer adds: a row without an id."""
        self.add_file(name, "p=d/f.parquet")

    def add_file(self, name: str, file: str) -> None:
        path = self.folder / name / file
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": pa.array([None], pa.int64()), "w": ["w"]}), path)

    def show(self, daemon: Daemon, *names: str) -> None:
        """What was appended to these tables is there for all, from now on at the latest."""

    def drop(self, name: str) -> None:
        shutil.rmtree(self.folder / name)

    def start(self, name: str, arg: dict[str, Any]) -> Operation:
        return self.group.client.start_operation("struck-validate", name, arg)

    def run(self, name: str, arg: dict[str, Any]) -> Told:
        operation = self.start(name, arg)
        return self.told(operation, operation.wait(150))

    def data(self, name: str) -> dict[str, bytes]:
        """The table's own files."""
        found = [path for path in (self.folder / name).rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in found if "_distop" not in path.parts}

    def beside(self, name: str) -> list[str]:
        """What operations have left beside the table, without what one that was killed was just writing."""
        shared = self.folder / name / "_distop"
        found = [path for path in shared.rglob("*") if path.is_file() and not path.name.startswith(".")]
        # Without the folder of the cluster.
        return sorted(str(Path(*path.relative_to(shared).parts[1:])) for path in found)

    def remove_list(self, name: str) -> None:
        """Nobody has certified the table yet, as far as files tell."""
        for lists in (self.folder / name / "_distop").glob("*/certificates"):
            shutil.rmtree(lists)

    def told(self, operation: Operation, result: Result) -> Told:
        """All that is told of an operation that has ended, of which each job has ended once."""
        written = Written(self.group.endpoint, OperationRef.parse(operation.ref))
        assert all(len(states) == 1 for states in written.states.values())
        assert all(len(outcomes) == 1 for outcomes in written.outcomes.values())
        report = dict(result.report or {})
        certificate = report.pop("certificate", None)
        if certificate is not None:
            assert certificate["operation"] == operation.ref
            report["certified"] = {k: v for k, v in certificate.items() if k not in ("operation", "time", "digest")}
        outcomes = [json.loads(outcome) for (outcome,) in written.outcomes.values()]
        return Told(
            result.state,
            report,
            {outcome["name"]: (_without_samples(outcome.get("result")), outcome.get("error")) for outcome in outcomes},
            certificate,
        )


def _without_samples(result: Any) -> Any:
    """How many rows a job shows depends on what it was run with; which the report shows does not."""
    if not isinstance(result, dict) or "checks" not in result:
        return result
    return {**result, "checks": [{k: v for k, v in c.items() if k != "samples"} for c in result["checks"]]}


class Told:
    """The state, the report, the outcomes by the names of partitions, and the certificate, if there is one."""

    def __init__(self, state: str, report: dict[str, Any], outcomes: dict[str, Any], certificate: Any) -> None:
        self.state = state
        self.report = report
        self.outcomes = outcomes
        self.certificate = certificate

    def assert_same(self, other: Told, what: object) -> None:
        """Both tell the same, whichever operation it was of."""
        assert (self.state, self.report, self.outcomes) == (other.state, other.report, other.outcomes), what


class IcebergSubject(Subject):
    lists = 0

    def __init__(self, group: Daemons, folder: Path, strikes: Strikes) -> None:
        super().__init__(group, folder, strikes)
        need(jar(), MAVEN)
        self.options = ("--spark-conf", f"spark.jars={jar()}")
        self.tables: dict[str, Any] = {}

    def made(self, name: str) -> TableRecord:
        self.tables[name] = Folder(self.folder / name).new(SCHEMA, BY_P)
        parts = [pa.table({**rows(n), "p": [p] * 3}) for n, p in enumerate(PARTITIONS)]
        self.tables[name].append(pa.concat_tables(parts))
        return TableRecord(name, "iceberg", str(self.folder / name))

    def append(self, name: str) -> None:
        table = pa.table({"id": pa.array([None], pa.int64()), "w": ["w"], "p": ["d"]})
        self.tables[name].append(table)


class SparkSubject(Subject):
    """Of Spark's catalog, whose metastore lets one process in at a time."""

    most = 1
    lists = 0
    written = ("p=c", "p=d")

    def __init__(self, group: Daemons, folder: Path, strikes: Strikes) -> None:
        super().__init__(group, folder, strikes)
        self.metastore = Metastore(folder)
        self.options = (*self.metastore.options, "--shared-dir", str(folder / "shared"))
        self.names = [f"t{n}" for n in range(8)]
        columns = "(id bigint, w string) using parquet partitioned by (p string)"
        self.metastore.run(
            "create database shop",
            *(f"create table shop.{name} {columns} location '{folder}/{name}'" for name in self.names),
            *(f"alter table shop.{name} add partition (p = '{p}')" for name in self.names for p in PARTITIONS),
        )

    def made(self, name: str) -> TableRecord:
        assert name in self.names
        for n, p in enumerate(PARTITIONS):
            pq.write_table(pa.table(rows(n)), self.folder / name / f"p={p}" / "f.parquet")
        return TableRecord(name, "spark", f"shop.{name}")

    def append(self, name: str) -> None:
        """Also to a partition that the catalog has: a row without an id in each."""
        super().append(name)
        self.add_file(name, "p=c/g.parquet")

    def show(self, daemon: Daemon, *names: str) -> None:
        """As the metastore lets nobody else in, the writer tells it of its partitions while there is no daemon."""
        assert daemon.stop() == 0
        self.metastore.run(*(f"alter table shop.{name} add partition (p = 'd')" for name in names))
        daemon.start()
        self.group.await_ready(daemon.name)

    def beside(self, name: str) -> list[str]:
        """Nothing: lists lie in the shared directory, without names of tables."""
        return []


FORMATS: dict[str, type[Subject]] = {"parquet": Subject, "iceberg": IcebergSubject, "spark": SparkSubject}


@pytest.fixture
def subject_of(group: Daemons, tmp_path: Path, strikes: Strikes) -> Callable[[str], Subject]:
    def made(kind: str) -> Subject:
        (tmp_path / "tables").mkdir()
        return FORMATS[kind](group, tmp_path / "tables", strikes)

    return made


def slow(*values: Any, name: str) -> Any:
    return pytest.param(*values, id=name, marks=pytest.mark.slow)


def without_scan(points: list[str]) -> list[tuple[dict[str, Any], str]]:
    return [(DECIDED, point) for point in points]


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        pytest.param("parquet", without_scan(SOME), id="parquet-some"),
        slow("parquet", without_scan([*PLAN, *REPORT]), name="parquet-jobs"),
        slow("parquet", without_scan([*COMPLETION, *LIST]), name="parquet-completion"),
        slow("parquet", [*SCAN, *SAMPLES], name="parquet-scan"),
        slow("parquet", OF_KEYS, name="parquet-keys"),
        slow(
            "iceberg", without_scan([*PLAN[1:], "manifest_facts.snapshot_of.after", *REPORT[1:3]]), name="iceberg-jobs"
        ),
        slow("iceberg", without_scan(COMPLETION), name="iceberg-completion"),
        slow("iceberg", [SCAN[1], SAMPLES[1], OF_KEYS[1]], name="iceberg-scan"),
        slow("spark", [*without_scan([PLAN[1], LIST[1]]), SAMPLES[1], OF_KEYS[1]], name="spark"),
    ],
)
def test_a_child_killed_at_each_commit_point_tells_what_an_undisturbed_run_does(
    kind: str,
    points: list[tuple[dict[str, Any], str]],
    subject_of: Callable[[str], Subject],
    group: Daemons,
    struck_env: dict[str, str],
) -> None:
    """Killed while it plans, at work on a job, between a job's end and its report, and around what completes it."""
    subject = subject_of(kind)
    for n, (_, point) in enumerate(points):
        subject.create(f"t{n}", f"{point} kill")
    before = [subject.data(f"t{n}") for n in range(len(points))]
    group.start(*("ann", "bob")[: subject.most], ttl=10, env=struck_env, options=(*SPARK, *subject.options))
    together = all(arg is DECIDED for arg, _ in points)  # a child's neighbours die with it: those that come soon again
    started = [subject.start(f"t{n}", arg) for n, (arg, _) in enumerate(points)] if together else []
    struck = []
    for n, (arg, point) in enumerate(points):
        operation = started[n] if together else subject.start(f"t{n}", arg)
        result = operation.wait(200)
        assert subject.strikes.struck(f"t{n}"), (point, result.record)
        struck.append(subject.told(operation, result))
        assert result.state == ("success" if arg in (DECIDED, SCANNED) else "failed"), (
            point,
            result.record,
            group.tails(),
        )
    left = [subject.beside(f"t{n}") for n in range(len(points))]
    for n, (arg, point) in enumerate(points):
        undisturbed = subject.run(f"t{n}", arg)
        struck[n].assert_same(undisturbed, point)
        assert (struck[n].certificate is None) == (arg in (VIOLATED, KEYS)), struck[n].report
        assert subject.data(f"t{n}") == before[n]
        assert len(left[n]) == (subject.lists if struck[n].certificate is not None else 0), left[n]
        assert left[n] == subject.beside(f"t{n}")


@pytest.mark.parametrize(
    ("kind", "at", "arg"),
    [
        slow("parquet", "result.before", DECIDED, name="parquet-job"),
        slow("parquet", "result.after", DECIDED, name="parquet-report"),
        slow("parquet", "partitions.after", DECIDED, name="parquet-plan"),
        pytest.param("parquet", "file_lists.write.before", DECIDED, id="parquet-list"),
        slow("parquet", "scan.count.after", SCANNED, name="parquet-scan"),
        slow("iceberg", "result.before", DECIDED, name="iceberg-job"),
        slow("iceberg", "certification.certify.after", DECIDED, name="iceberg-completion"),
    ],
)
def test_of_two_executors_on_one_job_the_one_that_wakes_up_changes_nothing(
    kind: str,
    at: str,
    arg: dict[str, Any],
    subject_of: Callable[[str], Subject],
    group: Daemons,
    struck_env: dict[str, str],
) -> None:
    """It wakes up when the other one has ended, and a writer and another operation have come after that."""
    subject = subject_of(kind)
    subject.create("t0", f"{at} hold")
    options = (*SPARK, *subject.options)
    (ann,) = group.start("ann", ttl=3, env=struck_env, options=options)
    operation = subject.start("t0", arg)
    pid = subject.strikes.await_struck(group, "t0")
    assert holder(pid, [ann]) is ann
    ann.suspend()
    group.start("bob", ttl=3, env=struck_env, options=options)
    result = operation.wait(150)
    assert result.state == "success", group.tails()
    former = subject.told(operation, result)
    former.assert_same(subject.run("t0", arg), at)
    subject.append("t0")
    before = subject.data("t0")
    later = subject.run("t0", arg)
    assert (later.state, later.report["verdict"]) == ("failed", "violated")
    left = subject.beside("t0")
    subject.strikes.release("t0")
    ann.wake()
    group.await_ready("ann")
    subject.told(operation, result).assert_same(former, at)
    assert subject.data("t0") == before
    assert subject.beside("t0") == left
    new = subject.run("t0", {**arg, "since": former.certificate["operation"]})
    assert list(new.outcomes) == ["p=d"], "the certificate covers what was there"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arg", "at"),
    [
        pytest.param("parquet", SCANNED, "scan.count.before", id="parquet-scan"),
        pytest.param("parquet", VIOLATED, "batch.fetch.before", id="parquet-samples"),
        pytest.param("parquet", KEYS, "KeyChecks.run.before", id="parquet-keys"),
        pytest.param("iceberg", VIOLATED, "batch.fetch.before", id="iceberg"),
        pytest.param("spark", VIOLATED, "batch.fetch.before", id="spark"),
    ],
)
def test_a_jvm_that_is_killed_costs_nothing_but_time(
    kind: str,
    arg: dict[str, Any],
    at: str,
    subject_of: Callable[[str], Subject],
    group: Daemons,
    struck_env: dict[str, str],
) -> None:
    subject = subject_of(kind)
    subject.create("t0")
    before = subject.data("t0")
    group.start("ann", ttl=10, env=struck_env, options=(*SPARK, *subject.options))
    undisturbed = subject.run("t0", arg)  # which leaves a Spark that is alive
    assert undisturbed.state == ("success" if arg is SCANNED else "failed"), group.tails()
    subject.strikes.aim("t0", f"{at} kill-jvm")
    struck = subject.run("t0", arg)
    assert subject.strikes.struck("t0")
    struck.assert_same(undisturbed, (at, group.tails()))
    assert subject.data("t0") == before


@pytest.mark.slow
@pytest.mark.parametrize("at", ["result.before", "completion.before"])
def test_an_executor_that_is_killed_leaves_its_jobs_to_another(
    at: str, subject_of: Callable[[str], Subject], group: Daemons, struck_env: dict[str, str]
) -> None:
    subject = subject_of("parquet")
    subject.create("t0", f"{at} hold")
    both = group.start("ann", "bob", ttl=3, env=struck_env)
    operation = subject.start("t0", DECIDED)
    struck = holder(subject.strikes.await_struck(group, "t0"), both)
    struck.kill()
    result = operation.wait(60)
    assert result.state == "success", group.tails()
    subject.told(operation, result).assert_same(subject.run("t0", DECIDED), at)


@pytest.mark.parametrize(
    ("kind", "arg", "points"),
    [
        pytest.param(
            "parquet",
            DECIDED,
            # Not after the batch: all its jobs are reported by then, and the operation may end before it is cancelled.
            [PLAN[1], *REPORT[:-1], "file_lists.write.before", "file_lists.write.after", "completion.after"],
            id="parquet",
        ),
        slow("parquet", VIOLATED, ["scan.count.before", "batch.fetch.before"], name="parquet-scan"),
        slow("iceberg", DECIDED, ["manifest_facts.snapshot_of.after", "certification.certify.after"], name="iceberg"),
        slow("spark", VIOLATED, ["scan.count.before"], name="spark"),
    ],
)
def test_a_cancel_in_the_middle_certifies_nothing_and_leaves_no_trace(
    kind: str,
    arg: dict[str, Any],
    points: list[str],
    subject_of: Callable[[str], Subject],
    group: Daemons,
    struck_env: dict[str, str],
) -> None:
    subject = subject_of(kind)
    group.start("ann", ttl=10, env=struck_env, options=(*SPARK, *subject.options))
    subject.create("t0")
    undisturbed, before = subject.run("t0", arg), subject.data("t0")
    left = subject.beside("t0")
    for at in points:
        subject.remove_list("t0")
        subject.strikes.aim("t0", f"{at} hold")
        operation = subject.start("t0", arg)
        subject.strikes.await_struck(group, "t0")
        operation.cancel("changed my mind")
        subject.strikes.release("t0")
        result = operation.wait(90)
        assert result.state == "cancelled", (at, group.tails())
        assert subject.told(operation, result).certificate is None
        assert subject.data("t0") == before
        assert set(subject.beside("t0")) <= set(left)
    subject.run("t0", arg).assert_same(undisturbed, points)
    assert subject.beside("t0") == left


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "iceberg", "spark"])
def test_what_a_writer_does_in_the_middle_is_not_looked_at(
    kind: str, subject_of: Callable[[str], Subject], group: Daemons, struck_env: dict[str, str]
) -> None:
    """What it adds is new to whoever goes on from the certificate; a table that it drops is no verdict."""
    subject = subject_of(kind)
    (ann,) = group.start("ann", ttl=10, env=struck_env, options=(*SPARK, *subject.options))
    certificates = {}
    for n, at in enumerate(("partitions.after", "result.before", "certification.certify.before")):
        name = f"t{n}"
        subject.create(name)
        undisturbed = subject.run(name, DECIDED)
        subject.strikes.aim(name, f"{at} hold")
        operation = subject.start(name, DECIDED)
        subject.strikes.await_struck(group, name)
        subject.append(name)
        subject.strikes.release(name)
        result = operation.wait(60)
        assert result.state == "success", group.tails()
        told = subject.told(operation, result)
        told.assert_same(undisturbed, at)
        certificates[name] = told.certificate
    subject.show(ann, *certificates)
    for name, certificate in certificates.items():
        new = subject.run(name, {**DECIDED, "since": certificate["operation"]})
        assert (new.state, new.report["rows"]) == ("failed", len(subject.written)), group.tails()
        assert sorted(new.outcomes) == [*subject.written]
    subject.create("t7", "batch.before hold")
    operation = subject.start("t7", DECIDED)
    subject.strikes.await_struck(group, "t7")
    subject.drop("t7")
    subject.strikes.release("t7")
    result = operation.wait(120)
    assert result.state == "failed"
    told = subject.told(operation, result)
    assert (told.certificate, told.report["verdict"]) == (None, "error")
    assert result.errors
    assert all(str(subject.folder / "t7") in error["text"] for error in result.errors), result.errors

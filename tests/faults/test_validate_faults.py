"""validate under faults on real daemons: report, outcomes and certificate equal those of a run without faults.

The table must be unchanged. conftest.py audits etcd's history. Checks decided from footers and manifests need no JVM,
so that killing a child is cheap; scans need one.
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
from distop.storage.files import local_path
from distop.storage.store_check import CHECKS
from tests.faults.fault_injection import FaultInjector
from tests.faults.test_index_faults import daemon_of
from tests.support import stored_files
from tests.support.daemons import SPARK
from tests.support.lake import MAVEN, Folder, jar
from tests.support.metastore import Metastore
from tests.support.needs import need
from tests.support.replay import Written

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop import Operation, Result
    from tests.faults.s3_lake import S3Lake
    from tests.support.daemons import Daemon, Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(400), pytest.mark.rotating]

PARTITIONS = ("a", "b", "c")
OWN = "_distop/"
"""The start of the keys of distop's files beside a table."""
DECIDED: dict[str, Any] = {
    "checks": [{"not_null": "id"}, {"range": {"column": "id", "min": 1, "max": 1_000}}],
    "sample": 0,
}
"""Decided without a scan, and certified."""
SCANNED: dict[str, Any] = {
    "checks": [{"not_null": "id"}, {"check": "id < 1000"}, {"matches": {"column": "w", "pattern": "w"}}]
}
"""Decided by a scan, and certified."""
VIOLATED: dict[str, Any] = {"checks": [{"check": "id % 10 < 2"}, {"not_null": "id"}], "sample": 5}
KEYS: dict[str, Any] = {"checks": [{"unique": "id"}, {"unique": "w"}], "sample": 4}
"""Decided by one job over all partitions; the second check is violated."""

PLAN = ["partitions.before", "partitions.after"]
COMPLETION = [f"{name}.{when}" for name in ("completion", "certification.certify") for when in ("before", "after")]
LIST = ["file_lists.write.before", "file_lists.write.after"]
"""Steps of writing the list of files, which certificates of Iceberg tables do not have."""
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


def parquet(columns: dict[str, Any]) -> bytes:
    """A Parquet file."""
    data = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), data)
    return data.getvalue().to_pybytes()


def rows(n: int) -> dict[str, pa.Array]:
    """Three rows that no other partition has, but for the text of the first."""
    return {"id": pa.array([10 * n + i for i in (1, 2, 3)], pa.int64()), "w": pa.array(["w", f"w{n}2", f"w{n}3"])}


class Subject:
    """Tables of one format, and operations on them. ``root``: a folder on a disk, or a URL. ``options``: for the
    daemons. ``most``: the number of daemons that can run at once.
    """

    most = 2
    options: tuple[str, ...] = ()
    lists = 1
    """The number of files that a certificate has beside the table."""
    written: tuple[str, ...] = ("p=d",)
    """The partitions to which ``append`` adds."""

    def __init__(self, group: Daemons, root: Path | str, faults: FaultInjector) -> None:
        self.group = group
        self.root = str(root)
        self.faults = faults
        self.records: dict[str, TableRecord] = {}

    @property
    def folder(self) -> Path:
        """The root on a disk."""
        found = local_path(self.root)
        assert found is not None
        return found

    def location(self, name: str) -> str:
        return f"{self.root}/{name}"

    def create(self, name: str, *faults: str) -> None:
        """Create and register a table with three partitions of three rows each, and set its faults."""
        self.records[name] = self.write_table(name)
        self.group.client.add_table(self.records[name], check=False)
        self.faults.set_faults(name, *faults)

    def write_table(self, name: str) -> TableRecord:
        for n, p in enumerate(PARTITIONS):
            stored_files.write(self.location(name), f"p={p}/f.parquet", parquet(rows(n)))
        return TableRecord(name, "parquet", self.location(name))

    def append(self, name: str) -> None:
        """Append a row without an id, as a writer."""
        self.add_file(name, "p=d/f.parquet")

    def add_file(self, name: str, file: str) -> None:
        stored_files.write(self.location(name), file, parquet({"id": pa.array([None], pa.int64()), "w": ["w"]}))

    def show(self, daemon: Daemon, *names: str) -> None:
        """Make appended partitions visible to all readers, if the format needs that."""

    def drop(self, name: str) -> None:
        where = self.location(name)
        if (folder := local_path(where)) is not None:
            shutil.rmtree(folder)
        else:
            stored_files.remove(where, stored_files.keys(where))

    def start(self, name: str, arg: dict[str, Any]) -> Operation:
        return self.group.client.start_operation("faulty-validate", name, arg)

    def run(self, name: str, arg: dict[str, Any]) -> Results:
        operation = self.start(name, arg)
        return self.collect_results(operation, operation.wait(150))

    def data(self, name: str) -> dict[str, bytes]:
        """The table's own files and their content."""
        where = self.location(name)
        return {key: stored_files.read(where, key) for key in stored_files.keys(where) if not key.startswith(OWN)}

    def operation_files(self, name: str) -> list[str]:
        """Files that operations left beside the table, without temporary files of killed ones."""
        found = [key for key in stored_files.keys(self.location(name)) if key.startswith(OWN) and CHECKS not in key]
        # The first part is the folder of the cluster.
        return sorted(key.split("/", 2)[2] for key in found if not Path(key).name.startswith("."))

    def remove_list(self, name: str) -> None:
        """Remove the files of all certificates."""
        found = [key for key in stored_files.keys(self.location(name)) if key.startswith(OWN)]
        stored_files.remove(self.location(name), [key for key in found if key.split("/")[2] == "certificates"])

    def collect_results(self, operation: Operation, result: Result) -> Results:
        """The results of an ended operation, after asserting that each of its jobs ended once."""
        written = Written(self.group.endpoint, OperationRef.parse(operation.ref))
        assert all(len(states) == 1 for states in written.states.values())
        assert all(len(outcomes) == 1 for outcomes in written.outcomes.values())
        report = dict(result.report or {})
        certificate = report.pop("certificate", None)
        if certificate is not None:
            assert certificate["operation"] == operation.ref
            report["certified"] = {k: v for k, v in certificate.items() if k not in ("operation", "time", "digest")}
        outcomes = [json.loads(outcome) for (outcome,) in written.outcomes.values()]
        return Results(
            result.state,
            report,
            {outcome["name"]: (_without_samples(outcome.get("result")), outcome.get("error")) for outcome in outcomes},
            certificate,
        )


def _without_samples(result: Any) -> Any:
    """The result without samples, whose number depends on the other jobs of the run. The report's samples do not."""
    if not isinstance(result, dict) or "checks" not in result:
        return result
    return {**result, "checks": [{k: v for k, v in c.items() if k != "samples"} for c in result["checks"]]}


class Results:
    """The state, the report, the outcomes by partition name, and the certificate (None if there is none)."""

    def __init__(self, state: str, report: dict[str, Any], outcomes: dict[str, Any], certificate: Any) -> None:
        self.state = state
        self.report = report
        self.outcomes = outcomes
        self.certificate = certificate

    def assert_same(self, other: Results, what: object) -> None:
        """Assert that both operations have the same state, report and outcomes."""
        assert (self.state, self.report, self.outcomes) == (other.state, other.report, other.outcomes), what


class IcebergSubject(Subject):
    lists = 0

    def __init__(self, group: Daemons, root: Path | str, faults: FaultInjector) -> None:
        super().__init__(group, root, faults)
        need(jar(), MAVEN)
        self.options = ("--spark-conf", f"spark.jars={jar()}")
        self.tables: dict[str, Any] = {}

    def write_table(self, name: str) -> TableRecord:
        self.tables[name] = Folder(self.folder / name).new(SCHEMA, BY_P)
        parts = [pa.table({**rows(n), "p": [p] * 3}) for n, p in enumerate(PARTITIONS)]
        self.tables[name].append(pa.concat_tables(parts))
        return TableRecord(name, "iceberg", str(self.folder / name))

    def append(self, name: str) -> None:
        table = pa.table({"id": pa.array([None], pa.int64()), "w": ["w"], "p": ["d"]})
        self.tables[name].append(table)


class SparkSubject(Subject):
    """Tables in Spark's catalog, whose metastore accepts one process at a time."""

    most = 1
    lists = 0
    written = ("p=c", "p=d")

    def __init__(self, group: Daemons, root: Path | str, faults: FaultInjector) -> None:
        super().__init__(group, root, faults)
        folder = self.folder
        self.metastore = Metastore(folder)
        self.options = (*self.metastore.options, "--shared-dir", str(folder / "shared"))
        self.names = [f"t{n}" for n in range(8)]
        columns = "(id bigint, w string) using parquet partitioned by (p string)"
        self.metastore.run(
            "create database shop",
            *(f"create table shop.{name} {columns} location '{folder}/{name}'" for name in self.names),
            *(f"alter table shop.{name} add partition (p = '{p}')" for name in self.names for p in PARTITIONS),
        )

    def write_table(self, name: str) -> TableRecord:
        assert name in self.names
        for n, p in enumerate(PARTITIONS):
            pq.write_table(pa.table(rows(n)), self.folder / name / f"p={p}" / "f.parquet")
        return TableRecord(name, "spark", f"shop.{name}")

    def append(self, name: str) -> None:
        """Append to a new partition and to an existing one, a row without an id each."""
        super().append(name)
        self.add_file(name, "p=c/g.parquet")

    def show(self, daemon: Daemon, *names: str) -> None:
        """Add the new partitions to the metastore while the daemon is stopped, because it accepts one process only."""
        assert daemon.stop() == 0
        self.metastore.run(*(f"alter table shop.{name} add partition (p = 'd')" for name in names))
        daemon.start()
        self.group.await_ready(daemon.name)

    def operation_files(self, name: str) -> list[str]:
        """Nothing: the files of certificates are in the shared directory."""
        return []


FORMATS: dict[str, type[Subject]] = {"parquet": Subject, "iceberg": IcebergSubject, "spark": SparkSubject}
S3 = "parquet on S3"


@pytest.fixture
def subject_of(
    lake_of_kind: S3Lake | None, group: Daemons, tmp_path: Path, faults: FaultInjector
) -> Callable[[str], Subject]:
    def make_subject(kind: str) -> Subject:
        if lake_of_kind is not None:
            return Subject(group, lake_of_kind.location, faults)
        (tmp_path / "tables").mkdir()
        return FORMATS[kind](group, tmp_path / "tables", faults)

    return make_subject


def slow(*values: Any, name: str) -> Any:
    return pytest.param(*values, id=name, marks=pytest.mark.slow)


def without_scan(points: list[str]) -> list[tuple[dict[str, Any], str]]:
    return [(DECIDED, point) for point in points]


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        pytest.param("parquet", without_scan(SOME), id="parquet-some"),
        pytest.param(S3, without_scan(SOME), id="s3-some"),
        slow(S3, without_scan([*PLAN, *REPORT, *COMPLETION, *LIST]), name="s3-more"),
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
def test_a_child_killed_at_any_commit_point_has_the_results_of_a_run_without_faults(
    kind: str,
    points: list[tuple[dict[str, Any], str]],
    subject_of: Callable[[str], Subject],
    group: Daemons,
    faulty_env: dict[str, str],
) -> None:
    """It is killed during planning, in a job, between a job's end and its report, and around the completion."""
    subject = subject_of(kind)
    for n, (_, point) in enumerate(points):
        subject.create(f"t{n}", f"{point} kill")
    before = [subject.data(f"t{n}") for n in range(len(points))]
    group.start(*("ann", "bob")[: subject.most], ttl=10, env=faulty_env, options=(*SPARK, *subject.options))
    together = all(arg is DECIDED for arg, _ in points)  # a kill repeats other jobs of the child, which is cheap here
    started = [subject.start(f"t{n}", arg) for n, (arg, _) in enumerate(points)] if together else []
    disturbed = []
    for n, (arg, point) in enumerate(points):
        operation = started[n] if together else subject.start(f"t{n}", arg)
        result = operation.wait(200)
        assert subject.faults.triggered(f"t{n}"), (point, result.record)
        disturbed.append(subject.collect_results(operation, result))
        assert result.state == ("success" if arg in (DECIDED, SCANNED) else "failed"), (
            point,
            result.record,
            group.tails(),
        )
    files_left = [subject.operation_files(f"t{n}") for n in range(len(points))]
    for n, (arg, point) in enumerate(points):
        undisturbed = subject.run(f"t{n}", arg)
        disturbed[n].assert_same(undisturbed, point)
        assert (disturbed[n].certificate is None) == (arg in (VIOLATED, KEYS)), disturbed[n].report
        assert subject.data(f"t{n}") == before[n]
        assert len(files_left[n]) == (subject.lists if disturbed[n].certificate is not None else 0), files_left[n]
        assert files_left[n] == subject.operation_files(f"t{n}")


@pytest.mark.parametrize(
    ("kind", "at", "arg"),
    [
        slow("parquet", "result.before", DECIDED, name="parquet-job"),
        slow("parquet", "result.after", DECIDED, name="parquet-report"),
        slow("parquet", "partitions.after", DECIDED, name="parquet-plan"),
        pytest.param("parquet", "file_lists.write.before", DECIDED, id="parquet-list"),
        pytest.param(S3, "file_lists.write.before", DECIDED, id="s3-list"),
        slow("parquet", "scan.count.after", SCANNED, name="parquet-scan"),
        slow("iceberg", "result.before", DECIDED, name="iceberg-job"),
        slow("iceberg", "certification.certify.after", DECIDED, name="iceberg-completion"),
    ],
)
def test_an_executor_that_wakes_up_after_a_takeover_changes_no_results(
    kind: str,
    at: str,
    arg: dict[str, Any],
    subject_of: Callable[[str], Subject],
    group: Daemons,
    faulty_env: dict[str, str],
) -> None:
    """It wakes up after the operation has ended, a writer has appended, and another operation has run."""
    subject = subject_of(kind)
    subject.create("t0", f"{at} hold")
    options = (*SPARK, *subject.options)
    (ann,) = group.start("ann", ttl=3, env=faulty_env, options=options)
    operation = subject.start("t0", arg)
    pid = subject.faults.await_triggered(group, "t0")
    assert daemon_of(pid, [ann]) is ann
    ann.suspend()
    group.start("bob", ttl=3, env=faulty_env, options=options)
    result = operation.wait(150)
    assert result.state == "success", group.tails()
    first_results = subject.collect_results(operation, result)
    first_results.assert_same(subject.run("t0", arg), at)
    subject.append("t0")
    before = subject.data("t0")
    later = subject.run("t0", arg)
    assert (later.state, later.report["verdict"]) == ("failed", "violated")
    files_left = subject.operation_files("t0")
    subject.faults.release("t0")
    ann.wake()
    group.await_ready("ann")
    subject.collect_results(operation, result).assert_same(first_results, at)
    assert subject.data("t0") == before
    assert subject.operation_files("t0") == files_left
    new = subject.run("t0", {**arg, "since": first_results.certificate["operation"]})
    assert list(new.outcomes) == ["p=d"], "the certificate covers the files from before the append"


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
def test_a_killed_jvm_does_not_change_the_results(
    kind: str,
    arg: dict[str, Any],
    at: str,
    subject_of: Callable[[str], Subject],
    group: Daemons,
    faulty_env: dict[str, str],
) -> None:
    subject = subject_of(kind)
    subject.create("t0")
    before = subject.data("t0")
    group.start("ann", ttl=10, env=faulty_env, options=(*SPARK, *subject.options))
    undisturbed = subject.run("t0", arg)  # which starts a Spark session
    assert undisturbed.state == ("success" if arg is SCANNED else "failed"), group.tails()
    subject.faults.set_faults("t0", f"{at} kill-jvm")
    disturbed = subject.run("t0", arg)
    assert subject.faults.triggered("t0")
    disturbed.assert_same(undisturbed, (at, group.tails()))
    assert subject.data("t0") == before


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        slow("parquet", "result.before", name="parquet-job"),
        slow("parquet", "completion.before", name="parquet-completion"),
        slow(S3, "result.before", name="s3-job"),
        pytest.param(S3, "completion.before", id="s3-completion"),
    ],
)
def test_jobs_of_a_killed_executor_are_taken_over_with_the_same_results(
    kind: str, at: str, subject_of: Callable[[str], Subject], group: Daemons, faulty_env: dict[str, str]
) -> None:
    subject = subject_of(kind)
    subject.create("t0", f"{at} hold")
    both = group.start("ann", "bob", ttl=3, env=faulty_env)
    operation = subject.start("t0", DECIDED)
    victim = daemon_of(subject.faults.await_triggered(group, "t0"), both)
    victim.kill()
    result = operation.wait(60)
    assert result.state == "success", group.tails()
    subject.collect_results(operation, result).assert_same(subject.run("t0", DECIDED), at)


@pytest.mark.parametrize(
    ("kind", "arg", "points"),
    [
        pytest.param(
            "parquet",
            DECIDED,
            # Not after the batch, when all jobs are reported and the operation may end before the cancel.
            [PLAN[1], *REPORT[:-1], "file_lists.write.before", "file_lists.write.after", "completion.after"],
            id="parquet",
        ),
        slow("parquet", VIOLATED, ["scan.count.before", "batch.fetch.before"], name="parquet-scan"),
        slow("iceberg", DECIDED, ["manifest_facts.snapshot_of.after", "certification.certify.after"], name="iceberg"),
        slow("spark", VIOLATED, ["scan.count.before"], name="spark"),
    ],
)
def test_a_cancelled_validation_issues_no_certificate_and_leaves_no_files(
    kind: str,
    arg: dict[str, Any],
    points: list[str],
    subject_of: Callable[[str], Subject],
    group: Daemons,
    faulty_env: dict[str, str],
) -> None:
    subject = subject_of(kind)
    group.start("ann", ttl=10, env=faulty_env, options=(*SPARK, *subject.options))
    subject.create("t0")
    undisturbed, before = subject.run("t0", arg), subject.data("t0")
    files_left = subject.operation_files("t0")
    for at in points:
        subject.remove_list("t0")
        subject.faults.set_faults("t0", f"{at} hold")
        operation = subject.start("t0", arg)
        subject.faults.await_triggered(group, "t0")
        operation.cancel("changed my mind")
        subject.faults.release("t0")
        result = operation.wait(90)
        assert result.state == "cancelled", (at, group.tails())
        assert subject.collect_results(operation, result).certificate is None
        assert subject.data("t0") == before
        assert set(subject.operation_files("t0")) <= set(files_left)
    subject.run("t0", arg).assert_same(undisturbed, points)
    assert subject.operation_files("t0") == files_left


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "iceberg", "spark"])
def test_changes_by_a_writer_during_a_validation_are_not_validated(
    kind: str, subject_of: Callable[[str], Subject], group: Daemons, faulty_env: dict[str, str]
) -> None:
    """A validation since the certificate covers the appended rows. A dropped table is an error and has no verdict."""
    subject = subject_of(kind)
    (ann,) = group.start("ann", ttl=10, env=faulty_env, options=(*SPARK, *subject.options))
    certificates = {}
    for n, at in enumerate(("partitions.after", "result.before", "certification.certify.before")):
        name = f"t{n}"
        subject.create(name)
        undisturbed = subject.run(name, DECIDED)
        subject.faults.set_faults(name, f"{at} hold")
        operation = subject.start(name, DECIDED)
        subject.faults.await_triggered(group, name)
        subject.append(name)
        subject.faults.release(name)
        result = operation.wait(60)
        assert result.state == "success", group.tails()
        results = subject.collect_results(operation, result)
        results.assert_same(undisturbed, at)
        certificates[name] = results.certificate
    subject.show(ann, *certificates)
    for name, certificate in certificates.items():
        new = subject.run(name, {**DECIDED, "since": certificate["operation"]})
        assert (new.state, new.report["rows"]) == ("failed", len(subject.written)), group.tails()
        assert sorted(new.outcomes) == [*subject.written]
    subject.create("t7", "batch.before hold")
    operation = subject.start("t7", DECIDED)
    subject.faults.await_triggered(group, "t7")
    subject.drop("t7")
    subject.faults.release("t7")
    result = operation.wait(120)
    assert result.state == "failed"
    results = subject.collect_results(operation, result)
    assert (results.certificate, results.report["verdict"]) == (None, "error")
    assert result.errors
    assert all(subject.location("t7") in error["text"] for error in result.errors), result.errors

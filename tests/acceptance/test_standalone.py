"""An executor whose Spark jobs run on a standalone cluster of two workers: verdicts, cancels and a lost worker."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from standalone import Size, options

from distop.protocol.records import OperationRef, TableRecord
from distop.store.embedded import EmbeddedEtcd
from distop.worker.guardian import session_members
from distop_behaviors.validate import Validate
from tests.support.context import run_operation
from tests.support.daemons import Daemons, daemons
from tests.support.lake import MAVEN, Folder, jar
from tests.support.localspark import FRUGAL
from tests.support.needs import need
from tests.support.processes import signal_all
from tests.support.replay import Written, violations
from tests.support.sparkcluster import spark_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from standalone import Standalone

    from tests.support.context import FakeContext

pytestmark = [pytest.mark.etcd, pytest.mark.spark, pytest.mark.timeout(400), pytest.mark.rotating]

ROOT = Path(__file__).parents[2]
SIZE = Size(workers=2, cores=1, memory="600m")
SMALL = f"extraJavaOptions={FRUGAL}"
CONF = (
    *("driver.memory=512m", f"driver.{SMALL}", "executor.memory=512m", f"executor.{SMALL}"),
    "sql.files.maxPartitionBytes=4194304",  # a Spark task for each small file
    *("sql.codegen.wholeStage=false", "sql.codegen.factoryMode=NO_CODEGEN"),  # faster without it
)
PARTS, ROWS = 8, 12
CHECKS: list[dict[str, Any]] = [
    {"not_null": "id"},
    {"range": {"column": "id", "min": 0, "max": 90}},
    {"matches": {"column": "code", "pattern": "^c[0-9]+$"}},
]
VIOLATIONS = [PARTS, 5, 3 * PARTS]


def rows(part: int) -> dict[str, list[Any]]:
    ids = [part * ROWS + n if n else None for n in range(ROWS)]
    return {"id": ids, "code": [f"c{n}" if n % 5 else f"d{n}" for n in range(ROWS)]}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TableRecord]:
    """The same rows as a Parquet and as an Iceberg table, with a partition for each ``k``."""
    folder = tmp_path_factory.mktemp("tables")
    columns = {"id": LongType(), "code": StringType(), "k": StringType()}
    fields = (NestedField(n, name, kind, required=False) for n, (name, kind) in enumerate(columns.items(), 1))
    schema = Schema(*fields)
    by_k = PartitionSpec(PartitionField(source_id=3, field_id=1000, transform=IdentityTransform(), name="k"))
    lake = Folder(folder / "lake").new(schema, by_k)
    every = {name: [value for part in range(PARTS) for value in rows(part)[name]] for name in ("id", "code")}
    lake.append(pa.table({**every, "k": [str(part) for part in range(PARTS) for _ in range(ROWS)]}))
    for part in range(PARTS):
        (folder / "plain" / f"k={part}").mkdir(parents=True)
        pq.write_table(pa.table(rows(part)), folder / "plain" / f"k={part}" / "rows.parquet")
    formats = {"plain": "parquet", "lake": "iceberg"}
    return {name: TableRecord(name, kind, str(folder / name)) for name, kind in formats.items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    with spark_cluster(tmp_path_factory.mktemp("spark"), SIZE) as found:
        yield found


@pytest.fixture(scope="module")
def group(
    cluster: Standalone, tables: dict[str, TableRecord], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemons]:
    """One executor, whose Spark has the cores of both workers."""
    need(jar(), MAVEN)
    words = [*options(cluster.url), "--spark-conf", f"spark.jars={jar()}"]
    for setting in CONF:
        words += ["--spark-conf", f"spark.{setting}"]
    with EmbeddedEtcd(compaction=None) as etcd:
        with daemons(etcd.endpoint, tmp_path_factory.mktemp("daemons")) as found:
            found.start("ann", ttl=10, options=tuple(words))
            for record in tables.values():
                found.client.add_table(record)
            scan(found, "plain", CHECKS[0]).wait(300)  # starts a Spark executor on both workers
            yield found
        found_violations = violations(etcd.endpoint)
    assert not found_violations, "\n".join(found_violations[:3])


def command(cluster: Standalone, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/cluster`` with the folder of this cluster."""
    called = [sys.executable, str(ROOT / "scripts" / "cluster.py"), "--folder", str(cluster.folder), *words]
    return subprocess.run(called, capture_output=True, text=True, check=False, timeout=120)


def scan(group: Daemons, table: str, *checks: dict[str, Any]) -> Any:
    """Start a validation that scans every row."""
    return group.client.start_operation("validate", table, {"checks": list(checks), "statistics": "never"})


@contextmanager
def operation_with_stopped_worker(group: Daemons, cluster: Standalone) -> Iterator[Any]:
    """A running operation with one stalled Spark task, because the first worker's Spark executor is stopped."""
    worker = cluster.parts()[1].pid
    stopped = [pid for pid in session_members(worker) if pid != worker]
    assert stopped
    signal_all(stopped, signal.SIGSTOP)
    try:
        operation = scan(group, "plain", *CHECKS)
        rest = [{"executor": "ann", "text": f"scanning {PARTS} files: {PARTS - 1} of {PARTS} Spark tasks"}]
        group.eventually(
            lambda: list(operation.status().doing) == rest, "its status reports the remaining task", seconds=200
        )
        yield operation
    finally:
        signal_all(stopped, signal.SIGCONT)


@pytest.mark.parametrize("name", ["plain", pytest.param("lake", marks=pytest.mark.slow)])
def test_verdicts_on_a_cluster_equal_those_of_a_local_spark(
    name: str, group: Daemons, tables: dict[str, TableRecord], context: Callable[[TableRecord], FakeContext]
) -> None:
    arg = {"checks": CHECKS, "statistics": "never"}
    local = run_operation(Validate(), tables[name], arg, context)
    assert [check["violations"] for check in local.report["checks"]] == VIOLATIONS
    result = scan(group, name, *CHECKS).wait(300)
    assert (result.state, result.jobs["total"]) == ("failed", PARTS), group.tails()
    assert result.report == local.report


def test_a_cancel_stops_the_tasks_on_the_workers(group: Daemons, cluster: Standalone) -> None:
    with operation_with_stopped_worker(group, cluster) as operation:
        operation.cancel()
        assert operation.wait(200).state == "cancelled", group.tails()
    after = scan(group, "plain", CHECKS[0]).wait(200)
    assert after.report["checks"][0]["violations"] == PARTS, group.tails()


@pytest.mark.slow
def test_a_lost_worker_fails_no_job_and_is_started_again(group: Daemons, cluster: Standalone) -> None:
    with operation_with_stopped_worker(group, cluster) as operation:
        cluster.kill("worker-1")
        result = operation.wait(300)
    verdicts = [(check["verdict"], check["violations"]) for check in result.report["checks"]]
    assert verdicts == [("violated", count) for count in VIOLATIONS], group.tails()
    claims = Written(group.endpoint, OperationRef.parse(operation.ref)).claims
    assert {len(found) for found in claims.values()} == {1}, "each job has one attempt"

    master, lost, other = cluster.parts()
    assert master.pid
    assert (lost.pid, bool(other.pid)) == (0, True)
    status = command(cluster, "status")
    assert (status.returncode, "worker-1: does not run" in status.stderr) == (1, True), status
    assert "of another size" in command(cluster, "up", "--workers", "3").stderr
    words = ("up", "--workers", "2", "--cores", "1", "--memory", SIZE.memory)
    again = command(cluster, *words)
    assert (again.returncode, again.stdout.split()) == (0, list(options(cluster.url))), again
    whole = cluster.parts()
    assert [part.pid for part in whole] == [master.pid, whole[1].pid, other.pid], "running parts are kept"
    assert whole[1].pid
    assert command(cluster, *words).stdout == again.stdout
    assert cluster.parts() == whole, "up changes nothing if all parts run"
    assert command(cluster, "status").returncode == 0

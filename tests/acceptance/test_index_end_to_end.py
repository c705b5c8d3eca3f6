"""Indexes end to end: built, refreshed and dropped by two executors, and looked up from a separate Spark."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from distop.protocol.records import TableRecord
from distop.store.embedded import EmbeddedEtcd
from distop_behaviors.index import lookup
from distop_behaviors.index.key_lookup import find
from tests.support.daemons import Daemons, daemons
from tests.support.daemons import distop_process as distop
from tests.support.replay import violations
from tests.support.tables import flights, write_partitions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

FLIGHTS = "nyc.flights"
DAYS = 59


def two_months() -> pa.Table:
    table = flights()
    return table.filter(pc.less_equal(table["month"], 2))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Daemons]:
    """A group without executors, and a table with the flights of two months."""
    (tmp_path / "daemons").mkdir()
    with EmbeddedEtcd(compaction=None) as etcd:
        with daemons(etcd.endpoint, tmp_path / "daemons") as found:
            location = write_partitions(two_months(), tmp_path / "flights", ["month", "day"])
            found.client.add_table(TableRecord(FLIGHTS, "parquet", str(location)))
            yield found
        found_violations = violations(etcd.endpoint)
    assert not found_violations, "\n".join(found_violations[:3])


def test_hole_3_nothing_is_staged_in_a_folder_that_others_can_write(group: Daemons, tmp_path: Path) -> None:
    """Another user could replace the journal of a job by a link."""
    planes = {"name": "planes", "columns": ["tailnum"]}
    group.start("ann")
    folder = tmp_path / "flights"
    folder.chmod(0o777)
    built = group.client.start_operation("build-index", FLIGHTS, planes)
    refusal = f"{folder}, which is writable by its group or by others (mode 0777)"
    group.eventually(lambda: refusal in group.tails(), "a job reports the reason", "ann")
    assert not list(folder.glob("_distop/*/stage"))
    folder.chmod(0o755)
    assert built.wait(100).state == "success", group.tails()


def test_an_index_finds_all_flights_of_a_plane(group: Daemons, spark: SparkSession, tmp_path: Path) -> None:
    planes = {"name": "planes", "columns": ["tailnum"]}
    _, bob = group.start("ann", "bob")
    killed = group.client.start_operation("build-index", FLIGHTS, planes)
    group.eventually(lambda: (killed.status().jobs["success"] or 0) > 20, "some jobs have ended", "ann", "bob")
    bob.kill()
    done = killed.wait(100)
    assert done.state == "success", group.tails()
    planes_of = Counter(two_months()["tailnum"].to_pylist())
    assert (done.report["files"], done.report["rows"]) == (DAYS, planes_of.total())
    assert done.report["not_indexed_files"] == 0

    found = find(str(tmp_path / "flights"), "planes", ["N14228"])
    assert 0 < len(found.named) < DAYS / 2
    rows = lookup(spark, str(tmp_path / "flights"), "planes", ["N14228"])
    assert [row.tailnum for row in rows.collect()] == ["N14228"] * planes_of["N14228"]
    (record,) = group.client.tables()
    assert lookup(spark, record, "planes", [None]).count() == planes_of[None] > 0

    again = distop(group, "start", "build-index", FLIGHTS, "--arg", json.dumps(planes), "--wait", "--json")
    answer = json.loads(again.stdout)
    assert (answer["jobs"]["total"], answer["report"]["indexed"], answer["report"]["generation"]) == (0, 0, 1)
    invalid = distop(group, "start", "build-index", FLIGHTS, "--arg", '{"name": "x", "columns": ["tail"]}', "--wait")
    assert (invalid.returncode, "the table has no column 'tail'" in invalid.stdout + invalid.stderr) == (1, True)
    dropped = group.client.start_operation("drop-index", FLIGHTS, {"name": "planes"}).wait(60)
    assert (dropped.state, dropped.report) == ("success", {"name": "planes", "dropped": True})
    files_left = [path.name for path in (tmp_path / "flights" / "_distop").rglob("*") if path.is_file()]
    assert files_left == ["000002.json"], "only the record of the drop is left"

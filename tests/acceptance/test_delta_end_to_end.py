"""A Delta table end to end: validated, changed and indexed on the command line, by an executor with Delta's jars."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest

from distop.store.embedded import EmbeddedEtcd
from distop_behaviors.index.key_lookup import find
from tests.support.daemons import SPARK, Daemons, daemons, distop_process
from tests.support.delta import MAVEN, DeltaLake, jars, writing_session
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

distop = partial(distop_process, seconds=200)


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DeltaLake:
    """A table ``t`` of a hundred rows in two partitions; those with a NULL in ``c`` are deleted but for one."""
    need(jars(), MAVEN)
    made = DeltaLake(writing_session(spark), tmp_path_factory.mktemp("delta"))
    vectors = {"delta.enableDeletionVectors": "true", "delta.columnMapping.mode": "name"}
    made.create("t", "id bigint, k int, c string", "partitioned by (k)", **vectors)
    made.sql(
        "insert into {t} select id, cast(id % 2 as int), if(id % 5 = 0, null, concat('v', id)) "
        "from range(0, 100, 1, 1)",
        "t",
    )
    made.sql("delete from {t} where c is null and id <> 5", "t")
    return made


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """An executor with Delta's jars."""
    found = jars()
    need(found, MAVEN)
    with EmbeddedEtcd() as etcd, daemons(etcd.endpoint, tmp_path_factory.mktemp("daemons")) as group:
        group.start("ann", ttl=10, options=(*SPARK, "--spark-conf", f"spark.jars={','.join(map(str, found or ()))}"))
        yield group


def test_a_delta_table_is_registered_validated_changed_and_indexed_on_the_command_line(
    group: Daemons, lake: DeltaLake
) -> None:
    location = str(lake.root / "t")
    refused = distop(group, "table", "add", "lake.t", "--format", "parquet", "--location", location)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "is a Delta table" in refused.stderr
    assert "register it with --format delta" in refused.stderr
    assert group.client.tables() == []
    assert distop(group, "table", "add", "lake.t", "--format", "delta", "--location", location).returncode == 0

    checks = [{"not_null": "c"}, {"range": {"column": "id", "max": 99}}, {"check": "id <> 5 or c is null"}]
    argument = json.dumps({"checks": checks})
    record = json.loads(distop(group, "start", "validate", "lake.t", "--arg", argument, "--wait", "--json").stdout)
    report = record["report"]
    found = [(check["verdict"], check["violations"]) for check in report["checks"]]
    assert found == [("violated", 1), ("valid", 0), ("valid", 0)], group.tails()
    assert (report["rows"], record["jobs"]) == (81, {"total": 2, "success": 1, "failed": 1})
    assert [sample["partition"] for sample in report["checks"][0]["samples"]] == ["k=1"]

    lake.sql("delete from {t} where id = 5", "t")
    again = distop(group, "start", "validate", "lake.t", "--arg", argument, "--wait", "--json")
    record = json.loads(again.stdout)
    certificate = record["report"]["certificate"]
    assert certificate is not None, json.dumps(record["report"])
    assert (certificate["rows"], certificate["version"][:2]) == (80, "3-"), group.tails()

    applied = distop(group, "apply", record["op"], "--settle", "0", "--wait", "--json")
    changes = json.loads(applied.stdout)["report"]["changes"]
    assert [(c["column"], c["property"]) for c in changes] == [
        ("c", None),
        (None, "delta.constraints.id_range"),
        (None, "delta.constraints.check"),
    ], group.tails()
    with pytest.raises(Exception, match="NOT NULL constraint violated"):
        lake.sql("insert into {t} values (7, 0, null)", "t")
    with pytest.raises(Exception, match="CHECK constraint id_range"):
        lake.sql("insert into {t} values (700, 0, 'x')", "t")

    names = {"name": "names", "columns": ["c"]}
    built = distop(group, "start", "build-index", "lake.t", "--arg", json.dumps(names), "--wait", "--json")
    answer = json.loads(built.stdout)
    assert (answer["jobs"]["total"], answer["report"]["files"], answer["report"]["rows"]) == (2, 2, 100), group.tails()
    assert answer["report"]["table_version"].startswith("4-"), "the version of the commit of apply"
    (table,) = group.client.tables()
    assert (len(find(table, "names", ["v7"]).named), len(find(table, "names", ["v5"]).named)) == (1, 0)
    dropped = distop(group, "start", "drop-index", "lake.t", "--arg", '{"name": "names"}', "--wait", "--json")
    assert json.loads(dropped.stdout)["report"] == {"name": "names", "dropped": True}

"""Iceberg tables end to end: registered, validated and changed on the command line, with Iceberg's jar."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from pyspark.errors import AnalysisException, SparkRuntimeException

from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.storage.location import Location
from distop.store.embedded import EmbeddedEtcd
from distop.tables.iceberg.metadata_file import current_metadata_file, read_metadata
from tests.acceptance.sparklake import Lake
from tests.support.daemons import SPARK, Daemons, daemons, distop_process
from tests.support.lake import COORDINATES, MAVEN, Folder, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "k", StringType(), required=False))
BY_K = PartitionSpec(PartitionField(source_id=2, field_id=1000, transform=IdentityTransform(), name="k"))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """An executor with Iceberg's jar."""
    need(jar(), MAVEN)
    with EmbeddedEtcd() as etcd, daemons(etcd.endpoint, tmp_path_factory.mktemp("daemons")) as found:
        found.start("ann", ttl=10, options=(*SPARK, "--spark-conf", f"spark.jars={jar()}"))
        yield found


distop = partial(distop_process, seconds=200)


def test_an_iceberg_table_is_registered_and_validated_on_the_command_line(group: Daemons, tmp_path: Path) -> None:
    Folder(tmp_path / "t").new(SCHEMA, BY_K).append(pa.table({"id": [1, 2, None, 4], "k": ["a", "a", "b", None]}))
    add = ("table", "add", "lake.t", "--format", "iceberg", "--location")
    refused = distop(group, *add, str(tmp_path / "t"), "--option", "warehouse=x")
    assert refused.returncode != 0
    assert "'warehouse' is not known for iceberg" in refused.stderr
    assert group.client.tables() == []
    assert distop(group, *add, str(tmp_path / "t")).returncode == 0
    argument = json.dumps({"checks": [{"not_null": "id"}, {"range": {"column": "id", "max": 4}}]})
    ran = distop(group, "start", "validate", "lake.t", "--arg", argument, "--wait", "--json")
    record = json.loads(ran.stdout)
    report = record["report"]
    assert [(c["verdict"], c["violations"]) for c in report["checks"]] == [("violated", 1), ("valid", 0)], group.tails()
    assert (report["rows"], record["jobs"]) == (4, {"total": 3, "success": 2, "failed": 1})
    assert [s["partition"] for s in report["checks"][0]["samples"]] == ["k=b"]


def test_the_commands_of_the_apply_how_to_run(group: Daemons, spark: SparkSession, tmp_path: Path) -> None:
    """Run the commands of docs/how-to/apply-with-a-certificate.md, and check Iceberg's errors before and after."""
    lake = Lake(spark, tmp_path)
    lake.create("orders", "id bigint, k string", "partitioned by (k)", 2)
    lake.sql("insert into {orders} values (1, 'a'), (2, 'b')")
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/apply-with-a-certificate.md").read_text()
    (iceberg_error,) = re.findall(r"^Cannot change nullable column .*$", page, re.MULTILINE)
    with pytest.raises(AnalysisException, match=iceberg_error):
        lake.sql("alter table {orders} alter column id set not null")
    (commands,) = re.findall(r"^```shell\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = commands.replace("/warehouse/db/orders", str(lake.path("orders")))
    commands = commands.replace("distop apply", "distop apply --settle 0")
    script = f'set -e; distop() {{ "{sys.executable}" -m distop.cli "$@"; }}; {commands}'
    ran = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "DISTOP_ETCD": group.endpoint},
    )  # fmt: skip
    assert ran.returncode == 0, (ran, group.tails())
    assert "id_not_null" in ran.stdout
    assert "orders/apply/1" in ran.stdout
    (field, _) = lake.rows("orders").schema.fields
    assert (field.name, field.nullable) == ("id", False)
    with pytest.raises(SparkRuntimeException, match="NULL value appeared in non-nullable field"):
        lake.sql("insert into {orders} values (null, 'c')")

    lake.sql("insert into {orders} values (3, 'c')")
    since = distop(group, "start", "validate", "orders", "--since", "orders/validate/1", "--wait", "--json")
    record = json.loads(since.stdout)
    assert (record["report"]["rows"], record["report"]["since"]) == (1, "orders/validate/1")
    assert record["report"]["certificate"]["rows"] == 3
    failed = distop(group, "start", "validate", "orders", "--arg", '{"checks": [{"check": "id > 2"}]}', "--wait")
    assert failed.returncode == 1
    for op, code, sentence in (
        ("orders/validate/3", 5, "orders/validate/3 has no certificate: it ended as failed"),
        ("orders/apply/1", 5, "orders/apply/1 has no certificate: operations of its type issue none"),
        ("orders/validate/9", 4, "orders/validate/9"),
    ):
        refused = distop(group, "apply", op)
        assert (refused.returncode, refused.stderr.count("\n")) == (code, 1)
        assert sentence in refused.stderr
    forged = {"certificate": {**record["report"]["certificate"], "rows": 9}}
    with pytest.raises(InvalidArgument, match="is not of type string"):
        group.client.start_operation("apply", "orders", forged)
    result = group.client.start_operation("apply", "orders", {"certificate": "orders/apply/1"}).wait(timeout=100)
    assert (result.state, result.jobs["total"]) == ("failed", 0)
    assert "'orders/apply/1' is not a validation" in result.sentence()


def test_a_column_is_narrowed_on_the_command_line(group: Daemons, spark: SparkSession, tmp_path: Path) -> None:
    """There is a job for each partition, and no staged files are left."""
    lake = Lake(spark, tmp_path)
    lake.create("wide", "id bigint, k string", "partitioned by (k)", 2)
    lake.sql("insert into {wide} values (1, 'a'), (2, 'b'), (3, null)")
    add = ("table", "add", "wide", "--format", "iceberg", "--location", str(lake.path("wide")))
    assert distop(group, *add).returncode == 0
    argument = '{"checks": [{"fits": {"column": "id", "type": "int"}}]}'
    assert distop(group, "start", "validate", "wide", "--arg", argument, "--wait").returncode == 0
    ran = distop(group, "apply", "wide/validate/1", "--settle", "0", "--wait", "--json")
    record = json.loads(ran.stdout)
    assert (record["state"], record["jobs"]["total"]) == ("success", 3), group.tails()
    assert record["report"]["rewritten"] | {"bytes": 0} == {"files": 3, "rows": 3, "bytes": 0, "late": 0}
    assert lake.rows("wide").dtypes == [("id", "int"), ("k", "string")]
    assert sorted((row.id, row.k) for row in lake.rows("wide").collect()) == [(1, "a"), (2, "b"), (3, None)]
    group.eventually(lambda: not list(lake.path("wide").glob("_distop/*/stage/*/apply/*")), "the stages are removed")
    assert "wide/apply/1" in distop(group, "show", "wide/apply/1").stdout
    refused = distop(group, "rerun", "wide/apply/1")
    assert refused.returncode != 0
    failed = group.client.start_operation("apply", "wide", {"certificate": certificate_of(group)}, partitions=["k=a"])
    assert "apply changes the whole table" in failed.wait(timeout=100).sentence()


def certificate_of(group: Daemons) -> str:
    """Validate the current table ``wide``, and return the operation with its certificate."""
    checks = {"checks": [{"fits": {"column": "id", "type": "decimal(5,0)"}}]}
    return group.client.start_operation("validate", "wide", checks).wait(timeout=100).op


def test_a_cancel_before_the_confirmation_reverts_the_change(group: Daemons, tmp_path: Path) -> None:
    table = Folder(tmp_path / "s").new(SCHEMA)
    table.append(pa.table({"id": [1, 2], "k": ["a", None]}))
    group.client.add_table(TableRecord("lake.s", "iceberg", str(tmp_path / "s")))
    validation = group.client.start_operation("validate", "lake.s", {"checks": [{"not_null": "id"}]}).wait(timeout=200)
    argument = {"certificate": validation.op, "settle_seconds": 600}
    applying = group.client.start_operation("apply", "lake.s", argument)

    def required() -> bool:
        source = current_metadata_file(Location.of(str(tmp_path / "s")))
        return bool(read_metadata(source)[0].schema().find_field("id").required)

    group.eventually(required, "the column is required", seconds=100)
    refused = distop(group, "apply", validation.op)
    assert (refused.returncode, "apply runs one at a time" in refused.stderr) == (5, True)
    applying.cancel("changed my mind")
    assert applying.wait(timeout=100).state == "cancelled"
    assert not required()


@pytest.mark.slow
@pytest.mark.parametrize("renamed", [False, True])
def test_a_jar_for_another_spark_is_reported_with_the_right_one(tmp_path: Path, *, renamed: bool) -> None:
    """Spark loads such a jar and would fail later. With ``renamed``, the file name does not show its version."""
    other = jar("iceberg-spark-runtime-4.0_2.13")
    need(other, MAVEN)
    assert other is not None
    if renamed:
        other = Path(shutil.copy(other, tmp_path / "iceberg.jar"))
    Folder(tmp_path / "t").new(SCHEMA).append(pa.table({"id": [1, 2], "k": ["a", None]}))
    (tmp_path / "daemons").mkdir()
    with EmbeddedEtcd() as etcd, daemons(etcd.endpoint, tmp_path / "daemons") as group:
        group.start("ann", ttl=10, options=(*SPARK, "--spark-conf", f"spark.jars={other}"))
        group.client.add_table(TableRecord("lake.t", "iceberg", str(tmp_path / "t")))
        arg = {"checks": [{"not_null": "id"}], "statistics": "never"}
        result = group.client.start_operation("validate", "lake.t", arg).wait(timeout=200)
        assert result.state == "failed", group.tails()
        sentence = rf"the Iceberg of \S*{re.escape(other.name)} does not fit Spark 4\.1\..*: start .*{COORDINATES}"
        assert re.search(sentence, result.sentence())
        # Checks without Spark still succeed.
        arg["statistics"] = "auto"
        assert group.client.start_operation("validate", "lake.t", arg).wait(timeout=200).report["verdict"] == "valid"

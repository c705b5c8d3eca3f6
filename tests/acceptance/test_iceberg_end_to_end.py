"""An Iceberg table as a person meets it: registered on the command line, with a jar that Spark fetches by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from distop.store.embedded import EmbeddedEtcd
from tests.support.daemons import SPARK, Daemons, daemons
from tests.support.lake import COORDINATES, MAVEN, Folder, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "k", StringType(), required=False))
BY_K = PartitionSpec(PartitionField(source_id=2, field_id=1000, transform=IdentityTransform(), name="k"))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Daemons]:
    """An executor that was told the coordinates of Iceberg's jar, and one table beside it."""
    need(jar(), MAVEN)  # first: it keeps several processes from fetching it at once
    Folder(tmp_path / "t").new(SCHEMA, BY_K).append(pa.table({"id": [1, 2, None, 4], "k": ["a", "a", "b", None]}))
    (tmp_path / "daemons").mkdir()
    with EmbeddedEtcd() as etcd, daemons(etcd.endpoint, tmp_path / "daemons") as found:
        packages = f"spark.jars.packages={COORDINATES}"
        found.start("ann", ttl=10, options=(*SPARK, "--spark-conf", packages))
        yield found


def distop(group: Daemons, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distop.cli", *words, "--etcd", group.endpoint]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def test_register_and_validate_on_the_command_line(group: Daemons, tmp_path: Path) -> None:
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

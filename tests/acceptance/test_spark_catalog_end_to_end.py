"""Tables of Spark's catalog end to end, on the command line and with the embedded metastore."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.store.embedded import EmbeddedEtcd
from tests.support.daemons import Daemons, daemons, distop_process
from tests.support.metastore import Metastore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Daemons]:
    """An executor with a metastore in which an ended Spark application created a table."""
    for folder, word in {"first": "a", "second": None, "third": "c"}.items():
        (tmp_path / folder).mkdir()
        rows = pa.table({"id": pa.array([1], pa.int32()), "word": pa.array([word], pa.string())})
        pq.write_table(rows, tmp_path / folder / "f.parquet")
    metastore = Metastore(tmp_path)
    places = {"1": "first", "2": "second", "null": "third"}
    metastore.run(
        "create database shop",
        "create table shop.orders (id int, word string) using parquet partitioned by (day int)",
        *(
            f"alter table shop.orders add partition (day = {day}) location '{tmp_path}/{folder}'"
            for day, folder in places.items()
        ),
    )
    (tmp_path / "daemons").mkdir()
    with EmbeddedEtcd() as etcd, daemons(etcd.endpoint, tmp_path / "daemons") as found:
        found.start(
            "ann",
            ttl=10,
            options=("--spark-master", "local[2]", "--shared-dir", str(tmp_path / "shared"), *metastore.options),
        )
        yield found


distop = partial(distop_process, seconds=200)


def test_a_table_of_sparks_catalog_is_validated_and_indexed_on_the_command_line(group: Daemons) -> None:
    add = ("table", "add", "orders", "--format", "spark", "--location")
    refused = distop(group, *add, "/data/orders")
    assert refused.returncode == 2
    assert "is not the name of a table in Spark's catalog" in refused.stderr
    assert distop(group, *add, "shop.orders").returncode == 0
    argument = json.dumps({"checks": [{"not_null": "word"}, {"range": {"column": "day", "max": 1}}]})
    ran = distop(group, "start", "validate", "orders", "--arg", argument, "--wait", "--json")
    report = json.loads(ran.stdout)["report"]
    assert [(c["verdict"], c["violations"]) for c in report["checks"]] == [("violated", 1)] * 2, group.tails()
    assert [s["partition"] for c in report["checks"] for s in c["samples"]] == ["day=2"] * 2
    assert report["rows"] == 3
    # Valid checks are certified (keys by the job of the whole table), and a later run starts from the certificate.
    argument = json.dumps({"checks": [{"not_null": "id"}, {"unique": ["id", "day"]}]})
    report = json.loads(distop(group, "start", "validate", "orders", "--arg", argument, "--wait", "--json").stdout)[
        "report"
    ]
    assert report["certificate"]["types"] == {"id": "int", "day": "int"}, (report, group.tails())
    since = ("--since", "orders/validate/2", "--arg", json.dumps({"checks": [{"not_null": "id"}]}))
    report = json.loads(distop(group, "start", "validate", "orders", *since, "--wait", "--json").stdout)["report"]
    assert (report["verdict"], report["rows"], report["certificate"]["rows"]) == ("valid", 0, 3), group.tails()
    argument = json.dumps({"name": "words", "columns": ["word"]})
    report = json.loads(distop(group, "start", "build-index", "orders", "--arg", argument, "--wait", "--json").stdout)[
        "report"
    ]
    assert (report["files"], report["rows"], report["not_indexed_files"]) == (3, 3, 0), group.tails()

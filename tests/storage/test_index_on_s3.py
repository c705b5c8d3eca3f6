"""An index of a table on S3: built, refreshed, searched and dropped, with its stages on S3 as well."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

import distop
from distop.protocol.records import TableRecord
from distop.storage import storage_options
from distop.storage.opened_stores import object_at, open_store
from distop_behaviors.index import row_lookup
from distop_behaviors.index.key_lookup import _read_here, find
from tests.storage import delta_tables, iceberg_tables
from tests.storage.conftest import S3
from tests.storage.faulty_http import FaultyProxy
from tests.storage.test_shared_dir import group, shared
from tests.support.behaviors import sample_env

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage.servers import Served
    from tests.support.daemons import Daemons

__all__ = ["group", "sample_env", "shared"]

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300), pytest.mark.rotating]
KIND = ["posting", "skip"]


@pytest.fixture
def location(served: Served) -> str:
    return f"{served.url}/{uuid.uuid4().hex}/t"


def rows_of(n: int) -> pa.Table:
    """Rows with the keys from ``10 n`` to ``10 n + 9``."""
    return pa.table({"k": [10 * n + i for i in range(10)], "n": [n] * 10})


def add(location: str, n: int) -> None:
    """Add a file with :func:`rows_of` to a folder of Parquet files."""
    rows = pa.BufferOutputStream()
    pq.write_table(rows_of(n), rows)
    open_store(location).put_new(f"{n}.parquet", rows.getvalue().to_pybytes())


def adding(table_format: str, location: str, port: int) -> Callable[[int], None]:
    """A function that adds a file with :func:`rows_of` to a new table of a format."""
    if table_format == "parquet":
        return lambda n: add(location, n)
    if table_format == "delta":
        return lambda n: delta_tables.append(location, port, rows_of(n))
    schema = Schema(NestedField(1, "k", LongType()), NestedField(2, "n", LongType()))
    table = iceberg_tables.new_table(open_store(location), port, schema)
    return lambda n: table.append(rows_of(n))


def named(record: TableRecord, key: int) -> list[list[int]]:
    """The keys in each file that the index names for a key."""
    found = []
    for path, _, _ in find(record, "i", [key]).files:
        store, inner = object_at(path)
        data = store.get(inner, limit=1 << 20).data
        found.append(pq.read_table(pa.BufferReader(data)).column("k").to_pylist())
    return found


def rows(record: TableRecord, *keys: int) -> list[dict[str, int]]:
    found = find(record, "i", keys)
    assert not found.uncovered
    return sorted(_read_here(found, row_lookup.LOCAL_BYTES).to_pylist(), key=lambda row: row["k"])


def keys(location: str) -> list[str]:
    """The table's own keys."""
    return sorted(found.key for found in open_store(location).list() if not found.key.startswith("_distop/"))


def files(location: str) -> list[str]:
    return [found.key.rpartition("/")[2] for found in open_store(f"{location}/_distop").list()]


@pytest.mark.parametrize("served", S3, indirect=True)
@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("table_format", ["parquet", "iceberg", "delta"])
def test_an_index_is_built_refreshed_searched_and_dropped(
    group: Daemons,
    shared: str,
    location: str,
    served: Served,
    sample_env: dict[str, str],
    kind: str,
    table_format: str,
) -> None:
    add_file = adding(table_format, location, served.port)
    for n in range(3):
        add_file(n)
    record = TableRecord("lake", table_format, location)
    group.client.add_table(record)
    group.start("a", options=("--shared-dir", shared), env=sample_env)

    def run(type_name: str, **argument: object) -> distop.OperationResult:
        return group.client.start_operation(type_name, "lake", {"name": "i", **argument}).wait(120).raise_for_state()

    report = run("build-index", columns=["k"], kind=kind).report
    assert (report["generation"], report["files"], report["rows"], report["not_indexed"]) == (1, 3, 30, [])
    assert named(record, 17) == [list(range(10, 20))]
    add_file(3)
    report = run("build-index", columns=["k"], kind=kind).report
    assert (report["generation"], report["indexed"], report["files"]) == (2, 1, 4)
    assert named(record, 31) == [list(range(30, 40))]
    if kind == "posting":
        assert rows(record, 17, 31) == [{"k": 17, "n": 1}, {"k": 31, "n": 3}]
    group.eventually(lambda: not list(open_store(shared).list()), "the stages are removed")
    before = keys(location)
    assert run("drop-index").report["dropped"] is True
    assert files(location) == ["000003.json"]
    assert keys(location) == before, "the table is unchanged"


@pytest.mark.parametrize("served", ["moto"], indirect=True)
def test_an_index_of_a_table_on_a_disk_has_its_stages_on_s3(
    group: Daemons, shared: str, sample_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"k": [1, 2, 3], "n": [0, 0, 0]}), tmp_path / "t" / "0.parquet")
    group.start("a", options=("--shared-dir", shared), env=sample_env)
    for generation in (1, 2):
        argument = {"name": "i", "columns": ["k"], "refresh": "full"}
        result = group.client.start_operation("build-index", "t", argument).wait(120).raise_for_state()
        assert result.report["generation"] == generation
        group.eventually(lambda: not list(open_store(shared).list()), "the stages are removed")
    assert [row["k"] for row in rows(TableRecord("t", "parquet", str(tmp_path / "t")), 2)] == [2]
    names = [path.name for path in (tmp_path / "t" / "_distop").iterdir()]
    assert names == ["index"], "nothing is staged below the table"


@pytest.mark.parametrize("served", ["moto"], indirect=True)  # it checks no signatures
@pytest.mark.parametrize("fault", ["lost answers", "repeated requests"])
def test_an_index_is_published_once_whatever_happens_to_the_answers(
    group: Daemons, shared: str, location: str, served: Served, sample_env: dict[str, str], fault: str
) -> None:
    add(location, 0)
    group.client.add_table(TableRecord("lake", "parquet", location))
    with FaultyProxy(served.port) as front:
        if fault == "lost answers":
            front.lose_answers("PUT", times=1 << 30)
        else:
            front.repeat_requests("PUT")
        settings = json.dumps(storage_options.as_given(served.options(front.port)))
        group.start("a", options=("--shared-dir", shared), env={**sample_env, "DISTOP_STORAGE": settings})
        argument = {"name": "i", "columns": ["k"]}
        result = group.client.start_operation("build-index", "lake", argument).wait(200).raise_for_state()
        assert front.seen
    assert result.report["generation"] == 1
    assert [name for name in files(location) if name.endswith(".json")] == ["000001.json"]
    assert rows(TableRecord("lake", "parquet", location), 7) == [{"k": 7, "n": 0}]

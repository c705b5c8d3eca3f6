"""Orphans of tables on S3, removed and restored by real executors."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import distop
from distop.protocol.records import TableRecord
from distop.storage.object_store import Listed
from distop.storage.opened_stores import open_store
from tests.storage import delta_tables, iceberg_tables
from tests.storage.conftest import S3
from tests.storage.test_shared_dir import group, shared
from tests.support.behaviors import sample_env
from tests.support.orphan_runs import NOW, Run, wait_until_older
from tests.support.table_files import LoggedRemote

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.servers import Served
    from tests.support.daemons import Daemons

__all__ = ["group", "sample_env", "shared"]

pytestmark = [pytest.mark.timeout(300)]
ORPHANS = ("data/left.parquet", "data/k=caf\u00e9 10%3A00/x y.parquet", "left")


def new_table(name: str, location: str, port: int) -> TableRecord:
    if name == "delta":
        for n in range(3):
            delta_tables.append(location, port, pa.table({"a": [n], "b": [n]}))
    else:
        table = LoggedRemote(open_store(location), iceberg_tables.properties_for(port)).new(iceberg_tables.SCHEMA)
        for n in range(3):
            table.append(pa.table({"a": [n], "b": [n]}))
    return TableRecord("lake", name, location)


def plant(location: str) -> None:
    for key in (*ORPHANS, "_distop/index/i/data/x"):
        open_store(location).put_new(key, key.encode())
    wait_until_older(location)


def contents(location: str) -> dict[str, bytes]:
    store = open_store(location)
    return {one.key: store.get(one.key, limit=1 << 20).data for one in store.list()}


@pytest.mark.parametrize("served", S3, indirect=True)
@pytest.mark.parametrize("table_format", ["iceberg", "delta"])
def test_orphans_on_s3_are_removed_and_restored(served: Served, tmp_path: Path, table_format: str) -> None:
    bucket = f"{served.url}/{uuid.uuid4().hex}"
    table = new_table(table_format, f"{bucket}/t", served.port)
    open_store(f"{bucket}/t2").put_new("left", b"beside")
    before = contents(bucket)
    plant(table.location)
    planted = contents(bucket)
    # The bucket has another name in the record than in the metadata.
    run = Run(TableRecord("lake", table_format, table.location.replace("s3:", "s3a:")), tmp_path)
    report = run.run(quarantine=True)
    assert (report["removed"]["files"], report["missing"], report["failed_files"]) == (len(ORPHANS), 0, 0)
    assert run.restore()["restored"] == report["removed"]
    assert contents(bucket) == planted
    wait_until_older(table.location)
    assert run.run()["removed"] == report["removed"]
    assert contents(bucket) == {**before, "t/_distop/index/i/data/x": b"_distop/index/i/data/x"}


@pytest.mark.parametrize("served", S3, indirect=True)
def test_an_object_that_was_replaced_since_the_list_is_kept(served: Served, tmp_path: Path) -> None:
    location = f"{served.url}/{uuid.uuid4().hex}/t"
    run = Run(new_table("iceberg", location, served.port), tmp_path)
    plant(location)
    plans = run.plan()
    store = open_store(location)
    store.replace_if(ORPHANS[0], b"another content", store.head(ORPHANS[0]).version)
    store.delete_many([ORPHANS[1]])
    report = run.remove(plans)
    assert (report["removed"]["files"], report["changed"], report["missing"]) == (1, 1, 1)
    assert store.get(ORPHANS[0], limit=100).data == b"another content"


@pytest.mark.parametrize("served", ["moto"], indirect=True)
def test_many_objects_are_removed_in_pages(served: Served) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    for n in range(30):
        store.put_new(f"a/{n}", b"")
    listed = [Listed(one.key, one.size, one.stamp) for one in store.list()]
    assert len(store.remove_listed([*listed, Listed("a/none", 0, "x")]).removed) == 30
    assert list(store.list()) == []


@pytest.mark.etcd
@pytest.mark.rotating
@pytest.mark.parametrize("served", S3, indirect=True)
def test_executors_remove_orphans_on_s3_unless_another_table_is_there(
    group: Daemons, shared: str, served: Served, sample_env: dict[str, str]
) -> None:
    location = f"{served.url}/{uuid.uuid4().hex}/t"
    group.client.add_table(new_table("iceberg", location, served.port))
    group.client.add_table(TableRecord("inner", "parquet", f"{location}/data"), check=False)
    plant(location)
    before = contents(location)
    group.start("a", options=("--shared-dir", shared), env=sample_env)

    def run(type_name: str, **argument: object) -> distop.OperationResult:
        return group.client.start_operation(type_name, "lake", argument).wait(120)

    refused = run("remove-orphans", **NOW)
    assert refused.state == "failed"
    assert "another table's folder" in str(refused.errors)
    assert contents(location) == before
    group.client.remove_table("inner")
    done = run("remove-orphans", **NOW, quarantine=True).raise_for_state()
    assert done.report["removed"]["files"] == len(ORPHANS)
    assert [job.name for job in group.client.operation(done.op).results()] == ["listing", "orphans-000001"]
    assert run("restore", operation=done.op).raise_for_state().report["restored"]["files"] == len(ORPHANS)
    assert contents(location) == before
    wait_until_older(location)
    assert run("remove-orphans", **NOW).raise_for_state().report["quarantine"] == ""
    assert not set(ORPHANS) & set(contents(location))

"""``export`` to and from S3: copies by the store, lost answers, and changed sources."""

from __future__ import annotations

import io
import re
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.storage import export_targets
from distop.storage.object_store import PART
from distop.storage.opened_stores import open_store
from distop.storage.remote_store import RemoteStore
from distop.tables import plan_table
from tests.storage import delta_tables, iceberg_tables
from tests.storage.conftest import S3
from tests.support.export_runs import ExportRun
from tests.support.table_files import LoggedRemote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distop.storage.object_store import ObjectStore
    from tests.storage.faulty_http import FaultyProxy
    from tests.storage.servers import Served

pytestmark = pytest.mark.timeout(300)
on_s3 = pytest.mark.parametrize("served", S3, indirect=True)
on_one = pytest.mark.parametrize("served", ["moto"], indirect=True)
FILES = 6


@pytest.fixture
def bucket(served: Served, tmp_path: Path) -> Iterator[str]:
    found = f"{served.url}/{uuid.uuid4().hex}"
    export_targets.configure([f"{found}/out", str(tmp_path / "out")])
    yield found
    export_targets.configure(())


def parquet_bytes(n: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"a": [n]}), buffer)
    return buffer.getvalue()


def fill(location: str, *, large: bool = False) -> TableRecord:
    store = open_store(location)
    for n in range(FILES):
        store.put_new(f"day={n % 3}/{n}.parquet", parquet_bytes(n))
    if large:  # an export does not look into files
        store.put_large("day=0/large.parquet", (bytes([n]) * PART for n in range(2)))
    return TableRecord("t", "parquet", location)


def data(store: ObjectStore) -> dict[str, bytes]:
    return {one.key: store.get(one.key, limit=1 << 26).data for one in store.list() if one.key.endswith(".parquet")}


def files(report: Any, name: str) -> int:
    return int(report[name]["files"])


@on_s3
@pytest.mark.parametrize("way", ["within", "up", "down"])
def test_a_table_is_exported_twice(served: Served, bucket: str, tmp_path: Path, way: str) -> None:
    location = str(tmp_path / "t") if way == "up" else f"{bucket}/t"
    target = str(tmp_path / "out" / "t") if way == "down" else f"{bucket}/out/t"
    run = ExportRun(fill(location, large=True), target, tmp_path / "work")
    report = run.run().report
    assert data(open_store(target)) == data(open_store(location))
    assert files(report, "copied") == files(report, "verified") == FILES + 1
    markers = {key for key in run.contents() if "_SUCCESS" in key}
    assert markers == {"_SUCCESS", *(f"day={n}/_SUCCESS" for n in range(3))}
    before = run.contents()
    report = run.run().report
    assert (files(report, "reused"), files(report, "copied"), report["complete"]) == (FILES + 1, 0, True)
    assert run.contents() == before


@on_one
def test_the_store_itself_copies_within_a_bucket(
    served: Served, bucket: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    run = ExportRun(fill(f"{bucket}/t"), f"{bucket}/out/t", tmp_path / "work")
    plans, version = run.plan()
    proxy.seen.clear()
    rows = run.jobs(plans)
    of_data = [seen for seen in proxy.seen if seen.target.partition("?")[0].endswith(".parquet")]
    name = bucket.rpartition("/")[2]
    assert {seen.method for seen in of_data if f"/{name}/t/" in seen.target} <= {"HEAD"}
    sent = [seen for seen in of_data if seen.method == "PUT"]
    assert len(sent) == FILES
    assert not any(b"PAR1" in seen.whole for seen in sent)
    assert run.complete(rows, plans, version).report["complete"]


@on_s3
@pytest.mark.parametrize("way", ["within", "up"])
@pytest.mark.parametrize("fault", ["lose_answers", "lose_requests"])
def test_lost_answers_do_not_fail_an_export(
    served: Served, bucket: str, proxy: FaultyProxy, tmp_path: Path, way: str, fault: str
) -> None:
    location = str(tmp_path / "t") if way == "up" else f"{bucket}/t"
    run = ExportRun(fill(location), f"{bucket}/out/t", tmp_path / "work")
    plans, version = run.plan()
    getattr(proxy, fault)("PUT", times=3)
    rows = run.jobs(plans)
    getattr(proxy, fault)("PUT", times=2)
    report = run.complete(rows, plans, version).report
    assert report["complete"]
    assert files(report, "copied") + files(report, "reused") == files(report, "verified") == FILES
    assert data(open_store(run.target)) == data(open_store(location))


@on_s3
@pytest.mark.parametrize("change", ["missing", "changed"])
def test_lakeFS_2089_a_missing_or_changed_object_fails_the_export(
    served: Served, bucket: str, tmp_path: Path, change: str
) -> None:
    run = ExportRun(fill(f"{bucket}/t"), f"{bucket}/out/t", tmp_path / "work")
    plans, version = run.plan()
    store, key = open_store(f"{bucket}/t"), "day=1/1.parquet"
    if change == "missing":
        store.delete_many([key])
    else:
        content = bytearray(store.get(key, limit=1 << 20).data)
        content[20] ^= 1
        store.put(key, bytes(content))
    rows = run.jobs(plans)
    assert [row.success for row in rows] == [True, False, True]
    assert change in rows[1].error
    assert not run.complete(rows, plans, version).report["complete"]
    found = run.contents()
    assert {key for key in found if key.endswith(("_SUCCESS", "_EXPORT.json"))} == {"day=0/_SUCCESS", "day=2/_SUCCESS"}


@on_one
def test_a_source_that_is_replaced_while_it_is_copied_is_not_marked(
    served: Served, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ExportRun(fill(f"{bucket}/t"), f"{bucket}/out/t", tmp_path / "work")
    plans, _ = run.plan()
    store, copy = open_store(f"{bucket}/t"), RemoteStore.copy

    def replaced(self: RemoteStore, source: str, target: str) -> None:
        if source.endswith("/day=1/1.parquet"):
            store.put("day=1/1.parquet", parquet_bytes(1) + b"x")
        copy(self, source, target)

    monkeypatch.setattr(RemoteStore, "copy", replaced)
    rows = run.jobs(plans)
    assert [row.success for row in rows] == [True, False, True]
    assert "day=1/_SUCCESS" not in run.contents()
    assert "day=1/1.parquet" not in run.contents()


@on_one
def test_an_export_that_was_killed_reuses_its_copies(
    served: Served, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ExportRun(fill(f"{bucket}/t"), f"{bucket}/out/t", tmp_path / "work")
    plans, version = run.plan()
    copy = RemoteStore.copy

    class Killed(BaseException):
        pass

    def killed(self: RemoteStore, source: str, target: str) -> None:
        if source.endswith("/4.parquet"):
            raise Killed
        copy(self, source, target)

    rows = run.jobs(plans[:1])
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RemoteStore, "copy", killed)
        run.jobs(plans[1:2])
    rows += run.jobs(plans[1:])
    report = run.complete(rows, plans, version).report
    assert (files(report, "copied"), files(report, "reused"), report["complete"]) == (FILES - 1, 1, True)
    assert data(open_store(run.target)) == data(open_store(f"{bucket}/t"))


@on_one
def test_a_version_of_delta_is_exported_within_a_bucket(served: Served, bucket: str, tmp_path: Path) -> None:
    location = f"{bucket}/d"
    for n in range(3):
        delta_tables.append(location, served.port, pa.table({"a": [n], "b": [n]}))
    run = ExportRun(TableRecord("d", "delta", location), f"{bucket}/out/d", tmp_path / "work")
    assert files(run.run(version="1").report, "files") == 2
    report = run.run(diff_from="1").report
    assert (files(report, "unchanged"), files(report, "copied"), files(report, "gone")) == (2, 1, 0)
    assert data(open_store(run.target)) == data(open_store(location))


@on_one
def test_other_buckets_and_places_are_refused(served: Served, bucket: str, tmp_path: Path) -> None:
    table = fill(f"{bucket}/t")
    for target in (f"{bucket}/other", "s3://another/out/t", f"{bucket}/out", f"{bucket}/t/x", f"{served.url}/"):
        run = ExportRun(table, target, tmp_path / "work")
        if target == f"{bucket}/out":
            assert run.plan()[0]  # the allowed place itself
            continue
        with pytest.raises(InvalidArgument, match="export"):
            run.plan()


@on_s3
@pytest.mark.parametrize("form", ["iceberg", "delta"])
def test_a_table_is_registered_within_a_bucket(served: Served, bucket: str, tmp_path: Path, form: str) -> None:
    location, target = f"{bucket}/t", f"{bucket}/out/t"
    if form == "iceberg":
        store = LoggedRemote(open_store(location), iceberg_tables.properties_for(served.port))
        table = store.new(iceberg_tables.SCHEMA)

    def append(n: int) -> None:
        if form == "iceberg":
            table.append(pa.table({"a": [n, n + 1], "b": [n, n]}))
        else:
            delta_tables.append(location, served.port, pa.table({"a": [n, n + 1], "b": [n, n]}))

    tables: list[TableRecord] = []
    for n in range(3):
        if n < 2:  # the last one is the second again
            append(n)
        run = ExportRun(TableRecord("t", form, location), target, tmp_path / "work", tables)
        ran = run.run(register={"name": "copy"})
        tables = run.registrations
        assert tables == [TableRecord("copy", form, target)]
        copies = [file for part in plan_table(tables[0]).partitions for file in part.files]
        assert len(copies) == ran.report["files"]["files"] == min(n, 1) + 1
        assert all(path.startswith(f"{target}/") for path, _, _ in copies)
        assert sum(size for _, size, _ in copies) == ran.report["files"]["bytes"]
    assert data(open_store(target)) == data(open_store(location))
    logs = [one.key for one in open_store(target).list() if re.search(r"/(v\d+\.metadata|\d{20})\.json$", one.key)]
    assert len(logs) == 2

"""Iceberg tables of a catalog whose files are in an object store, without Spark."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.table.update import SetPropertiesUpdate

from distop.behavior import TableRecord, load
from distop.errors import InvalidArgument, TableBusy, TableRefused, TableUnavailable
from distop.storage.opened_stores import open_store
from distop.tables import check_table, place_of, plan_table
from distop.tables.iceberg import iceberg_catalogs
from distop.tables.iceberg.bounded_io import BoundedIO
from tests.storage.catalog_lake import KINDS, THEIRS, catalog_lake
from tests.storage.conftest import S3
from tests.storage.iceberg_tables import table_in
from tests.support.context import FakeContext, run_operation
from tests.support.icebergrest import configure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.storage.catalog_lake import CatalogLake
    from tests.storage.faulty_http import FaultyProxy
    from tests.storage.servers import Served

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.rotating,
    pytest.mark.parametrize("served", S3, indirect=True),
]


@pytest.fixture(params=KINDS)
def lake(
    request: pytest.FixtureRequest,
    served: Served,
    proxy: FaultyProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[CatalogLake]:
    """A catalog that distop is configured for; its files are behind the proxy."""
    url = f"{served.url}/{uuid.uuid4().hex}"
    with catalog_lake(request.param, url, served.port, tmp_path / "catalog", monkeypatch) as found:
        proxy.seen.clear()
        yield found


def judged(record: TableRecord, folder: Path, **arg: Any) -> Any:
    """The report of checks by statistics alone."""
    argument = {"checks": [{"not_null": "a"}, {"not_null": "b"}], "statistics": "only", **arg}
    return run_operation(load("validate"), record, argument, lambda one: FakeContext(folder, one)).report


def verdicts(report: Any) -> list[tuple[str, int]]:
    return [(check["verdict"], check["violations"]) for check in report["checks"]]


def test_a_table_is_registered_planned_and_judged_by_its_statistics(
    lake: CatalogLake, proxy: FaultyProxy, tmp_path: Path
) -> None:
    assert check_table(lake.record) == lake.record
    assert place_of(lake.record) == lake.table.location() == f"{lake.url}/sales/orders"
    lake.add([3], [4])
    [plan] = plan_table(lake.record).partitions
    assert plan.source == lake.table.metadata_location
    assert len(plan.files) == 2
    assert verdicts(judged(lake.record, tmp_path)) == [("valid", 0), ("violated", 1)]
    assert all(".parquet" not in one.target for one in proxy.seen)


def test_a_table_of_a_hadoop_catalog_is_registered_planned_and_judged(
    served: Served, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{served.url}/{uuid.uuid4().hex}"
    store = open_store(f"{url}/sales/orders")
    table_in(store, served.port, {"a": [1, 2], "b": [1, None]}, {"a": [3], "b": [4]})
    option = configure(monkeypatch, "folder", type="hadoop", warehouse=url)
    record = TableRecord("t", "iceberg", "sales.orders", option)
    assert check_table(record) == record
    assert place_of(record) == store.location
    assert verdicts(judged(record, tmp_path)) == [("valid", 0), ("violated", 1)]


def test_a_later_validation_reads_only_new_files(lake: CatalogLake, tmp_path: Path) -> None:
    first = judged(lake.record, tmp_path, checks=[{"not_null": "a"}])
    lake.add([3, None], [4, 5])
    since = judged(lake.record, tmp_path, checks=[{"not_null": "a"}], since=first["certificate"])
    assert (since["rows"], verdicts(since)) == (2, [("violated", 1)])


@pytest.mark.parametrize(
    ("lake", "place"),
    [*(("rest", place) for place in ("config", "vended", "defaults", "overrides", "settings")), ("sql", "settings")],
    indirect=["lake"],
)
def test_an_endpoint_or_credential_of_the_catalog_is_not_used(
    place: str, lake: CatalogLake, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = [{"prefix": lake.url, "config": THEIRS}] if place == "vended" else THEIRS
    setattr(lake.rest, place, given)
    if place == "settings":
        configure(monkeypatch, **{name.replace(".", "__"): value for name, value in THEIRS.items()})
    assert verdicts(judged(lake.record, tmp_path)) == [("valid", 0), ("violated", 1)]
    assert proxy.seen
    assert not any(b"theirs" in one.whole or b"elsewhere" in one.whole for one in proxy.seen)
    assert all(b"Credential=tester/" in one.whole for one in proxy.seen)


def test_a_table_with_a_credential_in_its_properties_is_refused(lake: CatalogLake) -> None:
    lake.forge({"s3.access-key-id": "theirs"})
    with pytest.raises(InvalidArgument, match=r"has the property s3.access-key-id, which is a credential: remove it"):
        plan_table(lake.record)


def test_a_table_in_another_folder_than_its_record_says_is_refused(lake: CatalogLake) -> None:
    record = TableRecord("t", "iceberg", "sales.orders", {**lake.record.options, "folder": f"{lake.url}/sales/others"})
    with pytest.raises(InvalidArgument, match="but the option 'folder' of its record is "):
        plan_table(record)
    record = TableRecord("t", "iceberg", "sales.orders", {**lake.record.options, "folder": lake.table.location()})
    assert plan_table(record).partitions


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("403 Forbidden", "AccessDenied", TableRefused),
        ("404 Not Found", "NoSuchBucket", TableRefused),
        ("404 Not Found", "NoSuchKey", TableUnavailable),
        ("503 Slow Down", "SlowDown", TableBusy),
    ],
)
@pytest.mark.parametrize("suffix", [".metadata.json", ".avro"])
def test_planning_tells_refusals_of_the_store_from_a_busy_store(
    suffix: str,
    status: str,
    code: str,
    kind: type[Exception],
    lake: CatalogLake,
    proxy: FaultyProxy,
    request: pytest.FixtureRequest,
) -> None:
    if kind is TableBusy:  # a slow answer would be taken for a busy store in the other cases
        request.getfixturevalue("impatient")
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    proxy.answer(status, body, suffix=suffix)
    with pytest.raises(TableUnavailable) as raised:
        plan_table(lake.record)
    assert type(raised.value) is kind
    assert suffix in str(raised.value) or "snapshot" in str(raised.value)


def test_a_commit_through_the_catalog_writes_its_metadata_with_the_same_configuration(
    lake: CatalogLake, proxy: FaultyProxy
) -> None:
    with iceberg_catalogs.opened(lake.record) as found:
        former = found.source
        source = found.commit([SetPropertiesUpdate(updates={"checked": "yes"})])
        writes = [one.target for one in proxy.seen if one.method == "PUT"]
        assert writes == ([] if found.writes_metadata else [f"/{source.removeprefix('s3://')}"])
    assert source != former
    with iceberg_catalogs.opened(lake.record) as found:
        assert (found.source, found.metadata.properties["checked"]) == (source, "yes")


def test_a_new_file_of_pyiceberg_is_written_when_it_is_closed_without_an_error(served: Served) -> None:
    store = open_store(f"{served.url}/{uuid.uuid4().hex}")
    io = BoundedIO({"s3.endpoint": "http://127.0.0.1:1"})
    new = io.new_output(f"{store.location}/a")

    def write(data: bytes, *, overwrite: bool = False, fails: bool = False) -> None:
        with new.create(overwrite=overwrite) as file:
            assert file.write(data) == file.tell() == len(data)
            assert new.exists() == overwrite
            if fails:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(b"1", fails=True)
    assert not new.exists()
    write(b"12")
    assert (new.exists(), len(new), new.to_input_file().open().read()) == (True, 2, b"12")
    with pytest.raises(FileExistsError):
        with new.create() as file:
            file.write(b"3")
    write(b"123", overwrite=True)
    assert io.new_input(f"{store.location}/a").open().read() == b"123"

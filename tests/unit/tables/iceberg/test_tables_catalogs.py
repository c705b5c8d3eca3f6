"""Iceberg tables of a catalog: planned from the metadata file that the catalog names."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.update import SetLocationUpdate, SetPropertiesUpdate
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from distop.errors import InvalidArgument, OutcomeUnknown, TableUnavailable
from distop.protocol.records import TableRecord
from distop.runtime import secret_settings
from distop.storage.places import shared_of
from distop.storage.storage_urls import holds_secret
from distop.tables import check_reachable, check_table, folders_of, place_of, plan_table
from distop.tables.formats import OWN
from distop.tables.iceberg import iceberg_catalogs
from distop.tables.parquet.parquet_format import EMPTY
from tests.support.icebergrest import RestCatalogServer, configure, sql_catalog
from tests.support.lake import Folder

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "k", StringType(), required=False))
BY_K = PartitionSpec(PartitionField(source_id=2, field_id=1000, transform=IdentityTransform(), name="k"))
ROWS = pa.table({"id": [1, 2, 3], "k": ["a", "b", "b"]})


def record(location: str = "sales.orders", catalog: Any = "prod") -> TableRecord:
    return TableRecord("t", "iceberg", location, {"catalog": catalog})


@pytest.fixture
def sql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, TableRecord]]:
    """A catalog in SQLite with a table of two partitions, and the record that names it."""
    with sql_catalog(tmp_path / "lake") as catalog:
        catalog.create_namespace("sales")
        catalog.create_table("sales.orders", SCHEMA, partition_spec=BY_K).append(ROWS)
        configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
        yield catalog, record()


@pytest.fixture
def rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RestCatalogServer]:
    """The same table behind a REST catalog."""
    with RestCatalogServer(tmp_path / "lake") as server:
        configure(monkeypatch, type="rest", uri=server.uri)
        server.tables.create_namespace("sales")
        server.tables.create_table("sales.orders", SCHEMA, partition_spec=BY_K).append(ROWS)
        yield server


def test_a_table_of_a_sql_catalog_is_planned_from_the_file_that_the_catalog_names(sql: tuple[Any, TableRecord]) -> None:
    catalog, table = sql
    assert check_table(table) == table
    planned = plan_table(table)
    current = catalog.load_table("sales.orders")
    assert {p.source for p in planned.partitions} == {current.metadata_location}
    assert [(p.name, len(p.files)) for p in planned.partitions] == [("k=a", 1), ("k=b", 1)]
    assert planned.version == str(current.metadata.current_snapshot_id)
    current.append(ROWS)
    later = plan_table(table)
    assert later.version != planned.version
    assert [len(p.files) for p in later.partitions] == [2, 2]
    catalog.create_table("sales.empty", SCHEMA)
    assert [p.name for p in plan_table(record("sales.empty")).partitions] == [EMPTY]


def test_the_error_names_a_table_that_was_renamed_or_dropped(sql: tuple[Any, TableRecord]) -> None:
    catalog, table = sql
    planned = plan_table(table)
    catalog.rename_table("sales.orders", "sales.old")
    with pytest.raises(InvalidArgument, match=r"'prod' has no table 'sales.orders': it was dropped, renamed"):
        plan_table(table)
    check_reachable(table)  # a plan made before can still be read
    assert Path(planned.partitions[0].source).exists()
    with pytest.raises(InvalidArgument, match=r"has no table 'nowhere.orders'"):
        check_table(record("nowhere.orders"))
    catalog.drop_table("sales.old")
    with pytest.raises(InvalidArgument, match=r"has no table 'sales.old'"):
        plan_table(record("sales.old"))


def test_a_table_whose_metadata_cannot_be_read_here_is_unavailable(sql: tuple[Any, TableRecord]) -> None:
    catalog, table = sql
    check_reachable(table)
    Path(catalog.load_table("sales.orders").metadata_location).unlink()
    for ask in (plan_table, check_reachable):
        with pytest.raises(TableUnavailable, match=r"metadata of the table 'sales.orders' of .* cannot be read"):
            ask(table)


@pytest.mark.parametrize("moved", ["location", "link", "property"])
def test_hole_3_metadata_cannot_choose_a_folder_to_write_or_remove_in(
    sql: tuple[Any, TableRecord], tmp_path: Path, moved: str
) -> None:
    """A user who commits to a table sets its location: distop removed an index and wrote metadata there."""
    catalog, table = sql
    current = catalog.load_table("sales.orders")
    folder = current.metadata.location.removeprefix("file://")
    victim = tmp_path / "victim"
    victim.mkdir()
    assert place_of(table).removeprefix("file://") == folder
    elsewhere = str(victim)
    if moved == "link":
        elsewhere = f"{folder}/link"
        Path(elsewhere).symlink_to(victim)
    # A property that names the former folder keeps the metadata file where it is.
    properties = {"write.metadata.path": f"{victim if moved == 'property' else folder}/metadata"}
    source = Path(current.metadata_location.removeprefix("file://"))
    metadata = json.loads(source.read_text())
    metadata["properties"] |= properties
    metadata["location"] = metadata["location"] if moved == "property" else f"file://{elsewhere}"
    source.write_text(json.dumps(metadata))
    assert len(plan_table(table).partitions) == 2
    if moved == "property":
        assert place_of(table).removeprefix("file://") == folder
    else:
        with pytest.raises(InvalidArgument, match="is not the folder of its metadata: nothing is written or removed"):
            place_of(table)
    refused = "write to a folder that the table names" if moved == "property" else "is not the folder of its metadata"
    with iceberg_catalogs.opened(table) as found, pytest.raises(InvalidArgument, match=refused):
        found.commit([SetPropertiesUpdate(updates={"checked": "yes"})])
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize(
    "update",
    [
        SetPropertiesUpdate(updates={"write.py-location-provider.impl": "runpy.run_path"}),
        SetPropertiesUpdate(updates={"a": "b", "write.metadata.path": "/elsewhere"}),
        SetPropertiesUpdate(updates={"s3.secret-access-key": "x"}),
        SetLocationUpdate(location="/elsewhere"),
    ],
)
def test_hole_1_a_commit_cannot_make_pyiceberg_run_code_or_write_elsewhere(
    sql: tuple[Any, TableRecord], update: Any
) -> None:
    """pyiceberg writes the next metadata by the properties that the commit sets."""
    catalog, table = sql
    before = catalog.load_table("sales.orders").metadata_location
    with iceberg_catalogs.opened(table) as found, pytest.raises(InvalidArgument, match="distop does not "):
        found.commit([update])
    assert catalog.load_table("sales.orders").metadata_location == before


def test_hole_3_a_commit_checks_the_metadata_that_it_changes(sql: tuple[Any, TableRecord], tmp_path: Path) -> None:
    """The property is set during a rewrite, and pyiceberg loads the table again for its commit."""
    catalog, table = sql
    victim = tmp_path / "victim"
    with iceberg_catalogs.opened(table) as found:
        current = catalog.load_table("sales.orders")
        evil = SetPropertiesUpdate(updates={"write.metadata.path": f"file://{victim}"})
        catalog.commit_table(current, (), (evil,))
        made = set(victim.iterdir())
        with pytest.raises(InvalidArgument, match=r"write\.metadata\.path|is not the folder of its metadata"):
            found.commit([SetPropertiesUpdate(updates={"checked": "yes"})])
    assert set(victim.iterdir()) == made


def moved(catalog: Any, folder: Path) -> None:
    """Move the table as its writers can: the next metadata file lies in the new folder."""
    current = catalog.load_table("sales.orders")
    steps = (SetLocationUpdate(location=str(folder)), SetPropertiesUpdate(updates={"moved": "yes"}))
    catalog.commit_table(current, (), steps[:1])
    catalog.commit_table(catalog.load_table("sales.orders"), (), steps[1:])


def test_hole_2_a_table_that_was_moved_out_of_the_folder_of_its_record_is_refused(
    sql: tuple[Any, TableRecord], tmp_path: Path
) -> None:
    """Any files there would count as the table's."""
    catalog, table = sql
    folder = place_of(table).removeprefix("file://")
    pinned = replace(table, options={**table.options, "folder": folder})
    assert check_table(pinned) == pinned
    assert len(plan_table(pinned).partitions) == 2
    with iceberg_catalogs.opened(pinned) as found:
        moved(catalog, tmp_path / "victim")
        before = set((tmp_path / "victim").rglob("*"))
        with pytest.raises(InvalidArgument, match="the table has moved"):
            found.commit([SetPropertiesUpdate(updates={"checked": "yes"})])
    assert set((tmp_path / "victim").rglob("*")) == before
    message = f"'{tmp_path}/victim', but the option 'folder' of its record is '{folder}': the table has moved"
    for ask in (plan_table, place_of, folders_of, check_table):
        with pytest.raises(InvalidArgument, match=message):
            ask(pinned)
    assert len(plan_table(table).partitions) == 2, "without the option the catalog decides"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"folder": "/w"}, "needs the option 'catalog'"),
        ({"catalog": "prod", "folder": "w"}, "must be an absolute path or a URL"),
        ({"catalog": "prod", "folder": "/w/../x"}, "must be an absolute path or a URL"),
        ({"catalog": "prod", "folder": 5}, "must be an absolute path or a URL"),
    ],
)
def test_an_invalid_folder_option_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        check_table(TableRecord("t", "iceberg", "sales.orders", options))


def test_hole_2_the_folder_of_a_record_applies_to_a_hadoop_catalog_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, type="hadoop", warehouse=str(tmp_path))
    table = TableRecord("t", "iceberg", "sales.orders", {"catalog": "prod", "folder": f"{tmp_path}/sales/people"})
    for ask in (plan_table, place_of, folders_of, check_table):
        with pytest.raises(InvalidArgument, match="the table has moved"):
            ask(table)


def test_a_missing_sql_catalog_is_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "wrong.db"
    configure(monkeypatch, uri=f"sqlite:///{file}")
    table = record()
    with pytest.raises(TableUnavailable, match=r"the database file .*wrong\.db' does not exist"):
        plan_table(table)
    assert not file.exists()
    file.touch()
    with pytest.raises(TableUnavailable, match=r"the catalog 'prod' cannot be read: .*no such table"):
        plan_table(table)
    assert file.stat().st_size == 0
    with pytest.raises(InvalidArgument, match="cannot be read"):
        check_table(table)


def test_a_table_of_a_rest_catalog_is_planned_from_the_file_that_the_catalog_names(
    rest: RestCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, warehouse="main")
    table = record()
    assert check_table(table) == table
    planned = plan_table(table)
    assert {p.source for p in planned.partitions} == {rest.tables.load_table("sales.orders").metadata_location}
    assert [p.name for p in planned.partitions] == ["k=a", "k=b"]
    check_reachable(table)
    configure(monkeypatch, "other", uri=rest.uri, warehouse="other")
    with pytest.raises(InvalidArgument, match=r"'other' rejected .*Unable to find warehouse other"):
        plan_table(record(catalog="other"))
    with pytest.raises(InvalidArgument, match=r"has no table 'sales.nothing'"):
        plan_table(record("sales.nothing"))
    rest.tables.drop_table("sales.orders")
    with pytest.raises(InvalidArgument, match=r"has no table 'sales.orders': it was dropped, renamed"):
        plan_table(table)


def test_tokens_come_from_the_environment_of_the_node(rest: RestCatalogServer, monkeypatch: pytest.MonkeyPatch) -> None:
    rest.token = "sesame"
    table = record()
    with pytest.raises(TableUnavailable, match=r"rejects this node's credentials .*PYICEBERG_CATALOG__PROD__TOKEN"):
        plan_table(table)
    configure(monkeypatch, token="sesame")
    assert len(plan_table(check_table(table)).partitions) == 2
    assert "sesame" not in table.encode().decode()


TOKENS = {
    "token: moth-in-a-cloth/1": "moth-in-a-cloth/1",
    "credential: me:moth-in-a-cloth/1": "moth-in-a-cloth%2F1",
    "auth:\n        type: basic\n        basic:\n          username: me\n          password: moth": "bWU6bW90aA==",
}


@pytest.mark.parametrize("setting", TOKENS)
def test_hole_6_a_secret_in_the_file_of_pyiceberg_is_hidden_in_errors(
    rest: RestCatalogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Only variables and Spark's settings were hidden: a server's answer that quotes the token was written to etcd."""
    rest.token, rest.echoes = "another", True
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    (tmp_path / ".pyiceberg.yaml").write_text(f"catalog:\n    kept:\n      uri: {rest.uri}\n      {setting}\n")
    with pytest.raises(TableUnavailable, match="the token is not accepted") as refused:
        plan_table(record(catalog="kept"))
    message = str(refused.value)
    assert TOKENS[setting] in message, "the server quotes it"
    assert TOKENS[setting] not in secret_settings.redact(message)
    assert secret_settings.REPLACEMENT in secret_settings.redact(message)
    assert rest.uri in secret_settings.redact(f"{message} {rest.uri}")


def test_settings_come_from_the_environment_and_the_home_and_never_from_the_current_folder(
    rest: RestCatalogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "home", "other"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYICEBERG_HOME", raising=False)
    settings = f"catalog:\n  Written-Down:\n    uri: {rest.uri}\n    warehouse: main\n"
    (tmp_path / "here" / ".pyiceberg.yaml").write_text(settings)
    named = record(catalog="written-down")
    # After an empty file in the home folder, no other file is read.
    for text in (None, "", "other: 1"):
        if text is not None:
            (tmp_path / "home" / ".pyiceberg.yaml").write_text(text)
        with pytest.raises(TableUnavailable, match="is not configured on this node: .*PYICEBERG_CATALOG__WRITTEN_DOWN"):
            plan_table(named)
    assert rest.requests == []
    (tmp_path / "home" / ".pyiceberg.yaml").write_text(settings)
    assert len(plan_table(named).partitions) == 2
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path / "other"))
    (tmp_path / "other" / ".pyiceberg.yaml").write_text(settings.replace("main", "other"))
    with pytest.raises(InvalidArgument, match="Unable to find warehouse other"):
        plan_table(named)
    (tmp_path / "other" / ".pyiceberg.yaml").write_text("a: [")
    with pytest.raises(TableUnavailable, match=r"cannot read the file .*other/\.pyiceberg\.yaml"):
        plan_table(named)


def test_a_catalog_that_does_not_answer_is_unavailable(
    rest: RestCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = record()
    rest.status = 503
    with pytest.raises(TableUnavailable, match=r"the catalog 'prod' cannot be reached"):
        plan_table(table)
    rest.status, rest.page = 0, "<html>nothing of the kind</html>"
    with pytest.raises(TableUnavailable, match="cannot be used with the settings"):
        plan_table(table)
    rest.page = ""
    configure(monkeypatch, "nobody", uri="http://127.0.0.1:9")
    with pytest.raises(TableUnavailable, match="cannot be reached"):
        plan_table(record(catalog="nobody"))
    rest.released.clear()
    monkeypatch.setattr(iceberg_catalogs, "ANSWER_TIMEOUT", 0.5)
    with pytest.raises(TableUnavailable, match=r"did not answer within 0\.5 s"):
        plan_table(table)

    def stop() -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        plan_table(table, stop)


def test_a_commit_through_the_catalog_compares_before_it_swaps(rest: RestCatalogServer) -> None:
    table = record()
    with iceberg_catalogs.opened(table) as mine, iceberg_catalogs.opened(table) as other:
        before = mine.source
        rest.tables.load_table("sales.orders").append(ROWS)
        with pytest.raises(iceberg_catalogs.Changed, match=r"'sales.orders' was changed by another process"):
            mine.commit([SetPropertiesUpdate(updates={"checked": "no"})])
        with pytest.raises(iceberg_catalogs.Changed):
            other.commit([SetPropertiesUpdate(updates={"checked": "no"})])
    with iceberg_catalogs.opened(table) as mine:
        after = mine.commit([SetPropertiesUpdate(updates={"checked": "yes"})])
        assert after == mine.source == rest.tables.load_table("sales.orders").metadata_location != before
        assert mine.metadata.properties["checked"] == "yes"
        rest.lose_answers = True
        with pytest.raises(OutcomeUnknown, match="is unknown"):
            mine.commit([SetPropertiesUpdate(updates={"checked": "twice"})])
        rest.lose_answers, rest.status = False, 500
        with pytest.raises(OutcomeUnknown, match="is unknown"):
            mine.commit([SetPropertiesUpdate(updates={"checked": "twice"})])
    rest.status = 0
    with iceberg_catalogs.opened(table) as mine:
        assert mine.metadata.properties["checked"] == "twice"
        rest.tables.drop_table("sales.orders")
        with pytest.raises(iceberg_catalogs.Changed):
            mine.commit([SetPropertiesUpdate(updates={"checked": "no"})])


def test_a_table_of_a_hadoop_catalog_is_the_folder_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Folder(tmp_path / "lake" / "sales" / "orders").new(SCHEMA, BY_K).append(ROWS)
    configure(monkeypatch, type="hadoop", warehouse=f"{tmp_path}/lake/")
    table = check_table(record())
    assert table == record()
    assert [p.name for p in plan_table(table).partitions] == ["k=a", "k=b"]
    check_reachable(table)
    with pytest.raises(InvalidArgument, match=r"'/.*/lake/sales/nothing' does not exist"):
        check_table(record("sales.nothing"))
    monkeypatch.chdir(tmp_path)
    for warehouse in ("lake", ""):
        configure(monkeypatch, warehouse=warehouse)
        with pytest.raises(TableUnavailable, match="type hadoop needs its warehouse .*PROD__WAREHOUSE"):
            plan_table(table)
    configure(monkeypatch, type="nessie")
    with pytest.raises(TableUnavailable, match="the unknown type 'nessie' on this node .known: rest, sql"):
        plan_table(table)


@pytest.mark.parametrize(
    ("catalog", "sentence"),
    [
        ({"name": "prod"}, r"its type, uri, .* to the executors, as PYICEBERG_CATALOG__NAME__… in the"),
        ({"name": "prod", "type": "rest", "uri": "URI"}, "must be only the name of a catalog"),
        ({"type": "hadoop", "warehouse": "s3a://b/w?secret_key=pw"}, "must be only the name of a catalog"),
        ("https://pw@h", "must be the name of a catalog with letters"),
        ("prod.uri", "must be the name of a catalog with letters"),
        ("", "must be the name of a catalog with letters"),
        (["prod"], "must be the name of a catalog with letters"),
        (None, "must be the name of a catalog with letters"),
    ],
)
def test_a_record_cannot_choose_the_address_of_a_catalog_even_if_read_from_etcd(
    rest: RestCatalogServer, catalog: Any, sentence: str
) -> None:
    if isinstance(catalog, dict):
        catalog = {name: value.replace("URI", rest.uri) for name, value in catalog.items()}
    table = TableRecord.decode(record(catalog=catalog).encode())
    for ask in (check_table, plan_table, check_reachable, place_of):
        with pytest.raises(InvalidArgument, match=sentence) as refused:
            ask(table)
        assert "pw" not in str(refused.value)
    assert rest.requests == []


@pytest.mark.parametrize(
    "location",
    [
        "s3://AKIA:pw@bucket/t",
        "S3A://AKIA:pw/of#it+all@bucket/t",
        "s3://pw@bucket/t",
        "s3://bucket/t?region=eu&secret_key=pw",
        "s3://bucket/t?endpoint_override=https%3A%2F%2Fh%2F%3Ftoken%3Dpw",
        "abfs://container:pw@account.dfs.core.windows.net/t",
        "https://account.blob.core.windows.net/t?sv=1&sig=pw",
        "hdfs://user:pw@host:8020/t",
        "hdfs://[user:pw@host/t",
    ],
)
@pytest.mark.parametrize("format_name", OWN)
def test_a_location_with_a_secret_is_refused_and_not_repeated(format_name: str, location: str) -> None:
    with pytest.raises(InvalidArgument, match="password, a key or a token .*AWS_ACCESS_KEY_ID") as refused:
        check_table(TableRecord("t", format_name, location))
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize(
    "location",
    [
        "hdfs://user@host:8020/t",
        "hdfs://nameservice/t@2/key=1",
        "gs://anonymous@bucket/t",
        "abfss://container@account.dfs.core.windows.net/t",
        "s3://bucket/t?region=eu&endpoint_override=localhost%3A9000",
        "postgresql://user@[::1]:5432,other:5432/d",
        "thrift://a:9083,thrift://b:9083",
        "sqlite:////data/a@b.db",
        "/data/me:secret@home/t?token=1",
        "data@home/s3://k:s@b",
        "file:///data/me:secret@home/key=1?token=2",
        "sales.orders",
    ],
)
def test_a_location_without_a_secret_is_recognized(location: str) -> None:
    assert not holds_secret(location)


def test_a_folder_may_have_a_name_that_looks_like_a_secret(tmp_path: Path) -> None:
    folder = tmp_path / "k:s@b?token=1"
    folder.mkdir()
    pq.write_table(ROWS, folder / "a.parquet")
    assert check_table(TableRecord("t", "parquet", str(folder))).location == str(folder)


def test_an_answer_at_the_last_moment_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Future[Any]):
        """Its answer comes when the wait for it has just ended."""

        def result(self, timeout: float | None = None) -> Any:
            answer = super().result()
            if timeout is not None:
                raise TimeoutError
            return answer

    monkeypatch.setattr(iceberg_catalogs, "Future", Late)
    assert iceberg_catalogs._answer(lambda: "here", lambda: None) == "here"
    with pytest.raises(KeyError):
        iceberg_catalogs._answer(lambda: {}["nothing"], lambda: None)


@pytest.mark.parametrize("location", ["orders", "/lake/orders", "sales..orders", "../sales.orders", ""])
def test_a_location_that_is_not_a_name_in_a_catalog_is_refused(location: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{re.escape(repr(location))} is not the name of a table in a catalog"):
        check_table(record(location))


def test_a_name_in_a_catalog_is_not_used_as_a_folder() -> None:
    assert shared_of("", "abc", record()) is None
    for configured, table, place in (
        ("/shared", record(), "/shared/abc"),
        ("", TableRecord("t", "parquet", "s3://bucket/t/"), "s3://bucket/t/_distop/abc"),
        ("", TableRecord("t", "parquet", "/data/t"), "/data/t/_distop/abc"),
    ):
        found = shared_of(configured, "abc", table)
        assert found is not None
        assert found.location == place

"""A hostile REST catalog and hostile table properties choose no code, host or identity."""

from __future__ import annotations

import ast
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.table.update import SetPropertiesUpdate
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.tables import check_table, plan_table
from distop.tables.iceberg import guarded_catalogs, iceberg_catalogs
from distop.tables.iceberg.bounded_io import INNER_IMPL
from distop.tables.iceberg.guarded_catalogs import REST_PROPERTIES
from tests.support.icebergrest import RestCatalogServer, configure

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))
TABLE = TableRecord("t", "iceberg", "sales.orders", {"catalog": "prod"})
BOUNDED = "distop.tables.iceberg.bounded_io.BoundedIO"
TRAP = "distop_trap"
ROWS = pa.table({"id": [1]})

PROPERTIES: dict[str, Any] = {
    "py-io-impl": f"{TRAP}.Trap",
    INNER_IMPL: f"{TRAP}.Trap",
    "py-catalog-impl": f"{TRAP}.Trap",
    "auth": {"type": "custom", "impl": f"{TRAP}.Trap"},
    "auth.impl": f"{TRAP}.Trap",
    "s3.retry-strategy-impl": f"{TRAP}.Trap",
    "write.py-location-provider.impl": f"{TRAP}.Trap",
    "uri": "OTHER",
    "oauth2-server-uri": "OTHER/token",
    "s3.endpoint": "OTHER",
    "s3.proxy-uri": "OTHER",
    "s3.role-arn": "arn:aws:iam::1:role/other",
    "s3.signer": "S3V4RestSigner",
    "s3.signer.uri": "OTHER",
    "s3.signer.endpoint": "sign",
    "rest.sigv4-enabled": "true",
    "rest.signing-region": "elsewhere",
    "gcs.service.host": "OTHER",
    "adls.blob-storage-authority": ".example.com",
    "adls.account-host": "OTHER",
    "adls.connection-string": "OTHER",
    "hdfs.host": "example.com",
    "hf.endpoint": "OTHER",
    "ssl": {"cabundle": "/nowhere"},
    "header.X-Token": "theirs",
    "token": "theirs",
    "credential": "their:own",
    "scope": "everything",
    "warehouse": "s3://theirs/w",
    **dict.fromkeys(("s3.access-key-id", "s3.secret-access-key", "s3.session-token"), "theirs"),
    **dict.fromkeys(("s3.region", "client.region"), "elsewhere"),
    **dict.fromkeys(("gcs.oauth2.token", "gcs.oauth2.token-expires-at", "adls.sas-token"), "1"),
}
"""Properties that would choose code, a host, an identity or a secret. ``OTHER``: the address of another server."""


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module whose import leaves this file."""
    file = tmp_path / "sprung"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{TRAP}.py").write_text(
        f"open({str(file)!r}, 'a').close()\nclass Trap:\n    def __init__(self, *a, **k): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.delitem(sys.modules, TRAP, raising=False)
    return file


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RestCatalogServer, RestCatalogServer]]:
    """The configured catalog, and another server."""
    with RestCatalogServer(tmp_path / "lake") as ours, RestCatalogServer(tmp_path / "theirs") as theirs:
        ours.tables.create_namespace("sales")
        ours.tables.create_table("sales.orders", SCHEMA).append(ROWS)
        configure(monkeypatch, type="rest", uri=ours.uri, token="sesame")
        ours.token = "sesame"
        yield ours, theirs


def hostile(name: str, other: str) -> dict[str, Any]:
    return json.loads(json.dumps({name: PROPERTIES[name]}).replace("OTHER", other))


@pytest.mark.parametrize("place", ["defaults", "overrides", "config"])
def test_hole_2_properties_from_a_server_choose_neither_code_nor_a_host(
    servers: tuple[RestCatalogServer, RestCatalogServer], trap: Path, place: str
) -> None:
    ours, theirs = servers
    check_table(TABLE)
    for name in PROPERTIES:
        setattr(ours, place, hostile(name, theirs.uri))
        assert len(plan_table(TABLE).partitions) == 1, name
        with iceberg_catalogs.opened(TABLE) as found:
            io = found.loaded.io
            assert name not in io.properties or io.properties[name] in (ours.uri, "sesame", BOUNDED), name
            assert f"{type(io).__module__}.{type(io).__name__}" == BOUNDED, name
            found.commit([SetPropertiesUpdate(updates={"checked": name})])
        assert not trap.exists(), name
        assert theirs.requests == [], name
    for _, _, headers, _ in ours.requests:
        assert headers["Authorization"] == "Bearer sesame"
        assert "theirs" not in headers.values()


def test_the_hostile_properties_work_without_the_guard(
    servers: tuple[RestCatalogServer, RestCatalogServer], trap: Path
) -> None:
    ours, theirs = servers
    ours.overrides = hostile("py-io-impl", theirs.uri)
    RestCatalog("prod", uri=ours.uri, token="sesame").load_table("sales.orders")
    assert trap.exists()
    ours.overrides = hostile("uri", theirs.uri)
    with pytest.raises(NoSuchTableError):
        RestCatalog("prod", uri=ours.uri, token="sesame").load_table("sales.orders")
    assert theirs.requests[0][2]["Authorization"] == "Bearer sesame"


@pytest.mark.parametrize("name", ["py-io-impl", "write.py-location-provider.impl", "s3.endpoint", "uri"])
@pytest.mark.parametrize("kind", ["rest", "sql", "folder"])
def test_hole_2_properties_of_a_table_choose_neither_code_nor_a_host(
    servers: tuple[RestCatalogServer, RestCatalogServer],
    trap: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
) -> None:
    ours, theirs = servers
    value = str(hostile(name, theirs.uri)[name])
    table = ours.tables.load_table("sales.orders")
    ours.tables.commit_table(table, (), (SetPropertiesUpdate(updates={"kept": "yes"}),))
    source = Path(ours.tables.load_table("sales.orders").metadata_location.removeprefix("file://"))
    text = source.read_text().replace('"kept":"yes"', f'"kept":"yes",{json.dumps(name)}:{json.dumps(value)}')
    record = TABLE
    if kind == "rest":
        ours.properties = {name: value}
    elif kind == "sql":
        source.write_text(text)
        monkeypatch.delenv("PYICEBERG_CATALOG__PROD__TOKEN")
        configure(monkeypatch, type="sql", uri=f"sqlite:///{ours.folder}/catalog.db")
    else:
        folder = source.parents[1]
        (folder / "metadata" / "v1.metadata.json").write_text(text)
        record = TableRecord("t", "iceberg", str(folder))
    assert len(plan_table(record).partitions) == 1
    if kind != "folder":
        with iceberg_catalogs.opened(record) as found:
            assert found.metadata.properties[name] == value  # the guard does not change the table
            assert name not in found.loaded.io.properties or found.loaded.io.properties[name] != value
            if (kind, name) == ("sql", "write.py-location-provider.impl"):
                with pytest.raises(InvalidArgument, match="by which pyiceberg would run code for this change"):
                    found.commit([SetPropertiesUpdate(updates={"checked": "yes"})])
            elif kind == "sql":
                found.commit([SetPropertiesUpdate(updates={"checked": "yes"})])
    assert not trap.exists()
    assert theirs.requests == []


@pytest.mark.parametrize("method", ["load", "commit", "credential"])
def test_hole_2_a_redirect_takes_no_token_to_another_host(
    servers: tuple[RestCatalogServer, RestCatalogServer], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    ours, theirs = servers
    configure(monkeypatch, **{"header.X-Key": "sesame-header"})
    if method == "credential":
        # A client secret is in the body, which is sent again after a redirect by 307.
        configure(monkeypatch, credential="client:sesame-secret")
    if method == "commit":
        with iceberg_catalogs.opened(TABLE) as found:
            ours.redirect = theirs.uri
            with pytest.raises(Exception, match="it redirects to http://.*, which is not followed"):
                found.commit([SetPropertiesUpdate(updates={"checked": "yes"})])
    else:
        ours.redirect = theirs.uri
        with pytest.raises(TableUnavailable, match="it redirects to http://.*, which is not followed"):
            plan_table(TABLE)
    assert ours.requests
    assert theirs.requests == []


@pytest.mark.parametrize("name", ["s3.access-key-id", "gcs.oauth2.token", "adls.sas-token"])
@pytest.mark.parametrize("kind", ["rest", "sql"])
def test_hole_2_properties_of_a_table_choose_no_identity(
    servers: tuple[RestCatalogServer, RestCatalogServer], monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    ours, _ = servers
    table = ours.tables.load_table("sales.orders")
    ours.tables.commit_table(table, (), (SetPropertiesUpdate(updates={name: "somebody"}),))
    if kind == "sql":
        monkeypatch.delenv("PYICEBERG_CATALOG__PROD__TOKEN")
        configure(monkeypatch, type="sql", uri=f"sqlite:///{ours.folder}/catalog.db")
    with pytest.raises(InvalidArgument, match=f"has the property {name}, which is a credential"):
        plan_table(TABLE)


def test_a_server_may_set_no_hostile_property() -> None:
    assert not set(REST_PROPERTIES) & set(PROPERTIES)


def test_settings_of_pyiceberg_for_object_stores_are_ignored_with_a_warning(
    servers: tuple[RestCatalogServer, RestCatalogServer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    configure(monkeypatch, **{"s3__endpoint": "http://127.0.0.1:1", "s3__secret-access-key": "a-secret"})
    plan_table(TABLE)
    [line] = [record.getMessage() for record in caplog.records if record.name == "distop.tables"]
    assert line.startswith("Ignoring the settings s3.endpoint, s3.secret-access-key of the catalog 'prod': configure")


PRIVATE = {
    "_load_file_io": {
        *("catalog.rest:RestCatalog._response_to_table", "catalog.sql:SqlCatalog._convert_orm_to_iceberg"),
        *("catalog.hive:HiveCatalog._convert_hive_into_iceberg", "catalog.glue:GlueCatalog._convert_glue_to_iceberg"),
        "catalog.dynamodb:DynamoDbCatalog._convert_dynamo_table_item_to_iceberg_table",
        "catalog.bigquery_metastore:BigQueryMetastoreCatalog._convert_bigquery_table_to_iceberg_table",
        "catalog:MetastoreCatalog._update_and_stage_table",
    },
    "_update_and_stage_table": {
        *("catalog.sql:SqlCatalog.commit_table", "catalog.hive:HiveCatalog.commit_table"),
        "catalog.glue:GlueCatalog.commit_table",
    },
    "_fetch_config": {"catalog.rest:RestCatalog.__init__"},
    "_config_headers": {"catalog.rest:RestCatalog._create_session"},
    "_from_environment_variables": {"utils.config:Config.__init__"},
}
"""Private methods of pyiceberg that modules of ``distop/tables`` override or call, and pyiceberg's own callers: the
guard holds only as long as they call them. The catalogs of dynamodb and bigquery commit nothing.
"""


def methods(module: str) -> dict[str, set[str]]:
    """The methods in the source of a module of pyiceberg, each with the names of the attributes that it uses."""
    spec = find_spec(f"pyiceberg.{module}")  # not imported: some need other packages
    assert spec is not None
    assert spec.origin is not None
    return {
        f"{one.name}.{method.name}": {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
        for one in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(one, ast.ClassDef)
        for method in one.body
        if isinstance(method, ast.FunctionDef)
    }


def private_uses(path: Path) -> Iterator[str]:
    """Private names that a module takes of pyiceberg: by ``super()``, of a class of pyiceberg, or imported."""
    tree = ast.parse(path.read_text())
    theirs: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyiceberg"):
            theirs |= {alias.asname or alias.name for alias in node.names}
    private = re.compile(r"_[a-z]\w*")
    yield from (name for name in theirs if private.fullmatch(name))
    for one in ast.walk(tree):
        if isinstance(one, ast.Attribute) and private.fullmatch(one.attr):
            owner = one.value.func if isinstance(one.value, ast.Call) else one.value
            if isinstance(owner, ast.Name) and owner.id in theirs | {"super"}:
                yield one.attr
        elif isinstance(one, ast.ClassDef):
            defined = {n.name for n in one.body if isinstance(n, ast.FunctionDef) and private.fullmatch(n.name)}
            if any(isinstance(base, ast.Name) and base.id in theirs for base in one.bases):
                yield from defined & THEIRS


MODULES = sorted({"io", *(caller.partition(":")[0] for callers in PRIVATE.values() for caller in callers)})
FOUND = {f"{module}:{name}": uses for module in MODULES for name, uses in methods(module).items()}
THEIRS = {name.rpartition(".")[2] for name in FOUND}


def test_the_methods_that_the_guard_overrides_exist_in_pyiceberg() -> None:
    folder = Path(guarded_catalogs.__file__).parent
    used = {name for path in sorted(folder.glob("*.py")) for name in private_uses(path)}
    assert used == PRIVATE.keys(), "each private method of pyiceberg that is overridden or called is named here"
    for name, callers in PRIVATE.items():
        assert name in THEIRS, f"pyiceberg has no {name} any more"
        for caller in callers:
            assert name in FOUND.get(caller, ()), f"{caller} of pyiceberg does not call {name} any more"

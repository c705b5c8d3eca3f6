"""apply on Iceberg tables of a catalog whose files are in an object store: the catalog's commit makes the change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import TableRefused
from distop_behaviors.apply.apply_loop import MARK, Applying
from distop_behaviors.apply.catalog_commit import CatalogTarget
from tests.acceptance.applying import At, crashes
from tests.storage.iceberg_tables import properties_for
from tests.support.catalog_bench import NOT_NULL, REQUIRED, ROWS, catalog_bench
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore
    from tests.storage.faulty_http import FaultyProxy, Seen
    from tests.storage.servers import Served
    from tests.support.catalog_bench import CatalogBench

pytestmark = pytest.mark.rotating

POSITIVE = {"range": {"column": "id", "min": 0}, "name": "positive"}


@pytest.fixture(params=["sql", "rest"])
def bench(
    request: pytest.FixtureRequest, s3_server: Served, s3_place: ObjectStore, tmp_path: Path
) -> Iterator[CatalogBench]:
    """A table without Spark. The catalog's own clients use the store without the proxy."""
    storage = properties_for(s3_server.port)
    with catalog_bench(request.param, tmp_path, warehouse=s3_place.location, storage=storage) as found:
        yield found


def of_metadata(seen: Seen) -> bool:
    """Whether distop writes a metadata file."""
    return seen.method == "PUT" and seen.target.endswith(".metadata.json")


def test_a_certificate_is_applied_while_a_writer_appends(
    bench: CatalogBench, s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, before = bench.certificate(NOT_NULL, POSITIVE), bench.versions()
    bench.loaded.append(ROWS)
    at = At(CatalogTarget, "swap", 1, "before", lambda: bench.loaded.append(ROWS))
    monkeypatch.setattr(CatalogTarget, "swap", at.wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], ran.report["rounds"], ran.report["rows"]) == ("applied", 2, 4), ran.message
    assert (bench.required, bench.versions()) == (True, before + 3)
    assert json.loads(bench.loaded.properties["distop.constraint.positive"])["sql"] == "`id` >= 0"
    assert bench.loaded.metadata_location.startswith(f"{bench.loaded.location()}/metadata/")
    # A server of REST writes the metadata itself.
    assert sum(map(of_metadata, s3_proxy.seen)) == (1 if bench.kind == "sql" else 0)
    with pytest.raises(ValueError, match="Mismatch in fields"):
        bench.loaded.append(ROWS)
    bench.loaded.append(REQUIRED)
    assert bench.loaded.scan().to_arrow().num_rows == 8


@pytest.mark.parametrize(("method", "when"), crashes(CatalogTarget))
def test_a_crash_at_any_step_changes_the_table_once(
    bench: CatalogBench, monkeypatch: pytest.MonkeyPatch, method: tuple[Any, str], when: str
) -> None:
    def crash() -> None:
        raise ConnectionError("the process dies")

    certificate, before, ctx = bench.certificate(NOT_NULL, POSITIVE), bench.versions(), bench.context()
    with monkeypatch.context() as patch:
        patch.setattr(*method, At(*method, 1, when, crash).wrapped)
        with pytest.raises(ConnectionError):
            bench.apply(certificate, ctx)
    ran = bench.apply(certificate, ctx)
    assert (ran.report["verdict"], bench.required, bench.versions()) == ("applied", True, before + 1)
    assert bench.mark["operation"] == ctx.operation


@pytest.mark.parametrize("bench", ["sql"], indirect=True)
def test_the_answer_to_the_write_of_the_metadata_is_lost_or_comes_twice(
    bench: CatalogBench, s3_proxy: FaultyProxy
) -> None:
    certificate, before = bench.certificate(NOT_NULL), bench.versions()

    def lose(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        answer = forward(seen.whole)
        return None if of_metadata(seen) else answer

    def repeat(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        answer = forward(seen.whole)
        return forward(seen.whole) if of_metadata(seen) else answer

    for n, fault in enumerate((lose, repeat), 1):
        s3_proxy.fault = fault
        ran = bench.apply(certificate)
        assert (ran.report["verdict"], ran.report["rounds"], bench.versions()) == ("applied", 1, before + n)
    assert bench.required


@pytest.mark.parametrize("bench", ["sql"], indirect=True)
def test_refused_metadata_are_an_error_at_once(bench: CatalogBench, s3_proxy: FaultyProxy) -> None:
    certificate, before = bench.certificate(NOT_NULL), bench.loaded.metadata_location
    body = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    denied = b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
    s3_proxy.fault = lambda seen, forward: denied if of_metadata(seen) else forward(seen.whole)
    with pytest.raises(TableRefused, match="AccessDenied"):
        bench.apply(certificate)
    assert bench.loaded.metadata_location == before


@pytest.mark.parametrize("bench", ["rest"], indirect=True)
def test_the_answer_of_the_catalog_is_lost(bench: CatalogBench, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, before = bench.certificate(NOT_NULL), bench.versions()
    bench.server.lose_answers = True
    at = At(Applying, "load", 2, "before", lambda: setattr(bench.server, "lose_answers", False))
    monkeypatch.setattr(Applying, "load", at.wrapped)
    ran = bench.apply(certificate)
    assert (ran.report["verdict"], bench.required, bench.versions()) == ("applied", True, before + 1), ran.message


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sql", "rest"])
def test_a_column_is_narrowed_through_a_catalog(
    s3_server: Served, s3_store: ObjectStore, tmp_path: Path, spark: SparkSession, kind: str
) -> None:
    need(jar(), MAVEN)
    storage = properties_for(s3_server.port)
    with catalog_bench(kind, tmp_path, spark, warehouse=s3_store.location, storage=storage) as bench:
        before = sorted(bench.loaded.scan().to_arrow()["id"].to_pylist())
        ran = bench.apply(bench.certificate({"fits": {"column": "id", "type": "int"}}))
        assert (ran.report["verdict"], ran.report["rewritten"]["files"]) == ("applied", 1), ran.message
        table = bench.loaded
        assert str(table.schema().find_field("id").field_type) == "int"
        assert sorted(table.scan().to_arrow()["id"].to_pylist()) == before
        paths = table.inspect.files()["file_path"].to_pylist()
        assert all(path.startswith(f"{table.location()}/data/distop-staged/") for path in paths)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_null_of_a_concurrent_writer_reverts_the_change(
    s3_server: Served, s3_store: ObjectStore, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(jar(), MAVEN)
    storage = properties_for(s3_server.port)
    with catalog_bench("sql", tmp_path, spark, warehouse=s3_store.location, storage=storage) as bench:
        certificate = bench.certificate()
        at = At(CatalogTarget, "swap", 1, "after", bench.append_null)
        monkeypatch.setattr(CatalogTarget, "swap", at.wrapped)
        ran = bench.apply(certificate)
        assert (ran.report["verdict"], ran.report["reverted"]) == ("violated", True), ran.message
        assert [s["values"] for s in ran.report["checks"][0]["samples"]] == [{"c": None}]
        assert (bench.required, MARK in bench.loaded.properties) == (False, False)

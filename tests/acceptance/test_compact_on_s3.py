"""``compact`` on tables in S3; on a Delta table without a JVM."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from distop.storage.deletion import Place
from distop.storage.opened_stores import open_store
from distop.storage.places import shared_below
from distop.tables.commits import CommitUnknown
from distop.tables.delta.delta_replacer import DeltaReplacer
from distop.tables.iceberg.iceberg_replacer import IcebergReplacer
from distop_behaviors.compact import Compact
from tests.acceptance.applying import At
from tests.storage.iceberg_tables import properties_for
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.delta_bench import RemoteBench, rows
from tests.support.folder_bench import FolderBench
from tests.support.folder_bench import rows as folder_rows
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore
    from tests.storage.servers import Served

pytestmark = pytest.mark.rotating

SMALL = {"target_bytes": 1 << 20, "min_input_files": 2}


@pytest.fixture
def bench(s3_server: Served, s3_place: ObjectStore, tmp_path: Path) -> RemoteBench:
    """A Delta table of four files. Its other writers use the store by themselves."""
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_server.port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        **s3_server.environment,
    }
    made = RemoteBench(s3_place, tmp_path, options).create()
    made.work.mkdir()
    for first in (10, 20, 30):
        made.append(rows("a", "b", None, first=first))
    return made


def compact(bench: RemoteBench) -> Ran:
    def context(_: Any) -> FakeContext:
        ctx = bench.context()
        ctx.operation = "t/compact/1"
        ctx.shared = shared_below(bench.record.location, ctx.space)  # as without --shared-dir
        return ctx

    return run_operation(Compact(), bench.record, SMALL, context)


def rows_of(bench: RemoteBench) -> Counter[Any]:
    found = bench.table.to_pyarrow_table()
    return Counter(zip(found["id"].to_pylist(), found["c"].to_pylist(), strict=True))


def staged(bench: RemoteBench) -> list[str]:
    return [found.key for found in bench.store.list() if found.key.startswith("distop-staged/")]


def test_files_in_a_bucket_are_compacted_while_a_writer_appends(
    bench: RemoteBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows_of(bench)
    at = At(DeltaReplacer, "commit", 1, "before", lambda: bench.append(rows("z", first=100)))
    monkeypatch.setattr(DeltaReplacer, "commit", at.wrapped)
    ran = compact(bench)
    assert at.happened
    assert ran.report["verdict"] == "compacted", ran.message
    assert rows_of(bench) == before + Counter([(100, "z")])
    assert len(bench.table.file_uris()) == 2
    assert len(staged(bench)) == 1
    assert not [found.key for found in bench.store.list() if found.key.startswith("_distop/") and "stage/" in found.key]


@pytest.mark.parametrize("landed", [True, False])
def test_a_lost_answer_is_settled_by_reading(bench: RemoteBench, monkeypatch: pytest.MonkeyPatch, landed: bool) -> None:
    before, original, calls = rows_of(bench), DeltaReplacer.commit, [0]

    def commit(self: DeltaReplacer, *args: Any) -> str:
        calls[0] += 1
        if landed or calls[0] > 1:
            version = original(self, *args)
            if calls[0] > 1:
                return version
        raise CommitUnknown("the answer was lost")

    monkeypatch.setattr(DeltaReplacer, "commit", commit)
    ran = compact(bench)
    assert (ran.report["verdict"], ran.report["commits"]) == ("compacted", 1), ran.message
    assert calls[0] == (1 if landed else 2)
    assert rows_of(bench) == before
    assert len(staged(bench)) == 1


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_an_iceberg_table_in_a_bucket_is_compacted(
    s3_server: Served, s3_store: ObjectStore, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(jar(), MAVEN)
    properties = properties_for(s3_server.port)
    table = FolderBench(open_store(f"{s3_store.location}/db/t"), tmp_path, properties, spark)
    for first in (10, 20, 30):
        table.table.append(folder_rows("x", "y", first=first))

    def context(_: Any) -> FakeContext:
        ctx = table.context()
        ctx.operation = "t/compact/1"
        ctx.shared = Place(s3_store.location, "shared/c0ffee")
        ctx.shared_dir = ctx.shared.location
        return ctx

    before = sorted(table.table.scan().to_arrow()["id"].to_pylist())
    at = At(IcebergReplacer, "commit", 1, "before", lambda: table.table.append(folder_rows("z", first=100)))
    monkeypatch.setattr(IcebergReplacer, "commit", at.wrapped)
    ran = run_operation(Compact(), table.record, SMALL, context)
    assert at.happened
    assert ran.report is not None, ran.message
    assert ran.report["verdict"] == "compacted", ran.message
    assert sorted(table.table.scan().to_arrow()["id"].to_pylist()) == [*before, 100]
    assert len(table.table.inspect.files()["file_path"]) == 2
    assert [found.key for found in open_store(f"{s3_store.location}/shared/c0ffee").list()] == []

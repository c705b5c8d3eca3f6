"""Stages and their manifests in object stores, and their removal."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import NotFound, UnreadableRecord
from distop.protocol.records import TableRecord
from distop.storage.deletion import Place
from distop.storage.opened_stores import store_of
from distop.storage.places import Attempt, make_stage, make_table_data, stage_of, table_data
from distop.storage.stage_manifest import read_manifest, write_manifest
from distop.worker.child_side.stage_sweeping import StageSweeper, Swept
from tests.storage.conftest import S3

if TYPE_CHECKING:
    from tests.storage.servers import Served

OP, SPACE = "t/copy/3", "c0ffee"


@pytest.fixture
def home(served: Served) -> str:
    """A new place in the store."""
    return f"{served.url}/{uuid.uuid4().hex}"


def staged(home: str, partition: int, fence: int, op: str = OP) -> tuple[Place, Place]:
    """A stage with a file of three bytes, and its folder in the table with one of five bytes."""
    shared = Place(f"{home}/shared", SPACE)
    stage = stage_of(shared, Attempt(op, partition, fence, "inc"))
    make_stage(stage)
    store_of(stage).put_new("a/b.txt", b"abc")
    data = table_data(stage, shared, SPACE, f"{home}/t")
    make_table_data(stage, data)
    store_of(data).put_new("x.parquet", b"12345")
    return stage, data


@pytest.mark.parametrize("served", S3, indirect=True)
def test_a_manifest_names_versions_of_objects(home: str) -> None:
    stage, data = staged(home, 0, 7)
    committed = write_manifest(stage, {"a/b.txt": 1}, data=data, in_table={"x.parquet": 5}, checksums=False)
    assert (committed.files, committed.bytes, committed.rows) == (2, 8, 6)
    found = read_manifest(stage, committed, data)
    for file in found.files:
        found.check(file, contents=True)
        assert file.etag
    store_of(data).put("x.parquet", b"54321")
    of_table = found.files[1]
    with pytest.raises(UnreadableRecord, match="has changed since its job has ended"):
        found.check(of_table)
    store_of(data).delete_many(["x.parquet"])
    with pytest.raises(NotFound, match="is missing"):
        found.check(of_table)


@pytest.mark.parametrize("served", S3, indirect=True)
def test_stages_are_removed_except_files_of_the_table(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, table = Place(f"{home}/shared", SPACE), TableRecord("t", "parquet", f"{home}/t")
    spark: Any = None

    def sweeper() -> StageSweeper:
        return StageSweeper(
            OP, shared, SPACE, table, check=lambda: None, spark=spark, log=logging.getLogger("tests.stages")
        )

    named, dead, other = staged(home, 0, 7), staged(home, 0, 5), staged(home, 0, 5, "t/copy/30")
    live = [f"{named[1].location}/x.parquet".replace("s3://", "s3a://")]

    class Reached:
        def all_files(self, *, removed: bool) -> list[Any]:
            from distop.tables.reachability import DATA, TableFile

            return [TableFile(path, DATA) for path in live]

    monkeypatch.setattr("distop.tables.reachability_of", lambda *_: Reached())
    assert sweeper().remove_unnamed({0: (7, "inc")}) == Swept(1, 8)
    assert [any(store_of(place).list()) for place in (*dead, *named, *other)] == [False, False, True, True, True, True]
    assert sweeper().remove_all() == Swept(1, 3)
    assert [any(store_of(place).list()) for place in (*named, *other)] == [False, True, True, True]
    store_of(dead[1]).put_new("late.parquet", b"1234")
    assert sweeper().remove_all(late=True) == Swept(1, 4)
    assert [any(store_of(place).list()) for place in (dead[1], named[1], *other)] == [False, True, True, True]

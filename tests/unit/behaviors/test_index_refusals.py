"""A store that refuses files while they are indexed: the job fails with the cause instead of leaving them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord
from distop.errors import TableBusy, TableRefused, TableUnavailable
from distop.protocol.executor_nodes import WAITS_FOR_STORE
from distop.protocol.records import OperationRef
from distop.storage.deletion import Place
from distop.tables import plan_table, reader_of
from distop.testing import MemoryProgress
from distop_behaviors.index import BuildIndex, postings, segments
from distop_behaviors.index.index_argument import BuildArgument
from distop_behaviors.index.key_columns import pieces
from distop_behaviors.index.segments import SegmentWriter
from tests.support.index_runs import Indexes
from tests.support.refusing_store import RefusingStore
from tests.unit.support.running import Child

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distop_behaviors.index.index_argument import BuildResult
    from distop_behaviors.index.key_columns import Piece, SourceFile


pytestmark = pytest.mark.usefixtures("short_time_limit", "short_store_waits")


def content() -> bytes:
    data = pa.BufferOutputStream()
    pq.write_table(pa.table({"k": [1, 2]}), data)
    return bytes(data.getvalue().to_pybytes())


def index(files: dict[str, bytes | None], stage: Path) -> BuildResult:
    record = TableRecord("t", "parquet", "s3://bucket/t")
    [plan] = plan_table(record).partitions
    assert len(plan.files) == len(files)
    writer = SegmentWriter(
        BuildArgument(name="i", columns=["k"]), plan.files, Place(str(stage)), reader_of(record, [plan])
    )
    return writer.run(MemoryProgress())


@pytest.mark.parametrize(
    ("status", "code", "error", "cause"),
    [
        (403, "AccessDenied", TableRefused, "access is denied"),
        (503, "SlowDown", TableBusy, "SlowDown"),
        (500, "InternalError", TableBusy, "InternalError"),
    ],
)
def test_a_store_that_refuses_all_files_fails_the_job(
    status: int,
    code: str,
    error: type[TableUnavailable],
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {f"t/{n}.parquet": None for n in range(20)}
    with RefusingStore(status, code, files) as store:
        store.serve(monkeypatch)
        with pytest.raises(TableUnavailable, match=cause) as raised:
            index(files, tmp_path / "stage")
        assert len({one.partition("?")[0] for one in store.requests}) <= 3, "a few files show it"
    assert type(raised.value) is error


@pytest.mark.parametrize("kind", ["posting", "skip"])
def test_a_busy_store_is_waited_for_within_the_attempt(
    kind: Literal["posting", "skip"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of an index build that met a busy store counted as a failed attempt."""
    files: dict[str, bytes | None] = {f"t/{n}.parquet": content() for n in range(3)}

    texts: list[str] = []

    def recover(text: str) -> None:
        texts.append(text.partition(": ")[0])
        if text.startswith(WAITS_FOR_STORE):
            files["t/1.parquet"] = content()

    with RefusingStore(503, "SlowDown", files) as store:
        store.serve(monkeypatch)
        table = TableRecord("t", "parquet", "s3://bucket/t")
        [plan] = plan_table(table).partitions
        files["t/1.parquet"] = None
        argument = {"name": "i", "columns": ["k"], "kind": kind}
        child = Child(BuildIndex(), tmp_path, argument, op=str(OperationRef("t", "build-index", "i", 1)), table=table)
        child.sent.on_status = recover
        result = child.ends([plan], batch=False)[plan.name].result
    assert (result["files"], result["rows"]) == (3, 6)
    indexing = f"indexing {plan.name}"
    assert [text for text in texts if text] == [indexing, WAITS_FOR_STORE, indexing]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_file_of_which_a_part_was_written_is_not_in_the_index_twice(
    checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is busy in the middle of the second file. The job continues in its own stage from a checkpoint."""
    monkeypatch.setattr(postings, "RUN_ROWS", 1)
    monkeypatch.setattr(segments, "SEGMENT_FILES", 1 if checkpoint else 256)
    read: list[str] = []

    def interrupted(source: SourceFile) -> Iterator[Piece]:
        yield from pieces(source)
        read.append("")
        if len(read) == 2:
            raise TableBusy("SlowDown")

    monkeypatch.setattr(segments, "pieces", interrupted)
    (tmp_path / "table").mkdir()
    for n in range(3):
        (tmp_path / "table" / f"{n}.parquet").write_bytes(content())
    indexes = Indexes(tmp_path / "table", tmp_path / "other")
    [plan] = plan_table(indexes.record).partitions
    argument = {"name": "i", "columns": ["k"]}
    child = Child(BuildIndex(), tmp_path, argument, op="t/build-index/i/1", table=indexes.record)
    end = child.ends([plan], batch=False)[plan.name]
    assert end.kind == "success", end.error
    assert len(read) == (4 if checkpoint else 5), "complete files before a checkpoint are not read again"
    undisturbed = indexes.plan(columns=["k"])
    [whole] = undisturbed.planned.partitions
    assert end.result == undisturbed.run(whole).model_dump(mode="json")


def test_a_single_file_that_the_store_refuses_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"t/0.parquet": None, "t/1.parquet": content(), "t/2.parquet": None, "t/3.parquet": content()}
    with RefusingStore(403, "AccessDenied", files) as store:
        store.serve(monkeypatch)
        result = index(files, tmp_path / "stage")
    assert (result.files, result.rows) == (2, 4)

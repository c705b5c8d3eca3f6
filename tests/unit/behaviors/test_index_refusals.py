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
from distop.storage import store_waits
from distop.storage.deletion import Place
from distop.storage.store_waits import is_busy
from distop.tables import plan_table, reader_of
from distop.testing import FakeContext, MemoryProgress
from distop_behaviors.index import BuildIndex, postings, segments
from distop_behaviors.index.index_argument import BuildArgument
from distop_behaviors.index.key_columns import pieces
from distop_behaviors.index.segments import SegmentWriter
from tests.support.refusing_store import RefusingStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distop_behaviors.index.index_argument import BuildResult
    from distop_behaviors.index.key_columns import Piece, SourceFile


pytestmark = pytest.mark.usefixtures("short_time_limit")


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

    class Recovering(FakeContext):
        def status(self, text: str) -> None:
            super().status(text)
            if text.startswith(WAITS_FOR_STORE):
                files["t/1.parquet"] = content()

    monkeypatch.setattr(store_waits, "FIRST_PAUSE", 0.01)
    with RefusingStore(503, "SlowDown", files) as store:
        store.serve(monkeypatch)
        table = TableRecord("t", "parquet", "s3://bucket/t")
        [plan] = plan_table(table).partitions
        files["t/1.parquet"] = None
        context = Recovering(tmp_path, table, plan, operation=str(OperationRef("t", "build-index", "i", 1)))
        result = BuildIndex().start_or_resume_job(BuildArgument(name="i", columns=["k"], kind=kind), plan, context)
    assert (result.files, result.rows) == (3, 6)
    indexing = f"indexing {plan.name}"
    assert [text.partition(": ")[0] for text in context.statuses] == [indexing, WAITS_FOR_STORE, indexing]


def test_a_file_is_not_indexed_again_after_a_part_of_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its postings would be in the index twice: the next attempt begins at the last complete file."""
    monkeypatch.setattr(postings, "RUN_ROWS", 1)

    def interrupted(source: SourceFile) -> Iterator[Piece]:
        yield from pieces(source)
        raise TableBusy("SlowDown")

    files: dict[str, bytes | None] = {"t/0.parquet": content()}
    with RefusingStore(503, "SlowDown", files) as store:
        store.serve(monkeypatch)
        monkeypatch.setattr(segments, "pieces", interrupted)
        with pytest.raises(TableUnavailable, match="SlowDown") as raised:
            index(files, tmp_path / "stage")
    assert not is_busy(raised.value)


def test_a_single_file_that_the_store_refuses_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"t/0.parquet": None, "t/1.parquet": content(), "t/2.parquet": None, "t/3.parquet": content()}
    with RefusingStore(403, "AccessDenied", files) as store:
        store.serve(monkeypatch)
        result = index(files, tmp_path / "stage")
    assert (result.files, result.rows) == (2, 4)

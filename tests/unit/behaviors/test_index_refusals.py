"""A store that refuses files while they are indexed: the job fails with the cause instead of leaving them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord
from distop.errors import TableBusy, TableRefused, TableUnavailable
from distop.storage import storage_options
from distop.storage.deletion import Place
from distop.storage.storage_options import StorageOptions
from distop.tables import plan_table, reader_of
from distop.testing import MemoryProgress
from distop_behaviors.index.index_argument import BuildArgument
from distop_behaviors.index.segments import SegmentWriter
from tests.support.refusing_store import RefusingStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distop_behaviors.index.index_argument import BuildResult


@pytest.fixture(autouse=True)
def _short_time_limit() -> Iterator[None]:
    storage_options.configure({"s3://": StorageOptions(time_limit=0.1)})
    yield
    storage_options.configure({})


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


def test_a_single_file_that_the_store_refuses_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"t/0.parquet": None, "t/1.parquet": content(), "t/2.parquet": None, "t/3.parquet": content()}
    with RefusingStore(403, "AccessDenied", files) as store:
        store.serve(monkeypatch)
        result = index(files, tmp_path / "stage")
    assert (result.files, result.rows) == (2, 4)

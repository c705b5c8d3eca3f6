"""Open objects of a remote store: which requests their reads send, and which bytes they return."""

from __future__ import annotations

import io
import os
import random
from typing import TYPE_CHECKING, Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import MemoryStore

from distop.storage import remote_store
from distop.storage.remote_store import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY = "a"


class Requests:
    """A store in memory, and the ranges that were requested of it; None: a whole object or its metadata."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = RemoteStore("memory:", MemoryStore())
        self.seen: list[Any] = []
        get, head = obstore.get, obstore.head

        def counted_get(store: Any, path: str, *, options: Any = None) -> Any:
            self.seen.append((options or {}).get("range"))
            return get(store, path, options=options)

        def counted_head(store: Any, path: str) -> Any:
            self.seen.append(None)
            return head(store, path)

        monkeypatch.setattr(obstore, "get", counted_get)
        monkeypatch.setattr(obstore, "head", counted_head)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


def test_a_small_parquet_file_is_read_by_one_request(requests: Requests) -> None:
    rows = pa.table({"a": list(range(1000)), "b": [str(n) for n in range(1000)]})
    written = io.BytesIO()
    pq.write_table(rows, written)
    requests.store.put_new(KEY, written.getvalue())
    with requests.store.open(KEY) as found, pq.ParquetFile(found.file) as file:
        assert file.read() == rows
    assert requests.seen == [{"suffix": remote_store.READ_AHEAD}]


def test_the_bytes_before_the_last_ones_are_requested_once(requests: Requests) -> None:
    size = 3 * remote_store.READ_AHEAD
    content = random.Random(1).randbytes(size)
    requests.store.put_new(KEY, content)
    with requests.store.open(KEY) as found:
        assert found.file.read() == content
    ranges = [one for one in requests.seen if isinstance(one, tuple)]
    assert sum(end - start for start, end in ranges) == size - remote_store.READ_AHEAD


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_any_part_of_an_open_object_is_read(requests: Requests, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(remote_store, "READ_AHEAD", 100)
    drawn = random.Random(size)
    content = drawn.randbytes(size)
    requests.store.put_new(KEY, content)
    with requests.store.open(KEY) as found:
        for _ in range(200):
            start, count = drawn.randrange(size + 10), drawn.randrange(size + 10)
            assert found.file.seek(*_seek(drawn, start, size)) == start
            assert found.file.read(count) == content[start : start + count]
            assert found.file.tell() == start + len(content[start : start + count])


def _seek(drawn: random.Random, start: int, size: int) -> Sequence[int]:
    """The arguments of a seek to this position."""
    return drawn.choice([(start, os.SEEK_SET), (start - size, os.SEEK_END)])

"""The LRU cache of values that batches and operations share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.errors import JobCancelled
from distop.runtime.lru_cache import LruCache
from distop.tables.iceberg import manifest_facts
from tests.support.lake import Folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT = 30
SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))


def test_the_least_recently_used_value_is_evicted() -> None:
    made: list[str] = []
    kept: LruCache[str | None] = LruCache(2)

    def ask(name: str, *, keep: bool = True) -> None:
        kept.get((name,), lambda: made.append(name), keep=keep)

    for name in ("a", "b", "a", "c", "a", "c"):
        ask(name)
    assert made == ["a", "b", "c"], "None is a value, too"
    ask("b")
    assert made == ["a", "b", "c", "b"], "b was evicted for c: a was used after b"
    ask("d", keep=False)
    ask("d", keep=False)
    ask("c")
    assert made == ["a", "b", "c", "b", "d", "d"], "a value that is not kept evicts nothing"


def test_a_failed_computation_is_not_cached() -> None:
    kept: LruCache[float] = LruCache(2)
    with pytest.raises(ZeroDivisionError):
        kept.get(("a",), lambda: 1 / 0)
    assert kept.get(("a",), lambda: 1.0) == 1.0


def test_threads_can_get_values_at_the_same_time() -> None:
    """A new value evicts others, even one that another thread is about to read."""
    kept: LruCache[int] = LruCache(1)

    def ask(number: int) -> bool:
        return all(kept.get((n,), lambda n=n: n * n) == n * n for n in range(number, number + 200))  # type: ignore[misc]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(40)))


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """The thread, and what the call returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def joined(thread: threading.Thread) -> None:
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_one_thread_computes_a_value_that_several_request() -> None:
    kept: LruCache[str] = LruCache(4)
    begun, go_on, waiting = threading.Event(), threading.Event(), threading.Event()
    made: list[str] = []

    def make() -> str:
        begun.set()
        assert go_on.wait(LIMIT)
        made.append("x")
        return "x"

    first, one = in_thread(lambda: kept.get_once(("a",), make, lambda: None))
    assert begun.wait(LIMIT)
    second, two = in_thread(lambda: kept.get_once(("a",), make, waiting.set))
    assert waiting.wait(LIMIT)
    assert kept.get_once(("b",), lambda: "y", lambda: None) == "y", "other values are computed meanwhile"
    go_on.set()
    joined(first)
    joined(second)
    assert (one, two, made) == (["x"], ["x"], ["x"])


def test_after_a_failed_computation_the_next_thread_computes() -> None:
    kept: LruCache[str] = LruCache(4)
    begun, go_on, waiting = threading.Event(), threading.Event(), threading.Event()

    def fail() -> str:
        begun.set()
        assert go_on.wait(LIMIT)
        raise OSError("gone")

    first, one = in_thread(lambda: kept.get_once(("a",), fail, lambda: None))
    assert begun.wait(LIMIT)
    second, two = in_thread(lambda: kept.get_once(("a",), lambda: "x", waiting.set))
    assert waiting.wait(LIMIT)
    go_on.set()
    joined(first)
    joined(second)
    assert isinstance(one[0], OSError)
    assert two == ["x"]


def test_hole_9_reading_manifests_delays_no_other_table_and_waiting_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lock was held for hours while manifests were read; jobs that waited for it could only be killed."""
    sources = []
    for name in ("mine", "other"):
        table = Folder(tmp_path / name).new(SCHEMA)
        table.append(pa.table({"id": [1]}))
        sources.append(table.metadata_location)
    mine, other = sources
    begun, go_on, waiting = threading.Event(), threading.Event(), threading.Event()
    original = manifest_facts.read_anew

    def slow(source: str) -> Any:
        if source == mine:
            begun.set()
            assert go_on.wait(LIMIT)
        return original(source)

    def cancelled() -> None:
        waiting.set()
        raise JobCancelled

    monkeypatch.setattr(manifest_facts, "read_anew", slow)
    first, one = in_thread(lambda: manifest_facts.snapshot_of(mine, frozenset()))
    assert begun.wait(LIMIT)
    try:
        second, two = in_thread(lambda: manifest_facts.snapshot_of(other, frozenset()))
        third, three = in_thread(lambda: manifest_facts.snapshot_of(mine, frozenset(), cancelled))
        joined(second)
        joined(third)
        assert waiting.is_set()
        assert len(two[0].files) == 1
        assert isinstance(three[0], JobCancelled)
    finally:
        go_on.set()
    joined(first)
    assert len(one[0].files) == 1

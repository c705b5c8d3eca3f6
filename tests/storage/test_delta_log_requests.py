"""Reading a Delta log in an object store: which files are requested, how often, and how many at the same time."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord
from distop.errors import InvalidArgument, TableRefused
from distop.storage.opened_stores import open_store
from distop.tables import plan_table, reader_of
from distop.tables.delta import log_files
from tests.storage.delta_tables import upload
from tests.support.delta_logs import DeltaLog, remove

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from distop.storage.object_store import ObjectStore
    from tests.storage.faulty_http import FaultyProxy, Seen
    from tests.storage.servers import Served

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("served", ["moto"], indirect=True)]


@pytest.fixture
def store(served: Served, proxy: FaultyProxy) -> ObjectStore:
    """The store of a new table."""
    return open_store(f"{served.url}/{uuid.uuid4().hex}")


@pytest.fixture
def log(tmp_path: Path) -> DeltaLog:
    """A table on this disk, to be uploaded."""
    return DeltaLog(tmp_path / "t").create()


def names(log: DeltaLog, store: ObjectStore) -> tuple[list[str], list[str]]:
    """The planned files on the disk and in the store, relative to the table."""
    found = []
    for record in (log.record, TableRecord("t", "delta", store.location)):
        files = [path for plan in plan_table(record).partitions for path, _, _ in plan.files]
        found.append([path.removeprefix(f"{record.location}/") for path in files])
    return found[0], found[1]


def requested(proxy: FaultyProxy) -> list[str]:
    """The names of the files of the log that were requested since the last call, sorted."""
    found = [
        one.target.partition("?")[0] for one in proxy.seen if one.method == "GET" and "list-type" not in one.target
    ]
    proxy.seen.clear()
    return sorted(path.rpartition("/")[2] for path in found)


def listings(proxy: FaultyProxy) -> int:
    return sum("list-type" in one.target for one in proxy.seen)


def commits(*versions: int) -> list[str]:
    return [f"{version:020}.json" for version in versions]


def several_at_once(proxy: FaultyProxy, suffix: str) -> Callable[[], int]:
    """Let requests for files wait for each other; returns how many there were at most at the same time."""
    lock, several = threading.Lock(), threading.Event()
    now, most = [0], [0]

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        if not seen.target.endswith(suffix) or seen.method != "GET":
            return forward(seen.whole)
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] > 1:
                several.set()
        if f"{0:020}" in seen.target or ".0000000001." in seen.target:
            several.wait(4)  # a request has five seconds
        try:
            return forward(seen.whole)
        finally:
            with lock:
                now[0] -= 1

    proxy.fault = fault
    return lambda: most[0]


def test_commits_are_read_once_and_some_at_the_same_time(log: DeltaLog, store: ObjectStore, proxy: FaultyProxy) -> None:
    for n in range(30):
        log.commit(log.add(f"{n}.parquet"), *([remove(f"{n - 3}.parquet")] if n % 4 == 3 else []))
    upload(log.root, store)
    most = several_at_once(proxy, ".json")
    proxy.seen.clear()
    local, remote = names(log, store)
    assert remote == local
    assert len(remote) == 30 - 7
    assert listings(proxy) == 1
    assert requested(proxy) == commits(*range(31))
    assert 2 <= most() <= 8


def test_a_later_version_needs_its_new_commits(log: DeltaLog, store: ObjectStore, proxy: FaultyProxy) -> None:
    for n in range(5):
        log.commit(log.add(f"{n}.parquet"))
    checkpoint(log, parts=1)
    log.commit(log.add("5.parquet"))
    upload(log.root, store)
    names(log, store)
    first = requested(proxy)
    assert [name for name in first if name.endswith(".parquet")] == [f"{5:020}.checkpoint.parquet"]
    log.commit(log.add("6.parquet"), remove("0.parquet"))
    log.commit(log.add("7.parquet"))
    upload(log.root, store)
    proxy.seen.clear()
    local, remote = names(log, store)
    assert remote == local
    assert len(remote) == 7
    assert requested(proxy) == commits(6, 7, 8), "the commit of the former version shows that it is the same table"


def test_files_since_a_version_are_found_by_one_request_a_commit(
    log: DeltaLog, store: ObjectStore, proxy: FaultyProxy
) -> None:
    log.commit(log.add("a.parquet"))
    upload(log.root, store)
    record = TableRecord("t", "delta", store.location)
    first = plan_table(record).version
    for n in range(12):
        log.commit(log.add(f"{n}.parquet"))
    upload(log.root, store)
    version = reader_of(record, plan_table(record).partitions).version
    assert version is not None
    proxy.seen.clear()
    found = version.new_files(first, lambda: None)
    assert len(found or ()) == 12
    assert requested(proxy) == commits(*range(1, 14))


def test_parts_of_a_checkpoint_are_read_once_and_some_at_the_same_time(
    log: DeltaLog, store: ObjectStore, proxy: FaultyProxy
) -> None:
    for n in range(12):
        log.commit(log.add(f"{n}.parquet"))
    parts = checkpoint(log, parts=5)
    upload(log.root, store)
    most = several_at_once(proxy, ".parquet")
    proxy.seen.clear()
    local, remote = names(log, store)
    assert remote == local
    assert requested(proxy) == sorted([*parts, *commits(12)])
    assert 2 <= most() <= 8


def test_a_large_file_of_a_log_is_read_alone(
    log: DeltaLog, store: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(10):
        log.commit(log.add(f"{n}.parquet", stats="x" * (5_000 if n % 3 else 10)))
    upload(log.root, store)
    monkeypatch.setattr(log_files, "AHEAD_BYTES", 2_000)
    local, remote = names(log, store)
    assert remote == local
    assert len(remote) == 10


def test_a_log_that_is_too_large_is_refused(log: DeltaLog, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(20):
        log.commit(log.add(f"{n}.parquet", stats="x" * 1_000))
    upload(log.root, store)
    monkeypatch.setattr(log_files, "LOG_BYTES", 10_000)
    with pytest.raises(InvalidArgument, match=r"\.json has more than \d+ bytes, the limit for such a file"):
        plan_table(TableRecord("t", "delta", store.location))


def test_the_first_commit_that_cannot_be_read_is_the_error(
    log: DeltaLog, store: ObjectStore, proxy: FaultyProxy
) -> None:
    for n in range(20):
        log.commit(log.add(f"{n}.parquet"))
    upload(log.root, store)
    refused = commits(*range(7, 20))

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        if seen.target.endswith(tuple(refused)):
            body = b"<Error><Code>AccessDenied</Code></Error>"
            return b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        return forward(seen.whole)

    proxy.fault = fault
    with pytest.raises(TableRefused, match=f"cannot read the file .*{refused[0]}"):
        plan_table(TableRecord("t", "delta", store.location))


def checkpoint(log: DeltaLog, parts: int) -> Sequence[str]:
    """Write the checkpoint of the newest version in parts, and remove earlier commits; returns its names."""
    from deltalake import DeltaTable

    DeltaTable(log.root).create_checkpoint()
    whole = log.folder / f"{log.next - 1:020}.checkpoint.parquet"
    for version in range(log.next - 1):
        (log.folder / f"{version:020}.json").unlink()
    (log.folder / "_last_checkpoint").unlink()
    if parts == 1:
        return [whole.name]
    rows = pq.read_table(whole)
    whole.unlink()
    found = []
    size = -(-rows.num_rows // parts)
    for n in range(parts):
        found.append(f"{log.next - 1:020}.checkpoint.{n + 1:010}.{parts:010}.parquet")
        pq.write_table(pa.Table.slice(rows, n * size, size), log.folder / found[-1])
    return found

"""Reads the footers of many Parquet files in parallel threads, and caches their facts."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from distop.errors import TableBusy, TableUnavailable
from distop.storage.files import NotRegular, check_regular, local_path, open_filesystem
from distop.storage.location import stamp_of
from distop.storage.opened_stores import OpenedBuckets
from distop.storage.storage_options import in_object_store
from distop.storage.store_errors import BucketMissing, StoreError, StoreUnavailable
from distop.tables.reading import parquet_tail, store_refusals
from distop.tables.reading.file_facts import FileFacts, Unreadable
from distop.tables.reading.footer_facts import Schemas, facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from distop.tables.reading.file_facts import PlannedFile

THREADS = 8
CHECKED_EVERY = 512
"""Files read between two calls of ``check``."""
CHECKED_AFTER = 1.0
"""Seconds between two calls of ``check`` during the wait for a file."""
READ_TIMEOUT = 300.0
"""Time-out in seconds for a file. Clients of object stores have shorter ones; a file system may have none."""
CACHED_FILES = 20_000
"""Maximum files whose facts are cached."""

T = TypeVar("T")

_cached: dict[tuple[Any, ...], FileFacts] = {}
"""Facts by path, size, modification time and ``wanted``."""


def size_and_stamp(path: str, buckets: OpenedBuckets | None = None) -> tuple[int, int | str]:
    """The size in bytes and the stamp of a file. Raises OSError, including NotRegular.

    ``buckets``: to be shared by the calls for several files.
    """
    if in_object_store(path):
        store, key = (OpenedBuckets() if buckets is None else buckets).find(path)
        found = store.head(key)
        return found.size, stamp_of(found)
    if parquet_tail.is_remote(path):
        from pyarrow import fs

        filesystem, inner = open_filesystem(path)
        info = filesystem.get_file_info(inner)
        if info.type != fs.FileType.File:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return info.size, info.mtime_ns or 0
    status = os.stat(path)  # noqa: PTH116
    check_regular(path, status.st_mode)
    return status.st_size, status.st_mtime_ns


def check_unchanged(path: str, size: int, stamp: int | str, buckets: OpenedBuckets | None = None) -> None:
    """Raises Unreadable if a file's size or stamp differs from the plan, or it cannot be examined.

    ``buckets``: to be shared by the calls for several files.
    """
    try:
        found = size_and_stamp(path, buckets)
    except FileNotFoundError as e:
        raise _gone(path, e) from e
    except NotRegular as e:
        raise Unreadable(str(e)) from None
    except OSError as e:
        raise Unreadable(f"the file {path} cannot be read: {e.strerror or e}") from e
    if found != (size, stamp):
        raise Unreadable(f"the file {path} has changed since the operation was planned")


def _gone(path: str, error: FileNotFoundError) -> Unreadable:
    if isinstance(error, BucketMissing):
        return Unreadable(f"the file {path} cannot be read: {error}")
    return Unreadable(f"the file {path} is gone since the operation was planned")


def read_all(
    files: Sequence[PlannedFile],
    wanted: frozenset[str | int],
    check: Callable[[], None] = lambda: None,
    *,
    immutable: bool = False,
) -> list[FileFacts | Unreadable]:
    """The facts of each planned file, in order, or the error why it cannot be read.

    ``wanted``: the top-level columns (``file_facts.folded``) whose statistics are needed, or ids of fields. ``check``
    is called regularly, and raises to stop. Facts are cached for later operations; a cached file's size and time are
    compared with the plan, except if the files are ``immutable``: then the path alone identifies a file.
    """
    found: list[FileFacts | Unreadable | None] = []
    for n in range(0, len(files), CHECKED_EVERY):
        check()
        found += [_cached.get((*f, wanted)) for f in files[n : n + CHECKED_EVERY]]
    if not immutable:
        cached = [i for i, facts in enumerate(found) if facts is not None]
        wrong = changed([files[i] for i in cached], check)
        for i in cached:
            found[i] = wrong.get(files[i][0], found[i])
    unread = [i for i, facts in enumerate(found) if facts is None]
    if unread:
        schemas, buckets = Schemas(wanted), OpenedBuckets()
        with _pool() as pool:
            n, size = 0, THREADS
            while n < len(unread):
                check()
                page = unread[n : n + size]
                reading = [(i, pool.submit(_read, files[i], schemas, buckets, immutable)) for i in page]
                for i, one in reading:
                    found[i] = _wait_for(_Progress(files[i][0]), one, check)
                if n == 0 and len(unread) > size and (cause := refusal([found[i] for i in page])) is not None:
                    for i in unread[size:]:
                        found[i] = Unreadable(
                            f"the file {files[i][0]} was not read, because the store refused the first files: {cause}"
                        )
                    break
                n, size = n + size, CHECKED_EVERY
    return [f for f in found if f is not None]


def changed(files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, Unreadable]:
    """The errors of files that differ from the plan, by path, in order.

    Raises TableUnavailable if a file does not answer, TableBusy, and the errors of ``check``.
    """
    found: dict[str, Unreadable] = {}
    if not files:
        return found
    buckets = OpenedBuckets()
    with _pool() as pool:
        for n in range(0, len(files), CHECKED_EVERY):
            check()
            page = files[n : n + CHECKED_EVERY]
            # An object store answers requests in parallel; for a disk, further threads would take longer.
            parts = [page] if local_path(page[0][0]) is not None else [[file] for file in page]
            checks = [
                (at, pool.submit(_changed, part, at, buckets)) for part in parts for at in (_Progress(part[0][0]),)
            ]
            for at, one in checks:
                wrong: dict[str, Unreadable] = _wait_for(at, one, check)
                found |= wrong
    _check_busy(found.values())
    return found


def _changed(files: Sequence[PlannedFile], at: _Progress, buckets: OpenedBuckets) -> dict[str, Unreadable]:
    found: dict[str, Unreadable] = {}
    for file in files:
        at.path, at.since = file[0], time.monotonic()
        try:
            check_unchanged(*file, buckets)
        except Unreadable as e:
            found[file[0]] = e
    return found


def read_with_timeout(path: str, read: Callable[[Callable[[], None]], T], check: Callable[[], None]) -> T:
    """Call ``read`` in a thread, with a time-out for each part; returns its result or raises its error.

    ``read`` calls its argument after each part that it has read. Raises TableUnavailable if a part takes too long, and
    the errors of ``check``.
    """
    at = _Progress(path)

    def progress() -> None:
        at.since = time.monotonic()

    with _pool(1) as pool:
        return _wait_for(at, pool.submit(read, progress), check)


@contextmanager
def _pool(threads: int = THREADS) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that read. After an error, threads that hang are abandoned."""
    pool = ThreadPoolExecutor(threads, "footers")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


@dataclass(slots=True)
class _Progress:
    """A thread's current file, and the monotonic time of its last progress."""

    path: str
    since: float = 0.0


def _wait_for(at: _Progress, reading: Future[T], check: Callable[[], None]) -> T:
    """The result of a thread that reads files.

    Raises TableUnavailable if the thread makes no progress for READ_TIMEOUT seconds, and the errors of ``check``.
    """
    since = time.monotonic()
    while not reading.done() and not wait([reading], CHECKED_AFTER).done:
        check()
        if time.monotonic() - max(since, at.since) >= READ_TIMEOUT:
            raise TableUnavailable(
                f"the file {at.path} did not answer within {READ_TIMEOUT:g} s: check whether this machine can read it"
            )
    return reading.result()


def refusal(found: Sequence[FileFacts | Unreadable | None]) -> str | None:
    """The common cause why the store refuses all of these files; None if there is no such cause.

    None if a file was read, if the causes differ, or if an error was not caused by the store.
    """
    causes = {
        store_refusals.cause_of_python_error(facts.__cause__) if isinstance(facts, Unreadable) else None
        for facts in found
    }
    return causes.pop() if len(found) > 1 and len(causes) == 1 else None


def check_store(facts: Sequence[FileFacts | Unreadable]) -> None:
    """Raises TableUnavailable if the store refuses all of these files for one cause, or is busy.

    Such a refusal is no fault of the files. Of an object store it is final (TableRefused), unless the store is busy.
    """
    asked = facts[:THREADS]
    cause = refusal(asked)
    if cause is not None and all(isinstance(fact, Unreadable) for fact in facts):
        text = f"cannot read any file of this batch (files: {len(facts)}) from this executor: {cause} ({asked[0]})"
        stored = isinstance(asked[0], Unreadable) and isinstance(asked[0].__cause__, StoreError)
        raise store_refusals.error_of_cause(cause, text) if stored else TableUnavailable(text)
    _check_busy(facts)


def _check_busy(facts: Iterable[FileFacts | Unreadable]) -> None:
    """Raises TableBusy if the store may answer a request for one of the files later."""
    for one in facts:
        if isinstance(one, Unreadable) and isinstance(one.__cause__, StoreUnavailable):
            raise TableBusy(str(one))


def _read(file: PlannedFile, schemas: Schemas, buckets: OpenedBuckets, immutable: bool) -> FileFacts | Unreadable:
    try:
        if in_object_store(file[0]):
            facts = _read_object(file, schemas, buckets, immutable)
        else:
            facts = _read_footer(file[0], schemas) if immutable else _read_planned(file, schemas)
    except Unreadable as e:
        return e
    if immutable or shows_replacement(file):
        if len(_cached) >= CACHED_FILES:
            _cached.clear()
        _cached[(*file, schemas.wanted)] = facts
    return facts


def _read_planned(file: PlannedFile, schemas: Schemas) -> FileFacts:
    """The facts of a file that may be replaced. Raises Unreadable, also if it was replaced before or during the read.

    Size and time are compared with the plan before and after the read.
    """
    check_unchanged(*file)
    try:
        return _read_footer(file[0], schemas)
    finally:
        check_unchanged(*file)


def _read_object(file: PlannedFile, schemas: Schemas, buckets: OpenedBuckets, immutable: bool) -> FileFacts:
    """The facts of a file in an object store, which are of its planned version. Raises Unreadable."""
    try:
        return _read_footer(file[0], schemas, None if immutable else file, buckets)
    except Unreadable as e:
        cause = e.__cause__
        if isinstance(cause, FileNotFoundError):
            raise _gone(file[0], cause) from cause
        if isinstance(cause, StoreError):
            raise Unreadable(f"the file {file[0]} cannot be read: {cause}") from cause
        raise


def shows_replacement(file: PlannedFile) -> bool:
    """Whether the file's stamp shows its replacement by a file of the same size.

    Stores without ETags may have times in whole seconds, or none.
    """
    return isinstance(file[2], str) or file[2] % 1_000_000_000 != 0


def _read_footer(
    path: str, schemas: Schemas, planned: PlannedFile | None = None, buckets: OpenedBuckets | None = None
) -> FileFacts:
    import pyarrow as pa

    try:
        return facts_of(path, parquet_tail.read(path, planned, buckets), schemas)
    except (pa.ArrowException, OSError, ValueError) as e:
        reason = str(e).strip().split("\n")[0]
        raise Unreadable(f"the file {path} is not a readable Parquet file: {reason}") from e

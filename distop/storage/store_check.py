"""The self-test of a store: whether it honors conditional writes and lists objects at once.

Some stores accept conditional writes and ignore the condition (Garage lets each of 16 writers win), or list objects
late. There, a writer would overwrite what others have published. The check writes a few small objects below the
location, and removes them.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from distop.clock import time, uuid
from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import plural, shown
from distop.runtime.lru_cache import LruCache
from distop.storage.deletion import Place
from distop.storage.files import local_path
from distop.storage.object_store import Version
from distop.storage.opened_stores import open_store, store_of
from distop.storage.store_errors import ObjectChanged, ObjectExists, StoreError, UnknownWrite, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.storage.object_store import ObjectStore

WRITERS = 16
CLOCK_TOLERANCE = 5.0
"""Seconds."""
_RESOLUTION = 1.0
"""Seconds: stores give times in whole seconds."""
_CACHED_PLACES = 256
CHECKS = "_distop-check"
"""The folder with the objects of checks, each in a folder of its own."""
ABANDONED = 3600.0
"""Seconds after which the objects of a check belong to a killed process, or could not be removed."""


@frozen
class StoreReport:
    """The result of the self-test. ``defects``: why nothing may be written there; empty: the store is suitable.

    ``clock_offset``: seconds by which the store's clock is ahead of this machine's.
    """

    defects: Sequence[str]
    clock_offset: float

    @property
    def suitable(self) -> bool:
        return not self.defects


_reports: LruCache[StoreReport] = LruCache(_CACHED_PLACES)


def check_store(store: ObjectStore) -> StoreReport:
    """Check a store. Raises StoreError if it cannot be reached or refuses to write: then it has not been checked."""
    folder = f"{CHECKS}/{uuid.uuid4().hex}"
    wrong: list[str] = []
    try:
        wrong += _races(store, f"{folder}/race")
        before = time.time() - _RESOLUTION
        first = store.put_new(f"{folder}/a", b"first")
        modified = store.head(f"{folder}/a").modified
        clock = modified - min(max(modified, before), time.time())
        wrong += _overwrites(store, f"{folder}/a", first)
        wrong += _listing(store, folder, ["a", "race"])
        return StoreReport(tuple(wrong), clock)
    finally:
        with suppress(StoreError):
            store.delete_many([f"{folder}/a", f"{folder}/race"])
            before = time.time() - ABANDONED
            store.delete_many([found.key for found in store.list(CHECKS) if found.modified < before])


class UnsuitableStore(Unsupported, InvalidArgument):
    """The store failed the self-test."""


def require_suitable(location: str) -> None:
    """Run the self-test before the first write to a location, once for each location in this process.

    Raises UnsuitableStore if the store fails it, InvalidArgument for an invalid location, and StoreError if the test
    cannot run now.
    """
    report = _reports.get((os.getpid(), location.rstrip("/")), lambda: check_store(open_store(location)))
    if not report.suitable:
        raise UnsuitableStore(
            f"the store of {shown(location)} is not safe, so distop writes nothing there: {'; '.join(report.defects)}; "
            "use another store"
        )


def publishing_store(place: Place) -> ObjectStore:
    """The store of a place to write into, after :func:`require_suitable` for a URL.

    All places in one folder of the anchor are checked together: of a namespace in the shared directory, or of a table.
    Local folders are not checked: a link to a new file is atomic, or the file system refuses it. Raises the errors of
    :func:`require_suitable`.
    """
    if local_path(place.anchor) is None:
        require_suitable(Place(place.anchor, place.path.partition("/")[0]).location)
    return store_of(place)


def _races(store: ObjectStore, key: str) -> list[str]:
    barrier = threading.Barrier(WRITERS)

    def create(n: int) -> bool:
        barrier.wait()
        try:
            store.put_new(key, b"%d" % n)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        won = sum(pool.map(create, range(WRITERS)))
    return [] if won == 1 else [f"of {WRITERS} writers of a new object {won} won, not 1"]


def _overwrites(store: ObjectStore, key: str, first: Version) -> list[str]:
    wrong = []
    with suppress(ObjectExists):
        store.put_new(key, b"other")
        wrong.append("it overwrites an object that must be new")
        first = store.head(key).version
    try:
        second = store.replace_if(key, b"second", first)
    except ObjectChanged:
        return [*wrong, "it does not replace an object in its current version"]
    for version, what in ((first, "an older"), (Version('"0123456789abcdef"', "1"), "an unknown")):
        # After a lost answer, the content below decides.
        with suppress(ObjectChanged, UnknownWrite):
            store.replace_if(key, b"third", version)
            wrong.append(f"it replaces an object for {what} version")
    data = store.get(key, limit=100)
    if not wrong and data.data == b"third":
        wrong.append("it replaces an object for another version than its own")
    elif not wrong and (data.data != b"second" or data.stored.version != second):
        wrong.append("it returns an old version of an object that was replaced")
    return wrong


def _listing(store: ObjectStore, folder: str, names: Sequence[str]) -> list[str]:
    found = [one.key for one in store.list(folder)]
    missing = [name for name in names if f"{folder}/{name}" not in found]
    return [f"its listing lacks {plural(len(missing), 'object')} that had been written"] if missing else []

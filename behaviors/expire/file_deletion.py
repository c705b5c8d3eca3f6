"""Deletes files of a table in pages, and looks again before each page."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from distop.behavior import WorkDone
from distop.storage.deletion import Place
from distop.storage.object_store import Listed
from distop.storage.opened_stores import store_of
from distop.storage.store_errors import ObjectMissing
from distop_behaviors.orphans.deletion_pages import pages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from distop.behavior import JobContext
    from distop.storage.object_store import StoredObject
    from distop.tables.reachability import TableFile
    from distop_behaviors.expire.expire_argument import DeletionCounts

PAGE = 500
"""Files that are deleted together."""
CLOCK_DIFFERENCE = 600.0
"""Seconds by which the clocks of a table's writers and of its store may differ."""
_AT_ONCE = 8


class FileDeletion:
    """Deletes files below a table's folder.

    ``rate``: files per second, None for no limit. ``commits``: commits of the table that were made before.
    """

    def __init__(
        self, place: str, counts: DeletionCounts, ctx: JobContext, *, rate: float | None = None, commits: int = 0
    ) -> None:
        self._store = store_of(Place(place))
        self._counts = counts
        self._ctx = ctx
        self._rate = rate
        self.work = WorkDone(commits=commits)
        """What was done so far."""

    def delete(
        self, files: Mapping[str, TableFile], *, written_before: float, look_again: Callable[[], Collection[str]]
    ) -> None:
        """Delete files, by their keys, in this order.

        ``written_before``: a time in seconds. Files that the store received more than :data:`CLOCK_DIFFERENCE` after
        it stay. It is absolute, so it does not depend on when the deletion runs. ``look_again``: called before each
        page, returns the keys that may still be deleted. Raises StoreUnavailable, and UnsafePath for a link on the way
        to a file.
        """
        if not files:
            return
        before = written_before + CLOCK_DIFFERENCE
        done = size = 0
        whole = sum(file.size or 0 for file in files.values())
        self.work = WorkDone(0, 0, len(files), whole, self.work.commits)
        for page in pages(list(files), PAGE, self._rate, self._ctx):
            self._ctx.status(f"deleting files: {done} of {len(files)}")
            still = look_again()
            listed: dict[str, Listed] = {}
            for key, found in self._heads([key for key in page if key in still]):
                if found is None:
                    self._counts.missing += 1
                elif isinstance(found, OSError):
                    self._counts.fail(key, str(found))
                elif found.modified >= before:
                    self._counts.recent += 1
                else:
                    listed[key] = Listed(key, found.size, found.stamp)
            removed = self._store.remove_listed(list(listed.values()))
            for key in removed.removed:
                self._counts.count(files[key].kind, listed[key].size)
            self._counts.missing += len(removed.missing)
            self._counts.changed += len(removed.changed)
            for key, why in removed.failed.items():
                self._counts.fail(key, why)
            done += len(page)
            size += sum(files[key].size or 0 for key in page)
            deleted = self._counts.deleted.values()
            gone, gone_bytes = sum(one.files for one in deleted), sum(one.bytes for one in deleted)
            self.work = WorkDone(done, size, len(files), whole, self.work.commits, gone, gone_bytes)
            self._ctx.work_done(**self.work.to_json())

    def _heads(self, keys: Sequence[str]) -> Iterator[tuple[str, StoredObject | OSError | None]]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from zip(keys, pool.map(self._head, keys), strict=True)

    def _head(self, key: str) -> StoredObject | OSError | None:
        try:
            return self._store.head(key)
        except (ObjectMissing, FileNotFoundError):
            return None
        except PermissionError as error:
            return error

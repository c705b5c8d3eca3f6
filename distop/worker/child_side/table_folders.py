"""Checks that the files of a plan are in the folders of its table, which a catalog may define."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.runtime.lru_cache import LruCache
from distop.storage.confinement import TableFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.records import TableRecord

    Folders = Callable[[bool], tuple[str, ...]]
    """Lists the folders of a table; with True, also those of partitions in other locations, which takes longer."""


class TableFolders:
    """Caches the folders of tables; each operation lists them once."""

    def __init__(self) -> None:
        self._folders: LruCache[tuple[str, ...]] = LruCache(1_000)
        self._elsewhere: LruCache[TableFiles] = LruCache(100)

    def check(
        self,
        op: tuple[str, str],
        record: TableRecord,
        paths: Sequence[str],
        folders: Folders,
        check: Callable[[], None],
    ) -> None:
        """Raises InvalidArgument for a path outside the table's folders, and the errors of ``folders``.

        ``op``: the operation, and an identifier that distinguishes it from an earlier one of the same name. ``check``
        is called while another thread lists the folders, and raises to stop the wait.
        """
        key = (*op, record.name)
        known = self._folders.get_once(key, lambda: folders(False), check)
        try:
            # Not cached: a folder may have been replaced by a link.
            TableFiles(*known).check(paths, below=True)
        except InvalidArgument:
            elsewhere = self._elsewhere.get_once(key, lambda: TableFiles(*folders(True)), check)
            elsewhere.forget_resolved()
            elsewhere.check(paths, below=True)

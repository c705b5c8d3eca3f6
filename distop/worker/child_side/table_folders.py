"""Checks that the files that a plan names belong to its table, of a table of a catalog by what the catalog says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.runtime.lru_cache import Kept
from distop.storage.confinement import TableFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.records import TableRecord

    Folders = Callable[[bool], tuple[str, ...]]
    """The folders of a table; True: with those of partitions that may lie elsewhere, which take longer to list."""


class TableFolders:
    """The folders of tables, as they were when an operation began here: asked for once for each operation."""

    def __init__(self) -> None:
        self._folders: Kept[tuple[str, ...]] = Kept(1_000)
        self._elsewhere: Kept[TableFiles] = Kept(100)

    def check(
        self,
        op: tuple[str, str],
        record: TableRecord,
        paths: Sequence[str],
        folders: Folders,
        check: Callable[[], None],
    ) -> None:
        """Raises InvalidArgument for a path that lies in none of the table's folders, and what asking for these
        raises. ``op``: the operation, and what tells it from an earlier one of its name. ``check`` is called while
        another thread asks, and raises where the wait is to stop.
        """
        key = (*op, record.name)
        known = self._folders.get_once(key, lambda: folders(False), check)
        try:
            # Each time anew: a folder may have become a link.
            TableFiles(*known).check(paths, below=True)
        except InvalidArgument:
            elsewhere = self._elsewhere.get_once(key, lambda: TableFiles(*folders(True)), check)
            elsewhere.look_anew()
            elsewhere.check(paths, below=True)

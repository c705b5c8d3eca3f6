"""Checks that the files that a plan names belong to its table, of a table of a catalog by what the catalog says."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from distop.confinement import TableFiles
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.core.model import TableRecord

    Folders = Callable[[bool], tuple[str, ...]]
    """The folders of a table; True: with those of partitions that may lie elsewhere, which take longer to list."""

_KEPT = 1_000
"""Tables of operations of which the folders are kept."""


class _Table:
    """The folders of one table, as they were when an operation began here."""

    def __init__(self) -> None:
        self._folders: tuple[str, ...] = ()
        self._elsewhere: TableFiles | None = None
        self._lock = threading.Lock()

    def check(self, paths: Sequence[str], folders: Folders) -> None:
        """Raises InvalidArgument, and what ``folders`` raises."""
        with self._lock:
            self._folders = self._folders or folders(False)
            try:
                # Each time anew: a folder may have become a link.
                return TableFiles(*self._folders).check(paths, below=True)
            except InvalidArgument:
                self._elsewhere = self._elsewhere or TableFiles(*folders(True))
                return self._elsewhere.check(paths, below=True)


class TableFolders:
    """The folders of tables, asked for once for each operation."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[str, str], _Table] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, op: str, record: TableRecord, paths: Sequence[str], folders: Folders) -> None:
        """Raises InvalidArgument for a path that lies in none of the table's folders, and what asking for these
        raises.
        """
        with self._lock:
            table = self._tables.setdefault((op, record.name), _Table())
            self._tables.move_to_end((op, record.name))
            while len(self._tables) > _KEPT:
                self._tables.popitem(last=False)
        table.check(paths, folders)

"""A copy of one version of a table at another place: its files, and metadata of its own that name the copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.storage.deletion import Place
    from distop.tables.pinned_files import PinnedFiles

MARK = "distop.export"
"""The name under which the metadata of a copy say which version they are a copy of."""


class TableCopy(ABC):
    """A version of a table that can be copied with its metadata.

    ``pinned``: all files that are copied as they are, each to the same path below the new place, data files and others.
    ``origin``: fixes the version's metadata, for :meth:`distop.tables.formats.Format.table_copy`.
    """

    origin: str
    pinned: PinnedFiles

    @abstractmethod
    def write(self, place: Place, check: Callable[[], None]) -> None:
        """Write the metadata at the new place, where all files are. Writing them twice changes nothing.

        If there are metadata of an earlier copy, they are replaced by one commit. Raises InvalidArgument if somebody
        else has changed the table there, Conflict if somebody does it now, and StoreError.
        """

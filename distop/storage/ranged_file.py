"""Reads an object as a file: from its last bytes, and by requests for ranges of the others."""

from __future__ import annotations

from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distop.storage.object_store import Content, ObjectStore


class RangedFile(RawIOBase):
    """An object as a file. All its bytes are of one version. ``end``: its last bytes."""

    def __init__(self, store: ObjectStore, end: Content) -> None:
        super().__init__()
        self._store = store
        self._stored = end.stored
        self._end = end.data
        self._start = end.stored.size - len(end.data)
        """The position of the first of the last bytes."""
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._at = offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._stored.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._start:
            data = self._end[self._at - self._start :][: len(buffer)]
        else:
            some = [(self._at, min(self._at + len(buffer), self._start))]
            data = self._store.get_ranges(self._stored.key, some, version=self._stored.version)[0]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

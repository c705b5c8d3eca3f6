"""Reads an object as a file, by requests for ranges of its bytes."""

from __future__ import annotations

from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distop.storage.object_store import ObjectStore, StoredObject


class RangedFile(RawIOBase):
    """An object as a file, whose reads are requests for ranges of one version."""

    def __init__(self, store: ObjectStore, stored: StoredObject) -> None:
        super().__init__()
        self._store = store
        self._stored = stored
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
        end = min(self._at + len(buffer), self._stored.size)
        if end <= self._at:
            return 0
        some = [(self._at, end)]
        data = self._store.get_ranges(self._stored.key, some, version=self._stored.version)[0]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

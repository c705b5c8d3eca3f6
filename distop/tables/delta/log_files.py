"""Reads the files of a Delta table's log, and limits their size."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.storage import files as storage_files
from distop.storage.confinement import TableFiles
from distop.storage.files import METADATA_BYTES, NotRegular, TooLarge
from distop.storage.location import Location
from distop.storage.storage_options import in_object_store
from distop.storage.store_errors import unavailable
from distop.tables.delta.table_paths import LOG, commit_name

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

LOG_BYTES = 1 << 30
"""Maximum bytes of all files of a log that are read for one version."""
_AT_ONCE = 8
"""Files of a log in an object store that are read at the same time."""
AHEAD_BYTES = 16 << 20
"""Maximum bytes of a file that is read before its turn: all of them have less than one file may have."""


class LogFiles:
    """Opens files of a table's log, and limits their size."""

    def __init__(self, root: str, most: int | None = None) -> None:
        """``most``: maximum bytes of all files (default: for one version)."""
        self.root = root
        self.files = TableFiles(root)
        self._left = LOG_BYTES if most is None else most

    def path(self, name: str) -> str:
        """The path or URL of a file below the log."""
        return f"{self.root}/{LOG}/{name}"

    def read(self, name: str) -> bytes:
        """The bytes of a file below the log.

        Raises FileNotFoundError, InvalidArgument for a link or a file that is too large, TableUnavailable.
        """
        self.files.check((self.path(name),), below=True)
        try:
            return self._counted(self._bytes(name, min(METADATA_BYTES, self._left)), name)
        except TooLarge as error:
            raise InvalidArgument(str(error)) from error

    @contextmanager
    def read_each(self, names: Sequence[str]) -> Iterator[Iterator[bytes]]:
        """The bytes of files below the log, in order. In an object store some are read at the same time.

        The iterator raises the errors of :meth:`read` for a file when it is its turn.
        """
        with closing(self._in_turn(names)) as found:
            yield found

    def _in_turn(self, names: Sequence[str]) -> Generator[bytes]:
        if len(names) < 2 or not in_object_store(self.root):
            yield from map(self.read, names)
            return
        pool, rest = ThreadPoolExecutor(_AT_ONCE), iter(names)
        ahead = deque((name, pool.submit(self._early, name)) for name in islice(rest, _AT_ONCE))
        try:
            while ahead:
                name, reading = ahead.popleft()
                found = reading.result()
                yield self.read(name) if found is None else self._counted(found, name)
                del found, reading
                ahead.extend((name, pool.submit(self._early, name)) for name in islice(rest, 1))
        finally:
            pool.shutdown(cancel_futures=True)

    def _early(self, name: str) -> bytes | None:
        """The bytes of a file; None if it is too large to be read before its turn."""
        self.files.check((self.path(name),), below=True)
        try:
            return self._bytes(name, AHEAD_BYTES)
        except TooLarge:
            return None

    def _bytes(self, name: str, limit: int) -> bytes:
        path = self.path(name)
        try:
            return storage_files.read(path, limit, follow=False)
        except FileNotFoundError:
            raise
        except NotRegular as error:
            raise InvalidArgument(str(error)) from error
        except OSError as error:
            raise unavailable(f"cannot read the file {path}: {error.strerror or error}", error) from error

    def _counted(self, found: bytes, name: str) -> bytes:
        if len(found) > self._left:
            raise InvalidArgument(
                f"the file {self.path(name)} has more than {self._left} bytes, the limit for such a file"
            )
        self._left -= len(found)
        return found

    def find(self, name: str) -> bytes | None:
        """The bytes of a file below the log; None if there is none. Raises the other errors of :meth:`read`."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def names(self) -> frozenset[str]:
        """The names in the log. Raises InvalidArgument and TableUnavailable."""
        return Location.of(self.root).names_in(LOG)

    def digest(self, version: int) -> str:
        """A digest of a version's commit; "" if the log does not have it."""
        found = self.find(commit_name(version))
        return "" if found is None else digest_of(found)


def digest_of(data: bytes) -> str:
    """A digest of a commit."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()

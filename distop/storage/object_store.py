"""One interface for the objects of a local folder, of S3, GCS and Azure, and of memory.

An object is created once, by :meth:`ObjectStore.put_new`, or replaced if it still has a known version. There is no
rename and no folder: a key is a path below the store's location, such as ``plans/a/1.json``.

The answer to a request may be lost. A conditional write is therefore never repeated blindly: what is in the store
decides (:mod:`distop.storage.conditional_writes`). Each call has a time limit, after which at most one request more is
waited for. Local folders have none: a hanging disk cannot be interrupted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import field
from typing import TYPE_CHECKING

from distop.clock import uuid
from distop.errors import UnsafePath
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.storage.deletion import components
from distop.storage.store_errors import ObjectChanged, ObjectExists, ObjectMissing, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import BinaryIO

LONGEST_KEY = 1024
"""Bytes of a key with the store's prefix: the limit of S3 and GCS."""
LARGEST = 5 << 30
"""Bytes of an object: S3 copies no larger one in one part."""
PART = 8 << 20
"""Bytes of one part of a large object. An object of at most one part is written by a single request."""
_TRIES = 10
"""Tries to replace an object that other writers replace meanwhile."""
_SCRATCH = ".distop-", ".tmp"
"""Start and end of the names of objects and files that are not complete."""


@frozen
class Version:
    """The version of an object, to be compared only. ``generation``: GCS's number, which its listings leave out."""

    etag: str
    generation: str = field(default="", compare=False)


@frozen
class StoredObject:
    """An object: its key, size in bytes, version, and the store's time of its last change in seconds."""

    key: str
    size: int
    version: Version
    modified: float

    @property
    def stamp(self) -> int | str:
        """What changes when the object is replaced: its ETag; without one, the time of its change in ns."""
        return self.version.etag or int(self.modified * 1e9)


@frozen
class Listed:
    """An object of an earlier listing: its key, size in bytes and :attr:`StoredObject.stamp`.

    ``before``: a time of the store in seconds; an object that was changed later counts as changed.
    """

    key: str
    size: int
    stamp: int | str
    before: float = float("inf")

    def is_same(self, found: StoredObject) -> bool:
        """Whether an object has not changed since the listing."""
        return (found.size, found.stamp) == (self.size, self.stamp) and found.modified < self.before


@frozen
class Removed:
    """What became of objects that were to be removed or moved, by their keys.

    ``missing``: they did not exist; ``changed``: they are not those of the listing, and stay; ``failed``: with reasons.
    """

    removed: Sequence[str] = ()
    missing: Sequence[str] = ()
    changed: Sequence[str] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


@frozen
class Content:
    """The bytes of an object."""

    data: bytes
    stored: StoredObject


@frozen
class OpenObject:
    """An object that is open for reading: its bytes as a file, all of one version."""

    file: BinaryIO
    stored: StoredObject


@frozen
class FolderListing:
    """The objects whose keys have no further slash, and the names that are followed by one; both sorted."""

    folders: Sequence[str]
    objects: Sequence[StoredObject]


class ObjectStore(ABC):
    """The objects below a location. Thread-safe. Errors: :mod:`distop.storage.store_errors`, and UnsafePath for keys.

    Besides those that a method names, each may raise Denied, Throttled, TimedOut, and ObjectMissing if there is no such
    bucket.
    """

    location: str
    """A URL, or a local path."""

    @abstractmethod
    def get(self, key: str, *, limit: int) -> Content:
        """An object with its bytes. Raises ObjectMissing, and TooLarge if it has more than ``limit`` bytes."""

    @abstractmethod
    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, version: Version | None = None) -> list[bytes]:
        """The bytes of an object from each start to each end (exclusive), cut at the end of the object.

        Near ranges are read by one request. All bytes are of one version.

        Raises ObjectMissing, and ObjectChanged if that is not ``version``.
        """

    @abstractmethod
    def open(self, key: str) -> AbstractContextManager[OpenObject]:
        """Open an object to read parts of it. Raises ObjectMissing.

        Its reads raise ObjectChanged if the object has another version meanwhile.
        """

    @abstractmethod
    def get_end(self, key: str, count: int) -> Content:
        """The last bytes of an object, at most ``count``; all of it if it is smaller. Raises ObjectMissing."""

    @abstractmethod
    def head(self, key: str) -> StoredObject:
        """An object without its bytes. Raises ObjectMissing."""

    @abstractmethod
    def list(self, folder: str = "", *, after: str = "") -> Iterator[StoredObject]:
        """The objects below a folder, sorted by key, from the first key greater than ``after``.

        They are requested in pages while the iterator is used. A folder without objects does not exist.
        """

    @abstractmethod
    def list_folder(self, folder: str = "") -> FolderListing:
        """The objects and folders in a folder. All of them are in memory."""

    @abstractmethod
    def put_new(self, key: str, data: bytes) -> Version:
        """Create an object. Of several writers exactly one returns. Raises ObjectExists, and UnknownWrite."""

    @abstractmethod
    def replace_if(self, key: str, data: bytes, version: Version) -> Version:
        """Replace an object that has this version. Raises ObjectChanged, also if it is gone, and UnknownWrite."""

    @abstractmethod
    def put_large(self, key: str, chunks: Iterable[bytes]) -> Version:
        """Create an object of up to 5 GiB from chunks, in parts; it appears when it is complete.

        An equal object that exists already may count as created, because S3's copies carry no token of their writer.
        Raises ObjectExists, UnknownWrite, StoreError if it is larger, and errors of the chunks.
        """

    @abstractmethod
    def copy_new(self, source: str, target: str) -> Version:
        """Copy an object to a new key. An equal object there may count as the copy.

        Raises ObjectExists, ObjectMissing, and UnknownWrite.
        """

    def copy(self, source: str, target: str) -> None:
        """Copy an object to a key, and replace an object that is there. Raises ObjectMissing, and Unsupported."""
        raise Unsupported(f"{self.location} replaces no objects by copies: only object stores do")

    @abstractmethod
    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects. Those that do not exist are ignored."""

    @abstractmethod
    def remove_listed(self, objects: Sequence[Listed]) -> Removed:
        """Remove objects that have not changed since they were listed. Empty folders stay.

        In an object store each is examined just before: one that is replaced at that moment is removed as well. On a
        disk, a link on the way to a file is a failure of that file. Raises StoreUnavailable.
        """

    @abstractmethod
    def move_listed(self, objects: Mapping[Listed, str]) -> Removed:
        """Move objects that have not changed since they were listed to new keys. Empty folders stay.

        A move that was interrupted is completed by the next one. An object of another content at a new key is a
        failure. Raises as :meth:`remove_listed`.
        """

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Remove everything below a folder, also objects that are not complete. A missing folder is ignored.

        On a disk this removes links, never their targets, and then folders above that are empty.
        """

    @abstractmethod
    def delete_incomplete(self, folder: str = "", *, older_than: float = 0.0) -> None:
        """Remove objects in a folder that are not complete, as killed processes leave them.

        ``older_than``: seconds; a slower writer of such an object fails. 0: also those that are written now.
        """

    def put(self, key: str, data: bytes) -> Version:
        """Create an object, or replace the one that is there: the last of several writers wins.

        Raises ObjectChanged if others keep replacing it, and UnknownWrite.
        """
        for left in reversed(range(_TRIES)):
            try:
                return self.put_large(key, [data])
            except ObjectExists:
                try:
                    return self.replace_if(key, data, self.head(key).version)
                except (ObjectChanged, ObjectMissing):
                    if not left:
                        raise
        raise AssertionError("the last try returns or raises")

    def time(self, folder: str) -> float:
        """The store's own time in seconds, from a new object in a folder, which is removed again."""
        key = f"{check_key(folder)}/{scratch_name()}"
        self.put_new(key, b"")
        try:
            return self.head(key).modified
        finally:
            self.delete_many([key])

    def signed_url(self, key: str, seconds: float) -> str:
        """A URL by which anyone may read an object for a time. Raises Unsupported."""
        raise Unsupported(f"{self.location} signs no URLs: only S3, GCS and Azure do")

    def location_of(self, key: str) -> str:
        """The place of a key, for messages."""
        return f"{self.location.rstrip('/')}/{key}"


def check_key(key: str) -> str:
    """The key. Raises UnsafePath if it is no path below a folder, is too long, or has control characters."""
    components(key)
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise UnsafePath(f"the key {shown(key)} is not UTF-8, as names in an object store are") from None
    if size > LONGEST_KEY:
        raise UnsafePath(f"the key {shown(key)} has over {LONGEST_KEY} bytes, the limit of object stores")
    if not key.isprintable() and any(ord(character) < 32 or ord(character) == 127 for character in key):
        raise UnsafePath(f"the key {shown(key)} has a control character, which object stores refuse")
    return key


def scratch_name() -> str:
    """A new name of an object or a file that is not complete; listings leave it out."""
    return uuid.uuid4().hex.join(_SCRATCH)


def is_scratch(key: str) -> bool:
    """Whether a key's last name is that of an object that is not complete."""
    name = key.rpartition("/")[2]
    return name.startswith(_SCRATCH[0]) and name.endswith(_SCRATCH[1])


def merged(ranges: Sequence[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Ranges that cover all given ones: those with at most ``gap`` bytes between them are one. Empty ones are left out.

    Raises ValueError for a negative start.
    """
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start < 0:
            raise ValueError(f"a range must not start before 0, as ({start}, {end}) does")
        if end <= start:
            continue
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def cut(ranges: Sequence[tuple[int, int]], read: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """The bytes of each range. ``read``: starts and bytes of merged ranges, sorted."""
    found = []
    for start, end in ranges:
        inside = [(at, data) for at, data in read if at <= start] if end > start else []
        found.append(bytes(inside[-1][1][start - inside[-1][0] : end - inside[-1][0]]) if inside else b"")
    return found

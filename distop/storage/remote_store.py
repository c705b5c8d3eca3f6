"""Objects in S3, GCS, Azure and memory, by obstore.

obstore retries no request here: after its own retry of a conditional write, this process's write would look like
another writer's. :mod:`distop.storage.conditional_writes` retries reads and conditional writes. obstore retries only
the parts of a large object, which has a temporary name until it is complete.

obstore's threads do not survive a fork: a process that has used a store must not be forked to use one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BufferedReader
from itertools import chain
from typing import TYPE_CHECKING, Any

from distop.clock import time, uuid
from distop.errors import UnsafePath
from distop.storage.conditional_writes import ReadBack, repeated, settled
from distop.storage.files import TooLarge
from distop.storage.listed_removal import move_unchanged, remove_unchanged
from distop.storage.object_store import (
    LARGEST,
    LONGEST_KEY,
    PART,
    Content,
    FolderListing,
    Listed,
    ObjectStore,
    OpenObject,
    Removed,
    StoredObject,
    Version,
    check_key,
    cut,
    is_scratch,
    merged,
    scratch_name,
)
from distop.storage.ranged_file import RangedFile
from distop.storage.remote_listing import PAGE, RemoteListing
from distop.storage.store_errors import (
    AnswerLost,
    InvalidRange,
    ObjectChanged,
    ObjectMissing,
    RangeIgnored,
    StoreError,
    StoreUnavailable,
    Unsupported,
    asked,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

TOKEN = "distopwrite"
"""The name of the metadata with the token of a write; Azure allows no hyphen."""
_GAP = 1 << 20
"""Bytes between two ranges that are read by one request."""
READ_AHEAD = 1 << 18
"""Bytes that a request for a part of an open object reads at least, and that are read when it is opened: the end of the
object, where Parquet has its footer. So one request reads a small object."""
ONE_READ = 4 * PART
"""Maximum bytes of an object that is read by one request."""
_AT_ONCE = 8
"""Requests of one call at the same time."""


class RemoteStore(ObjectStore):
    """Objects below a prefix of a bucket. ``limit``: seconds for one call."""

    def __init__(
        self,
        location: str,
        store: Any,
        *,
        prefix: str = "",
        limit: float = 120.0,
        uploads: Any = None,
        numbered: bool = False,
    ) -> None:
        """``uploads``: the same store for the parts of large objects. ``numbered``: versions are numbers (GCS)."""
        self.location = location
        self._store = store
        self._uploads = store if uploads is None else uploads
        self._prefix = f"{prefix}/" if prefix else ""
        self._limit = limit
        self._numbered = numbered

    # ---- reading

    def get(self, key: str, *, limit: int) -> Content:
        path, what = self._path(key), f"read {self.location_of(key)}"

        def read() -> Content:
            found = self._fetch(path, what)
            stored = self._stored(found.meta)
            if stored.size > limit:
                raise TooLarge(f"{self.location_of(key)} has more than {limit} bytes, the limit for such an object")
            return Content(b"" if stored.size > ONE_READ else self._bytes(found, stored.size, what), stored)

        found = repeated(read, self._limit)
        size, version = found.stored.size, found.stored.version
        if size <= ONE_READ:
            return found
        # One request for all bytes could exceed the time limit of a request.
        parts = (self.get_ranges(key, [(at, at + PART)], version=version)[0] for at in range(0, size, PART))
        return Content(b"".join(parts), found.stored)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, version: Version | None = None) -> list[bytes]:
        path, what = self._path(key), f"read {self.location_of(key)}"
        asked = merged(ranges, _GAP)

        def read(one: tuple[int, int]) -> tuple[Version | None, bytes]:
            options: dict[str, Any] = {"range": one}
            if version is not None and version.etag:
                options["if_match"] = version.etag
            try:
                found = self._fetch(path, what, options)
                size = min(one[1], found.meta["size"]) - one[0]
                return self._version(found.meta), self._bytes(found, size, what)
            except InvalidRange:
                return None, b""

        def read_repeatedly(one: tuple[int, int]) -> tuple[Version | None, bytes]:
            return repeated(lambda: read(one), self._limit)

        if len(asked) > 1:
            with ThreadPoolExecutor(min(_AT_ONCE, len(asked))) as pool:
                answers = list(pool.map(read_repeatedly, asked))
        else:
            answers = [read_repeatedly(one) for one in asked]
        if len({found for found, _ in answers if found is not None} | ({version} - {None})) > 1:
            raise ObjectChanged(f"cannot {what}: the object has changed")
        return cut(ranges, [(start, data) for (start, _), (_, data) in zip(asked, answers, strict=True)])

    @contextmanager
    def open(self, key: str) -> Iterator[OpenObject]:
        end = self.get_end(key, READ_AHEAD)
        with BufferedReader(RangedFile(self, end), READ_AHEAD) as file:
            yield OpenObject(file, end.stored)

    def get_end(self, key: str, count: int) -> Content:
        path, what = self._path(key), f"read {self.location_of(key)}"

        def read() -> Content:
            found = self._fetch(path, what, {"range": {"suffix": count}})
            stored = self._stored(found.meta)
            return Content(self._bytes(found, min(count, stored.size), what), stored)

        try:
            return repeated(read, self._limit)
        except (InvalidRange, RangeIgnored, Unsupported) as error:  # the object is empty, or the store is Azure
            if isinstance(error, Unsupported) and error.status:
                raise
            stored = self.head(key)
            start = max(0, stored.size - count)
            [data] = self.get_ranges(key, [(start, stored.size)], version=stored.version)
            return Content(data, stored)

    def head(self, key: str) -> StoredObject:
        path, what = self._path(key), f"find {self.location_of(key)}"
        return repeated(lambda: self._stored(self._head(path, what).meta), self._limit)

    def list(self, folder: str = "", *, after: str = "") -> Iterator[StoredObject]:
        return (found for found in self._list(folder, after) if not is_scratch(found.key))

    def _list(self, folder: str, after: str) -> Iterator[StoredObject]:
        return map(self._stored, self._listing(folder).objects(self._prefix + after if after else ""))

    def list_folder(self, folder: str = "") -> FolderListing:
        found = self._list_folder(folder)
        return FolderListing(found.folders, tuple(one for one in found.objects if not is_scratch(one.key)))

    def _list_folder(self, folder: str) -> FolderListing:
        folders, objects = self._listing(folder).folder()
        return FolderListing(tuple(folders), tuple(map(self._stored, objects)))

    def _listing(self, folder: str) -> RemoteListing:
        prefix = self._path(folder) if folder else self._prefix.rstrip("/")
        return RemoteListing(self._store, prefix, self.location, f"list {self.location_of(folder)}", self._limit)

    # ---- writing

    def put_new(self, key: str, data: bytes) -> Version:
        return self._put(key, data, None, f"create {self.location_of(key)}")

    def replace_if(self, key: str, data: bytes, version: Version) -> Version:
        what = f"replace {self.location_of(key)}"
        if not version.etag:
            raise Unsupported(f"cannot {what}: the store gives it no version")
        if self._numbered and not version.generation:  # the version is from a listing
            try:
                found = self.head(key).version
            except ObjectMissing:
                found = Version("")
            if found != version:
                raise ObjectChanged(f"cannot {what}: the object has changed, or is gone")
            version = found
        return self._put(key, data, version, what)

    def put_large(self, key: str, chunks: Iterable[bytes]) -> Version:
        check_key(key)
        pieces = iter(chunks)
        start = bytearray()
        for piece in pieces:
            start += piece
            if len(start) > PART:
                break
        else:
            return self.put_new(key, bytes(start))
        scratch = "/".join(filter(None, (key.rpartition("/")[0], scratch_name())))
        try:
            self._upload(scratch, bytes(start), pieces, f"create {self.location_of(key)}")
            return self.copy_new(scratch, key)
        finally:
            # Left by a killed process: a listing leaves it out.
            with suppress(StoreError):
                self.delete_many([scratch])

    def copy_new(self, source: str, target: str) -> Version:
        import obstore

        what = f"copy {self.location_of(source)} to {self.location_of(target)}"
        paths = self._path(source), self._path(target)

        def send() -> Version:
            asked(lambda: obstore.copy(self._store, *paths, overwrite=False), what)
            try:
                return self.head(target).version
            except StoreUnavailable as error:
                raise AnswerLost(str(error)) from None  # the object was copied

        def read_back(unanswered: bool) -> ReadBack:
            try:
                found = self.head(target)
            except ObjectMissing:
                return ReadBack(None, own=False)
            return ReadBack(found.version, own=self._are_equal(source, found))

        return settled(send, read_back, what=what, limit=self._limit, expected=None)

    def copy(self, source: str, target: str) -> None:
        import obstore

        what = f"copy {self.location_of(source)} to {self.location_of(target)}"
        paths = self._path(source), self._path(target)
        repeated(lambda: asked(lambda: obstore.copy(self._store, *paths, overwrite=True), what), self._limit)

    def delete_many(self, keys: Iterable[str]) -> None:
        import obstore

        what = f"remove objects of {self.location}"

        def remove(paths: Sequence[str]) -> None:
            repeated(lambda: asked(lambda: obstore.delete(self._store, paths), what), self._limit)

        paths = [self._path(key) for key in keys]
        for n in range(0, len(paths), PAGE):
            some = paths[n : n + PAGE]
            try:
                remove(some)
            except ObjectMissing:
                # GCS and Azure report a missing object, and may stop there.
                for path in some:
                    with suppress(ObjectMissing):
                        remove([path])

    def remove_listed(self, objects: Sequence[Listed]) -> Removed:
        return remove_unchanged(self, objects)

    def move_listed(self, objects: Mapping[Listed, str]) -> Removed:
        return move_unchanged(self, objects)

    def delete_folder(self, folder: str) -> None:
        check_key(folder)
        self.delete_many([found.key for found in self._list(folder, "")])

    def delete_incomplete(self, folder: str = "", *, older_than: float = 0.0) -> None:
        limit = time.time() - older_than
        found = (one for one in self._list_folder(folder).objects if is_scratch(one.key))
        self.delete_many([one.key for one in found if not older_than or one.modified < limit])

    def signed_url(self, key: str, seconds: float) -> str:
        import obstore

        path, what = self._path(key), f"sign a URL of {self.location_of(key)}"
        try:
            signed = asked(lambda: obstore.sign(self._store, "GET", path, timedelta(seconds=seconds)), what)
        except ValueError:  # memory
            return super().signed_url(key, seconds)
        return str(signed)

    # ---- parts

    def _put(self, key: str, data: bytes, expected: Version | None, what: str) -> Version:
        import obstore

        path, token = self._path(key), uuid.uuid4().hex
        mode: Any = "create" if expected is None else _condition(expected)

        def send() -> Version:
            attributes = {TOKEN: token}
            answer = asked(lambda: obstore.put(self._store, path, data, attributes=attributes, mode=mode), what)
            return self._version(answer)

        def read_back(unanswered: bool) -> ReadBack:
            try:
                found = repeated(lambda: self._head(path, what), self._limit)
            except ObjectMissing:
                return ReadBack(None, own=False)
            stored, wrote = self._stored(found.meta), found.attributes.get(TOKEN)
            if wrote is not None or not unanswered:
                return ReadBack(stored.version, own=wrote == token)
            # The store keeps no metadata: the content decides.
            own = stored.size == len(data) and self.get(key, limit=len(data)).data == data
            return ReadBack(stored.version, own=own)

        return settled(send, read_back, what=what, limit=self._limit, expected=expected)

    def _upload(self, key: str, start: bytes, pieces: Iterator[bytes], what: str) -> None:
        """Upload the parts of an object under a name that nobody else uses."""
        import obstore

        path, size = self._path(key), 0
        raised: list[Exception] = []

        def counted() -> Iterator[bytes]:
            nonlocal size
            try:
                for piece in chain((start,), pieces):
                    size += len(piece)
                    if size > LARGEST:
                        raise StoreError(f"cannot {what}: it has over {LARGEST} bytes, the limit of an object")
                    yield piece
            except Exception as error:
                raised.append(error)
                raise

        try:
            asked(lambda: obstore.put(self._uploads, path, counted(), use_multipart=True, chunk_size=PART), what)
        except Exception:
            if raised:
                raise raised[0] from None
            # The answer to the completion of the upload may be lost.
            with suppress(ObjectMissing):
                if self.head(key).size == size:
                    return
            raise

    def _are_equal(self, source: str, target: StoredObject) -> bool:
        if self.head(source).size != target.size:
            return False
        for at in range(0, target.size, PART):
            some = [(at, at + PART)]
            if self.get_ranges(source, some) != self.get_ranges(target.key, some, version=target.version):
                return False
        return True

    def _head(self, path: str, what: str) -> Any:
        """The answer to a HEAD request. A refusal of one has no body, so GET tells the cause of the status 404.

        It may be a missing bucket or, on versitygw, an unknown access key.
        """
        try:
            return self._fetch(path, what, {"head": True})
        except ObjectMissing as error:
            if error.code:
                raise
            return self._fetch(path, what)

    def _fetch(self, path: str, what: str, options: Mapping[str, Any] | None = None) -> Any:
        import obstore

        return asked(lambda: obstore.get(self._store, path, options=options), what)  # type: ignore[arg-type]

    def _path(self, key: str) -> str:
        path = self._prefix + check_key(key)
        if len(path.encode()) > LONGEST_KEY:
            raise UnsafePath(
                f"{self.location_of(key)} has over {LONGEST_KEY} bytes after the bucket, the limit of stores"
            )
        return path

    def _bytes(self, found: Any, size: int, what: str) -> bytes:
        """The body of an answer. Raises AnswerLost if it does not have this size."""
        data = bytes(asked(found.bytes, what))
        if len(data) != size:
            raise AnswerLost(f"cannot {what}: the store sends {len(data)} bytes instead of {size}")
        return data

    def _version(self, answer: Mapping[str, Any]) -> Version:
        etag = answer["e_tag"] or ""
        # Azure's listings leave out the quotes.
        quoted = etag if not etag or etag.endswith('"') else f'"{etag}"'
        return Version(quoted, (answer["version"] or "") if self._numbered else "")

    def _stored(self, meta: Mapping[str, Any]) -> StoredObject:
        key = meta["path"][len(self._prefix) :]
        return StoredObject(key, meta["size"], self._version(meta), meta["last_modified"].timestamp())


def _condition(version: Version) -> dict[str, str]:
    found = {"e_tag": version.etag, "version": version.generation}
    return {name: value for name, value in found.items() if value}

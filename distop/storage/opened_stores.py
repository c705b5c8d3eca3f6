"""Opens the store of a location; stores of the same bucket share their connections."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.runtime.lru_cache import LruCache
from distop.storage.deletion import Place
from distop.storage.files import local_path
from distop.storage.folder_store import FolderStore
from distop.storage.object_store import check_key
from distop.storage.remote_store import RemoteStore
from distop.storage.storage_access import storage_access_for
from distop.storage.storage_options import bucket_of, in_object_store
from distop.storage.storage_urls import check_place

if TYPE_CHECKING:
    from distop.storage.object_store import ObjectStore

_CACHED_BUCKETS = 64
_UPLOAD_RETRIES = 10
_clients: LruCache[tuple[Any, Any]] = LruCache(_CACHED_BUCKETS)


def open_store(location: str, *, limit: float | None = None) -> ObjectStore:
    """The store below a local path or a URL. Sends nothing. Raises InvalidArgument.

    ``limit``: maximum seconds of a call with its retries, if the configuration allows more.
    """
    local = local_path(location)
    if local is not None:
        if not local.is_absolute():
            raise InvalidArgument(f"the location {shown(location)} of a store must be an absolute path or a URL")
        return FolderStore(Place(str(local)))
    access = storage_access_for(location)
    if path := location.partition("://")[2].partition("/")[2].removesuffix("/"):
        check_key(path)

    def connect() -> tuple[Any, Any]:
        return access.obstore(), access.obstore(retries=_UPLOAD_RETRIES)

    # obstore's threads end at a fork, and a client keeps the credentials that it was made with.
    key = (os.getpid(), access.bucket.prefix, access.options, access.credentials_id())
    store, uploads = _clients.get(key, connect)
    return RemoteStore(
        location.rstrip("/"),
        store,
        prefix=access.bucket.path,
        limit=access.time_limit if limit is None else min(access.time_limit, limit),
        uploads=uploads,
        numbered=access.bucket.family == "gs",
    )


def has_store(location: str) -> bool:
    """Whether a location is a local path, or of a kind of object store that distop can write to. HDFS is none."""
    return local_path(location) is not None or in_object_store(location)


def store_of(place: Place) -> ObjectStore:
    """The store below a place. Sends nothing. Raises InvalidArgument, and UnsafePath if the place's path is ambiguous.

    On a disk, links are followed in the anchor only.
    """
    if local_path(place.anchor) is not None:
        return FolderStore(place)
    bucket_of(place.anchor)  # else the path could name the bucket
    return open_store(place.location)


class OpenedBuckets:
    """The stores of the buckets of some files; each is opened once. Thread-safe, to be used for a short time."""

    def __init__(self) -> None:
        self._stores: dict[str, ObjectStore] = {}

    def find(self, path: str) -> tuple[ObjectStore, str]:
        """The store of a file's bucket, and the file's key. Raises InvalidArgument for a URL not allowed in data."""
        check_place("the URL", path)
        scheme, _, rest = path.partition("://")
        name, _, key = rest.partition("/")
        bucket = f"{scheme}://{name}"
        store = self._stores.get(bucket)
        if store is None:
            store = self._stores[bucket] = open_store(bucket)
        return store, key


def object_at(path: str) -> tuple[ObjectStore, str]:
    """The store of one file's bucket, and the file's key. Raises InvalidArgument for a URL not allowed in data."""
    return OpenedBuckets().find(path)


def memory_store() -> ObjectStore:
    """A new store in the memory of this process, for tests."""
    from obstore.store import MemoryStore

    return RemoteStore("memory:", MemoryStore())

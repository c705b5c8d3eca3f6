"""The files below a location on a disk or in an object store, as another program sees them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from distop.storage.files import local_path
from distop.storage.opened_stores import open_store
from distop.storage.remote_store import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LARGEST = 1 << 30


def keys(location: str) -> list[str]:
    """The sorted keys of all files below a location, with those of incomplete writes."""
    return sorted(_keys(location))


def _keys(location: str) -> Iterator[str]:
    root = local_path(location)
    if root is not None:
        for folder, _, names in os.walk(root):  # a folder may be removed meanwhile
            yield from (str(path.relative_to(root)) for name in names if (path := Path(folder, name)).is_file())
        return
    store = open_store(location)
    assert isinstance(store, RemoteStore)
    yield from (found.key for found in store._list("", ""))


def read(location: str, key: str) -> bytes:
    """The content of a file. Raises FileNotFoundError."""
    root = local_path(location)
    return (root / key).read_bytes() if root is not None else open_store(location).get(key, limit=LARGEST).data


def write(location: str, key: str, data: bytes) -> str:
    """Create a file, as a writer of a table; returns its path or URL. Raises FileExistsError."""
    root = local_path(location)
    if root is None:
        open_store(location).put_new(key, data)
        return f"{location}/{key}"
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
    return str(path)


def remove(location: str, some: Iterable[str]) -> None:
    """Remove the files with these keys."""
    root = local_path(location)
    if root is None:
        open_store(location).delete_many(some)
        return
    for key in some:
        (root / key).unlink()

"""A ``FileIO`` for pyiceberg that limits the size of the files it reads."""

from __future__ import annotations

import gzip
import io
import re
from typing import Any

from pyiceberg.io import PY_IO_IMPL, FileIO, InputFile, OutputFile, load_file_io

from distop.errors import UnsafePath
from distop.storage.confinement import check_form
from distop.storage.files import METADATA_BYTES, local_path, open_regular, read, read_whole
from distop.storage.opened_stores import OpenedBuckets
from distop.storage.storage_access import storage_options_for
from distop.storage.storage_options import bucket_of, in_object_store
from distop.storage.storage_urls import check_paths

INNER_IMPL = "distop.py-io-impl"
"""The setting of a catalog for its original ``py-io-impl``."""
_OF_STORAGE = ("s3.", "gcs.", "adls.", "client.", INNER_IMPL)
"""Starts of the names of properties with which a catalog, or its settings here, say how to open files."""

_COMPRESSED = ".gz.metadata.json"
"""Suffix of files that pyiceberg decompresses."""


PARSED_BYTES = 64 << 20
"""Maximum bytes of a metadata file, decompressed: parsing needs some forty times as much memory."""
_PARSED = re.compile(r"\.metadata\.json(\.gz)?\Z")


def is_compressed(location: str) -> bool:
    """Whether a metadata file is compressed, by its name, like in pyiceberg."""
    return location.endswith(_COMPRESSED)


def bounded(settings: dict[str, Any]) -> dict[str, Any]:
    """A catalog's settings with this module's FileIO."""
    inner = {INNER_IMPL: settings[PY_IO_IMPL]} if PY_IO_IMPL in settings else {}
    return {**settings, **inner, PY_IO_IMPL: f"{BoundedIO.__module__}.{BoundedIO.__name__}"}


class BoundedIO(FileIO):
    """Opens files like pyiceberg with these properties, but removes none.

    Raises TooLarge for a file of more than METADATA_BYTES (metadata files: PARSED_BYTES), InvalidArgument for a path or
    URL that is not allowed in data.
    """

    def new_input(self, location: str) -> InputFile:
        check_paths((location,))
        check_form(location)
        own = not any(name.startswith(_OF_STORAGE) for name in self.properties)
        if own and in_object_store(location):
            return _BoundedFile(_StoredFile(location))
        return _BoundedFile(self._of(location).new_input(location))

    def new_output(self, location: str) -> OutputFile:
        check_paths((location,))
        check_form(location)
        return self._of(location).new_output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Raises UnsafePath: files that metadata name are never removed."""
        where = location if isinstance(location, str) else location.location
        raise UnsafePath(f"{where} was not removed: distop does not remove files that a table's metadata name")

    def _of(self, location: str) -> FileIO:
        rest = {name: value for name, value in self.properties.items() if name not in (PY_IO_IMPL, INNER_IMPL)}
        if INNER_IMPL in self.properties:
            rest[PY_IO_IMPL] = self.properties[INNER_IMPL]
        return load_file_io({**_configuration(location), **rest}, location)


def _configuration(location: str) -> dict[str, str]:
    """This process's configuration of a bucket of S3 as properties for pyiceberg; without credentials."""
    if not in_object_store(location) or bucket_of(location).family != "s3":
        return {}
    access = storage_options_for(location)
    found = {"s3.force-virtual-addressing": str(not access.path_style).lower()}
    if access.options.endpoint:
        found["s3.endpoint"] = access.options.endpoint
    if access.region:
        found["s3.region"] = access.region
    return found


class _StoredFile(InputFile):
    """An object that distop's own storage layer reads."""

    def __len__(self) -> int:
        store, key = OpenedBuckets().find(self.location)
        return store.head(key).size

    def exists(self) -> bool:
        try:
            return len(self) >= 0
        except FileNotFoundError:
            return False

    def open(self, seekable: bool = True) -> Any:
        return io.BytesIO(read(self.location, METADATA_BYTES))


class _BoundedFile(InputFile):
    def __init__(self, inner: InputFile) -> None:
        super().__init__(inner.location)
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def exists(self) -> bool:
        return self._inner.exists()

    def open(self, seekable: bool = True) -> Any:
        path = local_path(self.location)
        limit = min(METADATA_BYTES, PARSED_BYTES) if _PARSED.search(self.location) else METADATA_BYTES
        with self._inner.open(seekable) if path is None else open_regular(str(path), follow=False) as stream:
            data = read_whole(stream, limit, self.location)
        if is_compressed(self.location):
            # A few bytes may decompress to any number: count them here, before all of them are in memory.
            with gzip.open(io.BytesIO(data)) as text:
                read_whole(text, limit, self.location)
        return io.BytesIO(data)

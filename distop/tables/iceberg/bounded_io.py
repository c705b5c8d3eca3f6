"""A ``FileIO`` for pyiceberg that limits the size of the files it reads."""

from __future__ import annotations

import gzip
import io
import re
from typing import TYPE_CHECKING, Any

from pyiceberg.io import PY_IO_IMPL, FileIO, InputFile, OutputFile, load_file_io

from distop.errors import UnsafePath
from distop.storage.confinement import check_form
from distop.storage.files import METADATA_BYTES, local_path, open_regular, read, read_whole
from distop.storage.opened_stores import object_at
from distop.storage.storage_options import in_object_store
from distop.storage.storage_urls import check_paths

if TYPE_CHECKING:
    from types import TracebackType

    from pyiceberg.io import OutputStream

INNER_IMPL = "distop.py-io-impl"
"""The setting of a catalog for its original ``py-io-impl``."""
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

    Files in an object store are opened by distop's own configuration of the bucket, whatever the properties.

    Raises TooLarge for a file of more than METADATA_BYTES (metadata files: PARSED_BYTES), InvalidArgument for a path or
    URL that is not allowed in data.
    """

    def new_input(self, location: str) -> InputFile:
        check_paths((location,))
        check_form(location)
        stored = in_object_store(location)
        return _BoundedFile(_StoredFile(location) if stored else self._of(location).new_input(location))

    def new_output(self, location: str) -> OutputFile:
        check_paths((location,))
        check_form(location)
        return _NewFile(location) if in_object_store(location) else self._of(location).new_output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Raises UnsafePath: files that metadata name are never removed."""
        where = location if isinstance(location, str) else location.location
        raise UnsafePath(f"{where} was not removed: distop does not remove files that a table's metadata name")

    def _of(self, location: str) -> FileIO:
        rest = {name: value for name, value in self.properties.items() if name not in (PY_IO_IMPL, INNER_IMPL)}
        if INNER_IMPL in self.properties:
            rest[PY_IO_IMPL] = self.properties[INNER_IMPL]
        return load_file_io(rest, location)


class _StoredFile(InputFile):
    """An object that distop's own storage layer reads."""

    def __len__(self) -> int:
        store, key = object_at(self.location)
        return store.head(key).size

    def exists(self) -> bool:
        try:
            return len(self) >= 0
        except FileNotFoundError:
            return False

    def open(self, seekable: bool = True) -> Any:
        return io.BytesIO(read(self.location, METADATA_BYTES))


class _NewFile(OutputFile):
    """An object that distop's own storage layer writes."""

    def __len__(self) -> int:
        return len(self.to_input_file())

    def exists(self) -> bool:
        return self.to_input_file().exists()

    def to_input_file(self) -> InputFile:
        return _BoundedFile(_StoredFile(self.location))

    def create(self, overwrite: bool = False) -> OutputStream:
        return _Upload(self.location, overwrite)


class _Upload:
    """The bytes of an object, which is written as a whole when this is closed, but not after an error.

    Closing raises ObjectExists unless it overwrites, and the other errors of a store.
    """

    def __init__(self, location: str, overwrite: bool) -> None:
        self._location = location
        self._overwrite = overwrite
        self._data: bytearray | None = bytearray()

    def write(self, b: bytes) -> int:
        if self._data is None:
            raise ValueError(f"the file {self._location} is closed")
        self._data += b
        return len(b)

    def tell(self) -> int:
        return len(self._data or b"")

    def close(self) -> None:
        data, self._data = self._data, None
        if data is not None:
            store, key = object_at(self._location)
            (store.put if self._overwrite else store.put_new)(key, bytes(data))

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(
        self, exctype: type[BaseException] | None, excinst: BaseException | None, exctb: TracebackType | None
    ) -> None:
        if exctype is not None:
            self._data = None
        self.close()


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

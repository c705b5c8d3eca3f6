"""Finds and reads an Iceberg table's current metadata file, once for the checks and for Spark.

Iceberg itself loads metadata by path. A user who can replace the file, or move its folder, could replace checked
metadata. So the text is read here, and Java parses the same text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.runtime.lru_cache import LruCache
from distop.storage.confinement import TableFiles, check_metadata, table_of
from distop.storage.files import NotRegular, identity
from distop.storage.store_errors import unavailable
from distop.tables.iceberg.avro import ManifestIO
from distop.tables.reading.table_folders import ICEBERG_METADATA, advice

if TYPE_CHECKING:
    from distop.storage.location import Location
    from distop.tables.iceberg.bounded_io import BoundedIO

METADATA = ICEBERG_METADATA

HINT = "version-hint.text"
"""The file in a table's metadata folder from whose number readers start to look for the current version."""
HINT_BYTES = 64
"""Maximum bytes of the version hint, a number."""
_NUMBERED = re.compile(r"v(0|[1-9][0-9]{0,8})(\.gz)?\.metadata\.json")
_EARLY = re.compile(r"v[0-9]+\.metadata\.json\.gz")
"""Names of early Iceberg releases, which Iceberg also finds."""
_HINTED = re.compile(r"([0-9]{1,9})(?:\r\n|\r|\n)?|\s*")
_CACHED_CHARACTERS = 4 << 20
"""Maximum characters of a cached file."""
_UNKNOWN = 2
"""Maximum length of the identity of a file that does not exist, or is not on a disk."""


@frozen
class MetadataFile:
    """The content of a metadata file when it was read.

    ``source``: its path or URL; ``text``: its JSON, ``digest``: of the text; ``content``: pyiceberg's
    ``TableMetadata``; ``io``: opens the files that it names.
    """

    source: str
    text: str
    digest: str
    content: Any
    io: BoundedIO

    def manifests(self) -> ManifestIO:
        """The ``FileIO`` for its manifests."""
        return ManifestIO(self.io, TableFiles(table_of(self.source)))

    def key(self) -> tuple[str, str]:
        """A cache key for this content, even if the file has been replaced since."""
        return self.source, self.digest


_read: LruCache[MetadataFile] = LruCache(4)


def identity_on_disk(source: str) -> tuple[str, ...] | None:
    """A cache key for a metadata file; None if the key would stay the same for a replaced file."""
    key = identity(source)
    return key if len(key) > _UNKNOWN else None


def read_file(source: str) -> MetadataFile:
    """A metadata file, from the cache if it is unchanged.

    Raises InvalidArgument if it is not valid metadata, TableUnavailable if it cannot be read.
    """
    from pyiceberg.exceptions import ValidationError

    check_metadata(source)
    key = identity_on_disk(source)
    try:
        if key is None:
            return read_anew(source)
        return _read.get(key, lambda: read_anew(source), keep=lambda file: len(file.text) <= _CACHED_CHARACTERS)
    except NotRegular as error:
        raise InvalidArgument(str(error)) from error
    except OSError as error:
        raise unavailable(f"cannot read the metadata file {source}: {error}", error) from error
    except (ValidationError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InvalidArgument(f"the file {source} is not valid Iceberg metadata: {reason}") from error


def json_of(source: str) -> dict[str, Any] | None:
    """The fields of a metadata file of any version; None if it is not JSON, as after a crash of its writer, or is gone.

    Raises InvalidArgument if it may not be opened, TableUnavailable if it cannot be read.
    """
    try:
        found = json.loads(_text_of(source))
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError):
        return None
    except OSError as error:
        raise unavailable(f"cannot read the metadata file {source}: {error}", error) from error
    return found if isinstance(found, dict) else None


def _text_of(source: str) -> str:
    """The text of a metadata file. Raises the errors of :func:`read_anew`, except those for invalid metadata."""
    from distop.tables.iceberg.bounded_io import BoundedIO, is_compressed

    check_metadata(source)
    with BoundedIO().new_input(source).open() as stream:
        data = stream.read()
    return (gzip.decompress(data) if is_compressed(source) else data).decode()


def read_anew(source: str) -> MetadataFile:
    """A metadata file, not from the cache.

    Raises InvalidArgument if it may not be opened, OSError, and pyiceberg's errors for invalid metadata (ValueError and
    its own).
    """
    from pyiceberg.table.metadata import TableMetadataUtil

    from distop.tables.iceberg.bounded_io import BoundedIO, is_compressed

    check_metadata(source)
    # Without the table's properties, which could choose the code that opens its files, and the host.
    io = BoundedIO()
    with io.new_input(source).open() as stream:
        data = stream.read()
    if is_compressed(source):
        data = gzip.decompress(data)
    text, digest = data.decode(), hashlib.blake2b(data, digest_size=16).hexdigest()
    return MetadataFile(source, text, digest, TableMetadataUtil.parse_raw(text), io)


def current_metadata_file(location: Location) -> str:
    """The table's current metadata file: the last of consecutive versions, starting at the version hint.

    So do Iceberg's file-system tables, because the hint may be outdated. Raises InvalidArgument if there is none, or
    only a catalog knows it; TableUnavailable if the folder cannot be listed.
    """
    names = location.names_in(METADATA)
    matches = [found for name in names if (found := _NUMBERED.fullmatch(name))]
    # If a version has two files, Iceberg uses the uncompressed one.
    matches.sort(key=lambda found: found[2] is None)
    numbered = {int(found[1]): found[0] for found in matches}
    if former := next(filter(_EARLY.fullmatch, names), None):
        raise InvalidArgument(
            f"the table at {location.text!r} has a metadata file {former!r} named by an early Iceberg release, which "
            "is not supported: rename it to end in .gz.metadata.json"
        )
    if not numbered:
        if any(name.endswith(".metadata.json") for name in names):
            raise InvalidArgument(
                f"the table at {location.text!r} belongs to a catalog, and only that knows its current metadata: "
                "register it with --option catalog=…, and its name in the catalog as its location"
            )
        raise InvalidArgument(
            f"the location {location.text!r} has no Iceberg table: it has no metadata file{advice(location)}"
        )
    hint = _HINTED.fullmatch(location.text_in(f"{METADATA}/{HINT}", HINT_BYTES) if HINT in names else "")
    if hint is None:
        # Iceberg uses its first line, or lists the folder: Spark might read another file than was checked here.
        raise InvalidArgument(
            f"the file {HINT} of the table at {location.text!r} has no version number: write the number of the "
            "current metadata file into it, or remove it"
        )
    version = int(hint[1]) if hint[1] else max(numbered)
    if version not in numbered:
        raise InvalidArgument(
            f"the metadata of the table at {location.text!r} is incomplete: it has no file for the version in {HINT}"
        )
    while version + 1 in numbered:
        version += 1
    source = f"{location.text.rstrip('/')}/{METADATA}/{numbered[version]}"
    check_metadata(source)
    return source


def hinted_version(text: str) -> int | None:
    """The number in a version hint; None if it has none."""
    found = _HINTED.fullmatch(text)
    return int(found[1]) if found and found[1] else None


def metadata_version(source: str) -> int:
    """The number of a metadata file of a table by folder. Raises InvalidArgument if its name has none."""
    found = _NUMBERED.fullmatch(source.rpartition("/")[2])
    if found is None:
        raise InvalidArgument(f"the name of the metadata file {source} has no version number: it belongs to a catalog")
    return int(found[1])


def read_metadata(source: str) -> tuple[Any, ManifestIO]:
    """The metadata, and the ``FileIO`` for the manifests. Raises the errors of :func:`read_file`."""
    file = read_file(source)
    return file.content, file.manifests()

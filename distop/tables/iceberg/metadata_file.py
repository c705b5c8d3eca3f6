"""An Iceberg table's metadata file, read once: what is checked of it is what Spark is given.

Iceberg loads metadata by their path, and whoever may write the file, or move its folder, chooses what stands there by
then. So its text is read here, and Java makes its table of that text.
"""

from __future__ import annotations

import gzip
import hashlib
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.frozen import frozen
from distop.runtime.lru_cache import LruCache
from distop.storage.confinement import TableFiles, check_metadata, table_of
from distop.storage.files import NotRegular, identity
from distop.tables.iceberg.avro import ManifestIO

if TYPE_CHECKING:
    from distop.tables.iceberg.bounded_io import BoundedIO

_KEPT_BYTES = 4 << 20
"""Of a file at most that is kept as it was read."""
_UNKNOWN = 2
"""So long is the identity of a file that is gone, or not on a disk: at most."""


@frozen
class MetadataFile:
    """A metadata file as it was read. ``source``: its path or URL; ``text``: its JSON; ``content``: what pyiceberg
    makes of that, a ``TableMetadata``; ``io``: opens what it names.
    """

    source: str
    text: str
    digest: str
    """Of the text."""
    content: Any
    io: BoundedIO

    def manifests(self) -> ManifestIO:
        """What its manifests are read by."""
        return ManifestIO(self.io, TableFiles(table_of(self.source)))

    def key(self) -> tuple[str, str]:
        """What tells it from others, whatever stands at its path by now."""
        return self.source, self.digest


_read: LruCache[MetadataFile] = LruCache(4)


def identity_on_disk(source: str) -> tuple[str, ...] | None:
    """The key of what is kept of a metadata file; None where another one of this name would not be told apart."""
    key = identity(source)
    return key if len(key) > _UNKNOWN else None


def read_file(source: str) -> MetadataFile:
    """The file. Raises InvalidArgument for what is no metadata, TableUnavailable where it cannot be read."""
    from pyiceberg.exceptions import ValidationError

    check_metadata(source)
    key = identity_on_disk(source)
    try:
        if key is None:
            return read_anew(source)
        return _read.get(key, lambda: read_anew(source), keep=lambda file: len(file.text) <= _KEPT_BYTES)
    except NotRegular as error:
        raise InvalidArgument(str(error)) from error
    except OSError as error:
        raise TableUnavailable(f"the metadata file {source} cannot be read: {error}") from error
    except (ValidationError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InvalidArgument(f"the file {source} is no Iceberg metadata that can be read here: {reason}") from error


def read_anew(source: str) -> MetadataFile:
    """The file, whatever is kept of it. Raises InvalidArgument where it may not be opened, OSError, and what pyiceberg
    raises where it is no metadata: ValueError, and errors of its own.
    """
    from pyiceberg.table.metadata import TableMetadataUtil

    from distop.tables.iceberg.bounded_io import BoundedIO, is_compressed

    check_metadata(source)
    # Without the table's properties: they would choose the code that opens its files, and the host.
    io = BoundedIO()
    with io.new_input(source).open() as stream:
        data = stream.read()
    if is_compressed(source):
        data = gzip.decompress(data)
    text, digest = data.decode(), hashlib.blake2b(data, digest_size=16).hexdigest()
    return MetadataFile(source, text, digest, TableMetadataUtil.parse_raw(text), io)

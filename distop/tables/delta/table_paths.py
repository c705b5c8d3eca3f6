"""Paths in a Delta log: of data files, deletion vectors and sidecars, which must be below the table's folder.

A log is not trusted: an absolute path, a URL or ``..`` in it is refused. So shallow clones, and files of other tables,
are not read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.storage.files import local_path
from distop.tables.reading.table_folders import DELTA_LOG

if TYPE_CHECKING:
    from distop.storage.confinement import TableFiles

LOG = DELTA_LOG
SIDECARS = "_sidecars"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_SOURCE = re.compile(rf"(.*)/{LOG}/([0-9]{{20}})\.json", re.DOTALL)
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_ENCODED_UUID = 20
"""Characters of a UUID in Z85."""


def source_of(root: str, version: int) -> str:
    """The path of a version's commit file, which is the ``source`` of plans of this version."""
    return f"{root}/{LOG}/{commit_name(version)}"


def commit_name(version: int) -> str:
    """The name of a version's commit file in the log."""
    return f"{version:020}.json"


def parse_source(source: str) -> tuple[str, int]:
    """The table's folder and the version of a plan's ``source``. Raises InvalidArgument for another path."""
    found = _SOURCE.fullmatch(source)
    if found is None:
        raise InvalidArgument(f"the plan names {shown(source)}, which is not a commit file of a Delta table")
    return found[1], int(found[2])


def data_path(root: str, encoded: object, files: TableFiles) -> str:
    """The planned path of a data file for its percent-encoded path in the log.

    Raises InvalidArgument for a path that is not relative, or a file that may not belong to the table.
    """
    if not isinstance(encoded, str) or not encoded or "\0" in encoded:
        raise InvalidArgument(f"the log of the Delta table {root!r} has the file path {shown(encoded)}")
    if encoded.startswith("/") or _SCHEME.match(encoded):
        raise InvalidArgument(
            f"the log of the Delta table {root!r} has the file path {shown(encoded)}: only relative paths are "
            "supported, so copy the rows of a shallow clone to a new table"
        )
    try:
        relative = unquote(encoded, errors="strict")
        relative.encode()
    except UnicodeError:
        raise InvalidArgument(f"the path {shown(encoded)} in the log of {root!r} is not UTF-8") from None
    path = f"{root}/{relative}"
    files.check((path,), below=True)
    return path


def for_spark(path: str) -> str:
    """A planned path as the percent-encoded URI that Delta's reader expects in an ``add``."""
    local = local_path(path)
    if local is not None:
        return "file://" + quote(str(local), errors="surrogateescape")
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{quote(rest, safe='/@:', errors='surrogateescape')}"


def vector_path(root: str, text: str) -> str:
    """The path of a deletion vector's file for its relative form in the log: a prefix, and a UUID in Z85.

    Raises InvalidArgument.
    """
    prefix, encoded = text[:-_ENCODED_UUID], text[-_ENCODED_UUID:]
    try:
        number = _decoded(encoded)
    except ValueError:
        raise InvalidArgument(f"the log of {root!r} has the invalid deletion vector {shown(text)}") from None
    uuid = "-".join((number[:8], number[8:12], number[12:16], number[16:20], number[20:]))
    folder = f"{root}/{prefix}" if prefix else root
    return f"{folder}/deletion_vector_{uuid}.bin"


def _decoded(text: str) -> str:
    """The hexadecimal digits of a text in Z85. Raises ValueError."""
    if len(text) != _ENCODED_UUID:
        raise ValueError(text)
    found = bytearray()
    for at in range(0, _ENCODED_UUID, 5):
        value = 0
        for char in text[at : at + 5]:
            value = value * 85 + _Z85.index(char)
        if value >= 1 << 32:
            raise ValueError(text)
        found += value.to_bytes(4, "big")
    return found.hex()

"""Recognizes folders of Delta, Iceberg and Hudi tables, which another format would read wrongly.

Such a folder also has data files that the table no longer has. Only its log or its metadata shows which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distop.storage.location import ListedFile, Location

DELTA_LOG = "_delta_log"
"""The folder below a Delta table that has its log."""
ICEBERG_METADATA = "metadata"
"""The folder below an Iceberg table that has its metadata files."""
_ICEBERG_DATA = "data"
_ICEBERG_FILES = (".metadata.json", ".metadata.json.gz")


@frozen
class FolderKind:
    """A kind of table: its name, with an article, and its format; "" if distop has none for it."""

    article: str
    name: str
    format: str = ""

    def __str__(self) -> str:
        return f"{self.article} {self.name} table"


DELTA = FolderKind("a", "Delta", "delta")
ICEBERG = FolderKind("an", "Iceberg", "iceberg")
_BY_FOLDER = {DELTA_LOG: DELTA, ".hoodie": FolderKind("a", "Hudi")}
"""The kinds of tables that are shown by a folder below them, if that is not empty."""
SHOWING = (*_BY_FOLDER, ICEBERG_METADATA)
"""The names of folders that show such tables."""


def kind_at(location: Location) -> FolderKind | None:
    """The kind of table whose folder this is; None for other folders. Raises InvalidArgument and TableUnavailable."""
    for folder, kind in _BY_FOLDER.items():
        if location.names_in(folder):
            return kind
    if _has_metadata(location.names_in(ICEBERG_METADATA)):
        return ICEBERG
    return None


def advice(location: Location) -> str:
    """For the error about a folder without the expected table: what other table it is; "" if it is none."""
    kind = kind_at(location)
    return f"; it is {kind}, so register it with --format {kind.format}" if kind is not None and kind.format else ""


def check_plain(location: Location) -> None:
    """Raises InvalidArgument if a folder is the folder of such a table, and TableUnavailable."""
    kind = kind_at(location)
    if kind is not None:
        raise belongs_to(location.text, location.text, kind)


def check_above(location: Location, known: dict[str, FolderKind | None] | None = None) -> None:
    """Raises InvalidArgument if a folder is a partition or the data of such a table.

    Folders above that cannot be listed are skipped: this process may have rights for the location only. ``known``: the
    kinds of folders from earlier calls, to which it adds.
    """
    known = {} if known is None else known
    for above in folders_above(location):
        if above.text not in known:
            known[above.text] = kind_above(above)
        kind = known[above.text]
        if kind is not None:
            raise belongs_to(location.text, above.text, kind)


def folders_above(location: Location) -> Iterator[Location]:
    """The folders that a location is a partition or the data of, if one of them is a table."""
    above: Location | None = location
    while above is not None and is_inner(above.name):
        above = above.parent()
        if above is not None:
            yield above


def is_inner(name: str) -> bool:
    """Whether a folder of this name may be a partition, or the data of an Iceberg table."""
    return "=" in name or name == _ICEBERG_DATA


def kind_above(folder: Location) -> FolderKind | None:
    """The kind of table whose folder this is; None also if it cannot be listed."""
    try:
        return kind_at(folder)
    except TableUnavailable:
        return None


def shown_kinds(path: str) -> Iterator[tuple[str, FolderKind]]:
    """The folders that the path of an object shows to be such tables, with their kinds; relative as the path."""
    parts = path.split("/")
    for n, part in enumerate(parts[:-1]):
        if part in _BY_FOLDER:
            yield "/".join(parts[:n]), _BY_FOLDER[part]
    if parts[-2:-1] == [ICEBERG_METADATA] and _has_metadata(parts[-1:]):
        yield "/".join(parts[:-2]), ICEBERG


def belongs_to(location: str, table: str, kind: FolderKind) -> InvalidArgument:
    """The error for a location that is, or is inside of, the folder of such a table."""
    if location == table:
        return _refused(f"the location {location!r} is {kind}", kind, "it")
    return _refused(f"the location {location!r} belongs to {kind}", kind, table)


def check_subfolder(location: Location, folder: str, name: str) -> None:
    """Raises InvalidArgument if a folder shows such a table. ``folder``: the one around it, "" at the root."""
    kind = _BY_FOLDER.get(name)
    inner = f"{folder}/{name}" if folder else name
    if kind is not None and location.names_in(inner):
        raise _inside(location, folder, kind)
    if name == ICEBERG_METADATA and _has_metadata(location.names_in(inner)):
        raise _inside(location, folder, ICEBERG)


def shown_by(key: str) -> tuple[FolderKind, str, str] | None:
    """The table that a file shows by its path below a folder; None if it shows none.

    Returns the kind, the table's folder ("" for the folder itself), and the folder of its metadata.
    """
    parts = key.split("/")
    for n, part in enumerate(parts[:-1]):
        kind = _BY_FOLDER.get(part)
        if part == ICEBERG_METADATA and n == len(parts) - 2 and parts[-1].endswith(_ICEBERG_FILES):
            kind = ICEBERG
        if kind is not None:
            return kind, "/".join(parts[:n]), "/".join(parts[: n + 1])
    return None


def _has_metadata(names: Iterable[str]) -> bool:
    return any(name.endswith(_ICEBERG_FILES) for name in names)


def check_file(location: Location, file: ListedFile) -> None:
    """Raises InvalidArgument if a file is the metadata of an Iceberg table."""
    around, _, name = file.folder.rpartition("/")
    if name == ICEBERG_METADATA and file.path.endswith(_ICEBERG_FILES):
        raise _inside(location, around, ICEBERG)


def _inside(location: Location, folder: str, kind: FolderKind) -> InvalidArgument:
    if not folder:
        return _refused(f"the location {location.text!r} is {kind}", kind, "it")
    return _refused(f"the location {location.text!r} has the {kind.name} table {folder!r}", kind, "it")


def _refused(what: str, kind: FolderKind, table: str) -> InvalidArgument:
    if not kind.format:
        return InvalidArgument(f"{what}, which distop does not support: its removed rows would count")
    return InvalidArgument(
        f"{what}: as Parquet files, its removed rows would count; register {table} with --format {kind.format}"
    )

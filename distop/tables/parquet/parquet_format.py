"""The planner for folders of Parquet files: Hive-style partitions at any depth, or groups of files."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING
from urllib.parse import unquote

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.plan import MAX_PARTITIONS, PartitionPlan, Planned
from distop.storage.location import Location, named_parquet
from distop.tables.formats import Format
from distop.tables.table_options import check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from distop.protocol.plan import Pinned
    from distop.protocol.records import TableRecord
    from distop.storage.location import Entry
    from distop.tables.formats import Spark
    from distop.tables.reader import Reader
    from distop.tables.table_options import Options

log = logging.getLogger("distop.tables")

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
EMPTY = "empty"
"""The name of the one partition of a table that is known to have none: its job still tells whether it has the columns.
"""
_UNNAMEABLE = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")

_DIGITS = re.compile(r"([0-9]+)")
_LOOKED_AT = 1_000
"""Files whose names are looked at before a table is registered: those of the location itself come first."""
_OPENED = 100
"""Of them, so many whose names tell nothing are opened: on a remote file system each costs a request."""
_CHECKED_EVERY = 1_000
"""Files listed between two looks at whether to go on."""


def check_table(record: TableRecord) -> TableRecord:
    """The record as it is to be stored. Of the data the first files are looked at: one that neither its name nor its
    first bytes show to be Parquet is refused. Hidden files are left alone.

    Raises InvalidArgument, naming it, for an unknown option, for a location that cannot be opened, does not exist,
    holds no Parquet file, or another one, and for a type of what is no partition column there.
    """
    options = check_options(record.options)
    try:
        location = Location.of(record.location)
        looked_at = list(islice(location.walk(), _LOOKED_AT))
    except TableUnavailable as error:
        raise InvalidArgument(str(error)) from error
    if not looked_at:
        raise InvalidArgument(f"the location {record.location!r} holds no Parquet files")
    for entry in islice((entry for entry in looked_at if not named_parquet(entry)), _OPENED):
        try:
            is_data = location.begins_as_parquet(entry)
        except OSError as error:
            raise InvalidArgument(f"the file {entry.path} cannot be read: {error.strerror or error}") from None
        if not is_data:
            raise InvalidArgument(
                f"the location {record.location!r} must hold Parquet files only, and {entry.path} is none: move it "
                "away, or give it a name that begins with '_' or '.'"
            )
    check_types(options, partition_values(looked_at[0].folder) or (), location)
    return replace(record, location=location.text)


def plan_table(table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
    """List the table and freeze its partitions: files with path, size and modification time.

    Where some files are named as Parquet is, others count only if they begin as Parquet does; the rest is logged. Where
    none is, all files count, and one that is something else fails its partition's job by name.

    Raises InvalidArgument where the layout is mixed, TableUnavailable where the location cannot be reached from here or
    holds no file: with no partitions, every promise about the table would hold.
    """
    location = Location.of(table.location)
    entries: list[Entry] = []
    for entry in location.walk():
        if len(entries) % _CHECKED_EVERY == 0:
            check()
        entries.append(entry)
    if not entries:
        raise location.nothing_there()
    return plan(data_files(entries, location), location, check_options(table.options))


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts ``day=2`` before ``day=10``; the text itself decides between ``01`` and ``1``."""
    parts = _DIGITS.split(text)
    return (*((1, int(p), p) if i % 2 else (0, 0, p) for i, p in enumerate(parts)),)


def partition_values(folder: str) -> dict[str, str | None] | None:
    """``month=1/day=__HIVE_DEFAULT_PARTITION__`` → ``{"month": "1", "day": None}``; None where it is no such path.

    Names and values are unescaped (``%3A`` is ``:``) and stay text: ``01`` is not ``1``.
    """
    values: dict[str, str | None] = {}
    for part in folder.split("/"):
        name, equals, value = part.partition("=")
        if not equals or not name:
            return None
        name = unquote(name)
        if name in values:
            return None
        values[name] = None if value == HIVE_NULL else unquote(value)
    return values


def escaped(text: str) -> str:
    """A name or a value as Hive and Spark write it into a path: what may not stand in one becomes ``%3A``."""
    return _UNNAMEABLE.sub(lambda found: f"%{ord(found[0]):02X}", text)


def data_files(entries: Sequence[Entry], location: Location) -> list[Entry]:
    """The files that are the table's data: all of them, unless some are named as Parquet is and others are not; then
    those others are opened, and what is no Parquet is left out and logged. One that cannot be read is data: its job
    fails and names it, where leaving it out would let its rows go unseen.
    """
    others = [entry for entry in entries if not named_parquet(entry)]
    if not others or len(others) == len(entries):
        return list(entries)
    strange = {entry for entry in others if not _may_be_data(entry, location)}
    if strange:
        example = min(entry.path for entry in strange)
        said = "%d files of %s are not Parquet, and no job reads them, such as %s: move them away"
        log.warning(said, len(strange), location.text, example)
    return [entry for entry in entries if entry not in strange]


def _may_be_data(entry: Entry, location: Location) -> bool:
    try:
        return location.begins_as_parquet(entry)
    except OSError:
        return True


def plan(entries: Iterable[Entry], location: Location, options: Options) -> Planned:
    """Freeze the listing. Raises InvalidArgument for a mixed layout, or over a million partitions."""
    folders: dict[str, list[tuple[str, int, int]]] = {}
    for entry in entries:
        folders.setdefault(entry.folder, []).append((entry.path, entry.size, entry.mtime_ns))
    for files in folders.values():
        files.sort(key=lambda f: (natural(f[0]), f[0]))
    partitioned = set(folders) - {""}
    if partitioned and "" in folders:
        example = folders[""][0][0]
        folder = min(partitioned, key=natural)
        raise InvalidArgument(
            f"the location {location.text!r} has a mixed layout: the file {example} stands beside the folder {folder}"
        )
    if partitioned:
        partitions = list(_by_folder(folders, location, options))
    else:
        check_types(options, [], location)
        partitions = list(_by_group(folders.get("", []), options))
    if len(partitions) > MAX_PARTITIONS:
        raise InvalidArgument(f"the location {location.text!r} has {len(partitions)} partitions, over a million")
    return Planned(partitions, _version(partitions))


def _by_folder(
    folders: dict[str, list[tuple[str, int, int]]], location: Location, options: Options
) -> Iterator[PartitionPlan]:
    columns: list[str] | None = None
    first = ""
    for ordinal, folder in enumerate(sorted(folders, key=lambda name: (natural(name), name))):
        values = partition_values(folder)
        if values is None:
            raise InvalidArgument(
                f"the location {location.text!r} has a mixed layout: the folder {folder!r} is not made of column=value"
            )
        if columns is None:
            columns, first = list(values), folder
            check_types(options, columns, location)
        elif list(values) != columns:
            raise InvalidArgument(
                f"the location {location.text!r} has a mixed layout: {folder!r} has other partition columns "
                f"than {first!r}"
            )
        files = folders[folder]
        yield PartitionPlan(ordinal, folder, sum(f[1] for f in files), tuple(files), values=values)


def _by_group(files: list[tuple[str, int, int]], options: Options) -> Iterator[PartitionPlan]:
    for ordinal, (name, group) in enumerate(in_groups(files, options)):
        yield PartitionPlan(ordinal, name, sum(f[1] for f in group), tuple(group))


def in_groups(
    files: Iterable[tuple[str, int, int]], options: Options
) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Files that are in no partition, in order, in named groups of bounded size."""
    group: list[tuple[str, int, int]] = []
    size = ordinal = 0
    for file in files:
        if group and (size + file[1] > options.group_bytes or len(group) >= options.group_files):
            yield f"files-{ordinal:06}", group
            group, size, ordinal = [], 0, ordinal + 1
        group.append(file)
        size += file[1]
    if group:
        yield f"files-{ordinal:06}", group


def check_types(options: Options, columns: Iterable[str], location: Location) -> None:
    """Raises InvalidArgument where ``partition_types`` names what is no partition column."""
    known = list(columns)
    for column in options.partition_types:
        if column not in known:
            raise InvalidArgument(
                f"partition_types names {column!r}, which is no partition column of {location.text!r} "
                f"(it has: {', '.join(known) or 'none'})"
            )


def _version(partitions: list[PartitionPlan]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for partition in partitions:
        digest.update(told(partition))
    return f"files-{digest.hexdigest()}"


def told(partition: PartitionPlan) -> bytes:
    """A partition's files, for the digest that is a table's version."""
    text = "".join(f"{path}\0{size}\0{mtime_ns}\n" for path, size, mtime_ns in partition.files)
    return text.encode("utf-8", "surrogateescape")


class ParquetFormat(Format):
    """Folders of Parquet files."""

    def check_table(self, record: TableRecord) -> TableRecord:
        return check_table(record)

    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
        return plan_table(table, check, spark)

    def reader(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
        from distop.tables.parquet.parquet_reader import ParquetReader

        return ParquetReader(table, plans, check_options(table.options).partition_types)


FORMAT = ParquetFormat()

"""The planner for folders of Parquet files: Hive-style partitions at any depth, or groups of files."""

from __future__ import annotations

import hashlib
import logging
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from distop.core.plan import MAX_PARTITIONS, PartitionPlan, Planned
from distop.errors import InvalidArgument
from distop.tables.location import named_parquet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distop.tables.location import Entry, Location
    from distop.tables.options import Options

log = logging.getLogger("distop.tables")

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"

_DIGITS = re.compile(r"([0-9]+)")


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
        log.warning("%d files of %s are left out, since they are no Parquet: %s", len(strange), location.text, example)
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
    group: list[tuple[str, int, int]] = []
    size = ordinal = 0
    for file in files:
        if group and (size + file[1] > options.group_bytes or len(group) >= options.group_files):
            yield PartitionPlan(ordinal, f"files-{ordinal:06}", size, tuple(group))
            group, size, ordinal = [], 0, ordinal + 1
        group.append(file)
        size += file[1]
    if group:
        yield PartitionPlan(ordinal, f"files-{ordinal:06}", size, tuple(group))


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
        for path, size, mtime_ns in partition.files:
            digest.update(f"{path}\0{size}\0{mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return f"files-{digest.hexdigest()}"

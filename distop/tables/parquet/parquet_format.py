"""The planner for folders of Parquet files: Hive-style partitions at any depth, or groups of files."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.plan import MAX_PARTITIONS, PartitionPlan, Planned
from distop.storage.deletion_scope import OWN
from distop.storage.location import Location, named_parquet, root_of
from distop.tables.formats import Format
from distop.tables.parquet import folder_swap
from distop.tables.reading import table_folders
from distop.tables.table_options import check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from distop.protocol.plan import Pinned
    from distop.protocol.records import TableRecord
    from distop.storage.location import ListedFile
    from distop.tables.commits import CommitContext, FileReplacer, ReplacementContext
    from distop.tables.formats import Spark
    from distop.tables.partition_removal import PartitionRemoval
    from distop.tables.reachability import Reachability
    from distop.tables.reader import Reader
    from distop.tables.reading.file_facts import PlannedFile
    from distop.tables.statistics import TableStatistics
    from distop.tables.table_options import TableOptions

log = logging.getLogger("distop.tables")

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
EMPTY = "empty"
"""The name of the only partition of a table without partitions: its job still checks the columns."""
_UNNAMEABLE = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")

_DIGITS = re.compile(r"([0-9]+)")
_CHECKED_FILES = 1_000
"""Maximum number of files whose names are checked at registration; files of the location itself come first."""
_OPENED = 100
"""Maximum number of these that are opened because their names do not show the format; each costs a request."""
_CHECKED_EVERY = 1_000
"""Number of listed files between two checks whether to stop."""
_PAGE = 500
"""Number of files that one request lists in an object store, with as many hidden ones."""
_LISTINGS = 5
"""Maximum listings of a folder whose files are replaced meanwhile."""


class ParquetFormat(Format):
    """Folders of Parquet files: Hive-style partitions at any depth, or groups of files."""

    def check_table(self, record: TableRecord) -> TableRecord:
        """Check a record; returns the record to store. The first files must be Parquet, by their names or first bytes.

        Hidden files are ignored. Raises InvalidArgument, with the name, for an unknown option, for a location that
        cannot be opened, does not exist, has no Parquet file or has other files, for a folder of a Delta, Iceberg or
        Hudi table, and for the type of a column that is not a partition column.
        """
        options = check_options(record.options)
        try:
            location = Location.of(record.location)
            table_folders.check_plain(location)
            first_files = list(islice(_files(location), _CHECKED_FILES))
        except TableUnavailable as error:
            raise InvalidArgument(str(error)) from error
        if not first_files:
            raise InvalidArgument(f"the location {record.location!r} has no Parquet files")
        for entry in islice((entry for entry in first_files if not named_parquet(entry)), _OPENED):
            try:
                is_data = location.has_parquet_magic(entry)
            except OSError as error:
                raise InvalidArgument(f"cannot read the file {entry.path}: {error.strerror or error}") from None
            if not is_data:
                raise InvalidArgument(
                    f"the location {record.location!r} may have Parquet files only, but {entry.path} is not one: move "
                    "it away, or give it a name that starts with '_' or '.'"
                )
        check_types(options, partition_values(first_files[0].folder) or (), location)
        return replace(record, location=location.text)

    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
        """List the table's files and plan its partitions: files with path, size and stamp.

        If some files have names of Parquet files, other files count only if they start like Parquet files; the rest is
        logged. If no file has such a name, all files count, and a file of another format fails its partition's job.

        Raises InvalidArgument for a mixed layout and for a folder of a Delta, Iceberg or Hudi table; TableUnavailable
        if the location cannot be reached from here or has no file: without partitions, every check of the table would
        succeed.
        """
        location = Location.of(table.location)
        entries = _listed(location, check)
        if not entries:
            raise location.empty_error()
        return plan(data_files(entries, location), location, check_options(table.options))

    def statistics(
        self, table: TableRecord, names: Collection[str], small_bytes: int, check: Callable[[], None]
    ) -> TableStatistics:
        """The statistics of the listed files. A folder has neither snapshots nor deleted rows."""
        from distop.tables.statistics import FileTotals, TableStatistics

        planned = self.plan_table(table, check, _no_spark)
        totals = FileTotals(small_bytes)
        for partition in planned.partitions:
            for _, size, _ in partition.files:
                totals.add(partition.name if partition.values is not None else "", size)
        return totals.statistics(TableStatistics(planned.version), 0.0)

    def replacer(self, table: TableRecord, ctx: ReplacementContext) -> FileReplacer:
        raise InvalidArgument(
            f"the files of the table {table.name!r} cannot be replaced in one step, because it is a folder of Parquet "
            'files: "swap": "hive" replaces them in several steps, during which readers find rows twice, or use an '
            "Iceberg or a Delta table"
        )

    def swapper(self, table: TableRecord, ctx: ReplacementContext) -> FileReplacer:
        from distop.tables.parquet.folder_replacer import FolderReplacer

        return FolderReplacer(table, ctx)

    def data_folder(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
        """The hidden folder below which new files are staged: readers must not find them before they are complete."""
        from distop.tables.parquet.folder_replacer import staged_below

        return staged_below(root_of(table.location))

    def reader(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
        from distop.tables.parquet.parquet_reader import ParquetReader

        return ParquetReader(table, plans, check_options(table.options).partition_types)

    def reachability(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, source: str = ""
    ) -> Reachability:
        """The files of a new plan: the listing is the table. Raises the errors of planning."""
        from distop.tables.parquet.folder_reachability import FolderReachability

        def folders() -> Iterator[tuple[str, Sequence[PlannedFile]]]:
            for partition in self.plan_table(table, check, spark).partitions:
                yield partition.name, partition.files

        return FolderReachability(Location.of(table.location).text, folders)

    def partition_removal(
        self, table: TableRecord, context: CommitContext, check: Callable[[], None]
    ) -> PartitionRemoval:
        """The partitions of a new plan. Raises the errors of planning."""
        from distop.tables.parquet.folder_partition_removal import FolderPartitionRemoval

        planned = self.plan_table(table, check, _no_spark)
        return FolderPartitionRemoval(table.name, planned, check_options(table.options).partition_types)


def _no_spark() -> Any:
    raise AssertionError("planning a folder needs no Spark")


def _files(location: Location, hidden: set[str] | None = None) -> Iterator[ListedFile]:
    """The files at the location. Raises InvalidArgument if they are, or belong to, a table of another kind.

    ``hidden``: gets the names of hidden folders in the location itself.
    """

    def skipped(folder: str, name: str) -> None:
        if hidden is not None and not folder:
            hidden.add(name)
        table_folders.check_subfolder(location, folder, name)

    table_folders.check_above(location)
    for entry in location.walk(skipped_folder=skipped):
        table_folders.check_file(location, entry)
        yield entry


def _listed(location: Location, check: Callable[[], None]) -> list[ListedFile]:
    """The files at a location of a moment in which ``compact`` replaces none of them.

    Otherwise the listing could have old and new files, or none of them. Raises TableUnavailable.
    """
    before = None if location.store is not None else folder_swap.state_at(location)
    for _ in range(_LISTINGS):
        if before is not None:
            folder_swap.check_settled(before, location.text)
        hidden: set[str] = set()
        entries: list[ListedFile] = []
        for entry in _files(location, hidden):
            if len(entries) % _CHECKED_EVERY == 0:
                check()
            entries.append(entry)
        if before is None and OWN not in hidden and len(entries) < _PAGE:
            return entries  # one request has listed all, and not even staged files were there
        after = folder_swap.state_at(location)
        if after.top == (0 if before is None else before.top):
            return entries
        before = after
    raise TableUnavailable(
        f"compact replaced files of {location.text} during each of {_LISTINGS} listings: wait for it"
    )


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that orders ``day=2`` before ``day=10``; ties such as ``01`` and ``1`` are ordered as texts."""
    parts = _DIGITS.split(text)
    return (*((1, int(p), p) if i % 2 else (0, 0, p) for i, p in enumerate(parts)),)


def partition_values(folder: str) -> dict[str, str | None] | None:
    """Parse ``month=1/day=__HIVE_DEFAULT_PARTITION__`` to ``{"month": "1", "day": None}``; None for other paths.

    Names and values are unescaped (``%3A`` is ``:``) and stay texts: ``01`` is not ``1``.
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
    """A name or value escaped for a path like by Hive and Spark: ``:`` becomes ``%3A``."""
    return _UNNAMEABLE.sub(lambda found: f"%{ord(found[0]):02X}", text)


def data_files(entries: Sequence[ListedFile], location: Location) -> list[ListedFile]:
    """The table's data files.

    If only some files have names of Parquet files, the others are opened, and those of other formats are skipped and
    logged. An unreadable file counts as data: its job fails with its name, whereas skipping it could hide its rows.
    """
    unnamed = [entry for entry in entries if not named_parquet(entry)]
    if not unnamed or len(unnamed) == len(entries):
        return list(entries)
    others = {entry for entry in unnamed if not _may_be_data(entry, location)}
    if others:
        example = min(entry.path for entry in others)
        count = f"{len(others)} file" + ("" if len(others) == 1 else "s")
        text = "Skipping %s of %s in another format than Parquet, such as %s; no job reads them: move them away"
        log.warning(text, count, location.text, example)
    return [entry for entry in entries if entry not in others]


def _may_be_data(entry: ListedFile, location: Location) -> bool:
    try:
        return location.has_parquet_magic(entry)
    except OSError:
        return True


def plan(entries: Iterable[ListedFile], location: Location, options: TableOptions) -> Planned:
    """Plan the listed files. Raises InvalidArgument for a mixed layout, or more than a million partitions."""
    folders: dict[str, list[PlannedFile]] = {}
    for entry in entries:
        folders.setdefault(entry.folder, []).append((entry.path, entry.size, entry.stamp))
    for files in folders.values():
        files.sort(key=lambda f: (natural(f[0]), f[0]))
    partitioned = set(folders) - {""}
    if partitioned and "" in folders:
        example = folders[""][0][0]
        folder = min(partitioned, key=natural)
        raise InvalidArgument(
            f"the location {location.text!r} has a mixed layout: both the file {example} and the folder {folder}"
        )
    if partitioned:
        partitions = list(_by_folder(folders, location, options))
    else:
        check_types(options, [], location)
        partitions = list(_by_group(folders.get("", []), options))
    if len(partitions) > MAX_PARTITIONS:
        raise InvalidArgument(
            f"the location {location.text!r} has {len(partitions)} partitions: at most a million are supported"
        )
    return Planned(partitions, _version(partitions))


def _by_folder(
    folders: dict[str, list[PlannedFile]], location: Location, options: TableOptions
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


def _by_group(files: list[PlannedFile], options: TableOptions) -> Iterator[PartitionPlan]:
    for ordinal, (name, group) in enumerate(in_groups(files, options)):
        yield PartitionPlan(ordinal, name, sum(f[1] for f in group), tuple(group))


def in_groups(files: Iterable[PlannedFile], options: TableOptions) -> Iterator[tuple[str, list[PlannedFile]]]:
    """Groups the files of a table without partitions, in order; yields name and files of each group."""
    group: list[PlannedFile] = []
    size = ordinal = 0
    for file in files:
        if group and (size + file[1] > options.group_bytes or len(group) >= options.group_files):
            yield f"files-{ordinal:06}", group
            group, size, ordinal = [], 0, ordinal + 1
        group.append(file)
        size += file[1]
    if group:
        yield f"files-{ordinal:06}", group


def check_types(options: TableOptions, columns: Iterable[str], location: Location) -> None:
    """Raises InvalidArgument if ``partition_types`` has a column that is not a partition column."""
    known = list(columns)
    for column in options.partition_types:
        if column not in known:
            raise InvalidArgument(
                f"partition_types has {column!r}, which is not a partition column of {location.text!r} "
                f"(it has: {', '.join(known) or 'none'})"
            )


def _version(partitions: list[PartitionPlan]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for partition in partitions:
        digest.update(files_text(partition))
    return f"files-{digest.hexdigest()}"


def files_text(partition: PartitionPlan) -> bytes:
    """A partition's files as bytes, for the digest that is a table's version."""
    text = "".join(f"{path}\0{size}\0{stamp}\n" for path, size, stamp in partition.files)
    return text.encode("utf-8", "surrogateescape")


FORMAT = ParquetFormat()

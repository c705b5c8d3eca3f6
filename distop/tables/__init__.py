"""Tables: what ``distop table add`` accepts, and how a table is split into partitions.

Planners by format; ``parquet`` is the one that exists. pyarrow is loaded only where a location is no local path.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, TableUnavailable
from distop.tables.location import Location, named_parquet
from distop.tables.options import FORMATS, check_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.core.model import TableRecord
    from distop.core.plan import Planned
    from distop.tables.location import Entry

__all__ = ["FORMATS", "check_reachable", "check_table", "plan_table"]

_LOOKED_AT = 1_000
"""Files whose names are looked at before a table is registered: those of the location itself come first."""
_OPENED = 100
"""Of them, so many whose names tell nothing are opened: on a remote file system each costs a request."""
_CHECKED_EVERY = 1_000
"""Files listed between two looks at whether to go on."""


def check_table(record: TableRecord) -> TableRecord:
    """The record as it is to be stored: its location absolute. Of the data the first files are looked at: one that
    neither its name nor its first bytes show to be Parquet is refused. Hidden files are left alone.

    Raises InvalidArgument, naming it, for an unknown format or option, for a location that cannot be opened, does
    not exist, holds no Parquet file, or another one, and for a type of what is no partition column there.
    """
    from distop.tables.parquet import check_types, partition_values

    _check_format(record)
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


def plan_table(table: TableRecord, check: Callable[[], None] = lambda: None) -> Planned:
    """List the table and freeze its partitions: files with path, size and modification time. ``check`` is called now
    and then, and raises where the listing is to stop.

    Where some files are named as Parquet is, others count only if they begin as Parquet does; the rest is logged. Where
    none is, all files count, and one that is something else fails its partition's job by name.

    Raises InvalidArgument where the layout is mixed, TableUnavailable where the location cannot be reached from here or
    holds no file: with no partitions, every promise about the table would hold.
    """
    from distop.tables.parquet import data_files, plan

    _check_format(table)
    location = Location.of(table.location)
    entries: list[Entry] = []
    for entry in location.walk():
        if len(entries) % _CHECKED_EVERY == 0:
            check()
        entries.append(entry)
    if not entries:
        raise location.nothing_there()
    return plan(data_files(entries, location), location, check_options(table.options))


def check_reachable(table: TableRecord) -> None:
    """Raises TableUnavailable where nothing of the table can be seen from here."""
    Location.of(table.location).check()


def _check_format(record: TableRecord) -> None:
    if record.format not in FORMATS:
        raise InvalidArgument(
            f"the format {record.format!r} of table {record.name!r} is not known (known: {', '.join(FORMATS)})"
        )

"""Tables: what ``distop table add`` accepts, and how a table is split into partitions.

Planners by format; ``parquet`` is the one that exists. pyarrow is loaded only where a location is no local path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.tables.location import Location
from distop.tables.options import FORMATS, check_options

if TYPE_CHECKING:
    from distop.behavior import Planned
    from distop.core.model import TableRecord

__all__ = ["FORMATS", "check_table", "plan_table"]


def check_table(record: TableRecord) -> TableRecord:
    """The record as it is to be stored: its location absolute. Nothing but the location is read.

    Raises InvalidArgument, naming it, for an unknown format or option, for a location that cannot be opened, does
    not exist, or holds no Parquet file.
    """
    _check_format(record)
    check_options(record.options)
    location = Location.of(record.location)
    first = next(location.walk(), None)
    if first is None:
        raise InvalidArgument(f"the location {record.location!r} holds no Parquet files")
    if not location.looks_like_parquet(first):
        raise InvalidArgument(f"the location {record.location!r} holds no Parquet files: {first.path} is none")
    return replace(record, location=location.text)


def plan_table(table: TableRecord) -> Planned:
    """List the table and freeze its partitions: files with path, size and modification time.

    Raises InvalidArgument where the location is gone or its layout is mixed. A location without files has no
    partitions.
    """
    from distop.tables.parquet import plan

    _check_format(table)
    return plan(Location.of(table.location).walk(), Location.of(table.location), check_options(table.options))


def _check_format(record: TableRecord) -> None:
    if record.format not in FORMATS:
        raise InvalidArgument(
            f"the format {record.format!r} of table {record.name!r} is not known (known: {', '.join(FORMATS)})"
        )

"""The partitions of a folder of Parquet files by value: removing one is deleting its files, because there is no log."""

from __future__ import annotations

from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import did_you_mean, shown
from distop.tables.partition_removal import PartitionRemoval, RemovedFiles, ValuedPartition

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from distop.protocol.plan import PartitionPlan, Planned

_DATE, _TIMES = "date", ("timestamp", "timestamp_ntz")


class FolderPartitionRemoval(PartitionRemoval):
    """One listing of a folder. ``types``: the option ``partition_types`` of the table."""

    deletes_files = True

    def __init__(self, name: str, planned: Planned, types: Mapping[str, Any]) -> None:
        self._name = name
        self._planned = planned
        self._types = types
        self.state = planned.version

    def partitions(self, column: str) -> Iterator[ValuedPartition]:
        columns = tuple(self._planned.partitions[0].values) if self._planned.partitions else ()
        if column not in columns:
            raise InvalidArgument(
                f"{column!r} is not a partition column of the table {shown(self._name)}"
                f"{did_you_mean(column, columns)} (it has: {', '.join(columns) or 'none'})"
            )
        for one in self._planned.partitions:
            text = one.values[column]
            value = None if text is None else _value(text, self._types.get(column))
            yield ValuedPartition(one, value, text=text or "")

    def remove(self, paths: Collection[str], planned: PartitionPlan) -> RemovedFiles:
        raise InvalidArgument(f"the table {shown(self._name)} has no commits: its partitions are removed by deletion")


def _value(text: str, kind: Any) -> Any:
    """A partition's value; the text itself if it is not of the declared type."""
    try:
        if kind == _DATE:
            return date.fromisoformat(text)
        if kind in _TIMES:
            return datetime.fromisoformat(text)
    except ValueError:
        pass
    return text

"""Statistics of a table as a whole, from its metadata: what the conditions of policies compare."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@frozen
class TableStatistics:
    """The statistics of one version of a table. None: the format does not have it.

    ``version``: of the table, changes with each commit. ``small_files``: files below the size that was asked for.
    ``delete_ratio``: rows removed by delete files or vectors, as a share of the rows in data files.
    ``oldest_snapshot``: seconds since the oldest version that can be read.
    """

    version: str
    files: int | None = None
    small_files: int | None = None
    bytes: int | None = None
    delete_ratio: float | None = None
    snapshots: int | None = None
    oldest_snapshot: float | None = None
    partitions: int | None = None

    def values(self, names: Iterable[str]) -> Mapping[str, float | None]:
        """These statistics by name. Raises InvalidArgument for an unknown name."""
        found = {}
        for name in names:
            if name == "version" or name not in self.__dataclass_fields__:
                raise InvalidArgument(f"there is no statistic {name!r}")
            value = getattr(self, name)
            found[name] = float(value) if value is not None else None
        return found


class FileTotals:
    """Adds up the data files of a table. ``small_bytes``: the size below which a file is small."""

    def __init__(self, small_bytes: int) -> None:
        self._small_bytes = small_bytes
        self.files = 0
        self.small_files = 0
        self.bytes = 0
        self._partitions: set[str] = set()

    def add(self, partition: str, size: int) -> None:
        """Add one data file of a partition ("" without partitions)."""
        self.files += 1
        self.small_files += size < self._small_bytes
        self.bytes += size
        self._partitions.add(partition)

    def statistics(self, of_metadata: TableStatistics, delete_ratio: float | None) -> TableStatistics:
        """These statistics with those of the files."""
        return replace(
            of_metadata,
            files=self.files,
            small_files=self.small_files,
            bytes=self.bytes,
            partitions=len(self._partitions),
            delete_ratio=delete_ratio,
        )

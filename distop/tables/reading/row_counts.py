"""Compares the number of rows that Spark has read with the counts in footers or manifests.

A Spark task reads the row groups whose middle is in its part of the file. If a footer states a wrong position, no task
reads the row group: its rows are skipped silently. Rows that were not read must not count as valid.

Comparing the totals of all files is enough if no file can yield more rows than its footer counts, so that no file can
compensate for another. Each row group is in one part at most, and ``parquet_rows`` refuses a listing with a file twice.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from distop.tables.reading.file_facts import FileFacts

_log = logging.getLogger(__name__)

_SCANS = ("FileSourceScanExec", "BatchScanExec")
"""Plan nodes that read files: Spark's own, and those of other sources."""
_ROWS = "numOutputRows"


class CountedBy(NamedTuple):
    """The source of a file's number of rows, and the fault if Spark reads another number."""

    name: str
    fault: str


FOOTER = CountedBy("footer", "the footer states wrong positions")
LOG = CountedBy("log", "the footer states wrong positions, or the log a wrong count")
MANIFEST = CountedBy("manifest", "the footer states wrong positions, or the manifest a wrong count")


@frozen
class RowsRead:
    """Spark's counters of the rows read by one plan's scans, summed over all its runs."""

    counters: Sequence[Any]

    def total(self) -> int:
        """The number of rows read so far."""
        return sum(int(counter.value()) for counter in self.counters)


def of_plan(plan: Any) -> RowsRead | None:
    """The row counters of a physical plan; None if this Spark has none."""
    try:
        # If stages share a shuffle, the plan has a scan twice.
        return RowsRead([*dict(_counters(plan)).values()])
    except Exception:
        _log.warning("Cannot read Spark's row counters; counting the rows with a separate query", exc_info=True)
        return None


def _counters(plan: Any) -> Iterator[tuple[int, Any]]:
    """The row counters of a plan, by id.

    Each call into the JVM is slow, so only the leaves are asked for, not each node.
    """
    leaves = plan.collectLeaves()
    for n in range(leaves.length()):
        leaf = leaves.apply(n)
        name = str(leaf.getClass().getSimpleName())
        if name == "AdaptiveSparkPlanExec":
            # A stage without rows is only in the first plan, a replanned stage only in the last.
            yield from _counters(leaf.initialPlan())
            yield from _counters(leaf.executedPlan())
        elif name.endswith("QueryStageExec"):
            yield from _counters(leaf.plan())
        elif name == "ReusedExchangeExec":
            yield from _counters(leaf.child())
        elif name in _SCANS:
            counter = leaf.metrics().apply(_ROWS)
            yield int(counter.id()), counter


def of_frame(frame: DataFrame) -> int | None:
    """The rows read when this frame was collected; None if not known."""
    found = of_plan(frame._jdf.queryExecution().executedPlan())
    return found.total() if found is not None else None


def expected_rows(files: Sequence[FileFacts], *, deleted: bool = False) -> int | None:
    """The number of rows that a reader must find in these files. ``deleted``: it also counts deleted rows.

    None if a reader may find more rows in a file than its footer counts, and so compensate for unread rows of another
    file: if deletes of a file are not counted, or if its footer contradicts itself.
    """
    return (
        None
        if any(facts.live_rows is None for facts in files)
        else sum(_counted(facts) + (facts.deleted or 0 if deleted else 0) for facts in files)
    )


def _counted(facts: FileFacts) -> int:
    return (facts.rows or 0) + facts.missing - (facts.deleted or 0)


def with_deletes(files: Sequence[FileFacts], deleted: Mapping[str, int]) -> list[FileFacts]:
    """The facts with ``deleted`` (rows by file, as a reader counted them) where deletes were not known."""
    return [
        one if one.deleted is not None else dataclasses.replace(one, deleted=deleted.get(one.path, 0)) for one in files
    ]


def misread_files(files: Sequence[FileFacts], found: Mapping[str, int], counted_by: CountedBy) -> dict[str, str]:
    """Error messages of the files whose row count differs from that of ``counted_by``, by path.

    ``files``: with known deletes (:func:`with_deletes`). ``found``: rows by file, as a reader counted them, without
    deleted rows.
    """
    wrong = {}
    for facts in files:
        rows = found.get(facts.path, 0)
        most = _counted(facts)
        if rows == most:
            continue
        why = facts.contradiction or counted_by.fault
        wrong[facts.path] = (
            f"the file {facts.path} cannot be read: Spark finds {rows} rows in it, but its {counted_by.name} counts "
            f"{most} ({why})"
        )
    return wrong

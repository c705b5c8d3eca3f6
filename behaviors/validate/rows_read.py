"""How many rows Spark's scans have read, to be compared with what the files' footers count.

A reader looks for a row group in the part of a file that holds the middle of it. Where a footer is wrong about its
place, no part does: the rows are left out, and no reader says so. What was not read must not pass.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from distop.core.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from distop_behaviors.reading.facts import FileFacts

_log = logging.getLogger(__name__)

_SCANS = ("FileSourceScanExec", "BatchScanExec")
"""The nodes that read files: Spark's own, and those of other sources."""
_ROWS = "numOutputRows"


@frozen
class RowsRead:
    """Spark's counters of the rows that the scans of one plan have read, over all of its runs."""

    counters: Sequence[Any]

    def total(self) -> int:
        """The rows so far."""
        return sum(int(counter.value()) for counter in self.counters)


def of_plan(plan: Any) -> RowsRead | None:
    """The counters of a physical plan; None where Spark does not tell of them as it did."""
    try:
        # Where stages share what was shuffled, a scan is in the plan twice.
        return RowsRead([*dict(_counters(plan)).values()])
    except Exception:
        _log.warning("Cannot read Spark's row counters; counting the rows with a separate query", exc_info=True)
        return None


def _counters(plan: Any) -> Iterator[tuple[int, Any]]:
    """The counters by their ids. Each call into the JVM takes a while, so it is asked for leaves, not for each node."""
    leaves = plan.collectLeaves()
    for n in range(leaves.length()):
        leaf = leaves.apply(n)
        name = str(leaf.getClass().getSimpleName())
        if name == "AdaptiveSparkPlanExec":
            # A stage that gave no row is in the first plan alone, one that was planned anew in the last.
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
    """The rows that were read when this frame was collected; None where that is not known."""
    found = of_plan(frame._jdf.queryExecution().executedPlan())
    return found.total() if found is not None else None


def expected(files: Sequence[FileFacts]) -> int | None:
    """The rows that a reader finds in these files; None where deletes leave that open."""
    return None if any(facts.deleted is None for facts in files) else sum(map(_most, files))


def _most(facts: FileFacts) -> int:
    return facts.rows + facts.missing - (facts.deleted or 0)


def left_out(files: Sequence[FileFacts], found: Mapping[str, int]) -> dict[str, str]:
    """The files of which a reader found other rows than there are, with a sentence; ``found``: rows by file."""
    wrong = {}
    for facts in files:
        rows = found.get(facts.path, 0)
        most = _most(facts)
        if rows == most or (facts.deleted is None and rows < most):
            continue
        why = facts.contradiction or "what it says of their places is wrong"
        wrong[facts.path] = (
            f"the file {facts.path} cannot be read: Spark finds {rows} rows in it, and its footer has {most} ({why})"
        )
    return wrong

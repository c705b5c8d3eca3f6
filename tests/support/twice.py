"""An operation in which all that a lost report, a late attempt or a new coordinator repeats is done twice."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from distop.behavior import OutcomeRow, select
from distop.runtime.lru_cache import LruCache
from distop.tables.reading import parquet_footers
from distop_behaviors.validate import file_lists
from tests.support.context import Ran, complete, named, run_jobs

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from distop.behavior import Behavior, TableRecord
    from tests.support.context import FakeContext

ATTEMPTS = 2


def forget() -> None:
    """As in the child of another executor, or of one that has started anew: nothing is kept of tables, files, queries
    and columns.
    """
    for one in gc.get_objects():
        if isinstance(one, LruCache):
            one._values.clear()
    for kept in (parquet_footers._cached, file_lists._written):
        kept.clear()


class Repeated:
    """What each attempt at each job said, and each completion of one choice among them."""

    def __init__(self, outcomes: list[list[OutcomeRow]], ended: list[Ran]) -> None:
        self.outcomes = outcomes
        self.ended = ended


def run_repeated(
    behavior: Behavior,
    table: TableRecord,
    arg: Any,
    context: Callable[[TableRecord, int], FakeContext],
    rng: random.Random,
) -> Repeated:
    """As ``run_operation``, but that each job is tried twice, in batches of any partitions and by one who has seen
    nothing before; either attempt is the one that was reported. ``context``: of an attempt, from 1 on.
    """
    argument = behavior.Arg.model_validate(named(arg))
    ctx = context(table, 1)
    planned = behavior.partitions(table, argument, ctx)
    plans = select(behavior.jobs(argument, planned.partitions, None, ctx), None)
    table = table.extended(planned.options)
    found: dict[int, list[OutcomeRow]] = {plan.partition: [] for plan in plans}
    for attempt in range(1, ATTEMPTS + 1):
        forget()
        shuffled = rng.sample(plans, len(plans))
        step = rng.randint(1, len(plans)) if behavior.run_batch is not None else 1
        for n in range(0, len(plans), step):
            batch = sorted(shuffled[n : n + step], key=lambda plan: plan.partition)
            for row in run_jobs(behavior, argument, batch, context(table, attempt)):
                found[row.partition].append(row)
    rows = [rng.choice(found[plan.partition]) for plan in plans]
    ended = []
    for attempt in range(1, ATTEMPTS + 1):
        forget()
        ended.append(complete(behavior, argument, table, rows, plans, context(table, attempt), version=planned.version))
    return Repeated([found[plan.partition] for plan in plans], ended)


def bytes_below(folder: Any) -> dict[str, bytes]:
    """Every file, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

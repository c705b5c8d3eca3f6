"""Runs an operation whose jobs and completion run twice, as after a lost report or with a new coordinator."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from distop.behavior import OutcomeRow, select
from distop.runtime.lru_cache import LruCache
from distop.tables.reading import parquet_footers
from distop_behaviors.validate import file_lists
from tests.support.context import Ran, complete, run_jobs, store_certificates

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from distop.behavior import Behavior, TableRecord
    from tests.support.context import FakeContext

ATTEMPTS = 2


def clear_caches() -> None:
    """Clear all caches of tables, files, queries and columns, as in a new child process."""
    for one in gc.get_objects():
        if isinstance(one, LruCache):
            one.clear()
    for kept in (parquet_footers._cached, file_lists._written):
        kept.clear()


class Repeated:
    """The outcomes of each job's attempts, and the results of the completions, all for the same choice of attempts."""

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
    """Like ``run_operation``, but each job and the completion run twice, in random batches and with empty caches.

    A random attempt of each job counts as reported. ``context``: takes the table and the attempt, from 1.
    """
    argument = behavior.Arg.model_validate(store_certificates(arg))
    ctx = context(table, 1)
    planned = behavior.partitions(table, argument, ctx)
    plans = select(behavior.jobs(argument, planned.partitions, None, ctx), None)
    table = table.extended(planned.options)
    found: dict[int, list[OutcomeRow]] = {plan.partition: [] for plan in plans}
    for attempt in range(1, ATTEMPTS + 1):
        clear_caches()
        shuffled = rng.sample(plans, len(plans))
        step = rng.randint(1, len(plans)) if behavior.run_batch is not None else 1
        for n in range(0, len(plans), step):
            batch = sorted(shuffled[n : n + step], key=lambda plan: plan.partition)
            for row in run_jobs(behavior, argument, batch, context(table, attempt)):
                found[row.partition].append(row)
    rows = [rng.choice(found[plan.partition]) for plan in plans]
    ended = []
    for attempt in range(1, ATTEMPTS + 1):
        clear_caches()
        ended.append(complete(behavior, argument, table, rows, plans, context(table, attempt), version=planned.version))
    return Repeated([found[plan.partition] for plan in plans], ended)


def bytes_below(folder: Any) -> dict[str, bytes]:
    """The content of all files in a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

"""Runs a batch while the store of a table's files is busy, which counts as no attempt of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    from distop.behavior import JobContext, PartitionPlan

    T = TypeVar("T")


def repeated(
    run: Callable[[Sequence[PartitionPlan]], Iterator[tuple[PartitionPlan, T]]],
    partitions: Sequence[PartitionPlan],
    ctx: JobContext,
) -> Iterator[tuple[PartitionPlan, T]]:
    """The results of ``run``, which is called again for the partitions without a result while the store is busy.

    Raises TableBusy after ``distop.storage.store_waits.LIMIT`` seconds without a result, and the errors of ``run``.
    """
    from distop.errors import TableBusy
    from distop.storage.store_waits import StoreWaits

    def new_waits() -> StoreWaits:
        return StoreWaits(ctx.check_cancelled, ctx.status, ctx.log)

    left = {plan.partition: plan for plan in partitions}
    waits = new_waits()
    while left:
        try:
            for plan, result in run(list(left.values())):
                left.pop(plan.partition, None)
                waits = new_waits()
                yield plan, result
            return
        except TableBusy as error:
            waits.wait(error)

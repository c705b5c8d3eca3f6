"""Waits while the store of a table's files is busy, which counts as no attempt of a job."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from distop.clock import time
from distop.protocol.executor_nodes import WAITS_FOR_STORE
from distop.runtime.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    from distop.behavior import JobContext, PartitionPlan
    from distop.errors import TableBusy

    T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two tries."""
LIMIT = 900.0
"""Seconds without any result after which the attempt fails."""
_STEP = 0.5
"""Seconds between two checks whether the job is cancelled."""


def repeated(
    run: Callable[[Sequence[PartitionPlan]], Iterator[tuple[PartitionPlan, T]]],
    partitions: Sequence[PartitionPlan],
    ctx: JobContext,
) -> Iterator[tuple[PartitionPlan, T]]:
    """The results of ``run``, which is called again for the partitions without a result while the store is busy.

    Raises TableBusy after :data:`LIMIT` seconds without a result, and the errors of ``run``.
    """
    from distop.errors import TableBusy

    left = {plan.partition: plan for plan in partitions}
    waits = _Waits(ctx)
    while left:
        try:
            for plan, result in run(list(left.values())):
                left.pop(plan.partition, None)
                waits = _Waits(ctx)
                yield plan, result
            return
        except TableBusy as error:
            waits.wait(error)


class _Waits:
    """The waits since the last result."""

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._end = time.monotonic() + LIMIT

    def wait(self, error: TableBusy) -> None:
        """Wait before the next try. Raises the error if the limit has passed, and JobCancelled."""
        now = time.monotonic()
        if now >= self._end:
            raise error
        until = min(now + self._backoff.pause(), self._end)
        self._ctx.log.warning("The store is busy; trying again in %.0f s: %s", until - now, error)
        self._ctx.status(f"{WAITS_FOR_STORE}: {error}")
        while (left := until - time.monotonic()) > 0:
            self._ctx.check_cancelled()
            threading.Event().wait(min(_STEP, left))

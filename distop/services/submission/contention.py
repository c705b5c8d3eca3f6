"""Starts race each other for a table's counters: who loses reads again and tries again, for a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from distop.clock import random, time
from distop.errors import OperationStartError
from distop.protocol.dependencies import HoldState
from distop.services.submission.idempotency import graph_holds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.protocol.keys import Keys
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

CONTENTION_LIMIT = 60.0
"""Seconds after which a start that always loses the race for the table's counters gives up."""
LOOK_EVERY = 0.2
"""Seconds between two looks at whether another call has inserted the same graph."""
T = TypeVar("T")


class Lost(Exception):
    """Another start or finish on the table came first: read again."""


class Inserting(Lost):
    """An earlier call with the same request id inserts the operation with its graph, under this hold."""

    def __init__(self, hold: str) -> None:
        super().__init__(hold)
        self.hold = hold


async def until_won(etcd: EtcdClient, keys: Keys, wanted: Request, attempt: Callable[[], Awaitable[T]]) -> T:
    """Try it until it is not lost. ``wanted``: of its operations, the one that a refusal names.

    Raises what the attempt raises; OperationStartError where it always loses.
    """
    began, tries = time.monotonic(), 0
    while True:
        try:
            return await attempt()
        except Inserting as other:
            await _until_decided(etcd, keys, other.hold, began)
        except Lost:
            tries += 1
            if overdue(began):
                raise too_contended(wanted) from None
            await asyncio.sleep(pause(tries))


async def _until_decided(etcd: EtcdClient, keys: Keys, hold: str, began: float) -> None:
    """Wait until an earlier call has inserted all of the graph, or that is given up. Raises OperationStartError where
    it goes on for long.
    """
    while (await graph_holds(etcd, keys, [hold])).get(hold) is HoldState.HELD:
        if overdue(began):
            raise OperationStartError(
                "an earlier call with the same request id inserts these operations still, or died while it did, which "
                "is noticed after a while: call again"
            )
        await asyncio.sleep(LOOK_EVERY)


def pause(tries: int, took: float = 0.0) -> float:
    """Seconds to wait after so many tries in a row that were lost, the last of which ``took`` so long: as long as one
    takes another one may be under way, which would be lost, too.
    """
    return random.uniform(0, min(0.25, max(0.004, took) * 2.0 ** min(tries - 1, 10)))


def overdue(began: float) -> bool:
    """A start that began then (``time.monotonic``) has lost the race for long enough."""
    return time.monotonic() - began > CONTENTION_LIMIT


def too_contended(wanted: Request) -> OperationStartError:
    """It always lost the race."""
    return OperationStartError(
        f"{wanted.type} on {wanted.table} could not be started within {CONTENTION_LIMIT:g} s, because others start "
        "and finish operations on it all the time: try again"
    )

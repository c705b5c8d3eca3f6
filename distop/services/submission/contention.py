"""Retries starts that lose the race for a table's counters, for a while."""

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
"""Seconds after which a start that always loses the race gives up."""
LOOK_EVERY = 0.2
"""Seconds between two checks whether another call has inserted the same graph."""
T = TypeVar("T")


class Lost(Exception):
    """Another start or finish on the table came first: read and try again."""


class Inserting(Lost):
    """An earlier call with the same request id is inserting the graph, under this hold."""

    def __init__(self, hold: str) -> None:
        super().__init__(hold)
        self.hold = hold


async def until_won(etcd: EtcdClient, keys: Keys, wanted: Request, attempt: Callable[[], Awaitable[T]]) -> T:
    """Retry an attempt until it does not raise Lost.

    ``wanted``: the operation that a refusal names. Raises the attempt's errors; OperationStartError if it always loses.
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
    """Wait until an earlier call has inserted the graph, or has given up.

    Raises OperationStartError if it takes too long.
    """
    while (await graph_holds(etcd, keys, [hold])).get(hold) is HoldState.HELD:
        if overdue(began):
            raise OperationStartError(
                "an earlier call with the same request id is still inserting these operations, or it died and its "
                "insertion has not expired yet: call again"
            )
        await asyncio.sleep(LOOK_EVERY)


def pause(tries: int, took: float = 0.0) -> float:
    """Seconds to wait after this many lost attempts.

    ``took``: the duration of the last one; another attempt may be under way for as long, and would make the next one
    lose.
    """
    return random.uniform(0, min(0.25, max(0.004, took) * 2.0 ** min(tries - 1, 10)))


def overdue(began: float) -> bool:
    """Whether a start since this time (``time.monotonic``) has to give up."""
    return time.monotonic() - began > CONTENTION_LIMIT


def too_contended(wanted: Request) -> OperationStartError:
    """The error of a start that always lost the race."""
    return OperationStartError(
        f"{wanted.type} on {wanted.table} could not be started within {CONTENTION_LIMIT:g} s, because other "
        "operations on it keep starting and ending: try again"
    )

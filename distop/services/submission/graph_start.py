"""Starting several operations that wait for each other: all of them, or none.

As many as one transaction takes are one transaction. More are inserted page by page under a *hold*
(``protocol.pending_operations.hold``): none of them begins while it is there, and the last transaction takes it away. A
caller that dies before leaves a hold that does not change any more: daemons deny it after a while, and what it held
ends as if it had been cancelled (``daemon.upkeep.abandoned_holds``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import InvalidArgument, OperationStartError, OutcomeUnknown
from distop.protocol.dependencies import HoldState
from distop.services.submission.idempotency import graph_holds
from distop.services.submission.insertion import Inserting, Insertion
from distop.services.submission.submit import Lost, overdue, pause, too_contended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.keys import Keys
    from distop.services.submission.insertion import Link, Whole
    from distop.services.submission.start_request import Request
    from distop.services.submission.submit import Started
    from distop.store.client import EtcdClient

MAX_GRAPH = 100_000
"""Operations in one graph."""
LOOK_EVERY = 0.2
"""Seconds between two looks at whether another call has inserted the same graph."""
IN_GRAPHS = ("", "join", "refuse")
"""What may become of a duplicate in a graph."""


async def start_graph(
    etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[Link], name: str = ""
) -> list[Started]:
    """Start these operations, in whose order the answer is. All of them wait, be it for nobody. ``name``: the request
    id that an OutcomeUnknown names.

    Raises as ``submit.submit`` does, for the first operation that is refused; nothing was started then.
    """
    check(wanted, links)
    began, tries = time.monotonic(), 0
    try:
        while True:
            try:
                return await Insertion(etcd, keys, wanted, links).run()
            except Inserting as other:
                await _until_decided(etcd, keys, other.hold, began)
            except Lost:
                tries += 1
                if overdue(began):
                    raise too_contended(wanted[0]) from None
                await asyncio.sleep(pause(tries))
    except OutcomeUnknown as error:
        raise OutcomeUnknown(
            "whether the operations were started is not known, because etcd stopped answering: call again with "
            f"request_id={name or wanted[0].request_id!r}, which starts them only if they were not"
        ) from error


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


async def in_one(
    etcd: EtcdClient, keys: Keys, wanted: Sequence[Request], links: Sequence[Link], hold: str = ""
) -> Whole:
    """What would start these operations, all of which wait (be it for nobody, or for a hold), in one transaction of
    somebody else's; nothing is written. It compares mod revisions, that tables are there, and whom ids name.

    Raises as :func:`start_graph` does; Incompatible also where an operation goes on that one of them would join;
    InvalidArgument where one transaction does not take them.
    """
    for one in wanted:
        if one.on_duplicate not in IN_GRAPHS:
            raise InvalidArgument(
                "what is prepared, or part of a transaction of the caller's, is refused where an operation of its id "
                f"goes on: start {one.type} on {one.table} by itself, to {one.on_duplicate} another one"
            )
    check(wanted, links)
    began, tries = time.monotonic(), 0
    while True:
        try:
            return await Insertion(etcd, keys, wanted, links, hold).in_one()
        except Inserting as other:
            await _until_decided(etcd, keys, other.hold, began)
        except Lost:
            tries += 1
            if overdue(began):
                raise too_contended(wanted[0]) from None
            await asyncio.sleep(pause(tries))


def check(wanted: Sequence[Request], links: Sequence[Link]) -> None:
    """Raises InvalidArgument: too many, the same request twice, a policy for duplicates that goes with one alone, a
    cycle.
    """
    if not wanted:
        raise InvalidArgument("there is no operation to start: the list is empty")
    if len(wanted) > MAX_GRAPH:
        raise InvalidArgument(f"{len(wanted)} operations are more than one graph takes ({MAX_GRAPH})")
    ids: set[str] = set()
    for one in wanted:
        if one.request_id in ids:
            raise InvalidArgument(f"two operations of the graph have the request id {one.request_id!r}")
        ids.add(one.request_id)
        if one.on_duplicate not in IN_GRAPHS:
            raise InvalidArgument(
                f"in a graph a duplicate is joined or refused: start {one.type} on {one.table} by itself, to "
                f"{one.on_duplicate} another one"
            )
    left = [0] * len(wanted)
    after: list[list[int]] = [[] for _ in wanted]
    for pred, succ, _ in links:
        left[succ] += 1
        after[pred].append(succ)
    free = [n for n, count in enumerate(left) if not count]
    done = 0
    while free:
        done += 1
        for succ in after[free.pop()]:
            left[succ] -= 1
            if not left[succ]:
                free.append(succ)
    if done < len(wanted):
        one = wanted[next(n for n, count in enumerate(left) if count)]
        raise InvalidArgument(
            f"the operations of the graph wait for each other in a circle, {one.type} on {one.table} among them"
        )

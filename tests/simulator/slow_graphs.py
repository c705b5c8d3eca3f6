"""Graphs inserted page by page by slow callers, and whether any is given up early."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.protocol import keys as K
from distop.protocol.dependencies import GRAPH, Hold, HoldState

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from distop.client.async_client import Client
    from distop.protocol.keys import ParsedKey
    from distop.protocol.revisioned import Change
    from distop.protocol.txn import Txn, TxnResult
    from distop.store.client import EtcdClient
    from tests.simulator.scenario import Host, Wish

MINUTE = 60.0
"""Seconds for which docs/internals/guarantees.md promises a graph to a caller that shows itself; deliberately not the
product's own ``GRAPH_LIMIT``.
"""


class SlowEtcd:
    """An etcd client that pauses for ``pause`` seconds after each transaction.

    As a caller does that computes the next page of a graph, or whose machine is busy.
    """

    def __init__(self, etcd: EtcdClient, pause: float) -> None:
        self._etcd = etcd
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._etcd, name)

    async def commit(self, txn: Txn, *, deadline: float | None = None) -> TxnResult:
        result = await self._etcd.commit(txn, deadline=deadline)
        await asyncio.sleep(self._pause)
        return result


def slowed(client: Client, pause: float) -> Client:
    """The same client, with such pauses."""
    other = copy.copy(client)
    other._etcd = SlowEtcd(client.etcd, pause)  # type: ignore[assignment]
    return other


class GraphHolds:
    """Follows the holds of graphs, and reports one that is given up too early.

    ``now`` returns the time, ``found(kind, key, text)`` is called for each breach.
    """

    def __init__(self, now: Callable[[], float], found: Callable[..., None]) -> None:
        self._now = now
        self._found = found
        self._written: dict[str, tuple[str, float]] = {}
        """Hold → who wrote it last as held, and when."""

    def step(self, parsed: Sequence[tuple[ParsedKey, Change]], sender: str) -> None:
        """Take the changes of one whole revision."""
        for key, change in parsed:
            if key.family != K.HOLD:
                continue
            if change.deleted:
                self._written.pop(key.id, None)
                continue
            hold = Hold.decode(change.kv.value)
            if hold.kind == GRAPH and hold.state is HoldState.HELD:
                self._written[key.id] = sender, self._now()
            elif key.id in self._written:
                caller, at = self._written.pop(key.id)
                if caller != sender and (age := self._now() - at) < MINUTE:
                    text = f"{sender} gave up the graph of {caller}, which had shown itself {age:.3f} s before"
                    self._found("given up too early", change.kv.key, text)


def inserted_slowly(chance: random.Random, wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """In some seeds, add a large graph whose caller pauses between two pages.

    In half of them it takes over a minute. Mostly its first operation waits for one that fails or is cancelled, in
    some seeds meanwhile.
    """
    from tests.simulator.scenario import LARGE_GRAPH

    if chance.random() >= 0.05:
        return ()
    n = chance.randrange(len(wishes))
    model = plain_of(wishes[n], chance.uniform(0.3, 3.0))
    pause = chance.choice((chance.uniform(0.1, 3.0), chance.uniform(14.0, 25.0)))
    behind = ((n, "success"),) if chance.random() < 0.8 else ()
    return (replace(model, graph=LARGE_GRAPH, pause=pause, behind=behind),)


def added_later(chance: random.Random, wishes: Sequence[Wish], hosts: Sequence[Host]) -> tuple[Wish, ...]:
    """In some seeds, add scheduled operations that get one more dependency later.

    They get it at about the time at which that dependency ends.
    """
    from tests.simulator.scenario import Act, expected

    if chance.random() >= 0.1:
        return ()
    n = chance.randrange(len(wishes))
    _, ends = expected(wishes, hosts)[n]
    found: list[Wish] = []
    for _ in range(chance.randint(2, 5)):
        at = max(wishes[n].after, ends + chance.uniform(-0.6, 0.6))
        after = max(0.0, at - chance.uniform(0.1, 0.5))
        model = plain_of(wishes[n], after)
        found.append(replace(model, delay=chance.uniform(2.0, 4.0), acts=(Act(at - after, f"behind {n}"),)))
    return tuple(found)


def plain_of(model: Wish, after: float) -> Wish:
    """A small operation of the same client, type and table, without other options."""
    from tests.simulator.scenario import Wish

    arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")}
    arg |= {"partitions": 1, "trouble": 0.0}
    return Wish(model.client, after, model.type, model.table, arg, None, None, ())

"""Slow callers that insert a graph page by page, and the check that no graph is abandoned too early."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.client.async_client import Client
from distop.protocol import keys as K
from distop.protocol.dependencies import GRAPH, Hold, HoldState

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from distop.protocol.keys import ParsedKey
    from distop.protocol.revisioned import Change
    from distop.protocol.txn import Txn, TxnResult
    from distop.store.client import EtcdClient
    from tests.simulator.scenario import Host, Submission

MINUTE = 60.0
"""Seconds without a refresh for which a graph is kept (docs/internals/guarantees.md); deliberately not the production
constant ``GRAPH_LIMIT``.
"""


class SlowEtcd:
    """An etcd client that pauses after each transaction, like a caller that computes the next page of a graph."""

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
    """A client on the same connection that pauses for ``pause`` seconds after each transaction."""
    return Client(client.config, SlowEtcd(client.etcd, pause))  # type: ignore[arg-type]


class GraphHolds:
    """Follows the holds of graphs. ``found(kind, key, text)`` is called for each graph that is abandoned too early."""

    def __init__(self, now: Callable[[], float], found: Callable[..., None]) -> None:
        self._now = now
        self._found = found
        self._written: dict[str, tuple[str, float]] = {}
        """Hold → the last caller that wrote it as held, and when."""

    def step(self, parsed: Sequence[tuple[ParsedKey, Change]], sender: str) -> None:
        """Fold one whole revision."""
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
                    text = f"{sender} abandoned the graph of {caller}, which had refreshed its hold {age:.3f} s before"
                    self._found("graph abandoned too early", change.kv.key, text)


def inserted_slowly(chance: random.Random, submissions: Sequence[Submission]) -> tuple[Submission, ...]:
    """In some seeds, add a large graph whose caller pauses between pages, in half of them for over a minute in all.

    Mostly its first operation has a predecessor, which may fail or be cancelled meanwhile.
    """
    from tests.simulator.scenario import LARGE_GRAPH

    if chance.random() >= 0.05:
        return ()
    n = chance.randrange(len(submissions))
    model = plain_of(submissions[n], chance.uniform(0.3, 3.0))
    pause = chance.choice((chance.uniform(0.1, 3.0), chance.uniform(14.0, 25.0)))
    predecessors = ((n, "success"),) if chance.random() < 0.8 else ()
    return (replace(model, graph=LARGE_GRAPH, pause=pause, predecessors=predecessors),)


def added_later(
    chance: random.Random, submissions: Sequence[Submission], hosts: Sequence[Host]
) -> tuple[Submission, ...]:
    """In some seeds, add delayed operations that get one more predecessor at about the time when it ends."""
    from tests.simulator.scenario import Action, expected

    if chance.random() >= 0.1:
        return ()
    n = chance.randrange(len(submissions))
    _, ends = expected(submissions, hosts)[n]
    found: list[Submission] = []
    for _ in range(chance.randint(2, 5)):
        at = max(submissions[n].after, ends + chance.uniform(-0.6, 0.6))
        after = max(0.0, at - chance.uniform(0.1, 0.5))
        model = plain_of(submissions[n], after)
        found.append(replace(model, delay=chance.uniform(2.0, 4.0), actions=(Action(at - after, f"depend-on {n}"),)))
    return tuple(found)


def plain_of(model: Submission, after: float) -> Submission:
    """A small operation of the same client, type and table, without other options."""
    from tests.simulator.scenario import Submission

    arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")}
    arg |= {"partitions": 1, "trouble": 0.0}
    return Submission(model.client, after, model.type, model.table, arg, None, None, ())

"""Client transactions with both branches, whose compares change meanwhile.

A compare may start or stop to hold while copies of the transaction are under way. Of each request one branch must be
applied, once, and its client must be told which.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.client.async_client import Client
from distop.client.graphs import Start
from distop.errors import EtcdRejected, EtcdUnavailable, OutcomeUnknown
from distop.protocol.txn import Delete, Get, Put, Txn, absent, exists

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from distop.client.async_operation import Operation
    from distop.protocol.revisioned import Change
    from distop.settings import ClientConfig
    from tests.simulator.clients import Told
    from tests.simulator.scenario import Wish

CALLERS = "caller/"
"""How the keys begin that clients write themselves."""
PAUSE = 0.3
"""Seconds after which it is tried again to turn what is compared."""


def gate(request: str) -> str:
    """The key that a transaction compares to be absent."""
    return f"{CALLERS}{request}/gate"


def ran(request: str) -> str:
    """The key that shows which branch ran."""
    return f"{CALLERS}{request}/ran"


async def start_with_branches(
    client: Client, request: str, wish: Wish, options: dict[str, Any], told: Told
) -> Operation | None:
    """Start the operation if the transaction's compare holds; else None."""
    done = await client.transaction(
        compare=[absent(gate(request))],
        success=[Put(ran(request), b"success")],
        failure=[Put(ran(request), b"failure"), Get(gate(request))],
        start=Start(wish.type, wish.table, dict(wish.arg), options=options),
        request_id=request,
    )
    told.branches.setdefault(request, []).append(done.committed)
    started: Operation | None = done.operations[0] if done.committed else None
    return started


async def refused_within(client: Client, request: str, start: Start) -> None:
    """A transaction whose compare never holds, and whose request id is not reused."""
    await client.transaction(
        compare=[exists(gate(request))], failure=[Put(f"{CALLERS}{request}/refused", b"")], start=start
    )


async def turn_some(config: ClientConfig, wishes: Sequence[tuple[int, Wish]]) -> None:
    """Make the compares of these wishes fail and hold again, each at its times."""
    turns = sorted((at, gate(f"request-{n}")) for n, wish in wishes for at in wish.turns)
    now = 0.0
    async with Client(config) as client:
        for at, key in turns:
            await asyncio.sleep(at - now)
            now = at
            await _turn(client, key)


async def _turn(client: Client, key: str) -> None:
    turned = Txn((exists(key),), (Delete(key),), (Put(key, b""),), "turn")
    while True:
        try:
            await client.etcd.commit(turned, deadline=PAUSE)
            return
        except (EtcdUnavailable, EtcdRejected):
            await asyncio.sleep(PAUSE)
        except OutcomeUnknown:
            return  # it may be turned once more: all the same


class Branches:
    """Follows the branches of clients' transactions in etcd's history."""

    def __init__(self) -> None:
        self._applied: dict[str, list[str]] = {}
        """The key of a request → which of its branches ran, in order."""

    def step(self, changes: Sequence[Change]) -> Iterator[tuple[str, str]]:
        """One revision: (key, text) of each breach."""
        for change in changes:
            key = change.kv.key
            if key.startswith(CALLERS) and key.endswith("/ran"):
                applied = self._applied.setdefault(key, [])
                applied.append(change.kv.value.decode())
                if len(applied) > 1:
                    yield key, f"the branches {' and '.join(applied)} of one transaction were applied"

    def broken(self, told: Told) -> Iterator[tuple[str, str]]:
        """(key, text) where a client was told of a branch that was not applied."""
        for request, answers in told.branches.items():
            applied = self._applied.get(ran(request), [])
            for committed in answers:
                if applied != (expected := ["success" if committed else "failure"]):
                    what = " and ".join(applied) or "none"
                    yield ran(request), f"a client was told that {expected[0]} was applied, and {what} was"


def with_branches(chance: random.Random, wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """In some seeds, add operations that are started in clients' transactions."""
    from tests.simulator.scenario import Wish

    if chance.random() >= 0.15:
        return ()
    found: list[Wish] = []
    for _ in range(chance.randint(1, 3)):
        model = chance.choice(wishes)
        arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")}
        after = chance.uniform(0.2, 3.0)
        lasts = chance.choice((0.5, 6.0))
        turns = sorted(max(0.0, after + chance.uniform(-0.3, lasts)) for _ in range(chance.randint(1, 6)))
        one = Wish(model.client, after, model.type, model.table, {**arg, "partitions": 1}, None, model.policy, ())
        found.append(replace(one, within=True, turns=tuple(turns)))
    return tuple(found)

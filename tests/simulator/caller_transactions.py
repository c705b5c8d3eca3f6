"""Client transactions with both branches, whose compares change while copies of a request are in flight.

Exactly one branch of each request must be applied, once, and the client must learn which one.
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
    from tests.simulator.clients import ClientAnswers
    from tests.simulator.scenario import Submission

CALLERS = "caller/"
"""Prefix of the keys that clients write themselves."""
PAUSE = 0.3
"""Seconds before a failed toggle of a compared key is retried."""


def gate_key(request: str) -> str:
    """The key that must be absent for the success branch."""
    return f"{CALLERS}{request}/gate"


def branch_key(request: str) -> str:
    """The key that records which branch was applied."""
    return f"{CALLERS}{request}/ran"


async def start_with_branches(
    client: Client, request: str, submission: Submission, options: dict[str, Any], answers: ClientAnswers
) -> Operation | None:
    """Start the operation if the transaction's compare holds; else return None."""
    done = await client.transaction(
        compare=[absent(gate_key(request))],
        success=[Put(branch_key(request), b"success")],
        failure=[Put(branch_key(request), b"failure"), Get(gate_key(request))],
        start=Start(submission.type, submission.table, dict(submission.arg), options=options),
        request_id=request,
    )
    answers.branches.setdefault(request, []).append(done.committed)
    started: Operation | None = done.operations[0] if done.committed else None
    return started


async def refused_start(client: Client, request: str, start: Start) -> None:
    """Send a transaction whose compare never holds, with a request id of its own."""
    await client.transaction(
        compare=[exists(gate_key(request))], failure=[Put(f"{CALLERS}{request}/refused", b"")], start=start
    )


async def toggle_compares(config: ClientConfig, submissions: Sequence[tuple[int, Submission]]) -> None:
    """Make the compares of these transactions fail and hold in turn, each at its times."""
    toggles = sorted((at, gate_key(f"request-{n}")) for n, submission in submissions for at in submission.toggles)
    now = 0.0
    async with Client(config) as client:
        for at, key in toggles:
            await asyncio.sleep(at - now)
            now = at
            await _toggle(client, key)


async def _toggle(client: Client, key: str) -> None:
    toggled = Txn((exists(key),), (Delete(key),), (Put(key, b""),), "turn")
    while True:
        try:
            await client.etcd.commit(toggled, deadline=PAUSE)
            return
        except (EtcdUnavailable, EtcdRejected):
            await asyncio.sleep(PAUSE)
        except OutcomeUnknown:
            return  # one more toggle does no harm


class Branches:
    """Checks in etcd's history that each client transaction applies one branch."""

    def __init__(self) -> None:
        self._applied: dict[str, list[str]] = {}
        """The key of a request → its applied branches, in order."""

    def step(self, changes: Sequence[Change]) -> Iterator[tuple[str, str]]:
        """Check one revision: (key, text) of each breach."""
        for change in changes:
            key = change.kv.key
            if key.startswith(CALLERS) and key.endswith("/ran"):
                applied = self._applied.setdefault(key, [])
                applied.append(change.kv.value.decode())
                if len(applied) > 1:
                    yield key, f"the branches {' and '.join(applied)} of one transaction were applied"

    def wrong_answers(self, answers: ClientAnswers) -> Iterator[tuple[str, str]]:
        """(key, text) of each answer that names a branch which was not applied."""
        for request, commits in answers.branches.items():
            applied = self._applied.get(branch_key(request), [])
            for committed in commits:
                if applied != (expected := ["success" if committed else "failure"]):
                    what = " and ".join(applied) or "none"
                    yield branch_key(request), f"a client was told that {expected[0]} was applied, but {what} was"


def with_branches(chance: random.Random, submissions: Sequence[Submission]) -> tuple[Submission, ...]:
    """In some seeds, add operations that are started in clients' transactions."""
    from tests.simulator.scenario import Submission

    if chance.random() >= 0.15:
        return ()
    found: list[Submission] = []
    for _ in range(chance.randint(1, 3)):
        model = chance.choice(submissions)
        arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")}
        after = chance.uniform(0.2, 3.0)
        lasts = chance.choice((0.5, 6.0))
        toggles = sorted(max(0.0, after + chance.uniform(-0.3, lasts)) for _ in range(chance.randint(1, 6)))
        one = Submission(model.client, after, model.type, model.table, {**arg, "partitions": 1}, None, model.policy, ())
        found.append(replace(one, in_transaction=True, toggles=tuple(toggles)))
    return tuple(found)

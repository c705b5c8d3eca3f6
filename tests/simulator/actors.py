"""Actors of a simulation: worker loops in processes that are no executors, on the production client. They do well and
badly: they extend their claims or forget to, return late, or never. Some operations have jobs that they alone run.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from distop.client.async_client import Client
from distop.clock import random
from distop.errors import ClusterChanged, DistopError, InvalidToken, OutcomeUnknown
from distop.services.claims.owned_jobs import Abort, Complete, Release, Retry
from tests.simulator.scenario import Act, Wish
from tests.simulator.simulated_behaviors import BY_HAND

if TYPE_CHECKING:
    import random as randomness
    from collections.abc import Callable, Sequence

    from distop.services.claims.owned_jobs import Outcome, OwnedJob
    from distop.settings import ClientConfig
    from tests.simulator.scenario import Host

AGAIN = 0.3
"""Seconds between looks, and after what did not work."""
MOST = 3
BROKEN = "an actor's attempt broke"


def by_hand(
    chance: randomness.Random, wishes: Sequence[Wish], hosts: Sequence[Host], actors: int
) -> tuple[tuple[Wish, ...], tuple[Host, ...]]:
    """In half of the seeds with actors, add operations of the type that has no code.

    Some of them are paused or cancelled while jobs run. Any executor may coordinate them that serves the type and the
    table.
    """
    if not actors or chance.random() < 0.5:
        return tuple(wishes), tuple(hosts)
    model, found = wishes[0], []
    for _ in range(chance.randint(1, 3)):
        jobs = chance.choices((1, 2, 5, 40), (4, 3, 3, 1))[0]
        arg = {"seed": chance.randrange(1 << 30), "partitions": jobs, "pace": 0.1, "trouble": 0.0, "calls": 0.1}
        ways = ((), (), (), ("cancel",), ("pause", "resume"), ("pause", "cancel"))
        acts = tuple(Act(chance.uniform(0.1, 2.0), what) for what in chance.choice(ways))
        names = tuple(f"p={n}" for n in range(jobs))
        arg["chunk"] = 1000
        found.append(Wish(model.client, chance.uniform(0.0, 2.0), BY_HAND, model.table, arg, names, None, acts))
    serving = tuple(
        replace(
            host,
            only_types=host.only_types and (*host.only_types, BY_HAND),
            only_tables=host.only_tables and tuple(dict.fromkeys((*host.only_tables, model.table))),
        )
        for host in hosts
    )
    return (*wishes, *found), serving


async def act(
    config: ClientConfig, name: str, types: tuple[str, ...], over: Callable[[], bool], note: Callable[[str], None]
) -> None:
    """Claim and return jobs, until nobody waits for anything any more. ``note``: is told what must not be."""
    async with Client(config) as client:
        work: set[asyncio.Task[None]] = set()
        gone: ClusterChanged | None = None
        while not over() and gone is None:
            await asyncio.sleep(AGAIN * random.uniform(0.3, 2.0))
            try:
                jobs = await client.own_jobs(name, types, int(random.uniform(1, MOST + 1)), random.uniform(0.3, 3.0))
            except ClusterChanged as error:
                gone = error  # for this client for good
                continue
            except DistopError:
                continue
            for job in jobs:
                task = asyncio.ensure_future(_work(client, job, note))
                work.add(task)
                task.add_done_callback(work.discard)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        if gone is not None:
            raise gone


async def _work(client: Client, job: OwnedJob, note: Callable[[str], None]) -> None:
    luck = random.uniform(0, 1)
    if luck < 0.1:
        return  # forgotten
    await asyncio.sleep(job.duration * random.uniform(0, 0.5))
    while random.uniform(0, 1) < 0.4:
        try:
            if not (await client.extend([job.token], job.duration))[0]:
                break
        except DistopError:
            pass
        await asyncio.sleep(job.duration * random.uniform(0.1, 0.6))
    if luck < 0.25:
        await asyncio.sleep(job.duration * random.uniform(1, 3))  # it returns late
    await _give(client, job, _outcome(), note)


def _outcome() -> Outcome:
    luck = random.uniform(0, 1)
    if luck < 0.7:
        return Complete({"by": "an actor"})
    if luck < 0.8:
        return Retry(BROKEN)
    return Release() if luck < 0.95 else Abort("an actor says no")


async def _give(client: Client, job: OwnedJob, outcome: Outcome, note: Callable[[str], None]) -> None:
    """Until it is told; a token that is void stays so."""
    for _ in range(50):
        try:
            await client.return_job(job.token, outcome)
            return
        except InvalidToken:
            break
        except OutcomeUnknown:
            continue
        except DistopError:
            await asyncio.sleep(AGAIN)
    else:
        return
    for again in (outcome, Complete()):
        try:
            await client.return_job(job.token, again)
        except DistopError:
            continue
        if not isinstance(again, type(outcome)):
            note(f"the token {job.token} was void, and then not")

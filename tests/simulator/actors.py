"""Simulated actors: processes other than executors that claim jobs through the production client.

They extend their claims or forget to, and return jobs in time, late or never. Jobs of some operations run only on
actors.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from distop.client.async_client import Client
from distop.clock import random
from distop.errors import ClusterChanged, DistopError, InvalidToken, OutcomeUnknown
from distop.services.claims.owned_jobs import Abort, Complete, Release, Retry
from tests.simulator.scenario import Action, Submission
from tests.simulator.simulated_behaviors import BY_HAND

if TYPE_CHECKING:
    import random as randomness
    from collections.abc import Callable, Sequence

    from distop.services.claims.owned_jobs import OwnedJob, OwnedOutcome
    from distop.settings import ClientConfig
    from tests.simulator.scenario import Host

AGAIN = 0.3
"""Seconds between two polls, and after an error."""
MOST = 3
"""Maximum jobs of one claim."""
BROKEN = "an actor's attempt failed"


def by_hand(
    chance: randomness.Random, submissions: Sequence[Submission], hosts: Sequence[Host], actors: int
) -> tuple[tuple[Submission, ...], tuple[Host, ...]]:
    """In half of the seeds with actors, add operations of the type without code.

    Some of them are paused or cancelled while jobs run. Each executor that serves the type and the table may coordinate
    them.
    """
    if not actors or chance.random() < 0.5:
        return tuple(submissions), tuple(hosts)
    model, found = submissions[0], []
    for _ in range(chance.randint(1, 3)):
        jobs = chance.choices((1, 2, 5, 40), (4, 3, 3, 1))[0]
        arg = {"seed": chance.randrange(1 << 30), "partitions": jobs, "pace": 0.1, "trouble": 0.0, "calls": 0.1}
        ways = ((), (), (), ("cancel",), ("pause", "resume"), ("pause", "cancel"))
        actions = tuple(Action(chance.uniform(0.1, 2.0), what) for what in chance.choice(ways))
        names = tuple(f"p={n}" for n in range(jobs))
        arg["chunk"] = 1000
        found.append(
            Submission(model.client, chance.uniform(0.0, 2.0), BY_HAND, model.table, arg, names, None, actions)
        )
    serving = tuple(
        replace(
            host,
            only_types=host.only_types and (*host.only_types, BY_HAND),
            only_tables=host.only_tables and tuple(dict.fromkeys((*host.only_tables, model.table))),
        )
        for host in hosts
    )
    return (*submissions, *found), serving


async def run_actor(
    config: ClientConfig, name: str, types: tuple[str, ...], over: Callable[[], bool], note: Callable[[str], None]
) -> None:
    """Claim and return jobs until ``over()``. Calls ``note(text)`` for each breach."""
    async with Client(config) as client:
        work: set[asyncio.Task[None]] = set()
        gone: ClusterChanged | None = None
        while not over() and gone is None:
            await asyncio.sleep(AGAIN * random.uniform(0.3, 2.0))
            try:
                jobs = await client.own_jobs(name, types, int(random.uniform(1, MOST + 1)), random.uniform(0.3, 3.0))
            except ClusterChanged as error:
                gone = error  # this client cannot be used any more
                continue
            except DistopError:
                continue
            for job in jobs:
                task = asyncio.ensure_future(work_on(client, job, note))
                work.add(task)
                task.add_done_callback(work.discard)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        if gone is not None:
            raise gone


async def work_on(client: Client, job: OwnedJob, note: Callable[[str], None]) -> None:
    luck = random.uniform(0, 1)
    if luck < 0.1:
        return  # neither extended nor returned
    await asyncio.sleep(job.duration * random.uniform(0, 0.5))
    while random.uniform(0, 1) < 0.4:
        try:
            if not (await client.extend([job.token], job.duration))[0]:
                break
        except DistopError:
            pass
        await asyncio.sleep(job.duration * random.uniform(0.1, 0.6))
    if luck < 0.25:
        await asyncio.sleep(job.duration * random.uniform(1, 3))  # returned late
    await _return_job(client, job, _outcome(), note)


def _outcome() -> OwnedOutcome:
    luck = random.uniform(0, 1)
    if luck < 0.7:
        return Complete({"by": "an actor"})
    if luck < 0.8:
        return Retry(BROKEN)
    return Release() if luck < 0.95 else Abort("aborted by an actor")


async def _return_job(client: Client, job: OwnedJob, outcome: OwnedOutcome, note: Callable[[str], None]) -> None:
    """Return a job until etcd answers, and check that a token which became invalid stays invalid."""
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
            note(f"token {job.token} was accepted after it had been rejected as invalid")

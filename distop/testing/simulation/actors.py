"""Actors of a simulation: worker loops in processes that are no executors, on the production client. They do well and
badly: they extend their claims or forget to, return late, or never.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.claims.model import Abort, Complete, Release, Retry
from distop.client import Client
from distop.clock import random
from distop.errors import DistopError, InvalidToken, OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.claims.model import Outcome, OwnedJob
    from distop.config import ClientConfig

AGAIN = 0.3
"""Seconds between looks, and after what did not work."""
MOST = 3
BROKEN = "an actor's attempt broke"


async def act(
    config: ClientConfig, name: str, types: tuple[str, ...], over: Callable[[], bool], note: Callable[[str], None]
) -> None:
    """Claim and return jobs, until nobody waits for anything any more. ``note``: is told what must not be."""
    async with Client(config) as client:
        work: set[asyncio.Task[None]] = set()
        while not over():
            await asyncio.sleep(AGAIN * random.uniform(0.3, 2.0))
            try:
                jobs = await client.own_jobs(name, types, int(random.uniform(1, MOST + 1)), random.uniform(0.3, 3.0))
            except DistopError:
                continue
            for job in jobs:
                task = asyncio.ensure_future(_work(client, job, note))
                work.add(task)
                task.add_done_callback(work.discard)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


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

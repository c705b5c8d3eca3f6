"""Elections of a daemon: one coordinator per table and type, while an operation of it is open or pending.

An election holds as long as its incarnation's node key lives; its mod revision is the fence in every coordinator
write. A short random delay keeps several candidates from racing for one key.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from distop.coordinator import Coordinator
from distop.core import transitions as t
from distop.core.txn import GetResult
from distop.errors import DistopError, SessionLost

if TYPE_CHECKING:
    from distop.incarnation import Context

RACE_DELAY = 0.05
"""Seconds over which candidates spread their attempts, for each other candidate."""
IDLE_BEFORE_RESIGNING = 300.0
"""Seconds without an operation after which an election is given up, so that idle tables cost no watch."""

Subject = tuple[str, str]


class Elections:
    """Seeks, takes up, gives up and stops the coordinator roles of one incarnation."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._roles: dict[Subject, Coordinator] = {}
        self._work: dict[Subject, asyncio.Task[None]] = {}
        self._idle_since: dict[Subject, float] = {}
        self._stopping = False

    def cluster_changed(self) -> None:
        """Operations, nodes or elections changed."""
        if self._stopping:
            return
        cluster, mine = self._ctx.cluster, self._ctx.incarnation
        for subject, role in list(self._roles.items()):
            held = cluster.elections.get(subject)
            if held is not None and held.mod > role.fence:
                self._drop(subject)  # taken over: by another, or by a later write of mine
            else:
                role.cluster_changed()
        wanted = {subject for subject in cluster.wanted_types() if subject[1] in self._ctx.types}
        for subject in wanted:
            self._idle_since.pop(subject, None)
            held = cluster.elections.get(subject)
            if subject in self._roles or subject in self._work:
                continue
            if held is None or held.value == mine or not cluster.live(held.value):
                self._work[subject] = asyncio.ensure_future(self._seek(subject))
        for subject in self._roles.keys() - wanted:
            self._idle_since.setdefault(subject, time.monotonic())

    def poll(self) -> None:
        """The regular look: take up elections that name me, resign from idle ones."""
        now = time.monotonic()
        for subject, since in list(self._idle_since.items()):
            if now - since > IDLE_BEFORE_RESIGNING and subject not in self._work:
                self._work[subject] = asyncio.ensure_future(self._resign(subject))
        self.cluster_changed()

    async def _seek(self, subject: Subject) -> None:
        ctx, (table, type_name) = self._ctx, subject
        rivals = len(ctx.cluster.capable(type_name)) - 1
        try:
            if rivals > 0:
                await asyncio.sleep(random.uniform(0, min(rivals, 20) * RACE_DELAY))
            held = ctx.cluster.elections.get(subject)
            if held is not None and held.value == ctx.incarnation:
                fence = held.mod  # an election of mine that I knew nothing of: its answer was lost
            elif held is not None and ctx.cluster.live(held.value):
                return
            else:
                seen, holder = (held.mod, held.value) if held is not None else (0, "")
                result = await ctx.commit(t.elect(ctx.keys, table, type_name, ctx.incarnation, seen, holder))
                fence = result.revision if result.succeeded else 0
                found = result.responses[0] if result.responses else None
                if not fence and isinstance(found, GetResult) and found.kv is not None:
                    fence = found.kv.mod_revision if found.kv.value.decode() == ctx.incarnation else 0
                if not fence:
                    await asyncio.sleep(RACE_DELAY)  # the winner's event is on its way
                    return
            role = Coordinator(ctx, table, type_name, fence)
            self._roles[subject] = role
            await role.start()
            ctx.log.info("coordinates %s on %s", type_name, table)
        except (SessionLost, asyncio.CancelledError):
            raise
        except DistopError as error:
            ctx.log.warning("could not become coordinator of %s on %s: %s", type_name, table, error)
            self._drop(subject)
            await asyncio.sleep(random.uniform(0.5, 2.0))
        finally:
            self._work.pop(subject, None)
            if not ctx.lost.done():
                asyncio.get_running_loop().call_soon(self.cluster_changed)

    async def _resign(self, subject: Subject) -> None:
        try:
            role = self._roles.get(subject)
            self._idle_since.pop(subject, None)
            if role is not None:
                self._drop(subject)
                await self._ctx.commit(t.resign(self._ctx.keys, *subject, role.fence))
        finally:
            self._work.pop(subject, None)

    def _drop(self, subject: Subject) -> None:
        role = self._roles.pop(subject, None)
        self._idle_since.pop(subject, None)
        if role is not None:
            role.close()

    async def stop(self) -> None:
        """Resign from everything, so that others take over at once."""
        self._stopping = True
        for work in self._work.values():
            work.cancel()
        await asyncio.gather(*self._work.values(), return_exceptions=True)
        roles, self._roles = self._roles, {}
        for subject, role in roles.items():
            await role.stop()
            await self._ctx.commit(t.resign(self._ctx.keys, *subject, role.fence))

    def close(self) -> None:
        """Drop everything at once."""
        self._stopping = True
        for work in self._work.values():
            work.cancel()
        for role in self._roles.values():
            role.close()
        self._roles.clear()

"""Reconciles what this executor has on its disk with what etcd says (I29): at its start, and again with each poll.

A job that may go on stays as it is: its claim is taken over like anyone's once the session that held it has expired,
first by this executor, which has its local state. What is left of any other is cleaned up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.decide.executor import Fate, judge
from distop.errors import DistopError, SessionLost, describe
from distop.protocol.jobs import Claim, Outcome
from distop.protocol.records import State
from distop.protocol.txn import Get
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from distop.daemon.incarnation_context import Context
    from distop.daemon.local_jobs import LocalJobs, LocalRun
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import GetResult


class Reconciler:
    """Settles the former runs of one executor."""

    def __init__(self, ctx: Context, local: LocalJobs) -> None:
        self._ctx = ctx
        self._local = local
        self._looking: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Read what is there, before anything is run. Raises InvalidArgument where the directory cannot be used."""
        await asyncio.to_thread(self._local.load)
        if self._local.former:
            jobs = sum(len(run.left) for run in self._local.former)
            self._ctx.log.info("%d jobs of %d former runs are left here", jobs, len(self._local.former))

    async def begin(self) -> None:
        """Look for the first time. Raises SessionLost."""
        await self.look()
        await self.sweep()

    async def sweep(self) -> None:
        """Remove the private directories of operations that are gone: they ended while nothing of them ran here, such
        as one that was paused and then cancelled. Raises SessionLost."""
        cluster = self._ctx.cluster
        try:
            left = {run.op for run in self._local.former}
            for ref in await asyncio.to_thread(self._local.operations):
                known = ref in left or ref in cluster.gates or ref in cluster.pending
                if not known and await self._state(ref) is None:
                    await self._ctx.worker.forget(str(ref))
        except SessionLost:
            raise
        except (DistopError, OSError) as error:
            self._ctx.log.warning("private directories of former operations are still here: %s", describe(error))

    def look_soon(self) -> None:
        """Look once more, beside what else goes on: a cleanup may take its time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self.begin())
            self._looking.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    def close(self) -> None:
        """Stop: the session is over."""
        if self._looking is not None:
            self._looking.cancel()

    async def look(self) -> None:
        """Settle what can be settled by now. Raises SessionLost; anything else is told and left for the next look."""
        for run in list(self._local.former):
            try:
                await self._settle(run)
            except SessionLost:
                raise
            except Exception as error:
                # Whatever it is: what was left of one run must not keep this node from all others.
                where = {"operation": str(run.op), "error": error}
                known = isinstance(error, DistopError | OSError)
                self._ctx.log.warning(
                    "what a former run left is still here: %s",
                    describe(error),
                    extra=where,
                    exc_info=None if known else error,
                )

    async def _state(self, ref: OperationRef) -> State | None:
        found = await self._ctx.client.get(self._ctx.keys.of(ref, "state"))
        return State(found.value.decode()) if found is not None else None

    async def _settle(self, run: LocalRun) -> None:
        state, wanted = await self._state(run.op), [p for p in run.left if not self._local.running(run, p)]
        fates: dict[Fate, list[int]] = {fate: [] for fate in Fate}
        if state is None:
            fates[Fate.CLEANED] = wanted
        size = self._ctx.limits.settled
        for n in range(0, len(wanted) if state is not None else 0, size):
            await self._judge(run, state, wanted[n : n + size], fates)
        # What this incarnation has begun anew since etcd was read is no former run's any more.
        cleaned = [p for p in fates[Fate.CLEANED] if p in run.left]
        if cleaned:
            await self._clean(run, cleaned)
        self._local.settled(run, [*fates[Fate.SETTLED], *cleaned])
        if state is None and not any(other.op == run.op for other in self._local.former):
            await self._ctx.worker.forget(str(run.op))

    async def _judge(self, run: LocalRun, state: State | None, page: list[int], fates: dict[Fate, list[int]]) -> None:
        """Sort these jobs by their fates; those that are begun anew here meanwhile have none."""
        ctx = self._ctx
        found = await ctx.client.read(
            *(Get(ctx.keys.claim(run.op, p)) for p in page), *(Get(ctx.keys.job(run.op, p, "outcome")) for p in page)
        )
        for n, p in enumerate(page):
            if (left := run.left.get(p)) is None:
                continue
            claim, outcome = _value(found[n]), _value(found[len(page) + n])
            fate = judge(
                (run.incarnation, left.attempt),
                state,
                Claim.decode(claim) if claim else None,
                Outcome.decode(outcome) if outcome else None,
                ctx.cluster.nodes,
                ctx.executor_id,
                ctx.incarnation,
            )
            fates[fate].append(p)

    async def _clean(self, run: LocalRun, partitions: list[int]) -> None:
        """Have the behavior remove what the attempt left. It may have been done elsewhere since, and says so."""
        where = {"operation": str(run.op)}
        if not self._ctx.admits(run.op.type, (run.op.table,)):
            self._ctx.log.warning("Left jobs are not cleaned up: this executor no longer serves them", extra=where)
            return
        if run.op.type not in self._ctx.types:
            self._ctx.log.warning("%s is not installed any more: its jobs are not cleaned up", run.op.type, extra=where)
            return
        self._ctx.log.info("cleans up after %d jobs that are not ours any more", len(partitions), extra=where)
        done = self._local.cleaning.setdefault(run.op, asyncio.get_running_loop().create_future())
        try:
            await self._ctx.worker.cleanup(
                str(run.op),
                run.op.type,
                run.arg,
                run.table,
                [run.left[p] for p in partitions],
                incarnation=run.incarnation,
                superseded=True,
            )
        except WorkerError as error:
            # Tried once: what is left is garbage on this node, and must not hold up its start for ever.
            self._ctx.log.warning("the cleanup failed: %s", error, extra=where)
        finally:
            self._local.cleaning.pop(run.op, None)
            if not done.done():
                done.set_result(None)


def _value(found: GetResult) -> bytes:
    return found.kv.value if found.kv is not None else b""

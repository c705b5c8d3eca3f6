"""Reconciles this executor's disk with etcd (I29): at its start and at each poll.

A job that may continue stays unchanged: once the session of its claim has expired, its claim is taken over as usual,
first by this executor, which has the local state. All other leftovers are cleaned up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.decide.earlier_runs import Disposition, judge
from distop.errors import DistopError, SessionLost, describe
from distop.protocol.jobs import Claim, Outcome
from distop.protocol.records import State
from distop.protocol.texts import plural
from distop.protocol.txn import Get
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from distop.daemon.incarnation_context import Context
    from distop.daemon.local_jobs import LocalJobs, LocalRun
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import GetResult


class Reconciler:
    """Settles the previous runs of one executor."""

    def __init__(self, ctx: Context, local: LocalJobs) -> None:
        self._ctx = ctx
        self._local = local
        self._looking: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Read the local records before the first job runs.

        Raises InvalidArgument if the directory cannot be used.
        """
        await asyncio.to_thread(self._local.load)
        if self._local.former:
            jobs = plural(sum(len(run.left) for run in self._local.former), "unfinished job")
            runs = plural(len(self._local.former), "previous run")
            self._ctx.log.info("Found %s of %s on this executor", jobs, runs)

    async def begin(self) -> None:
        """Reconcile for the first time. Raises SessionLost."""
        await self.look()
        await self.sweep()

    async def sweep(self) -> None:
        """Remove the private directories of operations that are gone.

        They ended while no job of theirs ran here: paused, then cancelled, for example. Raises SessionLost.
        """
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
            self._ctx.log.warning(
                "Cannot remove the private directories of ended operations; retrying later: %s", describe(error)
            )

    def look_soon(self) -> None:
        """Reconcile again in the background: a cleanup may take long."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self.begin())
            self._looking.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    def close(self) -> None:
        """Stop: the session has ended."""
        if self._looking is not None:
            self._looking.cancel()

    async def look(self) -> None:
        """Settle the previous runs as far as possible.

        Other errors are logged and retried the next time. Raises SessionLost.
        """
        for run in list(self._local.former):
            try:
                await self._settle(run)
            except SessionLost:
                raise
            except Exception as error:
                # Any error: leftovers of one run must not prevent all other runs on this node.
                where = {"operation": str(run.op), "error": error}
                known = isinstance(error, DistopError | OSError)
                self._ctx.log.warning(
                    "Cannot clean up after a previous run; retrying later: %s",
                    describe(error),
                    extra=where,
                    exc_info=None if known else error,
                )

    async def _state(self, ref: OperationRef) -> State | None:
        found = await self._ctx.client.get(self._ctx.keys.of(ref, "state"))
        return State(found.value.decode()) if found is not None else None

    async def _settle(self, run: LocalRun) -> None:
        state, wanted = await self._state(run.op), [p for p in run.left if not self._local.running(run, p)]
        fates: dict[Disposition, list[int]] = {fate: [] for fate in Disposition}
        if state is None:
            fates[Disposition.CLEANED] = wanted
        size = self._ctx.limits.settled
        for n in range(0, len(wanted) if state is not None else 0, size):
            await self._judge(run, state, wanted[n : n + size], fates)
        # Jobs that this incarnation has started since the read belong to its own run now.
        cleaned = [p for p in fates[Disposition.CLEANED] if p in run.left]
        if cleaned:
            await self._clean(run, cleaned)
        self._local.settled(run, [*fates[Disposition.SETTLED], *cleaned])
        if state is None and not any(other.op == run.op for other in self._local.former):
            await self._ctx.worker.forget(str(run.op))

    async def _judge(
        self, run: LocalRun, state: State | None, page: list[int], fates: dict[Disposition, list[int]]
    ) -> None:
        """Sort these jobs by their fates; jobs that were started here again meanwhile have none."""
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
        """Let the behavior clean up after the attempts.

        The jobs may have been finished elsewhere since (``superseded``).
        """
        where = {"operation": str(run.op)}
        if not self._ctx.admits(run.op.type, (run.op.table,)):
            self._ctx.log.warning(
                "Not cleaning up after jobs of a previous run: this executor no longer serves them", extra=where
            )
            return
        if run.op.type not in self._ctx.types:
            self._ctx.log.warning(
                "Not cleaning up after jobs of a previous run: the type %s is no longer installed",
                run.op.type,
                extra=where,
            )
            return
        self._ctx.log.info("Cleaning up after %s of a previous run", plural(len(partitions), "job"), extra=where)
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
            # Tried once: leftovers are garbage on this node, and must not prevent its start for ever.
            self._ctx.log.warning("Cleanup after a previous run failed; leaving its files: %s", error, extra=where)
        finally:
            self._local.cleaning.pop(run.op, None)
            if not done.done():
                done.set_result(None)


def _value(found: GetResult) -> bytes:
    return found.kv.value if found.kv is not None else b""

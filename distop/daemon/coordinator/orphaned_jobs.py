"""Cleans up the orphaned jobs of cancelled operations.

A job is orphaned when its holder is gone or has released it. Its claim is revoked, the child cleans up, then the claim
is deleted: only then can the operation end.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from distop.daemon.saved_checkpoints import read_checkpoints
from distop.decide import job_claims
from distop.protocol import job_transitions
from distop.protocol.executor_nodes import refusal
from distop.protocol.json_codec import loads
from distop.protocol.plan import CHUNK_PAGE
from distop.protocol.state_tables import Stage
from distop.protocol.txn import TxnResult
from distop.worker.daemon_side.requests import JobItem, WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from distop.daemon.coordinator.election import Election
    from distop.decide.operation_view import OperationView
    from distop.protocol.jobs import Claim
    from distop.protocol.txn import Txn

IN_FLIGHT = 8
"""Maximum concurrent transactions."""


class Reaper:
    """Reaps claims under one election.

    ``reached`` waits until the coordinator's view of the claims has reached a revision (W11).
    """

    def __init__(self, election: Election, reached: Callable[[int], Awaitable[None]]) -> None:
        self._ctx = election.ctx
        self._guard = election.guard
        self._call = election.call
        self._reached = reached

    async def reap(self, op: OperationView, claims: Sequence[tuple[int, int]]) -> bool:
        """Clean up after the jobs of these claims (partition, mod revision), and delete the claims.

        Returns False if some claims have changed.
        """
        applied = True
        chunks = await self._ctx.client.list(*self._ctx.keys.chunks_range(op.ref), page=CHUNK_PAGE)
        rows = PlanRows([kv.value for kv in chunks.kvs])
        # Not all of them first: a crash repeats the cleanup of so many at most.
        size = IN_FLIGHT * self._ctx.limits.reaped
        for n in range(0, len(claims), size):
            page = claims[n : n + size]
            revoked = await self._revoke(op, page)
            if revoked:
                await self._clean_up(op, rows, revoked)
            applied = await self._delete(op, revoked) and len(revoked) == len(page) and applied
        return applied

    async def _revoke(self, op: OperationView, claims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Revoke the claims, and return those without a holder (partition, mod revision), under which no report can be
        written.
        """
        known = ((p, mod, op.claims.get(p)) for p, mod in claims)  # the view goes on meanwhile
        seen = [(p, mod, found.value) for p, mod, found in known if found is not None and found.mod == mod]
        size = self._ctx.limits.reaped
        pages = [seen[n : n + size] for n in range(0, len(seen), size)]

        def revoke(page: Sequence[tuple[int, int, Claim]]) -> Txn:
            return job_transitions.revoke(self._ctx.keys, op.ref, self._guard, op.state_mod, page, job_claims.revoked)

        results = await asyncio.gather(*(self._ctx.commit(revoke(page)) for page in pages))
        return [
            (p, mod if claim.waiting else result.revision)
            for page, result in zip(pages, results, strict=True)
            for (p, mod, claim), one in zip(page, result.responses, strict=False)
            if result.succeeded and isinstance(one, TxnResult) and one.succeeded
        ]

    async def _clean_up(self, op: OperationView, rows: PlanRows, claims: Sequence[tuple[int, int]]) -> None:
        assert op.spec is not None
        where = {"operation": str(op.ref), "jobs": len(claims)}
        if why := refusal(self._ctx.config.serves, op.ref.type, (op.ref.table, *op.terms.beside)):
            self._ctx.log.warning(
                "Cannot clean up after cancelled jobs on this executor; deleting their claims: %s", why, extra=where
            )
            return
        if op.ref.type not in self._ctx.types:
            if op.spec.rules.code:  # else actors ran the jobs, and there is nothing to clean up after them
                self._ctx.log.warning(
                    "Cannot clean up after cancelled jobs; deleting their claims: no live executor offers the type %s",
                    op.ref.type,
                    extra=where,
                )
            return
        ref, worker = op.ref, self._ctx.worker
        partitions = sorted(p for p, _ in claims)
        saved = await read_checkpoints(self._ctx, ref, partitions) if op.spec.rules.resumable else {}
        items = [
            JobItem(row, seen.value.attempt, seen.mod, saved.get(row["partition"]))
            for row in rows.of(partitions)
            if (seen := op.claims.get(row["partition"])) is not None
        ]
        table = table_of(op)
        arg = await self._ctx.argument(ref)
        try:
            await self._call(ref, Stage.CANCELLING, lambda: worker.cleanup(str(ref), ref.type, arg, table, items))
        except WorkerError as error:
            # Left behind is garbage that nothing names; the operation must end all the same.
            self._ctx.log.warning(
                "Cleanup of cancelled jobs failed; deleting their claims: %s", error, extra={"operation": str(ref)}
            )

    async def _delete(self, op: OperationView, claims: Sequence[tuple[int, int]]) -> bool:
        keys, size = self._ctx.keys, self._ctx.limits.reaped
        results = await asyncio.gather(
            *(
                self._ctx.commit(job_transitions.reap(keys, op.ref, self._guard, op.state_mod, claims[n : n + size]))
                for n in range(0, len(claims), size)
            )
        )
        await self._reached(max((result.revision for result in results if result.succeeded), default=0))
        return all(
            result.succeeded and all(isinstance(one, TxnResult) and one.succeeded for one in result.responses)
            for result in results
        )


def table_of(op: OperationView) -> Mapping[str, Any] | None:
    """The record of an operation's table for its jobs: with the planned options, if there is a plan."""
    if op.spec is None or op.spec.table is None:
        return None
    return op.spec.table.extended(op.plan.options if op.plan is not None else {}).to_json()


class PlanRows:
    """The partitions of a plan in their JSON form, from its chunks in order."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = [chunk for chunk in chunks if chunk != b"[]"]
        first_row = json.JSONDecoder().raw_decode
        self._starts = [int(first_row(chunk.decode(), 1)[0]["partition"]) for chunk in self._chunks]

    def of(self, wanted: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        """The rows of these ordinals (sorted).

        Other chunks are not decoded; ordinals without a chunk are left out.
        """
        for n, start in enumerate(self._starts):
            begin = bisect_left(wanted, start)
            end = bisect_left(wanted, self._starts[n + 1]) if n + 1 < len(self._starts) else len(wanted)
            if begin < end:
                rows = loads(self._chunks[n])
                yield from (rows[p - start] for p in wanted[begin:end] if p - start < len(rows))

"""Reads what an evaluation of a policy looks at: the table's version and statistics, and operations that ended."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from distop.clock import time
from distop.decide.policy_evaluation import Facts, commanded_at, wanted
from distop.errors import DistopError, InvalidArgument, describe
from distop.protocol import keys as K
from distop.protocol import table_registry
from distop.protocol.json_codec import UNREADABLE, parse_time
from distop.protocol.policy import SUBMITTER
from distop.protocol.record_reading import read, word
from distop.protocol.records import History, OperationRef, State
from distop.protocol.txn import Get
from distop.protocol.type_aliases import names_of
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from distop.daemon.incarnation_context import Context
    from distop.protocol.policy import Policy, SeenPolicy
    from distop.protocol.records import TableRecord

LOOKED_BACK = 10
"""Maximum number of history records of a type that are read for its last success and its last failures."""

Scan = tuple[str, "Mapping[str, float | None]"]
"""A table's version, and its statistics."""


class Inputs:
    """The inputs of the policies of one table, each read once per look."""

    def __init__(self, ctx: Context, record: TableRecord) -> None:
        self._ctx = ctx
        self._record = record
        self._scans: dict[tuple[frozenset[str], int], Scan] = {}

    async def version(self) -> str:
        """The table's version. Raises WorkerError."""
        return (await self._scan(frozenset(), 0))[0]

    def of_version(self, version: str | None, problem: str) -> Facts:
        """What is known of a policy that is not due: the version, or why it cannot be read."""
        return Facts(time.time(), version, problem=problem, evaluator=self._ctx.incarnation)

    async def facts(self, name: str, seen: SeenPolicy, version: str | None) -> Facts:
        """What a policy wants to know. ``version``: as read before.

        A statistic is of the version that the facts have, or of a later one: so no version is missed. If nothing may
        start because operations failed, nothing else is looked at.
        """
        policy, last, now = seen.policy, seen.state.op, time.time()
        assert policy is not None
        by = self._ctx.incarnation
        try:
            active = await self._active(last)
            if last and not active:
                failures, failed_at = await self._failures(name, policy, last)
                found = Facts(now, version, evaluator=by, failures=failures, failed_at=failed_at)
                if found.paused_until:
                    return found
            asked = wanted(policy)
            statistics: Mapping[str, float | None] = {}
            if asked.scans:
                scanned, statistics = await self._scan(asked.statistics, asked.small_bytes)
                version = scanned if asked.version else version
            ended = {type_name: await self._since_success(type_name, now) for type_name in sorted(asked.since)}
            return Facts(now, version, statistics, ended, active, evaluator=by)
        except (WorkerError, DistopError) as error:
            return Facts(now, version, problem=describe(error), evaluator=by)

    async def _scan(self, names: frozenset[str], small_bytes: int) -> Scan:
        known = self._scans.get((names, small_bytes))
        if known is None:
            answer = await self._ctx.worker.statistics(self._record.to_json(), sorted(names), small_bytes)
            known = self._scans[names, small_bytes] = str(answer["version"]), answer["statistics"]
        return known

    async def _active(self, last: str) -> str:
        """The operation itself, if it has not ended."""
        try:
            ref = OperationRef.parse(last) if last else None
        except InvalidArgument:
            ref = None
        if ref is None:
            return ""
        state, history = await self._ctx.client.read(
            Get(self._ctx.keys.of(ref, "state")), Get(self._ctx.keys.history(ref), keys_only=True)
        )
        if history.kv is not None or state.kv is None or read(word(State), state.kv).terminal:
            return ""
        return last

    async def _since_success(self, type_name: str, now: float) -> float:
        """Seconds since the last success of a type on the table, under any of its names; infinite for none."""
        return max(0.0, now - await self._last_success(names_of(type_name)))

    async def _last_success(self, names: Iterable[str]) -> float:
        """When an operation of one of these types last succeeded on the table; minus infinity for never."""
        last = -math.inf
        for name in names:
            async for record in self._newest(name):
                if record.state == State.SUCCESS:
                    last = max(last, parse_time(record.finished))
                    break
        return last

    async def _failures(self, name: str, policy: Policy, last: str) -> tuple[int, float]:
        """How many operations of a policy have failed since the type's last success, and the end of the last one.

        None, if its last one did not fail, or a user has changed or resumed the policy since then.
        """
        others = [name for name in names_of(policy.start) if name != policy.start]
        after, count, failed_at = max(commanded_at(policy), await self._last_success(others)), 0, 0.0
        async for record in self._newest(policy.start):
            if record.state == State.SUCCESS:
                break
            if record.submitter != f"{SUBMITTER}{name}":
                continue
            finished = parse_time(record.finished)
            if record.state != State.FAILED or finished < after or (not count and record.op != last):
                break
            count, failed_at = count + 1, failed_at or finished
        return count, failed_at

    async def _newest(self, type_name: str) -> AsyncIterator[History]:
        """The last history records of a type on the table, the newest first. Unreadable ones are left out."""
        ctx = self._ctx
        start, end = table_registry.type_family(ctx.keys, K.HISTORY, self._record.name, type_name)
        listing = await ctx.client.list(start, end, keys_only=True)
        refs = table_registry.refs(ctx.keys, listing.kvs)
        for ref in sorted(refs, key=lambda ref: ref.instance, reverse=True)[:LOOKED_BACK]:
            kv = await ctx.client.get(ctx.keys.history(ref))
            try:
                record = History.decode(kv.value) if kv is not None else None
            except UNREADABLE:
                continue
            if record is not None:
                yield record

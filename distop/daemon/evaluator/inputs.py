"""Reads what an evaluation of a policy looks at: the table's version and statistics, and operations that ended."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from distop.clock import time
from distop.decide.policy_evaluation import Facts, Wanted
from distop.errors import DistopError, InvalidArgument, describe
from distop.protocol import keys as K
from distop.protocol import table_registry
from distop.protocol.json_codec import UNREADABLE, parse_time
from distop.protocol.record_reading import read, word
from distop.protocol.records import History, OperationRef, State
from distop.protocol.txn import Get
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.daemon.incarnation_context import Context
    from distop.protocol.records import TableRecord

LOOKED_BACK = 10
"""Maximum number of history records of a type that are read for its last success."""

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

    async def facts(self, wanted: Wanted, last: str, version: str | None) -> Facts:
        """What a policy wants to know. ``last``: the operation that it started last; ``version``: as read before.

        A statistic is of the version that the facts have, or of a later one: so no version is missed.
        """
        now = time.time()
        try:
            statistics: Mapping[str, float | None] = {}
            if wanted.scans:
                scanned, statistics = await self._scan(wanted.statistics, wanted.small_bytes)
                version = scanned if wanted.version else version
            ended = {name: await self._since_success(name, now) for name in sorted(wanted.since)}
            return Facts(now, version, statistics, ended, await self._active(last), evaluator=self._ctx.incarnation)
        except (WorkerError, DistopError) as error:
            return Facts(now, version, problem=describe(error), evaluator=self._ctx.incarnation)

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
        """Seconds since the last success of a type on the table; infinite for none."""
        ctx = self._ctx
        start, end = table_registry.type_family(ctx.keys, K.HISTORY, self._record.name, type_name)
        listing = await ctx.client.list(start, end, keys_only=True)
        refs = table_registry.refs(ctx.keys, listing.kvs)
        newest = sorted(refs, key=lambda ref: ref.instance, reverse=True)[:LOOKED_BACK]
        for ref in newest:
            kv = await ctx.client.get(ctx.keys.history(ref))
            try:
                record = History.decode(kv.value) if kv is not None else None
            except UNREADABLE:
                continue
            if record is not None and record.state == State.SUCCESS:
                return max(0.0, now - parse_time(record.finished))
        return math.inf

"""One look at the policies of a table: evaluates those that are due, and says when to look again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from distop.clock import time
from distop.daemon.evaluator.inputs import Inputs
from distop.decide import policy_evaluation as evaluation
from distop.errors import InvalidArgument, NotFound, OperationStartError, UnknownBehavior, UnreadableRecord, describe
from distop.protocol import keys as K
from distop.protocol import policy as p
from distop.protocol.record_reading import read, read_policy
from distop.protocol.records import TableRecord
from distop.protocol.txn import Get
from distop.services.submission.policy_start import request_of, start_by_policy
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from distop.daemon.incarnation_context import Context
    from distop.decide.policy_evaluation import Facts, PolicyJudgement
    from distop.protocol.policy import SeenPolicy
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue, Txn

SOON = 0.2
"""Seconds until the next look if something changed during this one: then the view of the election may be late."""


class NextLook(NamedTuple):
    """When to look at a table again. ``at``: ``time.time``, infinite for never.

    ``polls``: also after a poll, for a trigger that stays due, or the table's version.
    """

    at: float = math.inf
    polls: bool = False

    def with_other(self, other: NextLook) -> NextLook:
        """When to look again for two reasons."""
        return NextLook(min(self.at, other.at), self.polls or other.polls)


POLLED = NextLook(polls=True)


class TableLook:
    """Looks at one table under one election. ``fence``: the mod revision of the election."""

    def __init__(self, ctx: Context, table: str, fence: int) -> None:
        self._ctx = ctx
        self._table = table
        self._fence = fence

    async def look(self) -> NextLook:
        """Evaluate all due policies. Returns when to look again.

        Raises SessionLost and errors of etcd.
        """
        record, seen = await self._read()
        if record is None:
            return NextLook(polls=bool(seen))
        inputs, version, problem = Inputs(self._ctx, record), None, ""
        if any(p.VERSION in one.policy.on and not one.policy.paused for one in seen.values() if one.policy is not None):
            try:
                version = await inputs.version()
            except WorkerError as error:
                problem = describe(error)
                self._ctx.log.warning("Cannot read the version of table %s; retrying: %s", self._table, problem)
        again = NextLook()
        for name, one in sorted(seen.items(), key=_by_priority):
            again = again.with_other(await self._evaluate(name, one, inputs, version, problem))
        return again

    async def _read(self) -> tuple[TableRecord | None, dict[str, SeenPolicy]]:
        """The table's record and its policies, all at one revision. Unreadable ones are left out."""
        ctx, table = self._ctx, self._table
        families = (K.POLICY, K.POLICY_STATE, K.POLICY_EVENT)
        ranges = (Get(*p.table_range(ctx.keys, family, table)) for family in families)
        record, *found = await ctx.client.read(Get(ctx.keys.table(table)), *ranges)
        policies, states, events = ({ctx.keys.parse(kv.key).id: kv for kv in one.kvs} for one in found)
        seen: dict[str, SeenPolicy] = {}
        for name, kv in policies.items():
            try:
                seen[name] = read_policy(kv, states.get(name), events.get(name))
            except UnreadableRecord as error:
                ctx.log.warning("Skipping a policy of table %s: %s", table, error)
        return _record(record.kv), seen

    async def _evaluate(
        self, name: str, seen: SeenPolicy, inputs: Inputs, version: str | None, problem: str
    ) -> NextLook:
        """Evaluate one policy, if it is due. Returns when to look at it again.

        ``problem``: why the version cannot be read.
        """
        policy = seen.policy
        assert policy is not None
        if policy.paused:
            return NextLook()
        triggers = evaluation.due(seen, time.time(), version)
        if not triggers:
            of_version = evaluation.of_version(seen, inputs.of_version(version, problem))
            if of_version is not None and not await self._recorded(name, seen, of_version):
                return NextLook(time.time() + SOON)
            return self._next(seen, seen.state)
        facts = await inputs.facts(name, seen, version)
        judgement = evaluation.evaluate(seen, triggers, facts)
        if judgement.starts:
            try:
                if (ref := await self._start(name, seen, judgement, facts)) is None:
                    return NextLook(time.time() + SOON)
                self._ctx.log.info("Policy %s of table %s started %s", name, self._table, ref)
                return self._next(seen, judgement.after)
            except (OperationStartError, UnknownBehavior, NotFound, InvalidArgument) as error:
                judgement = evaluation.refused(seen, judgement, describe(error), facts)
        if not await self._recorded(name, seen, judgement):
            return NextLook(time.time() + SOON)
        if judgement.evaluation.verdict in (p.PolicyVerdict.WAITS, p.PolicyVerdict.FAILED):
            return POLLED
        return self._next(seen, judgement.after)

    async def _recorded(self, name: str, seen: SeenPolicy, judgement: PolicyJudgement) -> bool:
        """Record an evaluation that starts nothing, if it says something new; False: something else has changed."""
        if not evaluation.news(seen, judgement):
            return True
        txn = p.evaluate(self._ctx.keys, self._table, name, seen, judgement.after, self._fence)
        return (await self._ctx.commit(txn)).succeeded

    async def _start(
        self, name: str, seen: SeenPolicy, judgement: PolicyJudgement, facts: Facts
    ) -> OperationRef | None:
        """Start the policy's operation; None: something has changed since it was read.

        Raises what a start raises.
        """
        keys, table, policy = self._ctx.keys, self._table, seen.policy
        assert policy is not None
        request_id = p.request_id(policy.uid, judgement.evaluation.triggers, seen.state_mod)

        def record(ref: OperationRef, starts: Txn) -> Txn:
            after = evaluation.started(judgement, str(ref), facts)
            return p.start(keys, table, name, seen, after, self._fence, starts)

        wanted = request_of(table, name, policy, request_id)
        return await start_by_policy(self._ctx.client, keys, wanted, record, self._ctx.commit)

    def _next(self, seen: SeenPolicy, state: p.PolicyState) -> NextLook:
        """When a policy may be due again, without events, which are watched."""
        policy = seen.policy
        assert policy is not None
        return NextLook(evaluation.next_interval(policy, state, time.time()), p.VERSION in policy.on)


def _record(kv: KeyValue | None) -> TableRecord | None:
    return read(TableRecord.decode, kv) if kv is not None else None


def _by_priority(item: tuple[str, SeenPolicy]) -> tuple[int, str]:
    name, seen = item
    return (-seen.policy.options.priority if seen.policy is not None else 0, name)

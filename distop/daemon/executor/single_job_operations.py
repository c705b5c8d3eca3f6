"""Operations of one job: many of them are claimed in one transaction, and run one after the other in one slot.

Alone each would take a round trip to claim, a message to the child, and a slot of its own for all that time. How many
go together is learned for each type from what its jobs take: as many as are done in a moment (``Limits.moment``), so
that none waits long behind others while another executor is idle.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.decide import next_steps
from distop.protocol import batch_claims
from distop.protocol.jobs import Claim
from distop.protocol.operation_options import DEFAULT
from distop.protocol.records import CLUSTER_TABLE
from distop.services.open_operation import Held, OpenOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.plan import Gate
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Seen
    from distop.worker.daemon_side.requests import JobEnded

HEAD_STARTS = (0.2, 10.0)
"""Seconds for which an operation is left to the executor that it falls to by its name; then whoever has nothing else to
do takes it. Longer each time that this one had long taken them all, and its coordinator was behind with their ends.
"""
LOOKED_AT = 100
"""Of those that wait, so many are looked at for a group."""


def _plain(gate: Gate) -> bool:
    """It has one job, and no terms of its own."""
    return gate.count == 1 and gate.options == DEFAULT and not gate.where and not gate.beside


class Small:
    """The open operations of one incarnation, as they are to be served: those of one job, without terms of their own,
    that nobody here has looked at yet; and all others (``general``), which are served one by one. ``known`` tells which
    have been looked at.
    """

    def __init__(self, ctx: Context, known: Callable[[OperationRef], bool]) -> None:
        self._ctx = ctx
        self._known = known
        self.general: dict[OperationRef, None] = {}
        self._mine: dict[OperationRef, None] = {}
        self._others: dict[OperationRef, float] = {}
        """Those that fall to other executors, with the time (``time.monotonic``) at which each was seen."""
        self._lost: dict[OperationRef, None] = {}
        """Claimed by others: looked at again on a hint."""
        self.taken: dict[OperationRef, None] = {}
        """Claimed here together with others, or about to be: there is nothing to do for them."""
        self.urgent: dict[OperationRef, None] = {}
        """Of all others, those of a higher priority than what has none."""
        self._rivals: dict[tuple[str, str], tuple[str, ...]] = {}
        """By type and table: the executors among which they were divided."""
        self._sizes: dict[str, int] = {}
        self._head_starts: dict[str, float] = {}
        self._borrowed: set[OperationRef] = set()
        """Those that are being claimed although they fall to others."""

    # ---------------------------------------------------------------- intake

    def changed(self, gates: Mapping[OperationRef, Seen[Gate]], refs: Iterable[OperationRef] | None) -> None:
        """The gates of these operations have changed; None: perhaps of all."""
        if refs is None:
            for kept in self._all():
                for ref in [ref for ref in kept if ref not in gates]:
                    del kept[ref]
            altered = [ref for ref in (*self._mine, *self._others) if not _plain(gates[ref].value)]
            known = set().union(*self._all())
            refs = [*altered, *(ref for ref in gates if ref not in known)]
            self.urgent = {ref: None for ref in self.general if gates[ref].value.options.priority > 0}
        for ref in refs:
            for kept in (self.urgent, *self._all()):
                kept.pop(ref, None)
            if ref in gates:
                self._sort(ref, gates[ref])

    def _all(self) -> tuple[dict[OperationRef, Any], ...]:
        """Where an operation is kept, each in one of them."""
        return self.general, self._mine, self._others, self._lost, self.taken

    def hint(self) -> None:
        """There may be claims to take of those that others have won."""
        self.general.update(self._lost)
        self._lost.clear()

    def one_by_one(self, refs: Iterable[OperationRef]) -> None:
        """These are served as any other."""
        for ref in refs:
            if ref in self._ctx.cluster.gates:
                for kept in (self._mine, self._others, self.taken):
                    kept.pop(ref, None)
                self.general[ref] = None

    def done(self, ref: OperationRef) -> None:
        """All of its jobs have ended here."""
        for kept in (self.general, self.urgent, self.taken):
            kept.pop(ref, None)

    def _sort(self, ref: OperationRef, gate: Seen[Gate]) -> None:
        ctx = self._ctx
        fresh = _plain(gate.value) and gate.mod > ctx.caught_up_at and not self._known(ref)
        if not fresh or not ctx.serves(ref.type, (ref.table,)):
            self.general[ref] = None
            if gate.value.options.priority > 0:
                self.urgent[ref] = None
            return
        subject = ref.type, ref.table
        rivals = self._rivals.get(subject)
        if rivals is None:
            rivals = self._rivals[subject] = tuple(ctx.others(ref.type, (ref.table,)))
        if next_steps.shares(1, ctx.executor_id, rivals, str(ref))[1]:
            self._mine[ref] = None
        else:
            self._others[ref] = time.monotonic()

    def divide_anew(self) -> None:
        """Nodes have come or gone: what fell to one of them may fall to another."""
        others = self._ctx.others
        stale = {one for one, rivals in self._rivals.items() if rivals != tuple(others(one[0], (one[1],)))}
        if stale:
            for subject in stale:
                del self._rivals[subject]
            gates = self._ctx.cluster.gates
            self.changed(gates, [ref for ref in (*self._mine, *self._others) if (ref.type, ref.table) in stale])

    # ---------------------------------------------------------------- choice

    def choose(self, slots: int, wait: Callable[[OperationRef], float]) -> tuple[list[OperationRef], float | None]:
        """Those of one type to be claimed next; and where there are none, the seconds until that may change."""
        now = time.monotonic()
        pauses: dict[str, float] = {}
        # Whether another node can do what this one cannot depends on the table.
        apart = bool(self._ctx.capability.unable)
        # Of others' the last ones: those to whom they fall come from the front, and to these last.
        for waiting in (islice(self._mine, LOOKED_AT), islice(reversed(self._others), LOOKED_AT)):
            alike: dict[str, list[OperationRef]] = {}
            for ref in waiting:
                alike.setdefault(f"{ref.type}/{ref.table}" if apart else ref.type, []).append(ref)
            for name, refs in alike.items():
                pauses[name] = wait(refs[0])
                due = [ref for ref in refs if now - self._others.get(ref, -inf) >= self._head_start(ref.type)]
                if due and pauses[name] <= 0:
                    return self._take(due, slots), None
        if self._others:
            first = next(iter(self._others))
            pauses[""] = max(0.01, self._others[first] + self._head_start(first.type) - now)
        return [], min((pause for pause in pauses.values() if pause > 0), default=None)

    def _head_start(self, type_name: str) -> float:
        return self._head_starts.get(type_name, HEAD_STARTS[0])

    def _take(self, refs: Sequence[OperationRef], slots: int) -> list[OperationRef]:
        """As many of these, which are of one type, as go together; for each free slot its share."""
        size = min(self._size(refs[0].type), -(-len(refs) // max(slots, 1)), self._ctx.limits.together)
        chosen = list(refs[:size])
        if any(ref.table != CLUSTER_TABLE for ref in chosen):
            del chosen[batch_claims.PLANNED_PER_CLAIM :]
        for ref in chosen:
            if self._others.pop(ref, None) is not None:
                self._borrowed.add(ref)
            self._mine.pop(ref, None)
            self.taken[ref] = None
        return chosen

    # ----------------------------------------------------------------- claim

    async def claim(
        self,
        refs: Collection[OperationRef],
        give_back: Callable[[OperationRef, int, Claim, int], None],
        failed: Callable[[OperationRef, Exception], None],
    ) -> list[OpenOperation]:
        """Claim the one job of each; those that were won. What cannot be read is given back, and told (``failed``)."""
        ctx, keys = self._ctx, self._ctx.keys
        borrowed = not self._borrowed.isdisjoint(refs)
        self._borrowed.difference_update(refs)
        gates = {ref: gate for ref in refs if (gate := ctx.cluster.gates.get(ref)) is not None}
        opened = [batch_claims.Opened(ref, gate.mod, OpenOperation.records(keys, ref)) for ref, gate in gates.items()]
        if not opened:
            return []
        first = Claim(ctx.executor_id, ctx.incarnation, 1, 0)
        result = await ctx.commit(batch_claims.claim_together(keys, ctx.incarnation, opened, first))
        granted: Sequence[batch_claims.Granted | None]
        if result.succeeded:
            granted = batch_claims.granted_together(result, opened)
        else:
            apart = await ctx.commit(batch_claims.claim_apart(keys, ctx.incarnation, opened, first))
            granted = batch_claims.granted_apart(apart, first) if apart.succeeded else [None] * len(opened)
        if borrowed:
            self._learn(opened[0].ref.type, any(grant is not None for grant in granted))
        won: list[OpenOperation] = []
        for one, grant in zip(opened, granted, strict=True):
            if grant is None:
                self._left(one.ref)
                continue
            try:
                won.append(await self._opened(one, gates[one.ref].value, grant, first))
            except Exception as error:
                # Nobody here could run it, and others would wait for that until the poll finds it.
                give_back(one.ref, 0, first, grant.fence)
                failed(one.ref, error)
                self.one_by_one([one.ref])
        return won

    async def _opened(
        self, one: batch_claims.Opened, gate: Gate, grant: batch_claims.Granted, first: Claim
    ) -> OpenOperation:
        ctx = self._ctx
        op = await OpenOperation.of(grant.records, ctx.client, ctx.keys, one.ref, one.gate_mod)
        op.gate = gate
        op.held[0] = Held(first, grant.fence, str(op.partition(0).get("name", 0)))
        op.exhausted = True
        return op

    def _learn(self, type_name: str, won: bool) -> None:
        shortest, longest = HEAD_STARTS
        longer = self._head_start(type_name) * (0.5 if won else 2.0)
        self._head_starts[type_name] = max(shortest, min(longest, longer))

    def _left(self, ref: OperationRef) -> None:
        if ref in self.taken:
            del self.taken[ref]
            self._lost[ref] = None

    # ------------------------------------------------------------------ size

    def ran(self, type_name: str, ends: Sequence[JobEnded]) -> None:
        """How jobs of a type that went together ended: by what they took, more or fewer of them go together."""
        if ends:
            most, moment = self._ctx.limits.together, self._ctx.limits.moment
            each = sum(max(0.0, end.finished - end.started) for end in ends) / len(ends)
            if each * most > moment:
                most = int(moment / each)
            self._sizes[type_name] = max(1, min(2 * self._size(type_name), most))

    def _size(self, type_name: str) -> int:
        return self._sizes.get(type_name, self._ctx.limits.unlearned)

    def took_long(self, type_name: str) -> None:
        """Jobs of a type that went together were not done when they should have been."""
        self._sizes[type_name] = 1

"""Planted bugs in limits: too many jobs run at once, or none runs any more; and in served types and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from distop.daemon.coordinator.label_routing import Placing
from distop.daemon.elections import Elections
from distop.daemon.executor.claimer import Claimer
from distop.daemon.incarnation import Incarnation
from distop.daemon.incarnation_context import Context
from distop.protocol import job_transitions, permits
from distop.protocol.records import OperationRef
from distop.protocol.txn import Txn
from distop.services.claims import job_owner
from distop.services.open_operation import OpenOperation
from tests.simulation.bug_planting import Patch, bug, substitute, wrap
from tests.simulation.planted import without
from tests.simulation.planted_pending import BUGS, Planted
from tests.simulator import scenes


@bug("invariant 16", shape=scenes.changing_job_limits, drawn=393)
def claim_a_permit_without_comparing_it(patch: Patch) -> None:
    wrap(patch, job_transitions, "claim", lambda txn, _: without(txn, lambda compare: "Permit." in compare.key))


@bug("invariant 16", shape=scenes.changing_job_limits, first=8, drawn=1292)
def a_lowered_limit_that_ignores_running_jobs(patch: Patch) -> None:
    """All permits below the limit can be taken, however many jobs still run beyond it."""
    substitute(patch, permits, "usable_permits", lambda most, held, without: most)


@bug("invariant 16", "liveness", shape=scenes.changing_job_limits, drawn=393)
def a_report_that_keeps_its_permit(patch: Patch) -> None:
    def kept(guarded: job_transitions.Guarded, _: Any) -> job_transitions.Guarded:
        return replace(guarded, ops=tuple(op for op in guarded.ops if "Permit." not in getattr(op, "key", "")))

    wrap(patch, job_transitions, "report", kept)


@bug("invariant 16", shape=scenes.changing_job_limits, drawn=3480)
def claim_with_the_limit_of_a_former_gate(patch: Patch) -> None:
    """Claims that a former gate allowed are sent under the current gate."""
    former = Claimer._claim_group

    async def group(
        self: Claimer, op: Any, gate_mod: int, wants: Any, dead: Any, uncounted: Any, overdue: Any, won: Any
    ) -> None:
        await former(self, op, op.gate_mod, wants, dead, uncounted, overdue, won)

    def forget(self: OpenOperation, gate_mod: int, gate: Any) -> None:
        self.gate_mod, self.gate = gate_mod, gate
        self.told_to_stop = False

    substitute(patch, Claimer, "_claim_group", group)
    substitute(patch, OpenOperation, "reopened", forget)


@bug("invariant 16", shape=scenes.toggled_job_limits_with_actors, focus=("crash",), drawn=4978)
def a_lost_job_that_an_actor_takes_over_keeps_its_permit(patch: Patch) -> None:
    wrap(patch, job_owner, "takings", lambda found, _: [replace(one, former=None) for one in found])


@bug("invariant 16", "liveness", shape=scenes.lost_jobs_fail, focus=("crash",), drawn=232)
def a_lost_job_that_is_failed_keeps_its_permit(patch: Patch) -> None:
    def kept(txn: Txn, _: Any) -> Txn:
        parts = [part for part in txn.success if isinstance(part, Txn)]
        return replace(
            txn,
            success=tuple(
                replace(part, success=tuple(op for op in part.success if "Permit." not in getattr(op, "key", "")))
                for part in parts
            ),
        )

    wrap(patch, job_transitions, "fail_lost", kept)


@bug("liveness", shape=scenes.losses_beyond_compares, focus=("crash",), drawn=60)
def lost_claims_that_count_until_they_are_taken_over(patch: Patch) -> None:
    """There is no permit for a take-over."""

    async def nothing(self: Claimer, op: OpenOperation) -> None:
        return

    substitute(patch, Claimer, "revoke_lost", nothing)


def forget_claims(patch: Patch) -> None:
    """An executor loses every third group of claims from its memory, as after an error in its own code."""
    former = Claimer.claim_fresh
    calls: WeakKeyDictionary[Claimer, Iterator[int]] = WeakKeyDictionary()

    async def claim_fresh(
        self: Claimer, refs: Iterable[OperationRef]
    ) -> tuple[list[OpenOperation], dict[OperationRef, Exception]]:
        won, failures = await former(self, refs)
        forgets = next(calls.setdefault(self, count(1))) % 3 == 0
        return ([] if forgets else won), failures

    substitute(patch, Claimer, "claim_fresh", claim_fresh)


@bug("liveness", shape=scenes.gates_changed_at_once, first=71, drawn=71)
def unknown_own_claims_that_the_poll_does_not_release(patch: Patch) -> None:
    async def settle(self: Incarnation) -> None:
        return

    forget_claims(patch)
    substitute(patch, Incarnation, "_release_unknown_claims", settle)


__all__ = ["BUGS", "Planted"]


# ---------------------------------------------------------- types and tables


@bug("not served", "invariant 17", shape=scenes.one_serves_all, drawn=235)
def an_executor_that_ignores_what_it_serves(patch: Patch) -> None:
    """Only its child would refuse."""
    substitute(patch, Context, "admits", lambda self, type_name, tables: True)


@bug("not served", "liveness", shape=scenes.one_serves_all, first=2, drawn=1223)
def an_executor_that_coordinates_tables_that_it_does_not_serve(patch: Patch) -> None:
    def coordinates(self: Elections, subject: tuple[str, str]) -> bool:
        return subject[1] in self._ctx.types

    substitute(patch, Elections, "_coordinates", coordinates)
    substitute(patch, Placing, "here", lambda self, op, step: step)

"""Bugs of limits to be planted: those by which more jobs run at once than may, or none for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

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
from tests.simulation.planted import without
from tests.simulation.planted_waiting import BUGS, Planted
from tests.simulation.planting import Patch, bug, substitute, wrap
from tests.simulator import scenes


@bug("invariant 16", shape=scenes.few_at_once)
def claim_a_permit_without_comparing_it(patch: Patch) -> None:
    wrap(patch, job_transitions, "claim", lambda txn, _: without(txn, lambda compare: "Permit." in compare.key))


@bug("invariant 16", shape=scenes.few_at_once, first=8)
def a_lowered_limit_that_forgets_what_runs(patch: Patch) -> None:
    """All permits below the limit may be taken, whatever runs beyond."""
    substitute(patch, permits, "usable_permits", lambda most, held, without: most)


@bug("invariant 16", "liveness", shape=scenes.few_at_once)
def a_report_that_keeps_its_permit(patch: Patch) -> None:
    def kept(guarded: job_transitions.Guarded, _: Any) -> job_transitions.Guarded:
        return replace(guarded, ops=tuple(op for op in guarded.ops if "Permit." not in getattr(op, "key", "")))

    wrap(patch, job_transitions, "report", kept)


@bug("invariant 16", shape=scenes.few_at_once)
def claim_behind_a_gate_by_the_limit_of_another(patch: Patch) -> None:
    """What a former gate allowed is sent under the one that stands there now."""
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


@bug("invariant 16", shape=scenes.limits_come_and_go_beside_actors, focus=("crash",))
def a_lost_job_that_an_actor_takes_over_keeps_its_permit(patch: Patch) -> None:
    wrap(patch, job_owner, "takings", lambda found, _: [replace(one, former=None) for one in found])


@bug("invariant 16", "liveness", shape=scenes.lost_jobs_fail, focus=("crash",))
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


@bug("liveness", shape=scenes.losses_that_no_claim_compares, focus=("crash",))
def lost_claims_that_count_until_they_are_taken_over(patch: Patch) -> None:
    """For that there is no permit."""

    async def nothing(self: Claimer, op: OpenOperation) -> None:
        return

    substitute(patch, Claimer, "revoke_lost", nothing)


def forget_claims(patch: Patch) -> None:
    """An executor forgets every third group of claims that it has won, as after an error in its own code."""
    former, calls = Claimer.claim_fresh, count(1)

    async def claim_fresh(
        self: Claimer, jobs: Mapping[OperationRef, Sequence[int]]
    ) -> tuple[list[OpenOperation], dict[OperationRef, Exception]]:
        won, failures = await former(self, jobs)
        return ([], failures) if next(calls) % 3 == 0 else (won, failures)

    substitute(patch, Claimer, "claim_fresh", claim_fresh)


@bug("liveness", shape=scenes.gates_change_at_once, first=26)
def claims_of_mine_that_the_poll_does_not_give_back(patch: Patch) -> None:
    async def settle(self: Incarnation) -> None:
        return

    forget_claims(patch)
    substitute(patch, Incarnation, "_release_unknown_claims", settle)


__all__ = ["BUGS", "Planted"]


# ---------------------------------------------------------- types and tables


@bug("not served", "invariant 17", shape=scenes.one_serves_all)
def an_executor_that_does_not_ask_what_it_serves(patch: Patch) -> None:
    """Nothing but its child would refuse."""
    substitute(patch, Context, "admits", lambda self, type_name, tables: True)


@bug("not served", "liveness", shape=scenes.one_serves_all, first=2)
def an_executor_that_coordinates_tables_that_it_does_not_serve(patch: Patch) -> None:
    def coordinates(self: Elections, subject: tuple[str, str]) -> bool:
        return subject[1] in self._ctx.types

    substitute(patch, Elections, "_coordinates", coordinates)
    substitute(patch, Placing, "here", lambda self, op, step: step)

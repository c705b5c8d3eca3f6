"""Bugs of limits to be planted: those by which more jobs run at once than may, or none for ever."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from distop.claims import owner
from distop.coordinator.placing import Placing
from distop.core import claiming, permits
from distop.core.txn import Txn
from distop.daemon.elections import Elections
from distop.daemon.incarnation import Incarnation
from distop.executor.claimer import Claimer
from distop.node.context import Context
from distop.node.openop import OpenOperation
from distop.testing.simulation import Scenario
from distop.testing.simulation.behaviors import RARE
from distop.testing.simulation.scenario import Act, Wish
from tests.simulation.planted import without
from tests.simulation.planted_waiting import BUGS, Planted
from tests.simulation.planting import Patch, bug, substitute, wrap


def few_at_once(wanted: Scenario) -> Scenario:
    """No more than a few jobs of each operation run at once, which somebody changes meanwhile."""
    acts = (Act(0.3, "alter max_jobs=4"), Act(0.3, "alter max_jobs=1"), Act(0.3, "alter max_jobs=3"))
    wishes = tuple(
        replace(wish, acts=acts, rerun="", options={"max_jobs": 2}, arg={**wish.arg, "pace": 0.1})
        for wish in wanted.wishes
    )
    return replace(wanted, wishes=wishes, drains=())


@bug("invariant 16", shape=few_at_once)
def claim_a_permit_without_comparing_it(patch: Patch) -> None:
    wrap(patch, claiming, "claim", lambda txn, _: without(txn, lambda compare: "Permit." in compare.key))


@bug("invariant 16", shape=few_at_once, first=8)
def a_lowered_limit_that_forgets_what_runs(patch: Patch) -> None:
    """All permits below the limit may be taken, whatever runs beyond."""
    substitute(patch, permits, "usable_permits", lambda most, held, without: most)


@bug("invariant 16", "liveness", shape=few_at_once)
def a_report_that_keeps_its_permit(patch: Patch) -> None:
    def kept(guarded: claiming.Guarded, _: Any) -> claiming.Guarded:
        return replace(guarded, ops=tuple(op for op in guarded.ops if "Permit." not in getattr(op, "key", "")))

    wrap(patch, claiming, "report", kept)


@bug("invariant 16", shape=few_at_once)
def claim_behind_a_gate_by_the_limit_of_another(patch: Patch) -> None:
    """What a former gate allowed is sent under the one that stands there now."""
    former = Claimer._claim_group

    async def group(
        self: Claimer, op: Any, gate_mod: int, wants: Any, dead: Any, uncounted: Any, overdue: Any, won: Any
    ) -> None:
        await former(self, op, op.gate_mod, wants, dead, uncounted, overdue, won)

    def forget(self: OpenOperation, gate_mod: int, gate: Any) -> None:
        self.gate_mod, self.gate = gate_mod, gate
        self.exhausted = self.told_to_stop = False

    substitute(patch, Claimer, "_claim_group", group)
    substitute(patch, OpenOperation, "reopened", forget)


def limits_come_and_go_beside_actors(wanted: Scenario) -> Scenario:
    """One job at once, then any number, then one again.

    Executors die, and actors take over their jobs.
    """
    changes = ("max_jobs=1", "max_jobs=0") * 4 + ("max_jobs=1",)
    acts = tuple(Act(0.7, f"alter {what}") for what in changes)
    arg = {**wanted.wishes[0].arg, "partitions": 6, "pace": 0.3, "objects": False, "follows": False}
    wishes = tuple(
        Wish(0, 0.4 * n, "check", wanted.tables[0], {**arg, "seed": n}, None, None, acts, options={"max_jobs": 2})
        for n in range(2)
    )
    hosts = tuple(replace(host, types=tuple({*host.types, "check"})) for host in wanted.hosts)
    return replace(wanted, wishes=wishes, hosts=hosts, drains=(), removals=(), actors=2)


@bug("invariant 16", shape=limits_come_and_go_beside_actors, focus=("crash",))
def a_lost_job_that_an_actor_takes_over_keeps_its_permit(patch: Patch) -> None:
    wrap(patch, owner, "takings", lambda found, _: [replace(one, former=None) for one in found])


def lost_jobs_fail(wanted: Scenario) -> Scenario:
    """Few jobs run at once, of a type whose jobs fail where their executor is lost, with nothing to clean up."""
    arg = {**wanted.wishes[0].arg, "partitions": 6, "pace": 0.5, "trouble": 0.0, "objects": False, "follows": False}
    model = Wish(0, 0.0, "purge", wanted.tables[0], arg, None, "collect_all", (), options={"max_jobs": 2})
    wishes = tuple(replace(model, after=0.4 * n, arg={**arg, "seed": n}) for n in range(2))
    hosts = tuple(replace(host, types=tuple({*host.types, "purge"}), unable=()) for host in wanted.hosts)
    return replace(wanted, wishes=wishes, hosts=hosts, drains=(), removals=(), actors=0)


@bug("invariant 16", "liveness", shape=lost_jobs_fail, focus=("crash",))
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

    wrap(patch, claiming, "fail_lost", kept)


def losses_that_no_claim_compares(wanted: Scenario) -> Scenario:
    """A limit of one job comes while several run, under claims by executors that die and actors that forget them."""
    changed = limits_come_and_go_beside_actors(wanted)
    return replace(changed, limits=replace(changed.limits, gone=0, overdue=0))


@bug("liveness", shape=losses_that_no_claim_compares, focus=("crash",))
def lost_claims_that_count_until_they_are_taken_over(patch: Patch) -> None:
    """For that there is no permit."""

    async def nothing(self: Claimer, op: OpenOperation) -> None:
        return

    substitute(patch, Claimer, "revoke_lost", nothing)


def gates_change_at_once(wanted: Scenario) -> Scenario:
    """Small operations that are claimed unread, and altered as soon as they open.

    Where the answer to a claim is lost, its repetition is refused, and only the poll finds the jobs that it won.
    """
    chance = random.Random(wanted.seed)
    arg = {"partitions": 1, "pace": 0.3, "calls": 0.05, "trouble": 0.0, "chunk": 1000}
    wishes = tuple(
        Wish(
            *(0, 0.4 * n, "check", wanted.tables[0], {**arg, "seed": n}, None, None),
            tuple(Act(chance.uniform(0.05, 0.3), f"alter priority={one}") for one in range(12)),
        )
        for n in range(8)
    )
    return replace(wanted, wishes=wishes, drains=(), removals=(), actors=0, clients=1)


@bug("liveness", shape=gates_change_at_once, focus=("answers-lost",), first=104)
def claims_of_mine_that_the_poll_does_not_give_back(patch: Patch) -> None:
    async def settle(self: Incarnation) -> None:
        return

    substitute(patch, Incarnation, "_settle_claims", settle)


__all__ = ["BUGS", "Planted"]


# ---------------------------------------------------------- types and tables


def one_serves_all(wanted: Scenario) -> Scenario:
    """The first executor has all types, and serves everything; the second one has them, too, and serves no table."""
    types = tuple(sorted({wish.type for wish in wanted.wishes} | {"check", "noop"}))
    host = replace(wanted.hosts[0], types=types, slots=2, skew=0.0, unable=(), labels={}, leaves=0.0)
    first = replace(host, name="exec-0", only_types=None, only_tables=None)
    second = replace(host, name="exec-1", only_types=None, only_tables=("elsewhere.*",))
    wishes = tuple(wish for wish in wanted.wishes if wish.type != RARE and "where" not in wish.options)
    return replace(wanted, wishes=wishes or wanted.wishes[:1], hosts=(first, second), drains=())


@bug("not served", "invariant 17", shape=one_serves_all)
def an_executor_that_does_not_ask_what_it_serves(patch: Patch) -> None:
    """Nothing but its child would refuse."""
    substitute(patch, Context, "admits", lambda self, type_name, tables: True)


@bug("not served", "liveness", shape=one_serves_all, first=2)
def an_executor_that_coordinates_tables_that_it_does_not_serve(patch: Patch) -> None:
    def coordinates(self: Elections, subject: tuple[str, str]) -> bool:
        return subject[1] in self._ctx.types

    substitute(patch, Elections, "_coordinates", coordinates)
    substitute(patch, Placing, "here", lambda self, op, step: step)

"""Planted bugs in pending operations: dependencies, groups, series, holds, cancels without an executor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from distop.daemon import job_reports
from distop.daemon.coordinator import finish_batches, pending_starts
from distop.daemon.coordinator.follow_ups import FollowUps
from distop.daemon.coordinator.label_routing import Placing
from distop.daemon.coordinator.operation_end import Ending
from distop.daemon.elections import Elections
from distop.daemon.upkeep import abandoned_holds
from distop.daemon.upkeep.abandoned_holds import HoldKeeper
from distop.decide import due_operations
from distop.decide.operation_view import OperationView
from distop.decide.view import TypeView
from distop.protocol import operation_finish as f
from distop.protocol import pending_operations as w
from distop.protocol import transaction_groups
from distop.protocol.records import Cancel, State
from distop.protocol.txn import Compare, KeyValue, Txn
from tests.simulation.bug_planting import Patch, bug, give, substitute, wrap
from tests.simulation.planted import without
from tests.simulation.planted_commands import BUGS, Planted
from tests.simulator import scenes

# ----------------------------------------------------------------------- bugs


def _of_edges(compare: Compare) -> bool:
    return ".after." in compare.key or ".next." in compare.key


@bug("invariant 15", shape=scenes.chain_of_operations, drawn=110)
def successors_start_after_a_failure(patch: Patch) -> None:
    give(patch, w, "signal", ended=State.SUCCESS)


@bug("invariant 15", shape=scenes.chain_of_operations, drawn=110)
def an_operation_starts_before_its_predecessors_end(patch: Patch) -> None:
    """Dependencies are neither read nor compared."""

    def alone(decided: due_operations.StartDecision, given: Any) -> due_operations.StartDecision:
        return due_operations.Begin() if isinstance(decided, due_operations.Blocked) and not decided.hold else decided

    wrap(patch, pending_starts, "start_decision", alone)
    wrap(patch, w, "begins", lambda txn, _: without(txn, _of_edges))


@bug("invariant 15", shape=scenes.chain_of_operations, drawn=110)
def a_waiting_operation_is_aborted_without_cause(patch: Patch) -> None:
    def too_soon(decided: due_operations.StartDecision, given: Any) -> due_operations.StartDecision:
        waits = isinstance(decided, due_operations.Blocked) and not decided.hold
        return due_operations.EndWaiting(Cancel("aborted", "it waits")) if waits else decided

    wrap(patch, pending_starts, "start_decision", too_soon)


@bug("liveness", shape=scenes.chain_of_operations, drawn=110)
def an_operation_is_cleaned_up_before_its_successors_are_informed(patch: Patch) -> None:
    """All its keys are deleted, with those that name its successors."""
    fold = TypeView._fold_operation

    def see_none(op: OperationView, name: str, kv: KeyValue, deleted: bool, chunk: int = -1, edge_id: str = "") -> None:
        if name != "next":
            fold(op, name, kv, deleted, chunk, edge_id)

    substitute(patch, TypeView, "_fold_operation", staticmethod(see_none))
    wrap(patch, f, "end", lambda txn, _: without(txn, _of_edges))


@bug("invalid transaction", shape=scenes.chords_that_fail, drawn=2693)
def groups_that_ignore_common_keys_of_their_parts(patch: Patch) -> None:
    for module in (transaction_groups, job_reports):
        substitute(patch, module, "independent_count", lambda parts: len(parts))


@bug("liveness", shape=scenes.large_chord, first=6, drawn=214)
def finishes_beyond_the_room_of_a_transaction_are_lost(patch: Patch) -> None:
    add = finish_batches._FinishGroup.add

    def lossy(self: Any, item: Any) -> bool:
        return add(self, item) or not (item.apart or self.full)

    substitute(patch, finish_batches._FinishGroup, "add", lossy)


# --------------------------------------------------------------------- series


@bug("invariant 19", shape=scenes.series_of_operations, focus=("crash",), first=85, drawn=319)
def a_series_whose_next_operation_a_new_coordinator_skips(patch: Patch) -> None:
    """Only the coordinator that finished an operation starts the next one of the series."""
    finish, again = Ending.finish, FollowUps.start_next_of_series
    finished: set[tuple[int, str]] = set()

    async def finishing(
        self: Ending,
        op: Any,
        decision: Any,
        decision_mod: int,
        report: Any = None,
        failure: str | None = None,
        began: float = 0.0,
    ) -> bool:
        finished.add((id(self._follow_ups), str(op.ref)))
        return await finish(self, op, decision, decision_mod, report, failure, began)

    async def coming(self: FollowUps, op: Any) -> None:
        if (id(self), str(op.ref)) in finished:
            await again(self, op)

    substitute(patch, Ending, "finish", finishing)
    substitute(patch, FollowUps, "start_next_of_series", coming)


# ------------------------------------------------- cancels without an executor


@bug("liveness", shape=scenes.departing_executor, first=6, drawn=264)
def a_cancel_that_waits_for_labels_for_ever(patch: Patch) -> None:
    substitute(patch, Placing, "_waited", lambda self, ref, missing: self._only_ending)


@bug("liveness", shape=scenes.departing_executor, first=5, drawn=149)
def a_cancel_that_waits_for_its_type_for_ever(patch: Patch) -> None:
    substitute(patch, Elections, "_abandoned", lambda self: set())


@bug("invariant 15", shape=scenes.graph_inserted_with_late_holds, drawn=259)
def an_operation_of_an_unfinished_graph_is_ended_without_its_hold(patch: Patch) -> None:
    """Later operations of its graph depend on it, and are never informed."""

    def at_once(decided: due_operations.StartDecision, given: Any) -> due_operations.StartDecision:
        return replace(decided, hold="") if isinstance(decided, due_operations.EndWaiting) else decided

    wrap(patch, pending_starts, "start_decision", at_once)


@bug("graph abandoned too early", shape=scenes.slow_graph_insertion, drawn=78, slow=True)
def the_age_of_a_hold_is_not_reset(patch: Patch) -> None:
    """The age counts from the first view of the hold, even after a refresh."""
    former = HoldKeeper.changed

    def changed(self: HoldKeeper, ids: Collection[str] | None = None) -> None:
        since = {id_: at for id_, (_, at) in self._seen.items()}
        former(self, ids)
        for id_, (mod, at) in self._seen.items():
            self._seen[id_] = mod, since.get(id_, at)

    substitute(patch, HoldKeeper, "changed", changed)


@bug("graph abandoned too early", shape=scenes.slow_graph_insertion, drawn=78)
def a_graph_is_abandoned_within_its_minute(patch: Patch) -> None:
    """The check has its own minute, independent of the production constant."""
    patch.setattr(abandoned_holds, "GRAPH_LIMIT", 8.0)


@bug("invariant 15", shape=scenes.dependency_added_at_its_end, first=16, drawn=298)
def predecessors_are_not_compared_when_they_are_added(patch: Patch) -> None:
    def of_others(txn: Txn, given: Any) -> Txn:
        runs = {given.keys.of(run.ref, "state") for _, run, _ in given.links}
        return without(txn, lambda compare: compare.key not in runs)

    wrap(patch, w, "add_dependencies", of_others)


__all__ = ["BUGS", "Planted"]

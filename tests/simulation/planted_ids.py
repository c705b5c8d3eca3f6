"""Planted bugs in operation ids and in callers' transactions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distop.protocol import operation_finish as f
from distop.protocol import pending_operations as w
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef
from distop.protocol.txn import Delete, TxnOperation
from distop.protocol.user_transaction import CallerTransaction
from distop.services.submission import duplicates, insertion
from distop.services.submission.duplicates import ResolvedStart
from tests.simulation.bug_planting import Patch, bug, substitute, wrap
from tests.simulation.planted_limits import BUGS, Planted
from tests.simulator import scenes

# ----------------------------------------------------------------------- bugs


@bug("invariant 18", shape=scenes.operations_with_one_id, drawn=139)
def an_ended_operation_keeps_its_id(patch: Patch) -> None:
    for module in (f, w):
        substitute(patch, module, "id_releases", lambda keys, ref, history: ())


@bug("invariant 18", shape=scenes.operations_with_one_id, drawn=139)
def an_id_is_not_returned_to_the_running_operation(patch: Patch) -> None:
    wrap(patch, ResolvedStart, "spec", lambda spec, _: replace(spec, follows=""))


@bug("invariant 18", shape=scenes.operations_with_one_id, drawn=139)
def a_follower_starts_at_once(patch: Patch) -> None:
    def beside(asked: ResolvedStart, given: Any) -> ResolvedStart:
        return replace(asked, request=given.wanted)

    wrap(patch, duplicates, "_after_holder", beside)


@bug("invariant 18", shape=scenes.series_with_an_id, drawn=350)
def the_cleanup_of_a_series_operation_deletes_the_id_of_the_next(patch: Patch) -> None:
    def released(keys: Keys, ref: OperationRef, id_: str) -> tuple[TxnOperation, ...]:
        return (Delete(keys.unique(ref.table, ref.type, id_)),) if id_ else ()

    substitute(patch, f, "series_id_releases", released)


@bug("invalid transaction", shape=scenes.concurrent_replacements, first=3, drawn=115)
def a_holder_that_is_newer_than_the_counters_is_replaced(patch: Patch) -> None:
    """Its instance number equals the next one of the outdated counters."""
    substitute(patch, insertion, "_overtaken", lambda resolved, of_type: False)


@bug(
    "transaction branches",
    focus=("answers-lost", "requests-late"),
    shape=scenes.with_both_branches,
    first=76,
    drawn=8077,
)
def a_failure_branch_does_not_fence_other_copies(patch: Patch) -> None:
    """A late copy of a caller's transaction takes the success branch if its compares hold by then."""
    for name in ("writes_failure", "fences_failure"):
        patch.setattr(CallerTransaction, name, property(lambda self: False))


__all__ = ["BUGS", "Planted"]

"""Bugs in who holds an id, and in transactions of callers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distop.protocol import operation_finish as f
from distop.protocol import pending_operations as w
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef
from distop.protocol.txn import Delete, Operation
from distop.protocol.user_transaction import CallerTransaction
from distop.services.submission import duplicates, insertion
from distop.services.submission.duplicates import Asked
from tests.simulation.planted_limits import BUGS, Planted
from tests.simulation.planting import Patch, bug, substitute, wrap
from tests.simulator import scenes

# ----------------------------------------------------------------------- bugs


@bug("invariant 18", shape=scenes.of_one_id)
def an_end_keeps_the_id(patch: Patch) -> None:
    for module in (f, w):
        substitute(patch, module, "id_releases", lambda keys, ref, history: ())


@bug("invariant 18", shape=scenes.of_one_id)
def an_id_does_not_go_back_to_what_runs(patch: Patch) -> None:
    wrap(patch, Asked, "spec", lambda spec, _: replace(spec, follows=""))


@bug("invariant 18", shape=scenes.of_one_id)
def what_shall_follow_begins_at_once(patch: Patch) -> None:
    def beside(asked: Asked, given: Any) -> Asked:
        return replace(asked, request=given.wanted)

    wrap(patch, duplicates, "_after_holder", beside)


@bug("invariant 18", shape=scenes.series_of_one_id)
def the_last_keys_of_one_of_a_series_take_the_id_of_the_next_along(patch: Patch) -> None:
    def released(keys: Keys, ref: OperationRef, id_: str) -> tuple[Operation, ...]:
        return (Delete(keys.unique(ref.table, ref.type, id_)),) if id_ else ()

    substitute(patch, f, "series_id_releases", released)


@bug("progress", shape=scenes.at_one_time, first=3)
def a_holder_that_is_newer_than_the_counters_is_replaced(patch: Patch) -> None:
    """Its number is the one that the counters still give away."""
    substitute(patch, insertion, "_overtaken", lambda asked, of_type: False)


@bug("two branches", focus=("answers-lost", "requests-late"), shape=scenes.with_both_branches, first=76)
def a_failure_branch_refuses_no_other_copy(patch: Patch) -> None:
    """Of a caller's transaction: what it compares may have come to hold by then."""
    for name in ("writes_failure", "fences_failure"):
        patch.setattr(CallerTransaction, name, property(lambda self: False))


__all__ = ["BUGS", "Planted"]

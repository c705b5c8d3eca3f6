"""Bugs in what becomes of operations that wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distop.coordinator import waiters
from distop.core import due
from distop.core import finishing as f
from distop.core import waiting as w
from distop.core.model import Cancel, State
from distop.core.operationview import OperationView
from distop.core.txn import Compare, KeyValue
from distop.core.view import TypeView
from distop.testing.simulation import Scenario
from distop.testing.simulation.scenario import Act
from tests.simulation.planted import without
from tests.simulation.planted_opening import BUGS, Planted
from tests.simulation.planting import Patch, bug, give, substitute, wrap

# --------------------------------------------------------------------- shapes


def in_a_row(wanted: Scenario) -> Scenario:
    """Each operation waits for the one before it; some are cancelled, some fail."""
    plain = replace(wanted.wishes[0], within=False)
    model = replace(plain, client=0, names=None, rerun="", graph=0, delay=0.0, callers=1, type="check")
    arg = {**model.arg, "partitions": 4, "trouble": 1.0, "objects": False, "follows": False}
    wishes = [
        replace(
            model,
            after=0.2 * n,
            table=wanted.tables[0],
            arg={**arg, "seed": wanted.seed * 10 + n},
            acts=(Act(1.0, "cancel"),) if n == wanted.seed % 5 else (),
            behind=((n - 1, "success"),) if n else (),
        )
        for n in range(4)
    ]
    return replace(wanted, wishes=tuple(wishes))


# ----------------------------------------------------------------------- bugs


def _of_edges(compare: Compare) -> bool:
    return ".after." in compare.key or ".next." in compare.key


@bug("invariant 15", shape=in_a_row)
def successors_go_on_however_it_ended(patch: Patch) -> None:
    give(patch, w, "signal", ended=State.SUCCESS)


@bug("invariant 15", shape=in_a_row)
def what_waits_for_others_begins(patch: Patch) -> None:
    """Neither is an edge looked at, nor compared."""

    def alone(decided: due.Fate, given: Any) -> due.Fate:
        return due.Begin() if isinstance(decided, due.Blocked) and not decided.hold else decided

    wrap(patch, waiters, "fate", alone)
    wrap(patch, w, "begins", lambda txn, _: without(txn, _of_edges))


@bug("invariant 15", shape=in_a_row)
def what_waits_for_others_is_aborted_without_cause(patch: Patch) -> None:
    def too_soon(decided: due.Fate, given: Any) -> due.Fate:
        waits = isinstance(decided, due.Blocked) and not decided.hold
        return due.EndWaiting(Cancel("aborted", "it waits")) if waits else decided

    wrap(patch, waiters, "fate", too_soon)


@bug("liveness", shape=in_a_row)
def it_is_cleaned_up_before_its_successors_are_told(patch: Patch) -> None:
    """All that is left of it goes, also what names those that wait for it."""
    fold = TypeView._fold_operation

    def see_none(op: OperationView, name: str, kv: KeyValue, deleted: bool, chunk: int = -1, edge_id: str = "") -> None:
        if name != "next":
            fold(op, name, kv, deleted, chunk, edge_id)

    substitute(patch, TypeView, "_fold_operation", staticmethod(see_none))
    wrap(patch, f, "end", lambda txn, _: without(txn, _of_edges))


__all__ = ["BUGS", "Planted"]

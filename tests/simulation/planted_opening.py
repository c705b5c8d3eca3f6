"""Bugs in what an executor takes of an operation with the transaction that writes its plan."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from distop.daemon.executor.executor_role import Executor
from tests.simulation.planted_acts import BUGS, Planted
from tests.simulation.planting import Patch, bug, substitute
from tests.simulator import scenes

# ----------------------------------------------------------------------- bugs


@bug("not stopped", shape=scenes.watches_end_before_the_plan)
def a_gate_is_gone_only_where_it_was_seen(patch: Patch) -> None:
    """One that came and went while no watch told of it seems to be on its way for ever: what was claimed with it runs
    on, whatever becomes of the operation.
    """
    seen: WeakKeyDictionary[Executor, set[int]] = WeakKeyDictionary()
    former = Executor.cluster_changed

    def see(self: Executor) -> set[int]:
        gates = seen.setdefault(self, set())
        gates.update(gate.mod for gate in self._ctx.cluster.gates.values())
        return gates

    def changed(self: Executor, *, hint: bool, refs: Any = None) -> None:
        see(self)
        former(self, hint=hint, refs=refs)

    def shut(self: Executor, op: Any) -> bool:
        return op.gate_mod in see(self) and op.ref not in self._ctx.cluster.gates

    substitute(patch, Executor, "cluster_changed", changed)
    substitute(patch, Executor, "_shut", shut)


@bug("liveness", shape=scenes.paused_while_the_plan_is_on_its_way, first=18)
def keep_the_slots_of_a_plan_that_was_refused(patch: Patch) -> None:
    """They were taken for its first jobs, and nobody gives them back."""
    former = Executor._open_first

    async def open_first(self: Executor, op: Any, plan: Any, state_mod: int, ordinals: Any, slots: int) -> Any:
        result = await former(self, op, plan, state_mod, ordinals, slots)
        if not op.held and not result.succeeded:
            self._free_slots -= slots
        return result

    substitute(patch, Executor, "_open_first", open_first)


__all__ = ["BUGS", "Planted"]

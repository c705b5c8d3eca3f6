"""Bugs in what an executor takes of an operation with the transaction that writes its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from distop.core.limits import DEFAULT
from distop.executor.role import Executor
from distop.testing.simulation import Scenario
from distop.testing.simulation.scenario import Act, Fault
from tests.simulation.planted_acts import BUGS, Planted
from tests.simulation.planting import Patch, bug, substitute

# --------------------------------------------------------------------- shapes


def on_one_executor(wanted: Scenario, slots: int, after: float, acts: tuple[Act, ...], **arg: Any) -> Scenario:
    """One operation on one executor, to which clients do this. Faults are to be added."""
    drawn = wanted.wishes[0]
    given = {**drawn.arg, "partitions": 3, "name": "x", "chunk": 100_000, "trouble": 0.0, **arg}
    wish = replace(
        drawn,
        client=0,
        after=after,
        type="index",
        table="a",
        names=None,
        acts=acts,
        arg=given,
        policy=None,
        rerun="",
        options={},
        delay=0.0,
        behind=(),
        graph=0,
        prepared="",
        id="",
    )
    host = replace(wanted.hosts[0], name="exec-0", types=("index", "check"), slots=slots, skew=0.0, unable=())
    return replace(
        wanted, hosts=(host,), members=1, clients=1, wishes=(wish,), tables=("a",), drains=(), batch=1000, past=0,
        limits=DEFAULT,
    )  # fmt: skip


def watches_end_before_the_plan(wanted: Scenario) -> Scenario:
    """They are not let in again until the operation, whose jobs take minutes, was told to stop."""
    refused = Fault("watches-refused", 1.2, 3.0, (0.5, 0.5, 0.9, 0.0))
    slow = on_one_executor(wanted, 4, 1.0, (Act(2.0, "pause-now"),), pace=100.0, calls=1.0)
    return replace(slow, faults=(refused,), calm=4.2)


def paused_while_the_plan_is_on_its_way(wanted: Scenario) -> Scenario:
    """Requests are late, and the operation is paused and resumed while it is planned."""
    acts = tuple(Act(0.1, what) for _ in range(3) for what in ("pause", "resume"))
    late = Fault("requests-late", 1.02, 8.0, (0.5, 0.8, 0.5, 0.5))
    return replace(on_one_executor(wanted, 1, 1.0, acts, pace=0.02, calls=0.05), faults=(late,), calm=9.02)


# ----------------------------------------------------------------------- bugs


@bug("not stopped", shape=watches_end_before_the_plan)
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


@bug("liveness", shape=paused_while_the_plan_is_on_its_way, first=18)
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

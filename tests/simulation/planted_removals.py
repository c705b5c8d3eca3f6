"""Planted bugs of plans that remove their table: a removal that compares too little, or comes before its plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from distop.daemon.coordinator.operation_planning import Planning
from distop.protocol import operation_transitions as t
from tests.simulation.bug_planting import Patch, bug, substitute
from tests.simulation.planted_policies import BUGS, Planted
from tests.simulator.scenes import removed_by_operations

__all__ = ["BUGS", "Planted"]


@bug("wrong removal", shape=removed_by_operations, drawn=225)
def remove_a_later_record(patch: Patch) -> None:
    """The plan removes whatever record is there, also one that was registered after the start."""
    former = Planning._removal

    async def removal(self: Planning, op: Any) -> Any:
        found = await self._ctx.client.get(self._keys.table(op.ref.table))
        mod = found.mod_revision if found is not None else 0
        spec = replace(op.spec, table_revision=mod)
        return await former(self, SimpleNamespace(ref=op.ref, spec=spec))  # type: ignore[arg-type]

    substitute(patch, Planning, "_removal", removal)


@bug("wrong removal", shape=removed_by_operations, drawn=43)
def remove_before_the_plan(patch: Patch) -> None:
    """The record is removed before the plan is durable."""
    former = Planning._removal

    async def removal(self: Planning, op: Any) -> Any:
        await self._commit(await former(self, op))
        return t.NO_REMOVAL

    substitute(patch, Planning, "_removal", removal)

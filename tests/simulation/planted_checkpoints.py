"""Planted bugs in checkpoints, as other job systems had them: a job resumes from a wrong one."""

from __future__ import annotations

from typing import Any

from distop.daemon.saved_checkpoints import Checkpoints
from tests.simulation.bug_planting import Patch, bug, substitute
from tests.simulation.planted_ids import BUGS, Planted
from tests.simulator import scenes


# As cockroachdb/cockroach#159930
@bug("checkpoint lost", first=8)
def a_job_that_resumes_one_step_early(patch: Patch) -> None:
    """A job resumes one step before its last checkpoint, and repeats that step."""
    former = Checkpoints.load

    async def load(self: Checkpoints, op: Any, block: Any) -> dict[int, Any]:
        return {p: max(0, int(value) - 1) for p, value in (await former(self, op, block)).items()}

    substitute(patch, Checkpoints, "load", load)


# As cockroachdb/cockroach#140358
@bug("checkpoint lost", shape=scenes.checkpoints_and_two_pauses, drawn=647)
def a_second_pause_that_loses_progress(patch: Patch) -> None:
    """Only the second attempt finds the checkpoint of the first one."""
    former = Checkpoints.load

    async def load(self: Checkpoints, op: Any, block: Any) -> dict[int, Any]:
        found = await former(self, op, block)
        return {p: value for p, value in found.items() if op.held[p].claim.attempt == 2}

    substitute(patch, Checkpoints, "load", load)


# As cockroachdb/cockroach#173109
@bug("checkpoint lost", first=107)
def a_retry_whose_checkpoint_omits_earlier_steps(patch: Patch) -> None:
    """A later attempt saves only its own steps, without those of the checkpoint from which it resumed."""
    loaded: dict[tuple[str, int, int], int] = {}
    former_load, former_save = Checkpoints.load, Checkpoints.save

    async def load(self: Checkpoints, op: Any, block: Any) -> dict[int, Any]:
        found = await former_load(self, op, block)
        loaded.update({(str(op.ref), p, op.held[p].fence): int(value) for p, value in found.items()})
        return found

    async def save(self: Checkpoints, op: Any, partition: int, value: Any) -> bool:
        held = op.held.get(partition)
        before = loaded.get((str(op.ref), partition, held.fence), 0) if held is not None else 0
        return await former_save(self, op, partition, value - before if isinstance(value, int) else value)

    substitute(patch, Checkpoints, "load", load)
    substitute(patch, Checkpoints, "save", save)


__all__ = ["BUGS", "Planted"]

"""A planted bug for tests of lost jobs: the cleanup of one that was lost once too often comes before its claim."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distop.daemon.executor import claimer
from distop.daemon.executor.claimer import Claimer
from distop.decide import job_claims
from distop.worker.daemon_side.requests import JobItem
from tests.simulation.planting import Patch, substitute


def clean_up_before_the_claim(patch: Patch) -> None:
    """Whoever seems to have lost the job can give it back, or report it, beside the cleanup and after it."""
    former = Claimer._fail_lost

    async def fail_lost(self: Claimer, op: Any, over: Any, won: Any) -> None:
        items = [JobItem(op.partition(p), seen.value.attempt, seen.mod, None) for p, seen, _ in over]
        await self._ctx.worker.cleanup(str(op.ref), op.ref.type, op.arg, op.table, items)
        await former(self, op, over, won)

    substitute(patch, Claimer, "_fail_lost", fail_lost)
    patch.setattr(
        claimer, "job_claims", SimpleNamespace(**{**vars(job_claims), "only_ends": lambda claim, rules: False})
    )

"""A planted bug for tests of lost jobs: the cleanup after a job that failed by a loss comes before its claim."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distop.daemon.executor import claimer
from distop.daemon.executor.claimer import Claimer
from distop.decide import job_claims
from distop.worker.daemon_side.requests import JobItem
from tests.simulation.bug_planting import Patch, substitute


def clean_up_before_the_claim(patch: Patch) -> None:
    """The lost holder can release or report the job during and after the cleanup."""
    former = Claimer._fail_lost

    async def fail_lost(self: Claimer, op: Any, over: Any, won: Any) -> None:
        items = [JobItem(op.partition(p), seen.value.attempt, seen.mod, None) for p, seen, _ in over]
        await self._ctx.worker.cleanup(str(op.ref), op.ref.type, op.arg, op.table, items)
        await former(self, op, over, won)

    substitute(patch, Claimer, "_fail_lost", fail_lost)
    patch.setattr(
        claimer, "job_claims", SimpleNamespace(**{**vars(job_claims), "only_ends": lambda claim, rules: False})
    )

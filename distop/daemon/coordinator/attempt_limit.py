"""Counts failed attempts of planning and completion, and finds the last one allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import random, time
from distop.decide import next_steps

if TYPE_CHECKING:
    from distop.daemon.incarnation_context import Context
    from distop.protocol.records import Attempts, OperationRef, Spec
    from distop.worker.daemon_side.requests import WorkerError


class Elsewhere(Exception):
    """A call failed and was counted; another node makes the next attempt.

    The cause may be on this node alone.
    """


def failed_attempt(
    ctx: Context, ref: OperationRef, spec: Spec, what: str, before: int, error: WorkerError
) -> tuple[Attempts, bool] | None:
    """The attempts including this one, and whether it was the last.

    ``before``: earlier attempts. None if only this node cannot make the call: it is not counted, and another node makes
    it.
    """
    rules, where, tables = spec.rules, spec.where, (ref.table,)
    if error.kind == "unable" and ctx.capability.cannot(ref.type, str(error), tables):
        return None
    if error.kind == "unavailable" and ctx.capability.cannot_now(ref.type, str(error), where, tables=tables):
        return None
    text = f"{what} failed: {error}"
    ctx.log.warning("%s", text, extra={"operation": str(ref), "attempt": before + 1})
    final = error.kind in ("fatal", "unable") or next_steps.gives_up(rules, before + 1)
    jitter = 0.0 if final else random.uniform(0.5, 1.0)
    return next_steps.failed_attempt(rules, before, text, time.time(), final=final, jitter=jitter)

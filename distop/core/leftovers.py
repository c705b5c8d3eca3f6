"""What an executor does, when it starts or looks again, about a job that it ran before (I29): pure judgement."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from distop.core.model import State

if TYPE_CHECKING:
    from collections.abc import Collection

    from distop.core.jobs import Claim, Outcome


class Fate(Enum):
    """What becomes of what a former attempt left on this node."""

    STAYS = "stays"
    """The job has no end and nobody runs it: it may go on here."""
    SETTLED = "settled"
    """Nothing is left of it, or it is taken care of by a run of this incarnation."""
    CLEANED = "cleaned"
    """The job is gone, done by somebody, or runs elsewhere: what is left here is cleaned up."""


def judge(
    attempt: tuple[str, int],
    operation: State | None,
    claim: Claim | None,
    outcome: Outcome | None,
    live: Collection[str],
    executor: str,
    incarnation: str,
) -> Fate:
    """``attempt``: incarnation and attempt that left it; ``operation``: its state, None where it is gone; ``claim`` and
    ``outcome``: the job's, as they are now; ``live``: incarnations with a node key; ``executor`` and ``incarnation``:
    this one. (A claim of a former incarnation of this executor only waits for that one's session to expire.)
    """
    if outcome is not None:
        # What was reported from here had been cleaned up before, unless it is the result.
        return Fate.SETTLED if (outcome.incarnation, outcome.attempt) == attempt else Fate.CLEANED
    if operation is None or operation.terminal or operation is State.CANCELLING:
        return Fate.CLEANED
    if claim is not None and claim.incarnation == incarnation:
        return Fate.SETTLED
    if claim is not None and claim.actor:
        return Fate.CLEANED  # somebody's own worker loop has it, or had it last
    gone = claim is None or claim.waiting or claim.incarnation not in live or claim.executor == executor
    return Fate.STAYS if gone else Fate.CLEANED

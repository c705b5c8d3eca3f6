"""Decides what happens to the data of earlier runs on an executor's disk (I29). Pure.

:func:`judge` is called at the start of an executor, and with each poll.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from distop.protocol.records import State

if TYPE_CHECKING:
    from collections.abc import Collection

    from distop.protocol.jobs import Claim, Outcome


class Disposition(Enum):
    """What happens to the data of an earlier attempt on this node."""

    STAYS = "stays"
    """The job has not ended and has no holder: the data stay, since it may continue here."""
    SETTLED = "settled"
    """There are no data left, or a run of this incarnation handles them."""
    CLEANED = "cleaned"
    """The job is gone, ended or runs elsewhere: the data are cleaned up."""


def judge(
    attempt: tuple[str, int],
    operation: State | None,
    claim: Claim | None,
    outcome: Outcome | None,
    live: Collection[str],
    executor: str,
    incarnation: str,
) -> Disposition:
    """What happens to the data of ``attempt``, (incarnation, attempt).

    ``operation``: its state, None if it is gone. ``claim`` and ``outcome``: the job's current ones. ``live``:
    incarnations with a node key. ``executor`` and ``incarnation``: this one. (A claim of a former incarnation of this
    executor only waits until that session expires.)
    """
    if outcome is not None:
        # An attempt cleans up before it reports an end without a result.
        return Disposition.SETTLED if (outcome.incarnation, outcome.attempt) == attempt else Disposition.CLEANED
    if operation is None or operation.terminal or operation is State.CANCELLING:
        return Disposition.CLEANED
    if claim is not None and claim.incarnation == incarnation:
        return Disposition.SETTLED
    if claim is not None and claim.actor:
        return Disposition.CLEANED  # an actor holds the job, or held it last
    gone = claim is None or claim.waiting or claim.incarnation not in live or claim.executor == executor
    return Disposition.STAYS if gone else Disposition.CLEANED

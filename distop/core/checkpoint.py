"""What a checkpoint is to the attempts that follow: something to go on from, or given up.

Where a job ends without a result, what it left is removed before its end is reported. If that report does not come
through, the next attempt must not go on from what was removed. So its checkpoint is given up before the cleanup, under
the claim's fence: whoever follows cleans up, for which the checkpoint may still be needed, and starts over.
"""

from __future__ import annotations

from typing import Any

from distop.core.jobs import MAX_OUTCOME_BYTES

_GIVEN_UP = "distop:given_up"
MAX_BYTES = MAX_OUTCOME_BYTES
"""Of a checkpoint as its author saves it, in JSON."""
MARGIN = 64
"""Bytes that one takes more when it is given up."""


def given_up(checkpoint: Any) -> dict[str, Any]:
    """The checkpoint (any JSON value) as it is stored from then on."""
    return {_GIVEN_UP: for_cleanup(checkpoint)}


def for_cleanup(stored: Any) -> Any:
    """What a cleanup gets: what was saved last, given up or not."""
    return stored[_GIVEN_UP] if _is_given_up(stored) else stored


def to_go_on_from(stored: Any) -> Any:
    """What an attempt goes on from; None: it starts over."""
    return None if _is_given_up(stored) else stored


def _is_given_up(stored: Any) -> bool:
    return isinstance(stored, dict) and stored.keys() == {_GIVEN_UP}

"""What cannot be run again, and whether the sentence can be followed."""

from __future__ import annotations

import pytest

from distop.errors import NotAllowed
from distop.protocol.json_codec import to_ranges
from distop.protocol.records import History, OperationRef, State
from distop.services.submission.rerun import _names

REF = OperationRef("nyc.flights", "noop", "", 3)


def ended(failed: list[int], success: int = 0) -> History:
    total = 200_000
    return History(str(REF), State.FAILED, "", "", total, success, len(failed), None, (), to_ranges(failed))


@pytest.mark.parametrize("failed", [[3, 7, 8, 9], list(range(0, 200_000, 2))])
def test_names_that_were_too_many_to_keep_are_listed_by_a_command(failed: list[int]) -> None:
    """It said "with --partition for some", which nobody can follow who does not know which; then it listed ordinals."""
    with pytest.raises(NotAllowed) as refused:
        _names(REF, ended(failed), None, False)
    message = str(refused.value)
    assert message.endswith("(list the failed ones: `distop show nyc.flights/noop/3 --failed`)"), message
    assert len(message) < 300


def test_without_a_failed_partition_no_listing_is_proposed() -> None:
    with pytest.raises(NotAllowed, match="with --partition for some of them$"):
        _names(REF, ended([]), None, True)

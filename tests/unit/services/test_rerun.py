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


def test_what_was_too_much_to_be_kept_says_which_partitions_failed() -> None:
    """It said "with --partition for some", which nobody can follow who does not know which."""
    with pytest.raises(NotAllowed, match=r"with --partition for some \(failed, by their places .* from 0: 3,7-9\)$"):
        _names(REF, ended([3, 7, 8, 9]), None, False)


def test_of_very_many_it_names_the_first() -> None:
    with pytest.raises(NotAllowed) as refused:
        _names(REF, ended(list(range(0, 200_000, 2))), None, False)
    said = str(refused.value)
    assert "from 0: 0,2,4," in said
    assert said.endswith(",122,124 and more)"), said
    assert len(said) < 500


def test_where_none_failed_none_is_named() -> None:
    with pytest.raises(NotAllowed, match="with --partition for some$"):
        _names(REF, ended([]), None, True)

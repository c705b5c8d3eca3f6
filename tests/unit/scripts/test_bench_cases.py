"""The cases of ``scripts/bench validate``, which run alone with ``--cases``."""

from __future__ import annotations

from benchmarks import validate


def test_cases_are_chosen_by_name() -> None:
    (ten,) = validate.chosen(["ten"])
    assert (len(ten.checks), ten.statistics) == (10, "never")
    assert [case.name for case in validate.chosen(["statistics", "scan"], "the log")] == [
        "full scan",
        "decided from the log",
    ]
    assert len(validate.chosen(validate.CASE_NAMES)) == len(validate.CASE_NAMES)

"""What ``show`` prints for a person, where the words matter."""

from __future__ import annotations

from typing import Any

import pytest

from distop.cli.report import show_report, show_result, show_status
from distop.core.codec import rfc3339
from distop.core.model import History, State
from distop.results import OperationResult, OperationStatus


def going_on(**fields: Any) -> OperationStatus:
    jobs = {"total": 40, "success": 8, "failed": 2, "running": 4, "waiting": 1, **fields.pop("jobs", {})}
    return OperationStatus("t/noop/1", "running", "open", jobs, rfc3339(0), **fields)


def test_how_many_failed_stands_beside_how_many_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """It read "10/40, 2 failed ended"."""
    show_status(going_on())
    assert "jobs       10/40 ended (2 failed), 4 running, 1 to run again\n" in capsys.readouterr().out
    show_status(going_on(jobs={"failed": 0}))
    assert "jobs       8/40 ended, 4 running, 1 to run again\n" in capsys.readouterr().out


def test_before_the_plan_no_jobs_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """It read "- ended, 0 running, 0 to retry"."""
    show_status(going_on(jobs={"total": None}))
    assert "jobs" not in capsys.readouterr().out


def test_it_is_said_what_the_numbers_of_failed_jobs_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_status(going_on(failed="3,7"))
    assert "failed jobs  3,7 (places in the plan, from 0)\n" in capsys.readouterr().out
    history = History("t/noop/1", State.FAILED, "", "", 9, 5, 4, failed_ranges="3,7", failed_truncated=True)
    show_result(OperationResult.of(history))
    assert "failed jobs  3,7 and more (places in the plan, from 0)\n" in capsys.readouterr().out


def test_what_was_applied_and_what_is_certified_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    made = [
        {"check": "c_not_null", "column": "c", "property": None, "before": "other"},
        {"check": "small", "column": None, "property": "distop.constraint.small", "before": "same"},
    ]
    show_report({"verdict": "applied", "rows": 3, "certificate": "t/validate/1", "changes": made, "checks": []})
    told = capsys.readouterr().out
    assert "certificate  t/validate/1\n" in told
    assert "c is required" in told
    assert "the property distop.constraint.small" in told
    check = {"name": "c_not_null", "verdict": "valid", "violations": 0}
    show_report({"verdict": "valid", "rows": 0, "since": "t/validate/1", "uncertified": "too large", "checks": [check]})
    told = capsys.readouterr().out
    assert "since        t/validate/1\n" in told
    assert "certificate  none: too large\n" in told
    show_report({"verdict": "valid", "certificate": {"version": "7", "digest": "blake2b-1"}, "checks": [check]})
    assert "certificate  of 7 (blake2b-1)\n" in capsys.readouterr().out

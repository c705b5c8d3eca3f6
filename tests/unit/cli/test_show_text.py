"""What ``show`` prints for a person, where the words matter."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from distop.cli import output
from distop.cli.operation_text import show_errors, show_report, show_result, show_status
from distop.protocol.json_codec import rfc3339
from distop.protocol.records import History, State
from distop.services.operation_results import OperationResult, OperationStatus


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


HOSTILE = "x\n\x1b]0;owned\x07\x1b[2J\r\x9b2J\x7f\u202ey"
"""A line end, terminal titles, cleared screens, a C1 code, and an override of the reading direction."""


def harmless(told: str, lines: int) -> bool:
    return told.count("\n") == lines and not any(c in told for c in "\x1b\x07\r\x9b\x7f\u202e") and "x" in told


def test_hole_9_no_text_from_etcd_reaches_the_terminal_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    check = {"name": HOSTILE, "verdict": HOSTILE, "violations": 1, "error": HOSTILE}
    sample = {"partition": HOSTILE, "file": HOSTILE, "row_index": 1, "values": {HOSTILE: HOSTILE}}
    errors = (
        {"partition": HOSTILE, "text": HOSTILE, "attempts": [{"attempt": 1, "executor": HOSTILE, "text": HOSTILE}]},
    )
    history = History(
        HOSTILE, State.FAILED, HOSTILE, HOSTILE, 9, 5, 4, errors=errors, labels={HOSTILE: HOSTILE}, alarm=HOSTILE
    )
    for show, lines in (
        (lambda: output.say(HOSTILE), 1),
        (lambda: output.note(HOSTILE), 1),
        (lambda: output.fields({"a": HOSTILE}), 1),
        (lambda: output.table(("a",), [(HOSTILE,)], ""), 2),
        (lambda: output.write_json({HOSTILE: HOSTILE}), 1),
        (lambda: show_report(HOSTILE), 1),
        (lambda: show_report({"checks": [{**check, "samples": [sample]}]}), 9),
        (
            lambda: show_status(
                going_on(waiting_for=HOSTILE, id=HOSTILE, doing=({"executor": HOSTILE, "text": HOSTILE},))
            ),
            8,
        ),
        (lambda: show_result(OperationResult.of(history)), 11),
    ):
        show()
        captured = capsys.readouterr()
        assert harmless(captured.out + captured.err, lines), captured


def test_hole_9_a_json_document_means_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_json({HOSTILE: "é\u2028\udcff"})
    assert json.loads(capsys.readouterr().out) == {HOSTILE: "é\u2028\udcff"}


def test_hole_9_an_error_s_further_lines_are_told_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distop.cli.operation_text.current", SimpleNamespace(debug=True))
    show_errors([{"text": "x\nerror: forged\x1b[2J"}])
    assert capsys.readouterr().out == "\nerror: x\n    error: forged\\x1b[2J\n"

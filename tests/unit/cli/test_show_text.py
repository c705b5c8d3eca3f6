"""The text that ``distop show`` prints."""

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


def running_status(**fields: Any) -> OperationStatus:
    jobs = {"total": 40, "success": 8, "failed": 2, "running": 4, "waiting": 1, **fields.pop("jobs", {})}
    return OperationStatus("t/noop/1", "running", "open", jobs, rfc3339(0), **fields)


def test_the_number_of_failed_jobs_is_shown_beside_the_ended_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """The line was "10/40, 2 failed ended"."""
    show_status(running_status())
    assert "jobs       10/40 ended (2 failed), 4 running, 1 waiting for a retry\n" in capsys.readouterr().out
    show_status(running_status(jobs={"failed": 0}))
    assert "jobs       8/40 ended, 4 running, 1 waiting for a retry\n" in capsys.readouterr().out


def test_no_job_counts_are_shown_before_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The line was "- ended, 0 running, 0 to retry"."""
    show_status(running_status(jobs={"total": None}))
    assert "jobs" not in capsys.readouterr().out


def test_failed_partitions_are_counted_with_the_command_that_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    """It listed numbers in the plan, "1-4,6-33,35-71,…", instead of names."""
    command = "`distop show t/noop/1 --failed`"
    show_status(running_status(failed="3,7"))
    assert f"failed     2 of 40 partitions (list them: {command})\n" in capsys.readouterr().out
    show_status(running_status(jobs={"failed": 0}))
    assert "--failed" not in capsys.readouterr().out
    history = History("t/noop/1", State.FAILED, "", "", 365, 49, 316, failed_ranges="1-4,6-33")
    show_result(OperationResult.of(history))
    text = capsys.readouterr().out
    assert f"failed     316 of 365 partitions (list them: {command})\n" in text
    assert "1-4" not in text
    show_result(OperationResult.of(History("t/noop/1", State.FAILED, "", "", 1, 0, 1, failed_ranges="0")))
    assert f"1 of 1 partition (list it: {command})\n" in capsys.readouterr().out


def test_changes_and_certificates_are_shown_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    made = [
        {"check": "c_not_null", "column": "c", "property": None, "before": "other"},
        {"check": "small", "column": None, "property": "distop.constraint.small", "before": "same"},
    ]
    show_report({"verdict": "applied", "rows": 3, "certificate": "t/validate/1", "changes": made, "checks": []})
    text = capsys.readouterr().out
    assert "certificate  t/validate/1\n" in text
    assert "c is required" in text
    assert "the property distop.constraint.small" in text
    check = {"name": "c_not_null", "verdict": "valid", "violations": 0}
    show_report({"verdict": "valid", "rows": 0, "since": "t/validate/1", "uncertified": "too large", "checks": [check]})
    text = capsys.readouterr().out
    assert "since        t/validate/1\n" in text
    assert "certificate  none: too large\n" in text
    show_report({"verdict": "valid", "certificate": {"version": "7", "digest": "blake2b-1"}, "checks": [check]})
    assert "certificate  of 7 (blake2b-1)\n" in capsys.readouterr().out


HOSTILE = "x\n\x1b]0;owned\x07\x1b[2J\r\x9b2J\x7f\u202ey"
"""A line end, terminal titles, cleared screens, a C1 code, and an override of the reading direction."""


def harmless(text: str, lines: int) -> bool:
    return text.count("\n") == lines and not any(c in text for c in "\x1b\x07\r\x9b\x7f\u202e") and "x" in text


def test_hole_9_control_characters_from_etcd_are_escaped_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
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
                running_status(waiting_for=HOSTILE, id=HOSTILE, doing=({"executor": HOSTILE, "text": HOSTILE},))
            ),
            9,
        ),
        (lambda: show_result(OperationResult.of(history)), 12),
    ):
        show()
        captured = capsys.readouterr()
        assert harmless(captured.out + captured.err, lines), captured


def test_hole_9_escapes_in_a_json_document_keep_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_json({HOSTILE: "é\u2028\udcff"})
    assert json.loads(capsys.readouterr().out) == {HOSTILE: "é\u2028\udcff"}


def test_hole_9_further_lines_of_an_error_are_indented(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distop.cli.operation_text.current", SimpleNamespace(debug=True))
    show_errors([{"text": "x\nerror: forged\x1b[2J"}])
    assert capsys.readouterr().out == "\nerror: x\n    error: forged\\x1b[2J\n"


WORK = {"files": 1_200, "bytes": 3_100_000_000, "of_files": 10_000, "of_bytes": 25_000_000_000}
COMMITTED = {"commits": 2, "committed_files": 40, "committed_bytes": 1_200_000}


def test_the_work_is_shown_with_its_rate_and_what_is_committed(capsys: pytest.CaptureFixture[str]) -> None:
    work = {**WORK, **COMMITTED, "bytes_per_second": 120_000_000.0, "files_per_second": 40.0}
    show_status(running_status(work=work, eta_seconds=182.0))
    text = capsys.readouterr().out
    assert "left       about 3 min 02 s\n" in text
    assert "done       1,200/10,000 files, 3.1 GB of 25.0 GB (120.0 MB/s)\n" in text
    assert "committed  2 commits, 40 files, 1.2 MB\n" in text
    show_status(running_status(work={"files": 1, "of_files": None, "of_bytes": None, "files_per_second": 0.5}))
    assert "done       1 file (0.5 files/s)\n" in capsys.readouterr().out
    show_status(running_status(work=None))
    assert "done" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "work", "line"),
    [
        (State.CANCELLED, COMMITTED, "2 commits, 40 files, 1.2 MB: it stays"),
        (State.FAILED, {"commits": 1}, "1 commit: it stays"),
        (State.SUCCESS, COMMITTED, "2 commits, 40 files, 1.2 MB"),
        (State.CANCELLED, {}, "nothing"),
    ],
)
def test_the_record_says_what_a_cancelled_operation_keeps(
    capsys: pytest.CaptureFixture[str], state: State, work: dict[str, int], line: str
) -> None:
    show_result(OperationResult.of(History("t/compact/1", state, "", "", 9, 5, 0, report={"work": work})))
    assert f"committed  {line}\n" in capsys.readouterr().out
    show_result(OperationResult.of(History("t/validate/1", state, "", "", 9, 5, 0, report={"checks": []})))
    assert "committed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (5e15, "5,000.0 TB")]
)
def test_amounts_of_bytes(number: float, text: str) -> None:
    assert output.amount(number) == text

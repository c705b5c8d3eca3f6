"""An operation for people: how it is doing, and the report of one that has ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.cli.context import current
from distop.cli.output import duration, fields, jobs, say, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.results import OperationResult, OperationStatus

_SAMPLES = 5
_LONGEST = 100


def show_status(status: OperationStatus) -> None:
    """An operation that goes on."""
    counts = status.jobs
    fields(
        {
            "operation": status.op,
            "state": status.state if status.stage in (status.state, "open") else f"{status.state} ({status.stage})",
            "started": status.started,
            "jobs": f"{jobs(counts)} ended, {counts.get('running')} running, {counts.get('waiting')} to retry",
            "progress": f"{status.progress:.0%}",
            "left": f"about {duration(status.eta_seconds)}" if status.eta_seconds is not None else None,
            "waits for": status.waiting_for,
            "cancelled": _reason(status.cancel),
        }
    )
    show_errors(status.errors)


def show_result(result: OperationResult) -> None:
    """An operation that has ended."""
    fields(
        {
            "operation": result.op,
            "state": result.state,
            "started": result.record.get("started"),
            "finished": result.record.get("finished"),
            "took": duration(result.seconds),
            "jobs": jobs(result.jobs),
            "failed jobs": result.record.get("failed"),
            "cancelled": _reason(result.record.get("cancel")),
        }
    )
    if result.report is not None:
        say("")
        show_report(result.report)
    show_errors(result.errors)


def _reason(cancel: Mapping[str, str] | None) -> str | None:
    return ": ".join(filter(None, (cancel.get("reason"), cancel.get("text")))) if cancel else None


def show_report(report: Any) -> None:
    """A report with checks as a table of verdicts and samples; any other as JSON."""
    checks = report.get("checks") if isinstance(report, dict) else None
    if not isinstance(checks, list) or not all(isinstance(check, dict) and "verdict" in check for check in checks):
        say(json.dumps(report, ensure_ascii=False, indent=2, default=str))
        return
    fields({"verdict": report.get("verdict"), "rows": _count(report.get("rows"))})
    say("")
    rows = []
    for check in checks:
        evidence = check.get("evidence") or {}
        rows.append(
            (
                check.get("name"),
                check.get("verdict"),
                _violations(check),
                _count(evidence.get("files_statistics")),
                _count(evidence.get("files_scanned")),
            )
        )
    table(
        ("check", "verdict", "violations", "by statistics", "by scan"),
        rows,
        "no checks",
        ("violations", "by statistics", "by scan"),
    )
    for check in checks:
        if check.get("error"):
            say(f"\n{check.get('name')}: {_line(check['error'])}")
        samples = check.get("samples") or []
        if samples:
            say(f"\n{check.get('name')}: {min(len(samples), _SAMPLES)} of {_violations(check)} violating rows")
            table(
                ("partition", "file", "row", "values"),
                [_sample(sample) for sample in samples[:_SAMPLES]],
                "",
                ("row",),
            )


def _sample(sample: Mapping[str, Any]) -> tuple[Any, ...]:
    values = json.dumps(sample.get("values"), ensure_ascii=False, default=str)
    file = str(sample.get("file") or "")
    return (
        sample.get("partition"),
        file.rpartition("/")[2],
        sample.get("row_index"),
        values if len(values) <= _LONGEST else f"{values[:_LONGEST]}…",
    )


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def _violations(check: Mapping[str, Any]) -> str:
    text = _count(check.get("violations"))
    return text if check.get("exact", True) or not text else f"at least {text}"


def show_errors(errors: Sequence[Mapping[str, Any]]) -> None:
    """The first few errors, a line each."""
    if errors:
        say("")
    for error in errors:
        where = f"partition {error['partition']}: " if error.get("partition") is not None else ""
        say(f"error: {where}{_line(error.get('text'))}")


def _line(text: Any) -> str:
    """An error for people: its first line, unless they debug; the others say where in the code it came from."""
    whole = str(text or "").strip()
    return whole if current.debug else whole.partition("\n")[0]

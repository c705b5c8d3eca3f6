"""An operation for people: how it is doing, and the report of one that has ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.cli.command_context import current
from distop.cli.output import duration, fields, jobs, say, say_lines, table
from distop.protocol.user_actions import of_operation
from distop.services.operation_results import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.services.operation_results import OperationResult, OperationStatus

_SAMPLES = 5
_LONGEST = 100
_NAMES = 5


def show_status(status: OperationStatus) -> None:
    """An operation that goes on."""
    counts = status.jobs
    fields(
        {
            "operation": status.op,
            "state": state_of(status),
            "started": status.started,
            "id": status.id,
            **_of_start(status.submitter, status.request_id, status.rerun_of, status.labels),
            "options": _options(status.options),
            "jobs": _how_far(counts),
            "progress": f"{status.progress:.0%}",
            "left": f"about {duration(status.eta_seconds)}" if status.eta_seconds is not None else None,
            "waits for": status.waiting_for,
            "doing": doing(status),
            "cancelled": _reason(status.cancel),
            "failed jobs": _places(status.failed, truncated=status.failed_truncated),
        }
    )
    _show_actions(status.to_json())
    show_errors(status.errors)


def _show_actions(record: Mapping[str, Any]) -> None:
    """Who did what to an operation, where there is more than its start and its end."""
    found = of_operation(record)
    if any(one["action"] not in ("start", "finish") for one in found):
        say("")
        table(("time", "action", "by", "what"), action_rows(found), "")


def action_rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Of each action: time, what was done, who did it, and what that changed."""
    return [(one["time"], one["action"], one["by"] or one.get("executor"), _what(one)) for one in found]


def _what(action: Mapping[str, Any]) -> str:
    """``priority 0 → 9, max jobs - → 4``, or what else there is to tell of it."""
    before, after = action.get("from") or {}, action.get("to") or {}
    told = [f"{name.replace('_', ' ')} {_value(before.get(name))} → {_value(after.get(name))}" for name in after]
    told += [str(action[name]) for name in ("state", "reason", "text", "replaced_by") if action.get(name)]
    told += [f"{name} {action[name]}" for name in ("submitter", "dropped", "snapshot", "reverted") if action.get(name)]
    changes = [
        f"{one['column']} is required" if one.get("column") else f"the property {one.get('property')}"
        for one in action.get("changes") or ()
    ]
    return ", ".join([*told, *changes])


def _value(value: Any) -> str:
    return "-" if value in (None, "") else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _options(options: Mapping[str, Any]) -> str | None:
    """``priority 9, max jobs 4, where zone=a``; None where nothing was said."""
    said = [f"{name.replace('_', ' ')} {value}" for name, value in options.items() if name != "where"]
    said += [f"where {name}={value}" for name, value in options.get("where", {}).items()]
    return ", ".join(said) or None


def _how_far(counts: Mapping[str, int | None]) -> str | None:
    """``10/40 ended (2 failed), 4 running, 1 to run again``; None before the plan."""
    if counts.get("total") is None:
        return None
    failed = counts.get("failed") or 0
    done = (counts.get("success") or 0) + failed
    of_them = f" ({failed} failed)" if failed else ""
    again = counts.get("waiting")
    return f"{done}/{counts['total']} ended{of_them}, {counts.get('running')} running, {again} to run again"


def doing(status: OperationStatus) -> str | None:
    """What executors say that they are doing, the first few of them."""
    said = [f"{one['executor']}: {one['text']}" for one in status.doing]
    return "; ".join([*said[:_NAMES], *([f"and {len(said) - _NAMES} more"] if len(said) > _NAMES else [])]) or None


def _places(ranges: str | None, *, truncated: bool) -> str | None:
    """Ordinals mean nothing to who has not seen the plan: it is said what they are."""
    return f"{ranges}{' and more' if truncated else ''} (places in the plan, from 0)" if ranges else None


def _of_start(
    submitter: str | None, request_id: str | None, rerun_of: str | None, labels: Mapping[str, str] | None
) -> dict[str, str | None]:
    return {"by": submitter, "request id": request_id, "runs again": rerun_of, "labels": labelled(labels)}


def labelled(labels: Mapping[str, str] | None) -> str | None:
    """``team=x, ticket=42``."""
    return ", ".join(f"{key}={text}" for key, text in (labels or {}).items()) or None


def state_of(status: OperationStatus) -> str:
    """The state in words, with what it has not come to yet."""
    if status.stage == "pausing":
        running = status.jobs.get("running") or 0
        return f"pausing: {running} job{'s' if running != 1 else ''} still run{'s' if running == 1 else ''}"
    return status.state if status.stage in (status.state, "open") else f"{status.state} ({status.stage})"


def show_result(result: OperationResult) -> None:
    """An operation that has ended."""
    fields(
        {
            "operation": result.op,
            "state": result.state,
            "started": result.record.get("started"),
            "id": result.record.get("id"),
            **_of_start(*(result.record.get(name) for name in ("submitter", "request_id", "rerun_of", "labels"))),
            "finished": result.record.get("finished"),
            "took": duration(result.seconds),
            "jobs": jobs(result.jobs),
            "failed jobs": _places(result.record.get("failed"), truncated=bool(result.record.get("failed_truncated"))),
            "without an end": _without_end(result),
            "cancelled": _reason(result.record.get("cancel")),
            "alarm": result.alarm or None,
        }
    )
    _show_actions(result.record)
    if result.report is not None:
        say("")
        show_report(result.report)
    # The table of checks tells what jobs and behavior answered; what is left are jobs that gave no answer.
    told = bool(checks_of(result.report))
    show_errors([error for error in result.errors if not (told and error.get("verdict"))])


def _without_end(result: OperationResult) -> str | None:
    left = result.jobs.get("total", 0) - result.jobs.get("success", 0) - result.jobs.get("failed", 0)
    return f"{left} jobs" if left else None


def _reason(cancel: Mapping[str, str] | None) -> str | None:
    return ": ".join(filter(None, (cancel.get("reason"), cancel.get("text")))) if cancel else None


def show_report(report: Any) -> None:
    """A report with checks as a table of verdicts and samples, with changes as a table of these; any other as JSON."""
    checks, changes = checks_of(report), _changes(report)
    if not checks and not changes:
        say_lines(json.dumps(report, ensure_ascii=False, indent=2, default=str))
        return
    fields(
        {
            "verdict": report.get("verdict"),
            "rows": _count(report.get("rows")),
            "since": report.get("since"),
            "certificate": _certificate(report),
            "taken back": "all of it" if report.get("reverted") else None,
        }
    )
    if changes:
        say("")
        table(("check", "became", "before"), changes, "")
    if not checks:
        return
    say("")
    rows = []
    for check in checks:
        evidence = check.get("evidence") or {}
        rows.append(
            (
                check.get("name"),
                check.get("verdict"),
                violations_of(check),
                _count(evidence.get("files_statistics")),
                _count(evidence.get("files_scanned")),
            )
        )
    table(
        ("check", "verdict", "violations", "files by statistics", "files by scan"),
        rows,
        "no checks",
        ("violations", "files by statistics", "files by scan"),
    )
    reasons: dict[str, list[str]] = {}
    for check in checks:
        if check.get("error"):
            reasons.setdefault(_line(check["error"]), []).append(str(check.get("name")))
    for reason, names in reasons.items():
        say("")
        _say_error(f"{_some(names)}: ", reason)
    for check in checks:
        samples = check.get("samples") or []
        if samples:
            say("")
            say(f"{check.get('name')}: {min(len(samples), _SAMPLES)} of {violations_of(check)} violating rows")
            table(
                ("partition", "file", "row", "values"),
                [_sample(sample) for sample in samples[:_SAMPLES]],
                "",
                ("row",),
            )


def checks_of(report: Any) -> list[dict[str, Any]]:
    """The checks of a report that has verdicts; none of any other report."""
    checks = report.get("checks") if isinstance(report, dict) else None
    if not isinstance(checks, list) or not all(isinstance(check, dict) and "verdict" in check for check in checks):
        return []
    return checks


def _changes(report: Any) -> list[tuple[Any, ...]]:
    """What the checks of a certificate became; nothing for any other report."""
    changes = report.get("changes") if isinstance(report, dict) else None
    if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
        return []
    return [
        (
            change.get("check"),
            f"{change['column']} is required" if change.get("column") else f"the property {change.get('property')}",
            "the same" if change.get("before") == "same" else "",
        )
        for change in changes
    ]


def _certificate(report: Mapping[str, Any]) -> str | None:
    """The one that a report has, or is of; or why it has none."""
    found, why = report.get("certificate"), report.get("uncertified")
    if isinstance(found, dict):
        return f"of {found.get('version')} ({found.get('digest')})"
    return str(found) if found else f"none: {why}" if why else None


def _some(names: Sequence[str]) -> str:
    """The first few of the checks that share a reason."""
    shown = ", ".join(names[:_NAMES])
    return shown if len(names) <= _NAMES else f"{shown} and {len(names) - _NAMES} more"


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


def violations_of(check: Mapping[str, Any]) -> str:
    """How many rows violate a check: exactly, or at least so many."""
    found = check.get("violations")
    if check.get("exact", True) or found is None:
        return _count(found)
    return f"at least {_count(found)}" if found else "-"


def show_errors(errors: Sequence[Mapping[str, Any]]) -> None:
    """The first few errors, a line each."""
    if errors:
        say("")
    for error in errors:
        where = f"partition {error['partition']}: " if error.get("partition") is not None else ""
        _say_error(f"error: {where}", _line(error.get("text")))
        for tried in error.get("attempts") or ():
            _say_error(f"       attempt {tried.get('attempt')} on {tried.get('executor')}: ", _line(tried.get("text")))


def _say_error(before: str, text: str) -> None:
    """Lines after the first, which are there for who debugs, are indented: none of them looks like one of ours."""
    first, *others = text.split("\n")
    say(f"{before}{first}")
    for line in others:
        say(f"    {line}")


def _line(text: Any) -> str:
    """An error for people: its first line, unless they debug."""
    return str(text or "").strip() if current.debug else first_line(text)

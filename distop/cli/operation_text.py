"""Prints an operation for people: its status, or the report of one that has ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.cli.command_context import current
from distop.cli.output import amount, duration, fields, jobs, note, say, say_lines, table
from distop.protocol.user_actions import of_operation
from distop.services.operation_results import first_line
from distop.services.suggested_commands import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.services.inspection.failed_partitions import FailedPage
    from distop.services.operation_results import OperationResult, OperationStatus

_SAMPLES = 5
_LONGEST = 100
_NAMES = 5


def show_status(status: OperationStatus) -> None:
    """Print the status of an open operation."""
    counts = status.jobs
    fields(
        {
            "operation": status.op,
            "state": state_of(status),
            "started": status.started,
            "id": status.id,
            **_of_start(status.submitter, status.request_id, status.rerun_of, status.labels),
            "options": _options(status.options),
            "jobs": _job_counts(counts),
            "progress": f"{status.progress:.0%}",
            "left": f"about {duration(status.eta_seconds)}" if status.eta_seconds is not None else None,
            "waits for": status.waiting_for,
            "done": work_text(status.work),
            "committed": committed_text(status.work),
            "doing": doing(status),
            "cancelled": _reason(status.cancel),
            "failed": _failed(status.op, counts),
        }
    )
    _show_actions(status.to_json())
    show_errors(status.errors)


def _show_actions(record: Mapping[str, Any]) -> None:
    """Print who did what to an operation, if there is more than its start and its finish."""
    found = of_operation(record)
    if any(one["action"] not in ("start", "finish") for one in found):
        say("")
        table(("time", "action", "by", "what"), action_rows(found), "")


def action_rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows of a table of actions: the time, the action, who did it, and what it changed."""
    return [(one["time"], one["action"], one["by"] or one.get("executor"), _what(one)) for one in found]


def _what(action: Mapping[str, Any]) -> str:
    """What an action changed, such as ``priority 0 → 9, max jobs - → 4``."""
    before, after = action.get("from") or {}, action.get("to") or {}
    changes = [f"{name.replace('_', ' ')} {_value(before.get(name))} → {_value(after.get(name))}" for name in after]
    changes += [str(action[name]) for name in ("state", "reason", "text", "replaced_by") if action.get(name)]
    others = ("submitter", "dropped", "snapshot", "reverted")
    changes += [f"{name} {action[name]}" for name in others if action.get(name)]
    changes += [
        f"{one['column']} is required" if one.get("column") else f"the property {one.get('property')}"
        for one in action.get("changes") or ()
    ]
    return ", ".join(changes)


def _value(value: Any) -> str:
    return "-" if value in (None, "") else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _options(options: Mapping[str, Any]) -> str | None:
    """``priority 9, max jobs 4, where zone=a``; None without options."""
    texts = [f"{name.replace('_', ' ')} {value}" for name, value in options.items() if name != "where"]
    texts += [f"where {name}={value}" for name, value in options.get("where", {}).items()]
    return ", ".join(texts) or None


def _job_counts(counts: Mapping[str, int | None]) -> str | None:
    """``10/40 ended (2 failed), 4 running, 1 waiting for a retry``; None before the plan."""
    if counts.get("total") is None:
        return None
    failed = counts.get("failed") or 0
    done = (counts.get("success") or 0) + failed
    of_them = f" ({failed} failed)" if failed else ""
    ended, running = f"{done}/{counts['total']} ended{of_them}", f"{counts.get('running')} running"
    return f"{ended}, {running}, {counts.get('waiting')} waiting for a retry"


def doing(status: OperationStatus) -> str | None:
    """What the first few executors report about their jobs."""
    texts = [f"{one['executor']}: {one['text']}" for one in status.doing]
    return "; ".join([*texts[:_NAMES], *([f"and {len(texts) - _NAMES} more"] if len(texts) > _NAMES else [])]) or None


def work_text(work: Mapping[str, Any] | None, *, rate: bool = True) -> str | None:
    """``12/365 files, 1.2 GB of 30.0 GB (80.1 MB/s)``; None if the work is unknown. ``rate``: with the last part."""
    if work is None:
        return None
    files, bytes_ = work.get("files") or 0, work.get("bytes") or 0
    of_files, of_bytes = work.get("of_files"), work.get("of_bytes")
    texts = []
    if files or of_files:
        texts.append(f"{files:,}/{of_files:,} files" if of_files else f"{files:,} file{'s' if files != 1 else ''}")
    if bytes_ or of_bytes:
        texts.append(f"{amount(bytes_)} of {amount(of_bytes)}" if of_bytes else amount(bytes_))
    if not texts:
        return None
    text = ", ".join(texts)
    if rate and work.get("bytes_per_second"):
        text += f" ({amount(work['bytes_per_second'])}/s)"
    elif rate and work.get("files_per_second"):
        text += f" ({work['files_per_second']:,.1f} files/s)"
    return text


def committed_text(work: Mapping[str, Any] | None) -> str | None:
    """``2 commits, 40 files, 1.2 GB``; None if nothing is committed."""
    work = work or {}
    commits, files, bytes_ = (work.get(name) or 0 for name in ("commits", "committed_files", "committed_bytes"))
    texts = [f"{commits:,} commit{'s' if commits != 1 else ''}"] if commits else []
    texts += [f"{files:,} file{'s' if files != 1 else ''}"] if files else []
    texts += [amount(bytes_)] if bytes_ else []
    return ", ".join(texts) or None


def _failed(op: str, counts: Mapping[str, int | None]) -> str | None:
    """``316 of 365 partitions (list them: `distop show OP --failed`)``; None if none failed."""
    failed, total = counts.get("failed"), counts.get("total")
    if not failed:
        return None
    names = "it" if failed == 1 else "them"
    return f"{failed} of {partitions(total or failed)} (list {names}: {command('show', op, '--failed')})"


def partitions(number: int) -> str:
    """``1 partition``, ``365 partitions``."""
    return f"{number} partition{'s' if number != 1 else ''}"


def show_failed(page: FailedPage) -> None:
    """A page of failed partitions, and on stderr how to list the next one."""
    listed = page.partitions
    rows = [(one.name, one.attempt or None, one.executor, _line(one.error)) for one in listed]
    table(("partition", "attempt", "executor", "error"), rows, f"no partition of {page.op} failed", ("attempt",))
    if page.after is not None:
        of_all = f" of {page.failed}" if page.failed is not None else ""
        following = command("show", page.op, "--failed", "--after", str(page.after))
        note(f"listed {len(listed)}{of_all} failed partitions; list the next ones: {following}")


def _of_start(
    submitter: str | None, request_id: str | None, rerun_of: str | None, labels: Mapping[str, str] | None
) -> dict[str, str | None]:
    return {"by": submitter, "request id": request_id, "rerun of": rerun_of, "labels": labelled(labels)}


def labelled(labels: Mapping[str, str] | None) -> str | None:
    """``team=x, ticket=42``."""
    return ", ".join(f"{key}={text}" for key, text in (labels or {}).items()) or None


def state_of(status: OperationStatus) -> str:
    """The state in words, with the stage if that has more detail."""
    if status.stage == "pausing":
        running = status.jobs.get("running") or 0
        return f"pausing: {running} job{'s' if running != 1 else ''} still run{'s' if running == 1 else ''}"
    return status.state if status.stage in (status.state, "open") else f"{status.state} ({status.stage})"


def show_result(result: OperationResult) -> None:
    """Print the result of an operation that has ended."""
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
            "failed": _failed(result.op, result.jobs),
            "not ended": _without_end(result),
            "cancelled": _reason(result.record.get("cancel")),
            "committed": committed_of(result),
            "alarm": result.alarm or None,
        }
    )
    _show_actions(result.record)
    if result.report is not None:
        say("")
        show_report(result.report)
    # The table of checks has the errors of verdicts; only those of jobs without a verdict are left.
    checked = bool(checks_of(result.report))
    show_errors([error for error in result.errors if not (checked and error.get("verdict"))])


def committed_of(result: OperationResult) -> str | None:
    """What an ended operation has committed; a cancelled or failed one keeps it."""
    work = result.work
    if work is None:
        return None
    found = committed_text(work.to_json())
    if result.success:
        return found
    return f"{found}: it stays" if found else "nothing"


def _without_end(result: OperationResult) -> str | None:
    left = result.jobs.get("total", 0) - result.jobs.get("success", 0) - result.jobs.get("failed", 0)
    return f"{left} job{'s' if left != 1 else ''}" if left else None


def _reason(cancel: Mapping[str, str] | None) -> str | None:
    return ": ".join(filter(None, (cancel.get("reason"), cancel.get("text")))) if cancel else None


def show_report(report: Any) -> None:
    """Print a report: checks as tables of verdicts and samples, changes as a table, any other report as JSON."""
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
            "reverted": "all changes" if report.get("reverted") else None,
        }
    )
    if changes:
        say("")
        table(("check", "became", "before"), changes, "")
    if checks:
        say("")
        _show_verdicts(checks)
        _show_check_errors(checks)
        _show_samples(checks)


def _show_verdicts(checks: Sequence[Mapping[str, Any]]) -> None:
    counts = ("violations", "files by statistics", "files by scan")
    rows = []
    for check in checks:
        evidence = check.get("evidence") or {}
        files = (_count(evidence.get("files_statistics")), _count(evidence.get("files_scanned")))
        rows.append((check.get("name"), check.get("verdict"), violations_of(check), *files))
    table(("check", "verdict", *counts), rows, "no checks", counts)


def _show_check_errors(checks: Sequence[Mapping[str, Any]]) -> None:
    """Print each error once, with the names of the checks that have it."""
    reasons: dict[str, list[str]] = {}
    for check in checks:
        if check.get("error"):
            reasons.setdefault(_line(check["error"]), []).append(str(check.get("name")))
    for reason, names in reasons.items():
        say("")
        _say_error(f"{_some(names)}: ", reason)


def _show_samples(checks: Sequence[Mapping[str, Any]]) -> None:
    """Print the first few violating rows of each check."""
    for check in checks:
        if samples := check.get("samples") or []:
            say("")
            say(f"{check.get('name')}: {min(len(samples), _SAMPLES)} of {violations_of(check)} violating rows")
            table(("partition", "file", "row", "values"), list(map(_sample, samples[:_SAMPLES])), "", ("row",))


def checks_of(report: Any) -> list[dict[str, Any]]:
    """The checks of a report with verdicts; none for any other report."""
    checks = report.get("checks") if isinstance(report, dict) else None
    if not isinstance(checks, list) or not all(isinstance(check, dict) and "verdict" in check for check in checks):
        return []
    return checks


def _changes(report: Any) -> list[tuple[Any, ...]]:
    """The schema changes made from a certificate's checks; none for any other report."""
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
    """The certificate that a report has or is about, or why it has none."""
    found, why = report.get("certificate"), report.get("uncertified")
    if isinstance(found, dict):
        return f"of {found.get('version')} ({found.get('digest')})"
    return str(found) if found else f"none: {why}" if why else None


def _some(names: Sequence[str]) -> str:
    """The names of the first few checks that share a reason."""
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
    """How many rows violate a check: the exact number, or ``at least N``."""
    found = check.get("violations")
    if check.get("exact", True) or found is None:
        return _count(found)
    return f"at least {_count(found)}" if found else "-"


def show_errors(errors: Sequence[Mapping[str, Any]]) -> None:
    """Print errors, one line each, with the attempts before."""
    if errors:
        say("")
    for error in errors:
        where = f"partition {error['partition']}: " if error.get("partition") is not None else ""
        _say_error(f"error: {where}", _line(error.get("text")))
        for tried in error.get("attempts") or ():
            _say_error(f"       attempt {tried.get('attempt')} on {tried.get('executor')}: ", _line(tried.get("text")))


def _say_error(before: str, text: str) -> None:
    """Print an error; with ``--debug`` its further lines, indented so that they do not look like distop's own."""
    first, *others = text.split("\n")
    say(f"{before}{first}")
    for line in others:
        say(f"    {line}")


def _line(text: Any) -> str:
    """The first line of an error; all lines with ``--debug``."""
    return str(text or "").strip() if current.debug else first_line(text)

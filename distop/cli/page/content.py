"""The content of an operation's page, from its status and the states of its partitions. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distop.cli.operation_text import checks_of, committed_of, committed_text, labelled, state_of, work_text
from distop.cli.output import duration
from distop.cli.page import checks
from distop.cli.page.job_map import ENDED, KINDS, JobMap, Kind, KindList, jobs_of, split_error
from distop.cli.page.value_tree import ValueNode, tree
from distop.protocol.json_codec import rfc3339
from distop.protocol.records import CLUSTER_TABLE
from distop.services.inspection.partitions import MOST
from distop.services.operation_results import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.cli.page.checks import Checks
    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.records import Node as Executor
    from distop.protocol.records import OperationRef
    from distop.services.inspection.partitions import Account
    from distop.services.operation_results import OperationResult, OperationStatus

_NAMES = 100
"""Names of partitions that a list shows."""
_TONES = {"success": "good", "failed": "bad", "cancelled": "odd", "paused": "odd", "cancelling": "odd"}
_MARKS = {"good": "✓", "bad": "✕", "odd": "■", "going": "▶"}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error in the operation's record: its partition ("" for none), its first line, and the other lines."""

    partition: str
    text: str
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """The content of one page. ``tone``: ``good``, ``bad``, ``odd`` or ``going``; ``mark``: its sign without colour.

    ``verdict``: one sentence. ``taken``: when the operation was read; ``ended`` False: it was open then. ``asked`` and
    ``when``: names with texts. ``argument`` None: ``argument_missing`` has the reason. ``jobs`` None: the states of the
    partitions are unknown, for the reason ``jobs_missing``.
    """

    op: str
    state: str
    tone: str
    mark: str
    verdict: str
    taken: str
    ended: bool
    description: str
    asked: tuple[tuple[str, str], ...]
    argument: ValueNode | None
    argument_missing: str
    when: tuple[tuple[str, str], ...]
    checks: Checks | None
    report: ValueNode | None
    counts: tuple[tuple[Kind, int], ...]
    """How many jobs are of each kind, without kinds that have none."""
    total: int | None
    of_partitions: bool
    """Whether there is one job for each partition of a table, not one job for everything."""
    jobs: JobMap | None
    jobs_missing: str
    kept: tuple[KindList, ...]
    """Without ``jobs``: the names of the partitions that did not succeed, by kind, if they are kept."""
    problems: tuple[Problem, ...]


def page(
    ref: OperationRef,
    status: OperationStatus,
    account: Account,
    nodes: Mapping[str, Executor],
    declaration: Declaration | None,
    now: float,
) -> Page:
    """The content of an operation's page at the time ``now`` (seconds since the epoch).

    ``nodes``: live executors by incarnation. ``status`` and ``account`` agree on whether the operation has ended.
    """
    result = status.result
    jobs = jobs_of(account.partitions, nodes, ended=account.ended) if account.partitions is not None else None
    report = result.report if result is not None else None
    location = account.spec.table.location if account.spec is not None and account.spec.table is not None else ""
    checked = checks.checks(report, location) if report is not None and checks_of(report) else None
    tone = _TONES.get(status.state, "going")
    return Page(
        op=str(ref),
        state=result.state if result is not None else state_of(status),
        tone=tone,
        mark=_MARKS[tone],
        verdict=_ended(result, checked) if result is not None else _going(status, jobs),
        taken=moment(rfc3339(now)),
        ended=result is not None,
        description=first_line(declaration.description) if declaration is not None else "",
        asked=tuple(_asked(ref, status, account)),
        argument=tree(account.arg) if account.arg_known and account.arg is not None else None,
        argument_missing=_no_argument(account),
        when=tuple(_when(status, result, jobs)),
        checks=checked,
        report=_rest_of_report(report, checked),
        counts=_counts(status, jobs),
        total=status.jobs.get("total"),
        of_partitions=ref.table != CLUSTER_TABLE,
        jobs=jobs,
        jobs_missing="" if jobs is not None else _no_jobs(status, account),
        kept=_kept(account),
        problems=tuple(_problems(status, checked is not None, jobs)),
    )


def moment(text: str) -> str:
    """A time of a record for people: ``2013-01-01 00:00:00 UTC``."""
    date, t, clock = text.partition("T")
    return f"{date} {clock.partition('.')[0].removesuffix('Z')} UTC" if t and text.endswith("Z") else text


# ------------------------------------------------------------------- sentences


def _ended(result: OperationResult, checked: Checks | None) -> str:
    jobs, cancel = result.jobs, result.record.get("cancel") or {}
    total, failed, well = jobs["total"], jobs["failed"], jobs["success"]
    if result.state == "cancelled":
        text = f": {cancel['text']}" if cancel.get("text") else ""
        return _sentence(f"Cancelled when {well + failed:,} of {plural(total, 'job')} had ended{text}")
    if checked is not None and (result.success or not checked.valid):  # it may fail for another reason than its checks
        return _sentence(checked.sentence)
    if result.state == "success":
        return "Succeeded: there was nothing to do." if not total else f"Succeeded: {_all(total)} done."
    if failed:
        rest = total - failed - well
        stopped = f"; {plural(rest, 'job')} did not end, because others failed" if rest > 0 else ""
        return f"Failed: {failed:,} of {plural(total, 'job')} failed{stopped}."
    why = next((first_line(error.get("text")) for error in result.errors), "")
    return _sentence(f"Failed: {why}" if why else "Failed, although no job failed")


def _all(total: int) -> str:
    return "its only job is" if total == 1 else f"all {total:,} jobs are"


def _going(status: OperationStatus, jobs: JobMap | None) -> str:
    total = status.jobs.get("total")
    ended = jobs.ended if jobs is not None else (status.jobs.get("success") or 0) + (status.jobs.get("failed") or 0)
    done = f"{ended:,} of {plural(total, 'job')} had ended" if total is not None else "it had no plan yet"
    share = f" ({ended / total:.0%})" if total else ""
    left = f"; about {duration(status.eta_seconds)} were left" if status.eta_seconds is not None else ""
    waits = f"; it waited for {status.waiting_for}" if status.waiting_for else ""
    return _sentence(f"{state_of(status).capitalize()}: when this page was made, {done}{share}{left}{waits}")


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def plural(count: int, word: str) -> str:
    """``1 job``, ``1,200 jobs``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


# ------------------------------------------------------------------------ parts


def _asked(ref: OperationRef, status: OperationStatus, account: Account) -> list[tuple[str, str]]:
    spec = account.spec
    table = "none" if ref.table == CLUSTER_TABLE else ref.table
    pairs = [("type", ref.type), ("table", table)]
    if spec is not None and spec.table is not None:
        pairs.append(("files", f"{spec.table.location} ({spec.table.format})"))
    if ref.object:
        pairs.append(("object", ref.object))
    if spec is not None and account.planned:  # beside a history record the names asked for are not kept
        pairs.append(("partitions", some(spec.partitions) if spec.partitions is not None else "all"))
    if spec is not None:
        attempts = "no limit" if not spec.rules.can_fail else f"up to {spec.rules.retry.attempts:,}"
        pairs.append(("attempts of a job", attempts))
        policy = {"fail_fast": "other jobs are stopped", "collect_all": "other jobs go on"}
        pairs.append(("if a job fails", policy.get(spec.rules.failure_policy, spec.rules.failure_policy)))
    submitted = [("by", status.submitter), ("request id", status.request_id), ("rerun of", status.rerun_of)]
    submitted += [("id", status.id), ("labels", labelled(status.labels) or "")]
    return [*pairs, *((name, text) for name, text in submitted if text)]


def some(names: tuple[str, ...], most: int = _NAMES) -> str:
    """The first names of many, and how many more there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left:,} more" if left > 0 else "")


def _no_argument(account: Account) -> str:
    if account.arg_known:
        return "The operation has no argument." if account.arg is None else ""
    if account.gone:
        return "The argument is not kept any more."
    return "The argument cannot be read."


def _kept(account: Account) -> tuple[KindList, ...]:
    """The names of the partitions that did not succeed, by kind."""
    kept = (("failed", account.failed), ("unended", account.unfinished))
    return tuple(KindList(KINDS[kind], (), names) for kind, names in kept if names)


def _no_jobs(status: OperationStatus, account: Account) -> str:
    if account.gone:
        return (
            "The states of the partitions are gone: etcd has compacted them since the operation ended. The counts are "
            "those of the operation's record."
        )
    if not account.planned:
        return "The operation got no plan." if status.ended else "The operation has no plan yet."
    return f"There are more than {MOST:,} partitions: a page does not list their states."


def _when(status: OperationStatus, result: OperationResult | None, jobs: JobMap | None) -> list[tuple[str, str]]:
    pairs = [("started", moment(status.started))]
    if jobs is not None and jobs.first:
        pairs.append(("first job started", moment(rfc3339(jobs.first))))
    if jobs is not None and jobs.last:
        pairs.append(("last job ended" if result is not None else "latest job ended", moment(rfc3339(jobs.last))))
    if result is not None:
        finished = str(result.record.get("finished") or "")
        pairs += [("finished", moment(finished)), ("took", duration(result.seconds))]
        pairs.append(("committed", committed_of(result) or ""))
    else:
        left = f"about {duration(status.eta_seconds)}" if status.eta_seconds is not None else ""
        pairs += [("left", left), ("done", work_text(status.work) or "")]
        pairs.append(("committed", committed_text(status.work) or ""))
    return [(name, text) for name, text in pairs if text]


def _rest_of_report(report: Any, checked: Checks | None) -> ValueNode | None:
    """The fields of a report that the table of checks does not show."""
    if checked is not None:
        report = {name: value for name, value in report.items() if name not in ("verdict", "rows", "checks")}
        return tree(report) if report else None
    return tree(report) if report is not None else None


def _counts(status: OperationStatus, jobs: JobMap | None) -> tuple[tuple[Kind, int], ...]:
    if jobs is not None:
        return jobs.counts
    counts = {name: status.jobs.get(name) or 0 for name in ("success", "failed", "running", "waiting")}
    rest = (status.jobs.get("total") or 0) - sum(counts.values())
    counts["unended" if status.ended else "open"] = max(rest, 0)
    # Jobs that were only counted: the number of successful ones includes failed ones.
    kinds = {**KINDS, "success": KINDS["success"] if status.exact else ENDED}
    return tuple((kinds[name], count) for name, count in counts.items() if count)


def _problems(status: OperationStatus, in_checks: bool, jobs: JobMap | None) -> list[Problem]:
    """The errors of the record that the page does not show elsewhere, with a check or a partition."""
    shown = {row.name for group in jobs.by_kind for row in group.rows} if jobs is not None else set()
    problems = []
    for error in status.errors:
        partition = str(error["partition"]) if error.get("partition") is not None else ""
        if partition in shown or (in_checks and not partition and error.get("verdict")):
            continue
        line, rest = split_error(str(error.get("text") or ""))
        tried = [
            f"attempt {one.get('attempt')} on {one.get('executor')}: {str(one.get('text') or '').strip()}"
            for one in error.get("attempts") or ()
        ]
        problems.append(Problem(partition, line, "\n".join([*([rest] if rest else []), *tried])))
    return problems

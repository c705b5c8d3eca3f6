"""The reasons why an operation waits, derived from one view of it. Pure.

``status``, ``show``, ``ls`` and ``watch`` show the first reason; ``distop why`` shows all reasons with advice. A new
reason is a :class:`Code`, a row of :data:`ADVICE`, and a line in one of the functions below. The data that it needs is
a field of :class:`View`, filled by ``status.view_of`` or ``why.why``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from distop.decide import coordinator_ranking
from distop.decide.job_claims import abandoned_in
from distop.protocol.dependencies import GRAPH, hold_named
from distop.protocol.executor_nodes import WAITS_FOR_STORE, NodeState, named, refusal
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import SCHEMA_VERSION, parse_time, rfc3339
from distop.protocol.operation_options import fits
from distop.protocol.records import ALL_OPERATIONS, Attempts, Phase
from distop.protocol.state_tables import Stage
from distop.services.operation_results import first_line
from distop.services.suggested_commands import command

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from distop.protocol.jobs import Claim
    from distop.protocol.records import Node
    from distop.services.inspection.status import Snapshot

NO_SPACE = "etcd to have space again: its alarm NOSPACE is raised; see `distop doctor`"
LIMITS = (
    "if the request is too large or has too many operations, raise etcd's --max-request-bytes (default 1572864) or "
    "--max-txn-ops (default 128), or make jobs and reports return less; otherwise report a defect of distop, with the "
    "log of that executor"
)
"""The advice for a write that etcd rejects as invalid."""
_NAMED = 3
"""Executors or operations that a sentence names at most."""
CANCELLABLE = (Stage.WAITING, Stage.PLANNING, Stage.OPEN, Stage.PAUSED)
COORDINATED = (Stage.PLANNING, Stage.COMPLETING, Stage.CANCELLING)
"""Stages that only a coordinator moves on."""


class Code(StrEnum):
    """The code of a reason, for programs."""

    SPACE_ALARM = "space-alarm"
    NEWER_RELEASE = "newer-release"
    UNREADABLE = "unreadable-records"
    REFUSED = "refused-by-etcd"
    PAUSED = "paused"
    PAUSING = "pausing"
    NO_EXECUTOR = "no-executor"
    DRAINED = "drained"
    LABELS = "labels"
    NOT_SERVED = "not-served"
    WITHOUT_CODE = "without-code"
    PARTLY_DRAINED = "partly-drained"
    TIME = "time"
    PREDECESSORS = "predecessors"
    HELD = "held"
    BEGIN = "begin"
    NO_COORDINATOR = "no-coordinator"
    PLANNING = "planning"
    PLANNING_FAILS = "planning-fails"
    COMPLETION = "completion"
    COMPLETION_FAILS = "completion-fails"
    HOLDERS = "holders"
    LEASE_LOST = "lease-lost"
    SKIPPED = "skipped"
    SLOTS = "slots"
    UNCLAIMED = "unclaimed"
    NO_WORKER = "no-worker"
    CLAIM_OVERDUE = "claim-overdue"
    RETRY = "retry"
    JOB_LIMIT = "job-limit"
    NO_CORES = "no-cores"
    PARTLY_NO_CORES = "partly-no-cores"
    BUSY_STORE = "busy-store"


ADVICE: Mapping[Code, str] = {
    Code.SPACE_ALARM: "compact and defragment etcd, then disarm the alarm; `distop doctor` names the commands",
    Code.NEWER_RELEASE: "run executors of that release or a later one",
    Code.UNREADABLE: "repair or restore the named record, or run executors of a release that can read it{or_cancel}",
    Code.REFUSED: f"{LIMITS}{{or_cancel}}",
    Code.PAUSED: "{resume}",
    Code.PAUSING: "nothing: the operation is paused once these jobs have ended. To stop them now: {halt}",
    Code.NO_EXECUTOR: "start an executor on which `{type}` is installed and can run, or install what the named "
    "executor lacks; `distop behaviors` and `distop nodes` list what there is{or_cancel}",
    Code.DRAINED: "undo the drain of an executor, or start another executor that offers `{type}`",
    Code.LABELS: "start an executor with these labels (`--label`) on which `{type}` is installed; `distop nodes` lists "
    "the labels of all executors{or_cancel}",
    Code.NOT_SERVED: "start an executor that offers `{type}` and serves all of the operation's tables (`--tables`, "
    "`--types`); `distop nodes` lists what each executor serves{or_cancel}",
    Code.WITHOUT_CODE: "nothing: the operation ends by itself. To run its completion code, start such an executor now",
    Code.PARTLY_DRAINED: "undo the drain if you need their slots",
    Code.TIME: "nothing: the operation starts by itself. To drop it: {cancel}",
    Code.PREDECESSORS: "nothing, or run `distop why` on these operations. To drop this one: {cancel}",
    Code.HELD: "nothing, if it was submitted recently: its submission is not complete yet. To drop it: {cancel}",
    Code.BEGIN: "nothing: it starts by itself once no operation on the table excludes it. To drop it: {cancel}",
    Code.NO_COORDINATOR: "nothing: a coordinator is elected within seconds; if none is, read the logs of the executors "
    "that offer `{type}`",
    Code.PLANNING: "nothing, if it was started recently; else read the log of its coordinator",
    Code.PLANNING_FAILS: "fix what the error names; planning is retried, up to the limit of attempts",
    Code.COMPLETION: "nothing: its completion code runs, or starts soon",
    Code.COMPLETION_FAILS: "fix what the error names; completion is retried, up to the limit of attempts",
    Code.HOLDERS: "nothing: the jobs stop and clean up; those of a lost executor end with its session",
    Code.LEASE_LOST: "nothing: other executors take the jobs over within the time to live",
    Code.SKIPPED: "fix what the executor names, if anything: it tries again by itself (see its log){or_cancel}",
    Code.SLOTS: "wait, start another executor, give executors more --slots, or pause an operation that holds slots",
    Code.UNCLAIMED: "read the logs of the executors that offer `{type}`: one that has skipped the operation only for "
    "some seconds is not named yet; else run `distop doctor`",
    Code.NO_WORKER: "{no_worker}",
    Code.CLAIM_OVERDUE: "nothing, if these workers run: each extends its claims in time. If they do not, check that "
    "{takers} runs, which takes the jobs over",
    Code.RETRY: "see the error with `distop show`; the jobs are retried, up to the limit of attempts",
    Code.JOB_LIMIT: "raise the limit with `distop alter`, if more of its jobs may run at once",
    Code.NO_CORES: "give the Spark cluster more cores, or stop the applications that hold them (see the Spark master's "
    "web page). If the master no longer knows the session, distop replaces it",
    Code.BUSY_STORE: "nothing, if it passes: the operation continues by itself, and it counts as no attempt. Else "
    "check the store's limits, and its endpoint with `distop doctor --storage URL`",
    Code.PARTLY_NO_CORES: "give the Spark cluster more cores if these executors should work, too",
}
"""The advice for each reason, with the fields that :func:`reasons` fills in."""


@frozen
class Reason:
    """One reason why an operation waits, or is slow.

    ``text`` completes the sentence "it waits for …"; ``advice`` says what to do. ``stops`` False: the reason only slows
    the operation down, and only ``why`` shows it.
    """

    code: Code
    text: str
    advice: str
    stops: bool = True

    def to_json(self) -> dict[str, object]:
        return {"code": str(self.code), "text": self.text, "advice": self.advice, "stops": self.stops}


@frozen
class View:
    """An operation at one moment, and what is known of the executors that could work on it.

    The first block is read for every status. Only ``why`` reads ``coordinated`` (a live executor holds the election of
    the operation's type and table) and ``elsewhere`` (operation → its jobs held by executors that offer this one's
    type); they are None otherwise. ``not_before``: seconds since the epoch; 0: none. ``job_limit``: how many of its
    jobs may run at once; 0: no limit.
    """

    snapshot: Snapshot
    stage: Stage
    nodes: Mapping[str, Node]
    running: int
    ended: int
    total: int | None
    now: float = 0.0
    full: bool = False
    unreadable: str = ""
    """Why executors cannot read its records."""

    coordinated: bool | None = None
    elsewhere: Mapping[str, int] | None = None

    not_before: float = 0.0
    job_limit: int = 0

    @property
    def coordinating(self) -> bool:
        """Whether its coordinator plans it or runs its completion code, perhaps before the verdict is stored."""
        all_ended = self.total is not None and self.ended >= self.total and not self.running
        return self.stage in (Stage.PLANNING, Stage.COMPLETING) or (self.stage is Stage.OPEN and all_ended)


def reasons(view: View) -> tuple[Reason, ...]:
    """All reasons, the most important one first; none while jobs run, and none once the operation has ended."""
    ref = view.snapshot.ref
    fields = {
        "type": ref.type,
        "cancel": command("cancel", str(ref)),
        "or_cancel": f"; or {command('cancel', str(ref))}" if view.stage in CANCELLABLE else "",
        "resume": command("resume", str(ref)),
        "halt": command("pause", str(ref), "--now"),
        "no_worker": _worker_advice(view),
        "takers": "an executor" if _unowned(view) else "an executor or a worker" if _has_code(view) else "a worker",
    }
    slowing = (Code.JOB_LIMIT, Code.CLAIM_OVERDUE, Code.PARTLY_DRAINED, Code.PARTLY_NO_CORES)
    return tuple(Reason(code, text, ADVICE[code].format(**fields), code not in slowing) for code, text in _judge(view))


def _judge(view: View) -> Iterator[tuple[Code, str]]:
    if view.full:
        yield Code.SPACE_ALARM, NO_SPACE
    version = view.snapshot.spec.version if view.snapshot.spec is not None else SCHEMA_VERSION
    if version > SCHEMA_VERSION and view.stage is not Stage.CLEANING:
        known = f"its records are of version {version}, and this release knows version {SCHEMA_VERSION}"
        yield Code.NEWER_RELEASE, f"executors of a later release: {known}"
    if view.unreadable:
        yield Code.UNREADABLE, f"records that executors can read: {view.unreadable}"
    yield from _refused(view)
    if view.stage is Stage.CLEANING:
        return
    if view.stage is Stage.PAUSED:
        yield _paused(view)
    before = list(_scheduled(view)) if view.stage is Stage.WAITING else []
    yield from before
    yield from _executors(view)
    may_start = view.stage is Stage.WAITING and not before
    if (may_start or view.stage in COORDINATED) and view.coordinated is False and not _without_code(view):
        ref = view.snapshot.ref
        yield Code.NO_COORDINATOR, f"an executor to be elected to coordinate `{ref.type}` on {ref.table}"
    if may_start:
        table = view.snapshot.ref.table
        yield Code.BEGIN, f"its coordinator to start it, and operations on {table} that exclude it to end"
    yield from _work(view)
    if not view.running:
        yield from _refused_of_others(view)


def _paused(view: View) -> tuple[Code, str]:
    if view.running:
        halted = view.snapshot.phase is Phase.HALTED
        return Code.PAUSING, f"{_jobs(view.running)} to {'stop' if halted else 'finish'}"
    return Code.PAUSED, "resume"


def _scheduled(view: View) -> Iterator[tuple[Code, str]]:
    """What an operation in the state ``pending`` waits for before it may start."""
    snapshot = view.snapshot
    if snapshot.hold is not None:
        whole_graph = "the rest of its graph to be inserted"
        yield Code.HELD, whole_graph if snapshot.hold.kind == GRAPH else "its submission to be confirmed"
    if snapshot.predecessors:
        number, named = snapshot.predecessors, ", ".join(snapshot.behind)
        more = " and others" if number > len(snapshot.behind) else ""
        operations = f"{number} operation{'s' if number != 1 else ''}"
        yield Code.PREDECESSORS, f"{operations} to end" + (f" ({named}{more})" if named else "")
    if view.not_before > view.now:
        yield Code.TIME, f"its start time, {rfc3339(view.not_before)}"


def _any_executor(view: View) -> Iterator[tuple[Code, str]]:
    """Why an operation of a type without code has no coordinator. Any executor that serves it may coordinate it."""
    ref, nodes = view.snapshot.ref, view.nodes.values()
    if not nodes:
        yield Code.NO_COORDINATOR, f"any executor to be elected to coordinate `{ref.type}`"
    elif all(refusal(node.serves, ref.type, (ref.table,)) for node in nodes):
        alone = [] if any(not refusal(node.serves, None, (ref.table,)) for node in nodes) else [ref.table]
        what = named(alone) if alone else f"the type {ref.type} on table {ref.table}"
        yield Code.NOT_SERVED, f"an executor: no live executor serves {what}"


def _executors(view: View) -> Iterator[tuple[Code, str]]:
    type_name, nodes = view.snapshot.ref.type, view.nodes.values()
    if not _has_code(view):
        yield from _any_executor(view)
        return
    if missing := _without_code(view):
        ends = "if none starts within a minute, it ends without running its completion code"
        yield Code.WITHOUT_CODE, f"an executor that {missing}; {ends}"
        return
    capable = [node for node in nodes if type_name in node.behaviors]
    fitting = [node for node in nodes if fits(_where(view), node.labels)]
    if not capable:
        yield Code.NO_EXECUTOR, f"an executor that offers `{type_name}`{_cannot(nodes, type_name)}"
        return
    tables = _tables(view)
    if unserved := coordinator_ranking.unserved_tables(capable, type_name, tables):
        cannot = _cannot([node for node in nodes if not refusal(node.serves, type_name, tables)], type_name)
        yield Code.NOT_SERVED, f"an executor: no live executor serves {named(unserved)}{cannot}"
        return
    fitting = [node for node in fitting if not refusal(node.serves, type_name, tables)]
    capable = [node for node in capable if node in fitting]
    if not capable:
        yield Code.LABELS, f"{_executor_for(view)}{_cannot(fitting, type_name)}"
        return
    active = [node for node in capable if node.state is NodeState.ACTIVE]
    if active and not view.running and all(type_name in node.failing for node in active):
        yield Code.NO_EXECUTOR, f"an executor that can run `{type_name}`{_cannot(active, type_name)}"
    drained = sorted({node.executor for node in capable if node.state is not NodeState.ACTIVE})
    ending = view.stage in (Stage.CANCELLING, Stage.COMPLETING)
    if ending or not drained:
        return
    undo = command("drain", drained[0], "--undo")
    if not active:
        cannot = _cannot(fitting, type_name)
        yield Code.DRAINED, f"an executor that offers `{type_name}` and is not drained ({undo}){cannot}"
    else:
        what = "the drained executor" if len(drained) == 1 else "the drained executors"
        yield Code.PARTLY_DRAINED, f"{what} {_some(drained)} to work again ({undo})"


def _refused(view: View) -> Iterator[tuple[Code, str]]:
    """Writes that etcd rejects: about the operation, its predecessors, or its hold, which have to end before it."""
    before = (*view.snapshot.behind, *view.snapshot.rejected) if view.stage is Stage.WAITING else ()
    if view.snapshot.hold is not None and view.snapshot.spec is not None:
        before = (*before, hold_named(view.snapshot.spec.hold))
    for node in sorted(view.nodes.values(), key=lambda node: node.executor):
        for op in (str(view.snapshot.ref), *before):
            if text := node.refused.get(op):
                about = f" about {op}" if op in before else ""
                write = f"a write of executor {node.executor}{about}, which retries with back-off"
                yield Code.REFUSED, f"etcd to accept {write}: {text}"


def _refused_of_others(view: View) -> Iterator[tuple[Code, str]]:
    """Rejected writes of executors that name only some operations: this one may be among the others."""
    ref = str(view.snapshot.ref)
    if any(ref in node.refused for node in view.nodes.values()):
        return
    for node in sorted(view.nodes.values(), key=lambda node: node.executor):
        if more := node.refused_more:
            writes = f"writes of executor {node.executor} about {more} more operation{'s' if more > 1 else ''}"
            yield Code.REFUSED, f"etcd to accept {writes}, if this is one of them (see the executor's log)"


def _where(view: View) -> Mapping[str, str]:
    return view.snapshot.spec.where if view.snapshot.spec is not None else {}


def _tables(view: View) -> tuple[str, ...]:
    """All tables that the operation reads or writes, as far as its plan names them."""
    plan = view.snapshot.plan
    return (view.snapshot.ref.table, *(plan.beside if plan is not None else ()))


def _executor_for(view: View) -> str:
    """A phrase for an executor that may work for the operation."""
    labels = ", ".join(f"{name}={value}" for name, value in _where(view).items())
    return f"an executor that offers `{view.snapshot.ref.type}`" + (f" and has the labels {labels}" if labels else "")


def _cannot(nodes: Collection[Node], type_name: str) -> str:
    """The first of these executors that cannot run the type, with the cause, in parentheses."""
    found = coordinator_ranking.failed_executors(nodes, type_name)
    return f" ({found[0][0]} cannot: {first_line(found[0][1])})" if found else ""


def _without_code(view: View) -> str:
    """The reason why no executor can run a cancelled operation's completion code.

    It is "" if an executor can, or if the operation does not end without that code.
    """
    snapshot = view.snapshot
    if not coordinator_ranking.ends_without_code(snapshot.state, snapshot.cancel):
        return ""
    if not view.nodes or not _has_code(view):
        return ""
    return coordinator_ranking.missing_executor(view.nodes, snapshot.ref.type, _where(view), _tables(view))


def _has_code(view: View) -> bool:
    """Whether executors may have code for the operation's type: it was not declared without code."""
    return view.snapshot.spec is None or view.snapshot.spec.rules.code


def _work(view: View) -> Iterator[tuple[Code, str]]:
    """The work of the operation's stage that has not ended."""
    snapshot = view.snapshot
    if view.coordinating:
        yield from _busy_store(view)
    if view.stage is Stage.PLANNING:
        tried = _attempt(snapshot.planning)
        yield Code.PLANNING_FAILS if tried else Code.PLANNING, f"planning{tried}"
    elif view.stage is Stage.COMPLETING:
        decided = snapshot.decision
        tried = _attempt(Attempts(decided.attempts, decided.error) if decided is not None else None)
        yield Code.COMPLETION_FAILS if tried else Code.COMPLETION, f"completion{tried}"
    elif view.stage is Stage.CANCELLING:
        yield (Code.HOLDERS, "its running jobs to stop") if view.running else (Code.COMPLETION, "completion")
    elif view.stage is Stage.OPEN:
        yield from _open(view)


def _open(view: View) -> Iterator[tuple[Code, str]]:
    claims, left = view.snapshot.claims, None if view.total is None else view.total - view.ended
    if view.coordinating:
        yield Code.COMPLETION, "completion"
        return
    if view.running:
        if 0 < view.job_limit <= view.running and (left is None or left > view.running):
            yield Code.JOB_LIMIT, f"its own limit of {_jobs(view.job_limit)} at once"
        yield from _cores(view)
        yield from _busy_store(view)
        yield from _overdue(view)
        return
    # A released job has no time for its retry: it waits for an executor like a job that was never claimed.
    delayed = [claim for claim in claims.values() if claim.waiting and claim.retry_at]
    lost = [claim for claim in claims.values() if not claim.waiting and claim.incarnation not in view.nodes]
    if lost:
        yield Code.LEASE_LOST, _lost(lost)
    able = _able(view)
    skipping = [(node.executor, text) for node in able if (text := _skipped(view, node))]
    for executor, text in skipping:
        yield Code.SKIPPED, f"executor {executor} to claim its jobs again: {text}"
    if left is not None and len(delayed) + len(lost) < left:
        if not skipping or len(skipping) < len(able):
            yield _slots(view)
    elif delayed:
        due = min((t for claim in delayed if (t := parse_time(claim.retry_at))), default=0.0)
        yield Code.RETRY, f"retry of {_jobs(len(delayed))}" + (f", the next at {rfc3339(due)}" if due else "")
    for node in able:
        if node.skipped_more and not _skipped(view, node):
            others = f"{node.skipped_more} more operation{'s' if node.skipped_more > 1 else ''}"
            yield Code.SKIPPED, f"executor {node.executor}, which skips {others} for a while, if this is one of them"


def _able(view: View) -> list[Node]:
    """The executors that may claim the operation's jobs, by name."""
    type_name, nodes = view.snapshot.ref.type, sorted(view.nodes.values(), key=lambda node: node.executor)
    able = [node for node in nodes if node.state is NodeState.ACTIVE and type_name in node.behaviors]
    tables, where = _tables(view), _where(view)
    return [node for node in able if fits(where, node.labels) and not refusal(node.serves, type_name, tables)]


def _skipped(view: View, node: Node) -> str:
    """Why an executor skips the operation for a while; "": it does not, as far as its record shows."""
    return node.skipped.get(str(view.snapshot.ref), "") or node.skipped.get(ALL_OPERATIONS, "")


def _cores(view: View) -> Iterator[tuple[Code, str]]:
    """Executors that hold jobs of the operation and get no cores from Spark."""
    claims = view.snapshot.claims.values()
    holders = {claim.incarnation: view.nodes.get(claim.incarnation) for claim in claims if not claim.waiting}
    without = {node.executor: node.spark for node in holders.values() if node is not None and node.spark}
    if without:
        code = Code.NO_CORES if len(without) == len(holders) else Code.PARTLY_NO_CORES
        first = min(without)
        yield code, f"Spark cores on {_some(sorted(without))} ({first_line(without[first])})"


def _busy_store(view: View) -> Iterator[tuple[Code, str]]:
    """The store of the table's files, for which running jobs, planning or completion wait."""
    ref = str(view.snapshot.ref)
    found = {node.executor: node.doing.get(ref, "") for node in view.nodes.values()}
    waiting = {executor: text for executor, text in found.items() if text.startswith(WAITS_FOR_STORE)}
    if waiting:
        first = min(waiting)
        cause = waiting[first].removeprefix(WAITS_FOR_STORE).lstrip(": ")
        yield Code.BUSY_STORE, f"the store of its table, on {_some(sorted(waiting))} ({first_line(cause)})"


def _lost(lost: list[Claim]) -> str:
    executors = sorted({claim.executor for claim in lost})
    sessions = "whose session has" if len(executors) == 1 else "whose sessions have"
    return f"{_jobs(len(lost))} to be taken over from {_some(executors)}, {sessions} ended"


def _overdue(view: View) -> Iterator[tuple[Code, str]]:
    """Claims of actors that are overdue unless they were extended.

    The record of a claim has the time of the grant, and no time of an extension.
    """
    found = [
        claim
        for claim in view.snapshot.claims.values()
        if claim.actor and (granted := parse_time(claim.since)) and granted + abandoned_in(claim, 0.0) < view.now
    ]
    if found:
        first = min(found, key=lambda claim: claim.since)
        held = f"granted {first.since} for {first.duration:g} s" if len(found) == 1 else f"the first {first.since}"
        names = _some(sorted({claim.executor for claim in found}))
        text = f"{_jobs(len(found))} of {names}, whose claims are overdue unless they were extended ({held})"
        yield Code.CLAIM_OVERDUE, text


def _unowned(view: View) -> bool:
    """Whether actors and workers may not own its jobs, so that only executors run them."""
    return view.snapshot.options.limited or bool(_where(view))


def _worker_advice(view: View) -> str:
    type_name, ref = view.snapshot.ref.type, str(view.snapshot.ref)
    if _has_code(view) or not _unowned(view):
        what = f"start a worker that owns jobs of `{type_name}` (distop.Worker, own_jobs())"
        return f"{what}: no executor has code for it"
    drop = command("cancel", ref)
    lift = command("alter", ref, "--max-jobs", "0", "--max-jobs-per-executor", "0")
    what = drop if _where(view) else f"{lift}, and start a worker; or {drop}"
    return f"{what}: workers own no jobs of operations with a limit or with labels, and no executor has code for it"


def _slots(view: View) -> tuple[Code, str]:
    if not _has_code(view):
        return Code.NO_WORKER, f"a worker that owns jobs of `{view.snapshot.ref.type}`"
    if view.elsewhere is None:
        return Code.SLOTS, "free slots"
    if not view.elsewhere:
        return Code.UNCLAIMED, "an executor to claim its jobs: no other operation holds slots"
    held = sorted(view.elsewhere.items(), key=lambda one: (-one[1], one[0]))
    named = ", ".join(f"{_jobs(jobs)} of {op}" for op, jobs in held[:_NAMED])
    return Code.SLOTS, f"free slots: executors run {named}" + (" and of others" if len(held) > _NAMED else "")


def _attempt(tried: Attempts | None) -> str:
    if tried is None or not tried.attempts:
        return ""
    line = first_line(tried.error)
    return f", attempt {tried.attempts + 1}" + (f" (the last one failed: {line})" if line else "")


def _jobs(number: int) -> str:
    return f"{number} job{'s' if number != 1 else ''}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" and others" if len(names) > _NAMED else "")

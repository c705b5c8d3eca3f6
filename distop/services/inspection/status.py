"""The status of an operation: the reads, and the pure functions that derive the status from them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from distop.clock import time
from distop.errors import EtcdRejected, InvalidArgument, no_operation
from distop.protocol import keys as K
from distop.protocol import state_tables
from distop.protocol.behavior_declaration import Rules
from distop.protocol.dependencies import Edge, Hold
from distop.protocol.frozen import frozen
from distop.protocol.identity import edge_id
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import failed_text, parse_time
from distop.protocol.operation_options import DEFAULT, Options
from distop.protocol.plan import Plan
from distop.protocol.record_reading import read, word
from distop.protocol.records import (
    Attempts,
    Cancel,
    Decision,
    History,
    Node,
    OperationRef,
    Phase,
    Spec,
    State,
)
from distop.protocol.state_tables import Stage
from distop.protocol.txn import MAX_OPERATIONS, Get
from distop.protocol.user_actions import NO_ACTIONS, Actions
from distop.services.inspection.partitions import add_names
from distop.services.inspection.reasons import View, reasons
from distop.services.inspection.work import KnownWork, WorkReader, rate_of
from distop.services.operation_results import OperationResult, OperationStatus
from distop.services.readable_records import ReadabilityCheck, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue
    from distop.store.client import EtcdClient

T = TypeVar("T")

MANY_JOBS = 20_000
"""Ended jobs of larger plans are only counted: failed and successful ones are not distinguished."""
_ERRORS = 5
_BEHIND = 3
_READS_IN_FLIGHT = 4
_NO_SPEC = Spec("", "", "", Rules())


@frozen
class Pace:
    """How many jobs have ended since a time (0: unknown)."""

    since: float = 0.0
    ended: int = 0


@frozen
class Snapshot:
    """The records of an operation, as they were read."""

    ref: OperationRef
    state: State | None = None
    phase: Phase | None = None
    spec: Spec | None = None
    plan: Plan | None = None
    planning: Attempts | None = None
    cancel: Cancel | None = None
    decision: Decision | None = None
    history: History | None = None
    success: int = 0
    failed: int = 0
    failed_ranges: str = ""
    failed_truncated: bool = False
    exact: bool = True
    claims: Mapping[int, Claim] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    """Ordinal → name of the partitions with an error."""
    options: Options = DEFAULT
    actions: Actions = NO_ACTIONS
    pace: Pace = Pace()
    work: KnownWork | None = KnownWork()
    """None if it was not read."""
    predecessors: int = 0
    """How many operations it waits for."""
    behind: tuple[str, ...] = ()
    """The names of the first few of these."""
    rejected: tuple[str, ...] = ()
    """The names of the others that have writes which etcd rejects."""
    hold: Hold | None = None
    """The hold that has to be released before it may start."""


class JobStates:
    """A cache of the states of ended jobs. A state is written once and never changes, so none is read twice."""

    def __init__(self) -> None:
        self.seen: dict[int, bool] = {}
        self.mods: dict[int, int] = {}
        """The mod revisions of these states."""
        self.names: dict[int, str] = {}
        self.readability = ReadabilityCheck()
        self.work = WorkReader()
        self.first = (0, -1)
        """A gate's mod revision, and the first job that ended after it."""
        self.began = 0.0
        """The time at which that job was started."""

    @property
    def success(self) -> int:
        return sum(self.seen.values())

    @property
    def failed(self) -> int:
        return len(self.seen) - self.success


async def take(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, jobs: JobStates | None = None, *, work: bool = False
) -> Snapshot:
    """Read an operation. Raises NotFound if it has neither a state nor a history record, UnreadableRecord.

    ``work``: also read how much work is done, for which the plan is read.
    """
    names = ("state", "spec", "plan", "planning", "cancel", "decision", "options", "actions")
    found = await etcd.read(
        *(Get(keys.of(ref, name)) for name in names), *(Get(of(ref)) for of in (keys.pending, keys.gate, keys.history))
    )
    seen = dict(zip((*names, "pending", "gate", "history"), (answer.kv for answer in found), strict=True))

    def record(name: str, decode: Callable[[bytes], T]) -> T | None:
        kv = seen[name]
        return read(decode, kv) if kv is not None else None

    if (history := record("history", History.decode)) is not None:
        return Snapshot(ref, history=history)
    if (state := record("state", word(State))) is None:
        raise no_operation(ref)
    phase, spec = record("pending", word(Phase)), record("spec", Spec.decode)
    options, actions = record("options", Options.decode) or DEFAULT, record("actions", Actions.decode) or NO_ACTIONS
    if state is State.PENDING:
        return await _waiting(etcd, keys, Snapshot(ref, state, phase, spec, options=options, actions=actions))
    plan, planning = record("plan", Plan.decode), record("planning", Attempts.decode)
    cancel, decision = record("cancel", Cancel.decode), record("decision", Decision.decode)
    found_jobs: dict[str, Any] = {}
    jobs = jobs if jobs is not None else JobStates()
    if plan is not None and decision is None:
        never_paused = _modified(seen["gate"]) == _modified(seen["plan"])
        since = parse_time(spec.time) if spec is not None and never_paused else 0.0
        gate = _modified(seen["gate"])
        found_jobs = await _jobs(etcd, keys, ref, plan, jobs, gate, since)
        if work and found_jobs["exact"]:
            behind = [p for p, mod in jobs.mods.items() if gate and mod > gate]
            found_jobs["work"] = await jobs.work.known(etcd, keys, ref, plan, jobs.seen, behind)
    if not work:
        found_jobs["work"] = None
    records = (state, phase, spec, plan, planning, cancel, decision)
    return Snapshot(ref, *records, names=dict(jobs.names), options=options, actions=actions, **found_jobs)


async def _jobs(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, plan: Plan, jobs: JobStates, gate: int, since: float
) -> dict[str, Any]:
    """The fields of a snapshot that are about its jobs: their claims, and how many have ended.

    ``gate``: the gate's mod revision. ``since``: the start of an operation that was never paused, else 0.
    """
    listing = await etcd.list(*keys.claims_range(ref))
    claims = {keys.parse(kv.key).partition: read(Claim.decode, kv) for kv in listing.kvs}
    found: dict[str, Any] = {"claims": claims, "exact": True}
    if plan.count > MANY_JOBS:
        # An ended job has two keys, or three with a checkpoint.
        count = await etcd.count(*keys.jobs_range(ref))
        ended = min(count // 2, plan.count - min(len(claims), plan.count))
        found |= {"success": ended, "exact": False, "pace": Pace(since, ended) if since else Pace()}
    else:
        await _read_jobs(etcd, keys, ref, jobs)
        ranges, truncated = failed_text(p for p, well in jobs.seen.items() if not well)
        found |= {"success": jobs.success, "failed": jobs.failed, "failed_ranges": ranges}
        found |= {"failed_truncated": truncated, "pace": await _pace(etcd, keys, ref, jobs, gate)}
    await add_names(etcd, keys, ref, plan, _with_errors(claims), jobs.names)
    return found


async def _waiting(etcd: EtcdClient, keys: Keys, seen: Snapshot) -> Snapshot:
    """The predecessors and the hold of an operation that has not started."""
    edges = keys.edges_range(seen.ref, "after")
    id_ = seen.spec.hold if seen.spec is not None else ""
    first, *held = await etcd.read(Get(*edges, limit=_BEHIND), *([Get(keys.hold(id_))] if id_ else []))
    named = [edge.op for _, edge in readable(etcd, Edge.decode, first.kvs)]
    hold = read(Hold.decode, held[0].kv) if held and held[0].kv is not None else None
    return replace(seen, predecessors=first.count, behind=tuple(named), hold=hold)


def _modified(kv: KeyValue | None) -> int:
    return kv.mod_revision if kv is not None else 0


def _with_errors(claims: Mapping[int, Claim]) -> list[int]:
    """The first few jobs that failed and wait for a retry."""
    return sorted(p for p, claim in claims.items() if claim.error)[:_ERRORS]


async def _pace(etcd: EtcdClient, keys: Keys, ref: OperationRef, jobs: JobStates, gate: int) -> Pace:
    """How fast jobs have ended since the gate was written (``gate``: its mod revision).

    Measured from the start of the first such job: planning, a pause and the wait for an executor do not count.
    """
    behind = {p: mod for p, mod in jobs.mods.items() if gate and mod > gate}
    if not behind:
        return Pace()
    first = min(behind, key=lambda p: (behind[p], p))
    if jobs.first != (gate, first):
        kv = (await etcd.read(Get(keys.job(ref, first, "outcome"))))[0].kv
        jobs.first = gate, first
        jobs.began = parse_time(read(Outcome.decode, kv).started) if kv is not None else 0.0
    return Pace(jobs.began, len(behind))


async def _read_jobs(etcd: EtcdClient, keys: Keys, ref: OperationRef, jobs: JobStates) -> None:
    """Find the ended jobs by a listing without values (outcomes may be large), then read their one-word states."""
    listing = await etcd.list(*keys.jobs_range(ref), keys_only=True)
    new = []
    for kv in listing.kvs:
        if kv.key.endswith(".state") and (p := keys.parse(kv.key).partition) not in jobs.seen:
            new.append((p, kv.key))
            jobs.mods[p] = kv.mod_revision
    gate = asyncio.Semaphore(_READS_IN_FLIGHT)

    async def read(part: list[tuple[int, str]]) -> None:
        async with gate:
            answers = await etcd.read(*(Get(key) for _, key in part))
        for (p, _), answer in zip(part, answers, strict=True):
            if answer.kv is not None:
                jobs.seen[p] = answer.kv.value == JobState.SUCCESS.encode()

    await asyncio.gather(*(read(new[n : n + MAX_OPERATIONS]) for n in range(0, len(new), MAX_OPERATIONS)))


async def live_nodes(etcd: EtcdClient, keys: Keys) -> dict[str, Node]:
    """The live executors, by incarnation."""
    listing = await etcd.list(*keys.family(K.NODE))
    nodes = {}
    for kv, node in readable(etcd, Node.decode, listing.kvs):
        with contextlib.suppress(InvalidArgument):  # no key of distop: `doctor` reports it
            nodes[keys.parse(kv.key).id] = node
    return nodes


async def take_with_cluster(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, jobs: JobStates | None = None, *, work: bool = False
) -> tuple[Snapshot, dict[str, Node], tuple[str, ...]]:
    """Read an operation, the live executors and etcd's alarms. Raises as :func:`take`."""
    taking = take(etcd, keys, ref, jobs, work=work)
    snapshot, nodes, raised = await asyncio.gather(taking, live_nodes(etcd, keys), alarms(etcd))
    if snapshot.predecessors > _BEHIND:
        snapshot = replace(snapshot, rejected=await _rejected(etcd, keys, snapshot, nodes.values()))
    return snapshot, nodes, raised


async def _rejected(etcd: EtcdClient, keys: Keys, seen: Snapshot, nodes: Iterable[Node]) -> tuple[str, ...]:
    """The predecessors not in ``behind`` whose writes etcd rejects.

    Executors name few such operations, so their edges are read, not all edges of the operation.
    """
    edges: list[tuple[str, str]] = []
    for name in sorted({name for node in nodes for name in node.refused} - {*seen.behind}):
        with contextlib.suppress(InvalidArgument):  # the name of a hold
            edges.append((name, keys.edge(seen.ref, "after", edge_id(OperationRef.parse(name), seen.ref))))
    found: list[str] = []
    for n in range(0, len(edges), MAX_OPERATIONS):
        page = edges[n : n + MAX_OPERATIONS]
        answers = await etcd.read(*(Get(key, keys_only=True) for _, key in page))
        found += [name for (name, _), answer in zip(page, answers, strict=True) if answer.kv is not None]
    return tuple(found)


async def status(etcd: EtcdClient, keys: Keys, ref: OperationRef, jobs: JobStates | None = None) -> OperationStatus:
    """Read an operation and derive its status. Raises NotFound, UnreadableRecord."""
    jobs = jobs if jobs is not None else JobStates()
    snapshot, nodes, raised = await take_with_cluster(etcd, keys, ref, jobs, work=True)
    now = time.time()
    seen = judge(snapshot, nodes, now, raised)
    why = await unreadable_records(etcd, keys, seen, ref, jobs)
    return judge(snapshot, nodes, now, raised, why) if why else seen


async def unreadable_records(
    etcd: EtcdClient, keys: Keys, seen: OperationStatus, ref: OperationRef, jobs: JobStates | None = None
) -> str:
    """Why executors cannot read the records of an open operation without running jobs; "" if they can, or jobs run."""
    if seen.stage != Stage.OPEN or seen.jobs["running"] or seen.waiting_for is None:
        return ""
    return await (jobs.readability if jobs is not None else ReadabilityCheck()).problem(etcd, keys, ref)


async def alarms(etcd: EtcdClient) -> tuple[str, ...]:
    """The alarms that etcd raises; none if this client's user may not list them."""
    try:
        return await etcd.alarms()
    except EtcdRejected:
        return ()


# ------------------------------------------------------------------ judgement


def view_of(
    snapshot: Snapshot, nodes: Mapping[str, Node], now: float, alarms: Collection[str] = (), unreadable: str = ""
) -> View:
    """The view of an open operation from which ``reasons.reasons`` derives why it waits. Pure."""
    decision, total = snapshot.decision, snapshot.plan.count if snapshot.plan else None
    ended = snapshot.success + snapshot.failed
    if decision is not None:
        total, ended = decision.total, decision.success + decision.failed
    running = sum(1 for c in snapshot.claims.values() if c.actor or c.incarnation in nodes)
    due = parse_time(snapshot.spec.not_before) if snapshot.spec is not None else 0.0
    full = "NOSPACE" in alarms
    return View(
        snapshot,
        stage_of(snapshot),
        nodes,
        running,
        ended,
        total,
        now,
        full,
        unreadable,
        not_before=due,
        job_limit=snapshot.options.max_jobs,
    )


def judge(
    snapshot: Snapshot, nodes: Mapping[str, Node], now: float, alarms: Collection[str] = (), unreadable: str = ""
) -> OperationStatus:
    """The status that follows from a snapshot. Pure.

    ``now``: seconds since the epoch. ``alarms``: those that etcd raises. ``unreadable``: why executors cannot read the
    operation's records, or "".
    """
    if snapshot.history is not None:
        return ended_status(snapshot.ref, snapshot.history)
    view = view_of(snapshot, nodes, now, alarms, unreadable)
    stage, running, ended, total, decision = view.stage, view.running, view.ended, view.total, snapshot.decision
    success, failed = snapshot.success, snapshot.failed
    ranges, truncated = snapshot.failed_ranges, snapshot.failed_truncated
    if decision is not None:
        success, failed = decision.success, decision.failed
        ranges, truncated = decision.failed_ranges, decision.failed_truncated
    waiting = len(snapshot.claims) - running
    spec = snapshot.spec if snapshot.spec is not None else _NO_SPEC
    waits_for = next((reason.text for reason in reasons(view) if reason.stops), None)
    rate = rate_of(view, snapshot.pace.since)
    left = None
    if view.coordinating:
        left = rate.seconds_left
    elif stage is Stage.OPEN and waits_for is None:
        jobs_left = _eta(snapshot.pace, now, ended, total)
        left = rate.seconds_left if rate.seconds_left is not None else jobs_left
    return OperationStatus(
        str(snapshot.ref),
        str(snapshot.state),
        "pausing" if stage is Stage.PAUSED and running else str(stage),
        {"total": total, "success": success, "failed": failed, "running": running, "waiting": waiting},
        spec.time,
        min(1.0, ended / total) if total else float(total == 0),
        left,
        waits_for,
        _cancel(snapshot.cancel),
        tuple(_errors(snapshot)),
        snapshot.exact,
        failed=ranges,
        failed_truncated=truncated,
        options={**snapshot.options.to_json(), **({"where": dict(spec.where)} if spec.where else {})},
        doing=_doing(view),
        work=rate.work,
        actions=snapshot.actions.to_json(),
        **_of_start(spec),
    )


def ended_status(ref: OperationRef, history: History) -> OperationStatus:
    result = OperationResult.of(history)
    return OperationStatus(
        str(ref),
        result.state,
        "ended",
        {**result.jobs, "running": 0, "waiting": 0},
        history.started,
        1.0,
        cancel=_cancel(history.cancel),
        errors=result.errors,
        result=result,
        failed=history.failed_ranges,
        failed_truncated=history.failed_truncated,
        actions=history.actions.to_json(),
        **_of_start(history),
    )


def _of_start(record: Spec | History) -> dict[str, Any]:
    """The fields of a status that come from the start."""
    names = ("request_id", "request_digest", "submitter", "rerun_of", "labels", "id", "by")
    return {name: getattr(record, name) for name in names}


def _doing(view: View) -> tuple[dict[str, str], ...]:
    """What executors report about the operation: those that hold its jobs, or its coordinator.

    Other executors may have old reports. The coordinator is the only one to report during planning and completion.
    """
    snapshot, nodes = view.snapshot, view.nodes
    holders = {claim.incarnation for claim in snapshot.claims.values() if not claim.waiting}
    if view.coordinating and not holders:
        holders = set(nodes)
    statuses = ((nodes[inc].executor, nodes[inc].doing.get(str(snapshot.ref))) for inc in holders if inc in nodes)
    return tuple({"executor": executor, "text": text} for executor, text in sorted(statuses, key=str) if text)


def stage_of(snapshot: Snapshot) -> Stage:
    """The stage, from the operation's own keys (invariant 12)."""
    if snapshot.state is None:
        return Stage.CLEANING
    return state_tables.stage_of(
        snapshot.state, decided=snapshot.decision is not None, planned=snapshot.plan is not None
    )


def _cancel(cancel: Cancel | None) -> dict[str, str] | None:
    return cancel.to_json() if cancel else None


def _eta(pace: Pace, now: float, ended: int, total: int | None) -> float | None:
    if not total or not pace.ended or not pace.since:
        return None
    return max(0.0, now - pace.since) / pace.ended * max(0, total - ended)


def _errors(snapshot: Snapshot) -> Iterable[dict[str, object]]:
    if snapshot.planning is not None and snapshot.planning.error:
        yield {"partition": None, "text": f"planning: {snapshot.planning.error}"}
    if snapshot.decision is not None and snapshot.decision.error:
        yield {"partition": None, "text": f"completion: {snapshot.decision.error}"}
    for p in _with_errors(snapshot.claims):
        yield {"partition": snapshot.names.get(p, str(p)), "text": snapshot.claims[p].error}

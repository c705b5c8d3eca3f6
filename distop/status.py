"""How an operation is doing: what is read for it, and the pure judgement of what was read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distop.clock import time
from distop.core import keys as K
from distop.core.codec import rfc3339
from distop.core.decide import parse_time
from distop.core.draining import NodeState
from distop.core.jobs import Claim, JobState
from distop.core.model import Attempts, Cancel, Decision, History, Node, Phase, Spec, State
from distop.core.plan import Plan
from distop.core.states import Stage
from distop.core.txn import MAX_OPERATIONS, Get
from distop.errors import InvalidArgument, NotFound
from distop.results import OperationResult, OperationStatus, first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.core.keys import Keys
    from distop.core.model import OperationRef
    from distop.core.txn import GetResult
    from distop.store.client import EtcdClient

MANY_JOBS = 20_000
"""Up to here ended jobs are listed and told apart; above they are only counted."""
_ERRORS = 5
_READS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was read of an operation."""

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
    exact: bool = True
    claims: Mapping[int, Claim] = field(default_factory=dict)


class JobStates:
    """The states of ended jobs that were seen: written once, they never change, so none is read twice."""

    def __init__(self) -> None:
        self.seen: dict[int, bool] = {}

    @property
    def success(self) -> int:
        return sum(self.seen.values())

    @property
    def failed(self) -> int:
        return len(self.seen) - self.success


async def take(etcd: EtcdClient, keys: Keys, ref: OperationRef, jobs: JobStates | None = None) -> Snapshot:
    """Read an operation. Raises NotFound where there is neither its state nor its history."""
    names = ("state", "spec", "plan", "planning", "cancel", "decision")
    found = await etcd.read(
        *(Get(keys.of(ref, name)) for name in names), Get(keys.pending(ref)), Get(keys.history(ref))
    )
    values = dict(zip((*names, "pending", "history"), map(_value, found), strict=True))
    if values["history"]:
        return Snapshot(ref, history=History.decode(values["history"]))
    if not values["state"]:
        raise NotFound(
            f"there is no operation {ref}: it never was, or it ended so long ago that its history was dropped"
        )
    plan = Plan.decode(values["plan"]) if values["plan"] else None
    decision = Decision.decode(values["decision"]) if values["decision"] else None
    claims: dict[int, Claim] = {}
    success = failed = 0
    exact = True
    if plan is not None and decision is None:
        listing = await etcd.list(*keys.claims_range(ref))
        for kv in listing.kvs:
            claims[keys.parse(kv.key).partition] = Claim.decode(kv.value)
        if plan.count > MANY_JOBS:
            # Two keys for each ended job, three where a checkpoint stands beside them.
            count = await etcd.count(*keys.jobs_range(ref))
            success, exact = min(count // 2, plan.count - min(len(claims), plan.count)), False
        else:
            jobs = jobs if jobs is not None else JobStates()
            await _read_jobs(etcd, keys, ref, jobs)
            success, failed = jobs.success, jobs.failed
    return Snapshot(
        ref,
        State(values["state"].decode()),
        Phase(values["pending"].decode()) if values["pending"] else None,
        Spec.decode(values["spec"]) if values["spec"] else None,
        plan,
        Attempts.decode(values["planning"]) if values["planning"] else None,
        Cancel.decode(values["cancel"]) if values["cancel"] else None,
        decision,
        None,
        success,
        failed,
        exact,
        claims,
    )


def _value(found: GetResult) -> bytes:
    return found.kv.value if found.kv is not None else b""


async def _read_jobs(etcd: EtcdClient, keys: Keys, ref: OperationRef, jobs: JobStates) -> None:
    """Find the ended jobs by a listing without values (outcomes may be large), then read their one-word states."""
    listing = await etcd.list(*keys.jobs_range(ref), keys_only=True)
    new = [
        (p, kv.key)
        for kv in listing.kvs
        if kv.key.endswith(".state") and (p := keys.parse(kv.key).partition) not in jobs.seen
    ]
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
    for kv in listing.kvs:
        try:
            nodes[keys.parse(kv.key).id] = Node.decode(kv.value)
        except (InvalidArgument, ValueError, KeyError):
            continue
    return nodes


async def status(etcd: EtcdClient, keys: Keys, ref: OperationRef, jobs: JobStates | None = None) -> OperationStatus:
    """Read an operation and judge it. Raises NotFound."""
    snapshot, nodes = await asyncio.gather(take(etcd, keys, ref, jobs), live_nodes(etcd, keys))
    return judge(snapshot, nodes, time.time())


# ------------------------------------------------------------------ judgement


def judge(snapshot: Snapshot, nodes: Mapping[str, Node], now: float) -> OperationStatus:
    """What a snapshot says, at the time ``now`` (seconds since the epoch). Pure."""
    ref, history = snapshot.ref, snapshot.history
    if history is not None:
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
        )
    stage = stage_of(snapshot)
    decision, total = snapshot.decision, snapshot.plan.count if snapshot.plan else None
    success, failed = snapshot.success, snapshot.failed
    if decision is not None:
        total, success, failed = decision.total, decision.success, decision.failed
    running = sum(1 for c in snapshot.claims.values() if not c.waiting and c.incarnation in nodes)
    waiting = len(snapshot.claims) - running
    ended = success + failed
    started = snapshot.spec.time if snapshot.spec else ""
    progress = min(1.0, ended / total) if total else float(total == 0)
    return OperationStatus(
        str(ref),
        str(snapshot.state),
        "pausing" if stage is Stage.PAUSED and running else str(stage),
        {"total": total, "success": success, "failed": failed, "running": running, "waiting": waiting},
        started,
        progress,
        _eta(stage, parse_time(started), now, ended, total),
        waiting_for(snapshot, stage, nodes, running, ended, total),
        _cancel(snapshot.cancel),
        tuple(_errors(snapshot)),
        snapshot.exact,
    )


def stage_of(snapshot: Snapshot) -> Stage:
    """The stage, from the operation's own keys (invariant 12)."""
    if snapshot.state is None or snapshot.state.terminal:
        return Stage.CLEANING
    if snapshot.decision is not None:
        return Stage.COMPLETING
    if snapshot.state is State.RUNNING:
        return Stage.OPEN if snapshot.plan is not None else Stage.PLANNING
    stages = {State.PENDING: Stage.WAITING, State.PAUSED: Stage.PAUSED, State.CANCELLING: Stage.CANCELLING}
    return stages[snapshot.state]


def _cancel(cancel: Cancel | None) -> dict[str, str] | None:
    return {"reason": cancel.reason, "text": cancel.text} if cancel else None


def _eta(stage: Stage, started: float, now: float, ended: int, total: int | None) -> float | None:
    if stage is not Stage.OPEN or not total or not ended or not started:
        return None
    return max(0.0, now - started) / ended * max(0, total - ended)


def _errors(snapshot: Snapshot) -> Iterable[dict[str, object]]:
    if snapshot.planning is not None and snapshot.planning.error:
        yield {"partition": None, "text": f"planning: {snapshot.planning.error}"}
    if snapshot.decision is not None and snapshot.decision.error:
        yield {"partition": None, "text": f"completion: {snapshot.decision.error}"}
    told = [(p, c.error) for p, c in sorted(snapshot.claims.items()) if c.error][:_ERRORS]
    for p, error in told:
        yield {"partition": p, "text": error}


def waiting_for(
    snapshot: Snapshot, stage: Stage, nodes: Mapping[str, Node], running: int, ended: int, total: int | None
) -> str | None:
    """What the operation waits for, as words that fit after "waits for"; None while jobs run."""
    type_name = snapshot.ref.type
    if stage is Stage.PAUSED:
        jobs = f"{running} job{'s' if running != 1 else ''} to {'stop' if snapshot.phase is Phase.HALTED else 'finish'}"
        return jobs if running else "resume"
    if stage is Stage.CLEANING:
        return None
    capable = [node for node in nodes.values() if type_name in node.behaviors]
    if not capable:
        unable = [(node.executor, node.unable[type_name]) for node in nodes.values() if type_name in node.unable]
        why = f" ({unable[0][0]} cannot: {unable[0][1]})" if unable else ""
        return f"an executor that offers `{type_name}`{why}"
    ending = stage in (Stage.CANCELLING, Stage.COMPLETING)
    if not ending and all(node.state is not NodeState.ACTIVE for node in capable):
        drained = sorted({node.executor for node in capable})
        return f"an executor that offers `{type_name}` and is not drained (`distop drain {drained[0]} --undo`)"
    if stage is Stage.WAITING:
        return "its due time, or the operations before it"
    if stage is Stage.PLANNING:
        return f"planning{_again(snapshot.planning)}"
    if stage is Stage.COMPLETING:
        tried = snapshot.decision
        return f"completion{_again(Attempts(tried.attempts, tried.error) if tried is not None else None)}"
    if stage is Stage.CANCELLING:
        return "its holders to stop" if running else "completion"
    if total is not None and ended >= total and not running:
        return "completion"
    if running:
        return None
    delayed = [claim for claim in snapshot.claims.values() if claim.waiting]
    if total is not None and len(delayed) < total - ended:
        return "free slots"
    due = min((t for claim in delayed if (t := parse_time(claim.retry_at))), default=0.0)
    jobs = f"{len(delayed)} job{'s' if len(delayed) != 1 else ''}"
    return f"retry of {jobs}" + (f", the next at {rfc3339(due)}" if due else "")


def _again(tried: Attempts | None) -> str:
    if tried is None or not tried.attempts:
        return ""
    line = first_line(tried.error)
    return f", attempt {tried.attempts + 1}" + (f" (the last one failed: {line})" if line else "")

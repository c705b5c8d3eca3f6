"""The coordinator roles of one incarnation on a real etcd: elections, resignations and failed watches."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon import elections
from distop.daemon.capability import Capability
from distop.daemon.coordinator import coordinator_role as coordinator
from distop.daemon.coordinator.coordinator_role import Coordinator
from distop.daemon.coordinator.election import Callbacks
from distop.daemon.elections import Elections
from distop.daemon.incarnation import Context
from distop.daemon.rejected_writes import RejectedWrites
from distop.daemon.upkeep.history_pruning import HistoryPruner
from distop.decide.view import ClusterView
from distop.protocol import keys as K
from distop.protocol.behavior_declaration import Rules
from distop.protocol.identity import plan_digest
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import SCHEMA_VERSION, rfc3339
from distop.protocol.keys import Keys
from distop.protocol.plan import Gate, PartitionPlan, Plan, encode_chunk
from distop.protocol.records import Cancel, History, Node, OperationRef, Phase, Spec, State
from distop.protocol.revisioned import Change
from distop.protocol.size_limits import Limits
from distop.protocol.txn import Delete, Put, Txn, TxnResult
from distop.runtime import logs
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig
from distop.store.watch import Batch, Feed
from distop.worker.daemon_side.host import WorkerHost
from distop.worker.daemon_side.requests import CompleteRequest, CompleteResult, WorkerConfig
from tests.support.etcd import connected, until
from tests.support.history_age import age_history
from tests.support.users import ROOT, WORKER, enable_users, grant, revoke

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd

REF = OperationRef("t", "noop", "", 1)
SUBJECT = ("t", "noop")


class Incarnation:
    """An incarnation's context with a view of etcd, and elections that count as idle at once."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.elections = Elections(ctx, idle=0.0)

    def fold(self, batch: Batch) -> None:
        changes = [Change(event.kv, event.deleted) for event in batch.events]
        if batch.listing:
            self.ctx.cluster.replace((K.NODE, K.OPEN, K.PENDING, K.COORDINATOR), changes)
        else:
            self.ctx.cluster.apply(changes)
        self.elections.cluster_changed()

    async def write(self, *ops: Put | Delete) -> int:
        return (await self.ctx.client.commit(Txn((), ops))).revision

    async def add_pending_operation(self) -> None:
        """Write a pending operation that needs a coordinator."""
        await self.write(Put(self.ctx.keys.pending(REF), Phase.PLANNING.encode()))

    async def fence(self) -> int:
        kv = await self.ctx.client.get(self.ctx.keys.coordinator(*SUBJECT))
        return kv.mod_revision if kv is not None else 0

    @property
    def role(self) -> Coordinator | None:
        """The coordinator role, once it is ready."""
        role = self.elections._roles.get(SUBJECT)
        return role if role is not None and role._ready else None


def count_role_feeds() -> int:
    return sum(task.get_name() in ("distop-feed-jobs", "distop-feed-claims") for task in asyncio.all_tasks())


@asynccontextmanager
async def running_incarnation(endpoint: str, tmp_path: Path, **options: str) -> AsyncIterator[Incarnation]:
    async with connected(endpoint, **options) as client:
        ctx = Context()
        ctx.config = ExecutorConfig(EtcdConfig((endpoint,)), tmp_path, history_limit=2)
        ctx.client, ctx.keys, ctx.log = client, Keys(), logs.get()
        ctx.incarnation, ctx.executor_id, ctx.types = "inc-1", "ex", frozenset({"noop"})
        ctx.cluster, ctx.rejected_writes = ClusterView(ctx.keys), RejectedWrites(ctx.log, lambda: None)
        ctx.capability = Capability(ctx.cluster, "inc-1", ctx.log, lambda: None)
        ctx.worker = WorkerHost(WorkerConfig(tmp_path, "ex", "inc-1"))
        ctx.arguments, ctx.reports_only = {}, frozenset()
        ctx.lost = asyncio.get_running_loop().create_future()
        started = Incarnation(ctx)
        await started.write(Put(ctx.keys.node("inc-1"), Node("ex", "host", 1, ("noop",)).encode()))
        feed = Feed(client, "distOpA", "distOq", started.fold, name="cluster")
        await feed.start()
        try:
            yield started
        finally:
            await started.elections.stop()
            await feed.close()


@pytest.fixture
async def incarnation(etcd: EmbeddedEtcd, tmp_path: Path) -> AsyncIterator[Incarnation]:
    async with running_incarnation(etcd.endpoint, tmp_path) as started:
        yield started


async def test_an_idle_coordinator_resigns_and_is_elected_again(incarnation: Incarnation) -> None:
    await incarnation.add_pending_operation()
    await until(lambda: incarnation.role is not None, "the coordinator is elected")
    first = await incarnation.fence()
    assert first > 0
    incarnation.elections.poll()
    assert incarnation.role is not None, "a needed coordinator does not resign"
    await incarnation.write(Delete(incarnation.ctx.keys.pending(REF)))
    await until(lambda: not incarnation.ctx.cluster.pending)

    async def resigned() -> None:
        while await incarnation.fence():
            incarnation.elections.poll()

    await asyncio.wait_for(resigned(), 20)
    await until(lambda: count_role_feeds() == 0, "the coordinator has closed its watches")
    await incarnation.add_pending_operation()
    await until(lambda: incarnation.role is not None, "the coordinator is elected again")
    assert await incarnation.fence() > first


async def test_an_idle_election_from_before_is_resigned(incarnation: Incarnation) -> None:
    await incarnation.write(Put(incarnation.ctx.keys.coordinator(*SUBJECT), b"inc-1"))
    await until(lambda: SUBJECT in incarnation.ctx.cluster.elections)
    incarnation.elections.poll()
    await until(lambda: SUBJECT not in incarnation.ctx.cluster.elections, "the election is resigned")


async def test_a_coordinator_whose_watch_fails_is_elected_again(
    incarnation: Incarnation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an error in applying events ends a watch, so this test injects one."""
    await incarnation.add_pending_operation()
    await until(lambda: incarnation.role is not None, "the coordinator is elected")
    first, role = await incarnation.fence(), incarnation.role
    assert role is not None

    def fail(changes: Any) -> set[OperationRef]:
        raise ValueError("these events cannot be applied")

    monkeypatch.setattr(role._view, "apply", fail)
    await incarnation.write(Put(incarnation.ctx.keys.of(REF, "cancel"), b"{}"))
    await until(lambda: incarnation.role is not None and incarnation.role is not role, "another coordinator is elected")
    assert await incarnation.fence() > first
    await until(lambda: count_role_feeds() == 1, "the previous coordinator has closed its watches")


async def coordinator_of_cancelled_job(incarnation: Incarnation, client: EtcdClient | None = None) -> Coordinator:
    """Let ``client`` write a cancelled operation whose job inc-1 holds, and return the coordinator of the operation."""
    keys, now = incarnation.ctx.keys, rfc3339(time.time())
    written = (
        Put(keys.of(REF, "spec"), Spec("request", now, "tester", Rules(completes=False)).encode()),
        Put(keys.of(REF, "arg"), b"{}"),
        Put(keys.of(REF, "state"), State.CANCELLING.encode()),
        Put(keys.of(REF, "cancel"), Cancel("user", "not needed").encode()),
        Put(keys.run_ops("t"), b'{"noop":1}'),
        Put(keys.claim(REF, 0), Claim("ex", "inc-1", 1, 0).encode()),
        Put(keys.pending(REF), Phase.CANCELLING.encode()),
    )
    await (client or incarnation.ctx.client).commit(Txn((), written))
    await until(
        lambda: incarnation.role is not None and incarnation.role._cancelling == {REF},
        "the coordinator sees the cancel",
    )
    assert incarnation.role is not None
    return incarnation.role


async def test_a_coordinator_watches_claims_during_a_cancel_only(incarnation: Incarnation) -> None:
    role = await coordinator_of_cancelled_job(incarnation)
    await until(lambda: 0 in role._view.operations[REF].claims, "the coordinator sees the claim")
    assert count_role_feeds() == 2
    await incarnation.write(Delete(incarnation.ctx.keys.claim(REF, 0)))
    await until(lambda: REF not in role._view.operations, "the operation has ended")
    await until(lambda: count_role_feeds() == 1, "the coordinator no longer watches claims")
    assert not role._view.claims_known


async def test_a_coordinator_survives_a_denied_listing_of_claims(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    """The coordinator stays elected, and its cancelled operation ends once it may list claims."""
    await enable_users(etcd.endpoint, "distOp", "distOq")
    async with (
        running_incarnation(etcd.endpoint, tmp_path, **WORKER) as incarnation,
        connected(etcd.endpoint, **ROOT) as root,
    ):
        await incarnation.add_pending_operation()
        await until(lambda: incarnation.role is not None, "the coordinator is elected")
        role = incarnation.role
        assert role is not None
        await grant(root, "distOpCo", "distOq")
        await grant(root, "distOp.", "distOp/")
        await revoke(root, "distOp", "distOq")
        await coordinator_of_cancelled_job(incarnation, root)
        await until(lambda: "denies" in claims_problem(role), "etcd denies the listing of claims")
        await grant(root, "distOpClaim.", "distOpClaim/")
        await until(lambda: 0 in role._view.operations[REF].claims, "the coordinator sees the claim")
        assert incarnation.role is role


def claims_problem(role: Coordinator) -> str:
    feed = role._claims._feed
    return feed.problem if feed is not None else ""


async def test_a_coordinator_stopped_while_it_lists_claims_closes_its_watches(incarnation: Incarnation) -> None:
    await coordinator_of_cancelled_job(incarnation)
    role = Coordinator(incarnation.ctx, *SUBJECT, 1, Callbacks(lambda error: None, lambda: None, lambda: True))
    await role.start()
    assert role._cancelling
    await role.stop()
    assert count_role_feeds() <= 2, "only the elected coordinator has watches"
    assert not role._claims._follows


async def test_a_coordinator_whose_watch_of_claims_fails_is_elected_again(incarnation: Incarnation) -> None:
    role = await coordinator_of_cancelled_job(incarnation)
    await until(lambda: 0 in role._view.operations[REF].claims, "the coordinator sees the claim")
    feed = role._claims._feed
    assert feed is not None

    def fail(batch: Batch) -> None:
        raise ValueError("these events cannot be applied")

    feed._apply = fail
    await incarnation.write(Put(incarnation.ctx.keys.claim(REF, 0), Claim("ex", "inc-1", 1, 1).encode()))
    await until(lambda: incarnation.role is not None and incarnation.role is not role, "another coordinator is elected")
    await until(lambda: count_role_feeds() == 2, "the previous coordinator has closed its watches")


async def test_a_coordinator_that_cannot_start_leaves_no_watches(
    etcd: EmbeddedEtcd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At first its user may write the election but not read the operations."""
    await enable_users(etcd.endpoint, "distOpA", "distOq")
    async with running_incarnation(etcd.endpoint, tmp_path, **WORKER) as incarnation:
        await incarnation.add_pending_operation()
        await until(lambda: "Cannot become coordinator" in caplog.text, "the first attempt fails")
        assert incarnation.role is None
        assert count_role_feeds() == 0
        async with connected(etcd.endpoint, **ROOT) as root:
            await grant(root, "distOp.", "distOp/")
        await until(lambda: incarnation.role is not None, "the coordinator is elected")
        await until(lambda: count_role_feeds() == 1, "the failed attempt left no watches")


async def test_a_coordinator_closed_while_it_starts_never_becomes_ready(incarnation: Incarnation) -> None:
    role = Coordinator(incarnation.ctx, *SUBJECT, 1, Callbacks(lambda error: None, lambda: None, lambda: True))
    start = asyncio.ensure_future(role.start())
    await asyncio.sleep(0)
    role.close()
    await start
    assert not role._ready
    await until(lambda: count_role_feeds() == 0)


async def test_a_coordinator_is_elected_again_after_its_key_was_deleted(incarnation: Incarnation) -> None:
    await incarnation.add_pending_operation()
    await until(lambda: incarnation.role is not None and SUBJECT in incarnation.ctx.cluster.elections)
    role = incarnation.role
    await incarnation.write(Delete(incarnation.ctx.keys.coordinator(*SUBJECT)))
    await until(lambda: incarnation.role is not None and incarnation.role is not role, "another coordinator is elected")


async def test_a_coordinator_hands_over_after_a_failed_call_at_most_once_in_a_while(
    incarnation: Incarnation, caplog: pytest.LogCaptureFixture
) -> None:
    """If calls fail on every node, the election must not move for ever."""

    def count_handovers() -> int:
        return sum("a call failed here" in record.getMessage() for record in caplog.records)

    await incarnation.add_pending_operation()
    await until(lambda: incarnation.role is not None and not incarnation.elections._work, "the coordinator is elected")
    role, first = incarnation.role, await incarnation.fence()
    assert role is not None
    role._callbacks.trouble()
    assert incarnation.role is role, "there is no other node"
    node = Node("other", "host", 1, ("noop",))
    await incarnation.write(Put(incarnation.ctx.keys.node("inc-2"), node.encode()))
    await until(lambda: "inc-2" in incarnation.ctx.cluster.nodes)
    role._callbacks.trouble()
    assert incarnation.role is None
    assert count_handovers() == 1
    # The other node does not take over, so this one is elected again.
    await until(
        lambda: incarnation.role is not None and not incarnation.elections._work, "the coordinator is elected again"
    )
    assert await incarnation.fence() > first
    role = incarnation.role
    assert role is not None
    role._callbacks.trouble()
    assert incarnation.role is role
    assert count_handovers() == 1


def unknown_types(number: int) -> list[OperationRef]:
    return [OperationRef("t", f"unknown{i:03d}", "", 1) for i in range(number)]


async def write_cancelling(incarnation: Incarnation, refs: list[OperationRef]) -> None:
    """Write pending keys without operations, as a submitter can."""
    for first in range(0, len(refs), 50):
        await incarnation.write(
            *(Put(incarnation.ctx.keys.pending(ref), b"cancelling") for ref in refs[first : first + 50])
        )


async def test_few_types_without_code_are_coordinated_at_once(
    incarnation: Incarnation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their records are unreadable, so their operations never end: each type's turn ends in favour of the next."""
    monkeypatch.setattr(elections, "ABSENT", 0.0)
    monkeypatch.setattr(elections, "ABANDONED_TURN", 0.1)
    coordinated: set[str] = set()
    most_at_once = 0
    refs = unknown_types(60)
    await incarnation.write(*(Put(incarnation.ctx.keys.of(ref, "spec"), b"null") for ref in refs))
    await write_cancelling(incarnation, refs)

    async def all_coordinated() -> None:
        nonlocal most_at_once
        while len(coordinated) < len(refs):
            incarnation.elections.cluster_changed()
            most_at_once = max(most_at_once, len(incarnation.elections._roles))
            coordinated.update(type_name for _, type_name in incarnation.elections._roles)
            await asyncio.sleep(0.01)

    await asyncio.wait_for(all_coordinated(), 60)
    assert 0 < most_at_once <= 2 * elections.ABANDONED_AT_ONCE, "types whose turn ends or starts count"


async def test_pending_keys_without_an_operation_are_removed(
    incarnation: Incarnation, monkeypatch: pytest.MonkeyPatch
) -> None:
    won: list[Coordinator] = []

    async def start(role: Coordinator) -> None:
        won.append(role)

    monkeypatch.setattr(Coordinator, "start", start)
    await write_cancelling(incarnation, unknown_types(60))
    await until(lambda: len(incarnation.ctx.cluster.pending) == 60, "the incarnation sees all pending keys")
    monkeypatch.setattr(elections, "ABSENT", 0.0)
    incarnation.elections.poll()
    await until(lambda: not incarnation.ctx.cluster.pending, "the pending keys are removed")
    assert not won
    assert not incarnation.ctx.cluster.elections


async def test_resigned_elections_are_forgotten_after_a_while(
    incarnation: Incarnation, monkeypatch: pytest.MonkeyPatch
) -> None:
    await incarnation.add_pending_operation()
    await until(lambda: incarnation.role is not None and not incarnation.elections._work)
    await incarnation.write(Delete(incarnation.ctx.keys.pending(REF)))
    await until(lambda: not incarnation.ctx.cluster.pending)
    incarnation.elections.poll()
    await until(
        lambda: bool(incarnation.elections._resigned) and not incarnation.elections._work,
        "the coordinator has resigned",
    )
    incarnation.elections.poll()
    assert incarnation.elections._resigned, "the view may still lag behind"
    monkeypatch.setattr(elections, "RESIGNED_KEPT", 0.0)
    incarnation.elections.poll()
    assert not incarnation.elections._resigned


async def test_an_operation_of_a_newer_release_is_skipped_and_logged_once(
    incarnation: Incarnation, caplog: pytest.LogCaptureFixture
) -> None:
    keys, spec = (
        incarnation.ctx.keys,
        Spec("request", rfc3339(time.time()), "tester", Rules(), version=SCHEMA_VERSION + 1),
    )
    await incarnation.write(
        Put(keys.of(REF, "spec"), spec.encode()),
        Put(keys.of(REF, "state"), State.RUNNING.encode()),
        Put(keys.pending(REF), Phase.PLANNING.encode()),
    )

    def count_logged() -> int:
        return sum("Not coordinating" in record.getMessage() for record in caplog.records)

    await until(lambda: count_logged() == 1, "the operation is logged")
    role = incarnation.role
    assert role is not None
    await role._jobs.reached(await incarnation.write(Put(keys.of(REF, "arg"), b"{}")))
    await until(lambda: not role._driving)
    assert count_logged() == 1
    assert role._left_alone == {REF}
    gone = await incarnation.write(*(Delete(keys.of(REF, name)) for name in ("spec", "state", "arg")))
    await role._jobs.reached(gone)
    assert not role._left_alone


@pytest.mark.parametrize("rules", [Rules(completes=False), Rules(), Rules(reports_only=True)])
async def test_a_claim_that_blocks_the_end_is_logged_once(
    incarnation: Incarnation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rules: Rules
) -> None:
    """A claim written by hand for an ended job makes etcd refuse the decision, which must be logged."""
    monkeypatch.setattr(coordinator, "REFUSED_PAUSE", (0.001, 0.01))
    keys, now = incarnation.ctx.keys, rfc3339(time.time())
    chunks = [encode_chunk([PartitionPlan(0, "a")])]
    claim = keys.claim(REF, 0)
    outcome = Outcome("a", "ex", "inc-1", 1, now, now)
    await incarnation.write(
        Put(keys.run_ops("t"), b'{"noop":1}'),
        Put(keys.of(REF, "spec"), Spec("request", now, "tester", rules).encode()),
        Put(keys.of(REF, "arg"), b"{}"),
        Put(keys.of(REF, "state"), State.RUNNING.encode()),
        Put(keys.chunk(REF, 0), chunks[0]),
        Put(keys.of(REF, "plan"), Plan(1, "", plan_digest(chunks), 1).encode()),
        Put(keys.job(REF, 0, "state"), JobState.SUCCESS.encode()),
        Put(keys.job(REF, 0, "outcome"), outcome.encode()),
        Put(claim, Claim("ex", "inc-1", 2, 0).encode()),
        Put(keys.gate(REF), Gate(1).encode()),
    )

    def logged() -> list[str]:
        return [r.getMessage() for r in caplog.records if "Cannot end the operation" in r.getMessage()]

    refused: list[None] = []
    commit = incarnation.ctx.commit

    async def counted(txn: Txn) -> TxnResult:
        result = await commit(txn)
        refused.extend([None] * (not result.succeeded))
        return result

    made: list[int] = []

    async def report(request: CompleteRequest) -> CompleteResult:
        made.append(request.total)
        return CompleteResult({}, None)

    monkeypatch.setattr(incarnation.ctx, "commit", counted)
    monkeypatch.setattr(incarnation.ctx.worker, "complete", report)
    incarnation.ctx.reports_only = frozenset({"noop"})
    await until(lambda: len(refused) > 3 * coordinator.TOLD_AFTER, "etcd refuses several attempts")
    (message,) = logged()
    assert message.endswith(f"Delete that key: `etcdctl del {claim}`")
    role = incarnation.role
    assert role is not None
    await incarnation.write(Delete(claim))
    await until(
        lambda: (op := role._view.operations.get(REF)) is None or op.decision is not None or op.state is State.SUCCESS,
        "the operation has a decision",
    )
    assert len(logged()) == 1
    assert len(made) <= 1 + rules.reports_only, "there is at most one report before the decision and one after it"


async def test_history_beyond_the_limit_and_older_than_an_hour_is_pruned(
    incarnation: Incarnation, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, now = incarnation.ctx.keys, time.time()

    async def record(instance: int, finished: float) -> None:
        ref = OperationRef("t", "noop", "", instance)
        history = History(str(ref), State.SUCCESS, "", rfc3339(finished), 1, 1, 0)
        await incarnation.write(Put(keys.history(ref), history.encode()))

    for n in range(1, 12):
        await record(n, now - 7200)
    await incarnation.write(Put(keys.history(OperationRef("t", "noop", "", 3)), b"not a record"))
    await age_history(incarnation.ctx.client, keys)
    for n in range(12, 15):
        await record(n, now - 7200)  # written by a clock that is two hours behind
    pruner = HistoryPruner(incarnation.ctx)
    await pruner.prune("t")
    left = await incarnation.ctx.client.list(*keys.history_range("t"), keys_only=True)
    kept = sorted(ref.instance for kv in left.kvs if (ref := keys.parse(kv.key).ref) is not None)
    # Record 3 is unreadable. Record 12 is beyond the limit, but younger than an hour by etcd's time.
    assert kept == [3, 12, 13, 14]
    # The pruner forgets tables that it pruned long ago.
    monkeypatch.setattr(incarnation.ctx, "limits", Limits(prune_every=0.0))
    await pruner.prune("u")
    await pruner.prune("v")
    assert set(pruner._last) == {"v"}

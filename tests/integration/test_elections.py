"""The roles of one incarnation on a real etcd: taken up, given up when idle, begun anew when what they watch fails."""

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
from distop.worker.daemon_side.host import Worker
from distop.worker.daemon_side.requests import CompleteRequest, CompleteResult, WorkerConfig
from tests.support.etcd import connected, until
from tests.support.hours import pass_hour
from tests.support.users import ROOT, WORKER, enable_users, grant, take

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd

REF = OperationRef("t", "noop", "", 1)
SUBJECT = ("t", "noop")


class Life:
    """A context with a view that follows etcd, and elections in it that are idle at once."""

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

    async def want(self) -> None:
        """Something is to be coordinated."""
        await self.write(Put(self.ctx.keys.pending(REF), Phase.PLANNING.encode()))

    async def fence(self) -> int:
        kv = await self.ctx.client.get(self.ctx.keys.coordinator(*SUBJECT))
        return kv.mod_revision if kv is not None else 0

    @property
    def role(self) -> Coordinator | None:
        """The role, once it works."""
        role = self.elections._roles.get(SUBJECT)
        return role if role is not None and role._ready else None


def role_feeds() -> int:
    return sum(task.get_name() in ("distop-feed-jobs", "distop-feed-claims") for task in asyncio.all_tasks())


@asynccontextmanager
async def living(endpoint: str, tmp_path: Path, **options: str) -> AsyncIterator[Life]:
    async with connected(endpoint, **options) as client:
        ctx = Context()
        ctx.config = ExecutorConfig(EtcdConfig((endpoint,)), tmp_path, history_limit=2)
        ctx.client, ctx.keys, ctx.log = client, Keys(), logs.get()
        ctx.incarnation, ctx.executor_id, ctx.types = "inc-1", "ex", frozenset({"noop"})
        ctx.cluster, ctx.rejected_writes = ClusterView(ctx.keys), RejectedWrites(ctx.log, lambda: None)
        ctx.capability = Capability(ctx.cluster, "inc-1", ctx.log, lambda: None)
        ctx.worker = Worker(WorkerConfig(tmp_path, "ex", "inc-1"))
        ctx.arguments, ctx.reports_only = {}, frozenset()
        ctx.lost = asyncio.get_running_loop().create_future()
        one = Life(ctx)
        await one.write(Put(ctx.keys.node("inc-1"), Node("ex", "host", 1, ("noop",)).encode()))
        feed = Feed(client, "distOpA", "distOq", one.fold, name="cluster")
        await feed.start()
        try:
            yield one
        finally:
            await one.elections.stop()
            await feed.close()


@pytest.fixture
async def life(etcd: EmbeddedEtcd, tmp_path: Path) -> AsyncIterator[Life]:
    async with living(etcd.endpoint, tmp_path) as one:
        yield one


async def test_an_idle_election_is_given_up_and_won_again(life: Life) -> None:
    await life.want()
    await until(lambda: life.role is not None, "the role is taken up")
    first = await life.fence()
    assert first > 0
    life.elections.poll()
    assert life.role is not None, "it is needed"
    await life.write(Delete(life.ctx.keys.pending(REF)))
    await until(lambda: not life.ctx.cluster.pending)

    async def given_up() -> None:
        while await life.fence():
            life.elections.poll()

    await asyncio.wait_for(given_up(), 20)
    await until(lambda: role_feeds() == 0, "nothing is watched any more")
    await life.want()
    await until(lambda: life.role is not None, "the role is taken up again")
    assert await life.fence() > first


async def test_an_election_that_nobody_knew_of_is_given_up(life: Life) -> None:
    await life.write(Put(life.ctx.keys.coordinator(*SUBJECT), b"inc-1"))
    await until(lambda: SUBJECT in life.ctx.cluster.elections)
    life.elections.poll()
    await until(lambda: SUBJECT not in life.ctx.cluster.elections, "it is resigned from")


async def test_a_role_whose_watch_fails_is_begun_anew(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that etcd holds or refuses ends a watch, only a defect of what folds its events: so one is put in."""
    await life.want()
    await until(lambda: life.role is not None, "the role is taken up")
    first, role = await life.fence(), life.role
    assert role is not None

    def broken(changes: Any) -> set[OperationRef]:
        raise ValueError("this cannot be folded")

    monkeypatch.setattr(role._view, "apply", broken)
    await life.write(Put(life.ctx.keys.of(REF, "cancel"), b"{}"))
    await until(lambda: life.role is not None and life.role is not role, "another role is taken up")
    assert await life.fence() > first
    await until(lambda: role_feeds() == 1, "the former one watches nothing")


async def cancelled_beside_a_job(life: Life, client: EtcdClient | None = None) -> Coordinator:
    """Whoever coordinates an operation that is being cancelled while inc-1 holds its job. ``client`` writes it."""
    keys, now = life.ctx.keys, rfc3339(time.time())
    written = (
        Put(keys.of(REF, "spec"), Spec("request", now, "tester", Rules(completes=False)).encode()),
        Put(keys.of(REF, "arg"), b"{}"),
        Put(keys.of(REF, "state"), State.CANCELLING.encode()),
        Put(keys.of(REF, "cancel"), Cancel("user", "not needed").encode()),
        Put(keys.run_ops("t"), b'{"noop":1}'),
        Put(keys.claim(REF, 0), Claim("ex", "inc-1", 1, 0).encode()),
        Put(keys.pending(REF), Phase.CANCELLING.encode()),
    )
    await (client or life.ctx.client).commit(Txn((), written))
    await until(lambda: life.role is not None and life.role._cancelling == {REF}, "it is seen to be cancelled")
    assert life.role is not None
    return life.role


async def test_claims_are_watched_while_something_is_cancelled(life: Life) -> None:
    role = await cancelled_beside_a_job(life)
    await until(lambda: 0 in role._view.operations[REF].claims, "the claim is seen")
    assert role_feeds() == 2
    await life.write(Delete(life.ctx.keys.claim(REF, 0)))
    await until(lambda: REF not in role._view.operations, "it has ended")
    await until(lambda: role_feeds() == 1, "the claims are not watched any more")
    assert not role._view.claims_known


async def test_claims_that_may_not_be_listed_for_a_while(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    """The role goes on, with what is under way for other operations; what is cancelled ends once they may be listed."""
    await enable_users(etcd.endpoint, "distOp", "distOq")
    async with living(etcd.endpoint, tmp_path, **WORKER) as life, connected(etcd.endpoint, **ROOT) as root:
        await life.want()
        await until(lambda: life.role is not None, "the role is taken up")
        role = life.role
        assert role is not None
        await grant(root, "distOpCo", "distOq")
        await grant(root, "distOp.", "distOp/")
        await take(root, "distOp", "distOq")
        await cancelled_beside_a_job(life, root)
        await until(lambda: "denies" in claims_problem(role), "the claims may not be listed")
        await grant(root, "distOpClaim.", "distOpClaim/")
        await until(lambda: 0 in role._view.operations[REF].claims, "the claim is seen")
        assert life.role is role


def claims_problem(role: Coordinator) -> str:
    feed = role._claims._feed
    return feed.problem if feed is not None else ""


async def test_a_role_that_is_closed_while_it_lists_claims(life: Life) -> None:
    await cancelled_beside_a_job(life)
    role = Coordinator(life.ctx, *SUBJECT, 1, Callbacks(lambda error: None, lambda: None, lambda: True))
    await role.start()
    assert role._cancelling
    await role.stop()
    assert role_feeds() <= 2, "that of the elected role, and of its claims"
    assert not role._claims._follows


async def test_a_role_whose_watch_of_claims_fails_is_begun_anew(life: Life) -> None:
    role = await cancelled_beside_a_job(life)
    await until(lambda: 0 in role._view.operations[REF].claims, "the claim is seen")
    feed = role._claims._feed
    assert feed is not None

    def broken(batch: Batch) -> None:
        raise ValueError("this cannot be folded")

    feed._apply = broken
    await life.write(Put(life.ctx.keys.claim(REF, 0), Claim("ex", "inc-1", 1, 1).encode()))
    await until(lambda: life.role is not None and life.role is not role, "another role is taken up")
    await until(lambda: role_feeds() == 2, "the former one watches nothing")


async def test_a_role_that_cannot_start_leaves_nothing_behind(
    etcd: EmbeddedEtcd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be elected, but not read the operations: until it may."""
    await enable_users(etcd.endpoint, "distOpA", "distOq")
    async with living(etcd.endpoint, tmp_path, **WORKER) as life:
        await life.want()
        await until(lambda: "Cannot become coordinator" in caplog.text, "the first try fails")
        assert life.role is None
        assert role_feeds() == 0
        async with connected(etcd.endpoint, **ROOT) as root:
            await grant(root, "distOp.", "distOp/")
        await until(lambda: life.role is not None, "the role is taken up")
        await until(lambda: role_feeds() == 1, "the first try watches nothing")


async def test_a_role_that_is_closed_while_it_starts(life: Life) -> None:
    role = Coordinator(life.ctx, *SUBJECT, 1, Callbacks(lambda error: None, lambda: None, lambda: True))
    start = asyncio.ensure_future(role.start())
    await asyncio.sleep(0)
    role.close()
    await start
    assert not role._ready
    await until(lambda: role_feeds() == 0)


async def test_an_election_key_that_somebody_deleted_is_sought_again(life: Life) -> None:
    await life.want()
    await until(lambda: life.role is not None and SUBJECT in life.ctx.cluster.elections)
    role = life.role
    await life.write(Delete(life.ctx.keys.coordinator(*SUBJECT)))
    await until(lambda: life.role is not None and life.role is not role, "another role is taken up")


async def test_an_election_is_handed_over_for_trouble_once_in_a_while(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    """Where everybody has the same trouble it must not wander for ever."""

    def handed_over() -> int:
        return sum("a call failed here" in record.getMessage() for record in caplog.records)

    await life.want()
    await until(lambda: life.role is not None and not life.elections._work, "the role is taken up")
    role, first = life.role, await life.fence()
    assert role is not None
    role._callbacks.trouble()
    assert life.role is role, "there is nobody else"
    node = Node("other", "host", 1, ("noop",))
    await life.write(Put(life.ctx.keys.node("inc-2"), node.encode()))
    await until(lambda: "inc-2" in life.ctx.cluster.nodes)
    role._callbacks.trouble()
    assert life.role is None
    assert handed_over() == 1
    # The other one does not take it: it is sought again.
    await until(lambda: life.role is not None and not life.elections._work, "the role is taken up again")
    assert await life.fence() > first
    role = life.role
    assert role is not None
    role._callbacks.trouble()
    assert life.role is role
    assert handed_over() == 1


def invented(number: int) -> list[OperationRef]:
    return [OperationRef("t", f"invented{i:03d}", "", 1) for i in range(number)]


async def write_cancelling(life: Life, refs: list[OperationRef]) -> None:
    """Pending keys, such as a submitter may write by hand."""
    for first in range(0, len(refs), 50):
        await life.write(*(Put(life.ctx.keys.pending(ref), b"cancelling") for ref in refs[first : first + 50]))


async def test_only_some_types_without_code_are_sought_at_once(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their operations do not end, as their records cannot be read: each type makes room for the next."""
    monkeypatch.setattr(elections, "ABSENT", 0.0)
    monkeypatch.setattr(elections, "ABANDONED_TURN", 0.1)
    sought: set[str] = set()
    most = 0
    refs = invented(60)
    await life.write(*(Put(life.ctx.keys.of(ref, "spec"), b"null") for ref in refs))
    await write_cancelling(life, refs)

    async def all_sought() -> None:
        nonlocal most
        while len(sought) < len(refs):
            life.elections.cluster_changed()
            most = max(most, len(life.elections._roles))
            sought.update(type_name for _, type_name in life.elections._roles)
            await asyncio.sleep(0.01)

    await asyncio.wait_for(all_sought(), 60)
    assert 0 < most <= 2 * elections.ABANDONED_AT_ONCE, "of those whose turn ends, and those whose turn comes"


async def test_pending_keys_without_an_operation_are_removed(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    won: list[Coordinator] = []

    async def start(role: Coordinator) -> None:
        won.append(role)

    monkeypatch.setattr(Coordinator, "start", start)
    await write_cancelling(life, invented(60))
    await until(lambda: len(life.ctx.cluster.pending) == 60, "they are seen")
    monkeypatch.setattr(elections, "ABSENT", 0.0)
    life.elections.poll()
    await until(lambda: not life.ctx.cluster.pending, "they are removed")
    assert not won
    assert not life.ctx.cluster.elections


async def test_what_was_resigned_from_is_not_remembered_for_ever(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    await life.want()
    await until(lambda: life.role is not None and not life.elections._work)
    await life.write(Delete(life.ctx.keys.pending(REF)))
    await until(lambda: not life.ctx.cluster.pending)
    life.elections.poll()
    await until(lambda: bool(life.elections._resigned) and not life.elections._work, "it is given up")
    life.elections.poll()
    assert life.elections._resigned, "a view may still be behind"
    monkeypatch.setattr(elections, "RESIGNED_KEPT", 0.0)
    life.elections.poll()
    assert not life.elections._resigned


async def test_an_operation_of_a_newer_release_is_left_alone_and_told_of_once(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    keys, spec = life.ctx.keys, Spec("request", rfc3339(time.time()), "tester", Rules(), version=SCHEMA_VERSION + 1)
    await life.write(
        Put(keys.of(REF, "spec"), spec.encode()),
        Put(keys.of(REF, "state"), State.RUNNING.encode()),
        Put(keys.pending(REF), Phase.PLANNING.encode()),
    )

    def told() -> int:
        return sum("Not coordinating" in record.getMessage() for record in caplog.records)

    await until(lambda: told() == 1, "the operation is told of")
    role = life.role
    assert role is not None
    await role._jobs.reached(await life.write(Put(keys.of(REF, "arg"), b"{}")))
    await until(lambda: not role._driving)
    assert told() == 1
    assert role._left_alone == {REF}
    gone = await life.write(*(Delete(keys.of(REF, name)) for name in ("spec", "state", "arg")))
    await role._jobs.reached(gone)
    assert not role._left_alone


@pytest.mark.parametrize("rules", [Rules(completes=False), Rules(), Rules(reports_only=True)])
async def test_a_claim_that_bars_the_end_is_named_once(
    life: Life, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rules: Rules
) -> None:
    """Somebody wrote it by hand, for a job that has ended: the decision was refused for ever, and no log said why."""
    monkeypatch.setattr(coordinator, "REFUSED_PAUSE", (0.001, 0.01))
    keys, now = life.ctx.keys, rfc3339(time.time())
    chunks = [encode_chunk([PartitionPlan(0, "a")])]
    claim = keys.claim(REF, 0)
    outcome = Outcome("a", "ex", "inc-1", 1, now, now)
    await life.write(
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

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if "Cannot end the operation" in r.getMessage()]

    refused: list[None] = []
    commit = life.ctx.commit

    async def counted(txn: Txn) -> TxnResult:
        result = await commit(txn)
        refused.extend([None] * (not result.succeeded))
        return result

    made: list[int] = []

    async def report(request: CompleteRequest) -> CompleteResult:
        made.append(request.total)
        return CompleteResult({}, None)

    monkeypatch.setattr(life.ctx, "commit", counted)
    monkeypatch.setattr(life.ctx.worker, "complete", report)
    life.ctx.reports_only = frozenset({"noop"})
    await until(lambda: len(refused) > 3 * coordinator.TOLD_AFTER, "it is refused again and again")
    (said,) = told()
    assert said.endswith(f"Delete that key: `etcdctl del {claim}`")
    role = life.role
    assert role is not None
    await life.write(Delete(claim))
    await until(
        lambda: (op := role._view.operations.get(REF)) is None or op.decision is not None or op.state is State.SUCCESS,
        "it is decided",
    )
    assert len(told()) == 1
    assert len(made) <= 1 + rules.reports_only, "a report is made once in vain, and once after the decision"


async def test_the_oldest_records_are_pruned(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, now = life.ctx.keys, time.time()

    async def record(instance: int, finished: float) -> None:
        ref = OperationRef("t", "noop", "", instance)
        told = History(str(ref), State.SUCCESS, "", rfc3339(finished), 1, 1, 0)
        await life.write(Put(keys.history(ref), told.encode()))

    for n in range(1, 12):
        await record(n, now - 7200)
    await life.write(Put(keys.history(OperationRef("t", "noop", "", 3)), b"not a record"))
    await pass_hour(life.ctx.client, keys)
    for n in range(12, 15):
        await record(n, now - 7200)  # by a clock that is two hours behind
    pruner = HistoryPruner(life.ctx)
    await pruner.prune("t")
    left = await life.ctx.client.list(*keys.history_range("t"), keys_only=True)
    kept = sorted(ref.instance for kv in left.kvs if (ref := keys.parse(kv.key).ref) is not None)
    # 3 cannot be read; 12 is beyond the limit, but younger than an hour, whatever it says.
    assert kept == [3, 12, 13, 14]
    # Tables of the past are not remembered.
    monkeypatch.setattr(life.ctx, "limits", Limits(prune_every=0.0))
    await pruner.prune("u")
    await pruner.prune("v")
    assert set(pruner._last) == {"v"}

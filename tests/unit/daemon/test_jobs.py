"""Jobs that an executor holds: their ends are written once, whatever fails beside them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.capability import Capability
from distop.daemon.executor.job_runs import Jobs
from distop.daemon.incarnation_context import Context
from distop.daemon.job_progress import JobStatuses
from distop.daemon.job_reports import Reporter
from distop.daemon.local_jobs import LocalJobs, RunFiles
from distop.daemon.rejected_writes import RejectedWrites
from distop.decide import job_claims
from distop.decide.view import ClusterView
from distop.errors import EtcdRejected, EtcdUnavailable
from distop.protocol import job_transitions
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.jobs import Claim, JobState, Outcome, Tried, for_cleanup, to_go_on_from
from distop.protocol.json_codec import from_rfc3339
from distop.protocol.keys import Keys
from distop.protocol.plan import PartitionPlan, Plan, chunked
from distop.protocol.records import Node, OperationRef, Spec
from distop.protocol.txn import Put, Txn
from distop.runtime import logs
from distop.services.open_operation import Held, OpenOperation
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig
from distop.testing import ModelStore
from distop.worker.daemon_side.requests import JobEnded, JobItem
from tests.unit.support.virtualtime import in_virtual_time, now

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.protocol.txn import Get, TxnResult
    from tests.unit.support.clock import StandingClock

REF = OperationRef("t", "noop", "", 1)
RULES = Rules()


class Etcd:
    """A store behind a connection. ``lost``: the first answer to each write is lost, and the write is sent again."""

    def __init__(self) -> None:
        self.store = ModelStore()
        self.lost = False
        self.open = asyncio.Event()
        self.open.set()
        self.readable = True
        self.asked = asyncio.Event()
        """A request has come."""

    async def commit(self, txn: Txn, **_: Any) -> TxnResult:
        self.asked.set()
        await self.open.wait()
        if self.lost:
            self.store.apply(txn)
        return self.store.apply(txn)

    async def get(self, key: str) -> Any:
        return self.store.get(key)

    async def read(self, *gets: Get) -> list[Any]:
        self.asked.set()
        if not self.readable:
            raise EtcdUnavailable("nobody answers")
        return list(self.store.apply(Txn((), gets)).responses)


class Child:
    """A worker: ``script`` plays the run, ``cleans`` a cleanup."""

    def __init__(self) -> None:
        self.script: Callable[[Callable[[list[JobEnded]], None]], None] = lambda _: None
        self.cleans: Callable[[], None] = lambda: None
        self.cleaned: list[JobItem] = []

    async def run(self, request: Any, on_events: Callable[[list[JobEnded]], None], **_: Any) -> None:
        self.script(on_events)

    async def cleanup(self, *args: Any, **_: Any) -> None:
        self.cleaned += args[-1]
        self.cleans()


class IdleScheduler:
    """A scheduler that starts nothing."""

    def __init__(self) -> None:
        self.stops = False
        self.ended: list[int] = []
        """Jobs that ended here."""
        self.released: list[int] = []
        """Jobs that are not held any more, and have not ended."""

    def stopping(self, op: OpenOperation) -> bool:
        return self.stops

    def settled(self, op: OpenOperation, partition: int, *, ended: bool) -> None:
        (self.ended if ended else self.released).append(partition)

    def job_failed(self, ref: OperationRef) -> None: ...

    def succeeded(self, ref: OperationRef) -> None: ...

    def hint_released(self) -> None: ...


class HoldingExecutor(Context):
    """An executor that holds the first jobs of an operation."""

    def __init__(self, directory: Path, rules: Rules = RULES, attempt: int = 1, failures: int = 0) -> None:
        self.keys = Keys()
        self.etcd = Etcd()
        self.client: Any = self.etcd
        self.cluster = ClusterView(self.keys)
        self.cluster.nodes["me"] = Node("ex-me", "host", 4, ("noop",))
        self.incarnation, self.executor_id = "me", "ex-me"
        self.config = ExecutorConfig(EtcdConfig(), directory)
        self.log = logs.get("distop.test")
        self.child = Child()
        self.worker: Any = self.child
        self.session: Any = type("Session", (), {"deadline": 0.0})
        self.doing = JobStatuses(lambda: 1, lambda: None)
        self.capability = Capability(self.cluster, "me", self.log, lambda: None)
        self.lost = asyncio.get_running_loop().create_future()
        self.rejected_writes = RejectedWrites(self.log, lambda: None)
        self.reporter = Reporter(self)
        files = RunFiles(directory)
        files.names()
        self.local = LocalJobs(files, "me")
        chunks = chunked([PartitionPlan(n, f"p={n}") for n in range(4)])
        self.op = OpenOperation(REF, 1, Spec("request", "", "", rules), {}, Plan(4, "", "", len(chunks)), chunks, [0])
        self.scheduler = IdleScheduler()
        self.jobs = Jobs(self, self.scheduler)
        claim = Claim("ex-me", "me", attempt, failures)
        for p in range(4):
            written = self.etcd.store.apply(Txn((), (Put(self.keys.claim(REF, p), claim.encode()),)))
            self.op.held[p] = Held(claim, written.revision, f"p={p}")
        self.submitted: Counter[str] = Counter()
        submit = self.reporter.submit

        def counted(writes: Any) -> None:
            writes = list(writes)
            self.submitted.update(write.guard.key for write, _ in writes)
            submit(writes)

        self.reporter.submit = counted  # type: ignore[method-assign]

    def state(self, p: int) -> str:
        kv = self.etcd.store.get(self.keys.job(REF, p, "state"))
        return kv.value.decode() if kv is not None else ""

    def outcome(self, p: int) -> Outcome:
        return Outcome.decode(self.etcd.store.get(self.keys.job(REF, p, "outcome")).value)

    def claim(self, p: int) -> Claim | None:
        kv = self.etcd.store.get(self.keys.claim(REF, p))
        return Claim.decode(kv.value) if kv is not None else None


async def test_an_applied_report_whose_answer_was_lost_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The retry is refused, because the first copy deleted the claim (T9): nobody else has the job."""
    here = HoldingExecutor(tmp_path)
    here.etcd.lost = True
    here.child.script = lambda send: send([JobEnded(p, "success", {"rows": p}) for p in (0, 1)])
    with caplog.at_level(logging.INFO, "distop"):
        await here.jobs.run(here.op, [0, 1])
        await here.jobs.drain()
    assert [here.state(p) for p in (0, 1)] == ["success", "success"]
    assert (here.scheduler.ended, sorted(here.op.held)) == ([0, 1], [2, 3])
    assert here.local.former == [], "no trace of them is left here"
    assert list((tmp_path / "runs").iterdir()) == []
    assert caplog.records == []


async def test_a_report_that_lost_its_fence_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = HoldingExecutor(tmp_path)
    other = Claim("ex-other", "other", 2, 1)
    here.etcd.store.apply(Txn((), (Put(here.keys.claim(REF, 0), other.encode()),)))
    theirs = Outcome("p=1", "ex-other", "other", 2, "", "")
    guard = here.etcd.store.mod(here.keys.claim(REF, 1))
    here.etcd.store.apply(
        job_transitions.group([job_transitions.report(here.keys, REF, 1, guard, JobState.FAILED, theirs)])
    )
    here.child.script = lambda send: send([JobEnded(p, "success") for p in (0, 1, 2)])
    with caplog.at_level(logging.INFO, "distop"):
        await here.jobs.run(here.op, [0, 1, 2])
        await here.jobs.drain()
    assert [here.state(p) for p in (0, 1, 2)] == ["", "failed", "success"]
    assert (here.claim(0), here.outcome(1).executor) == (other, "ex-other")
    assert here.scheduler.ended == [2]
    assert sum("Dropping the end of a job" in record.getMessage() for record in caplog.records) == 2


async def test_an_applied_release_whose_answer_was_lost_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = HoldingExecutor(tmp_path)
    here.etcd.lost = True
    with caplog.at_level(logging.INFO, "distop"):
        here.jobs.release(here.op, [0, 1, 2, 3])
        await here.jobs.drain()
    assert here.op.held == {}
    assert [here.claim(p) for p in range(4)] == [job_claims.released(Claim("ex-me", "me", 1, 0), "ex-me")] * 4
    assert caplog.records == []


async def test_a_failing_run_releases_only_jobs_whose_end_is_not_being_written(tmp_path: Path) -> None:
    here = HoldingExecutor(tmp_path)
    here.etcd.open.clear()

    def script(send: Callable[[list[JobEnded]], None]) -> None:
        send([JobEnded(0, "success"), JobEnded(1, "error", None, "it failed")])
        raise RuntimeError("the pipe is closed")

    here.child.script = script
    with pytest.raises(RuntimeError, match="the pipe is closed"):
        await here.jobs.run(here.op, [0, 1, 2])
    here.jobs.release(here.op, [0, 1, 2])
    assert here.submitted == {here.keys.claim(REF, p): 1 for p in (0, 1, 2)}
    here.etcd.open.set()
    await here.jobs.drain()
    assert here.state(0) == "success"
    claims = [here.claim(p) for p in (1, 2)]
    assert [(claim.failures, claim.waiting) for claim in claims if claim is not None] == [(1, True), (0, True)]
    assert sorted(here.op.held) == [3]


async def test_a_failing_cleanup_leaves_no_job_held(tmp_path: Path) -> None:
    here = HoldingExecutor(tmp_path)

    def fails() -> None:
        raise RuntimeError("no such file")

    here.child.cleans = fails
    here.child.script = lambda send: send([JobEnded(0, "fatal", None, "no such column")])
    await here.jobs.run(here.op, [0])
    await here.jobs.drain()
    assert (here.state(0), here.outcome(0).error) == ("failed", "no such column")
    assert sorted(here.op.held) == [1, 2, 3]


@pytest.mark.parametrize("resumable", [True, False])
async def test_the_cleanup_of_a_job_with_a_fatal_error_gets_its_checkpoint(resumable: bool, tmp_path: Path) -> None:
    here = HoldingExecutor(tmp_path, Rules(resumable=resumable))
    assert await here.jobs._checkpoints.save(here.op, 0, {"at": 41})
    here.child.script = lambda send: send([JobEnded(0, "fatal", None, "no such column")])
    await here.jobs.run(here.op, [0])
    await here.jobs.drain()
    assert here.state(0) == "failed"
    assert [item.progress for item in here.child.cleaned] == [{"at": 41} if resumable else None]


async def test_a_checkpoint_is_abandoned_before_the_cleanup_that_removes_its_files(tmp_path: Path) -> None:
    """Otherwise the next attempt would resume from it if the report after the cleanup failed."""
    here = HoldingExecutor(tmp_path, Rules(resumable=True))
    assert await here.jobs._checkpoints.save(here.op, 0, {"at": 41})
    stored: list[Any] = []

    def cleans() -> None:
        kv = here.etcd.store.get(here.keys.job(REF, 0, "progress"))
        stored.append(here.decode(kv.value))

    here.child.cleans = cleans
    here.child.script = lambda send: send([JobEnded(0, "fatal", None, "no such column")])
    await here.jobs.run(here.op, [0])
    await here.jobs.drain()
    assert [(to_go_on_from(one), for_cleanup(one)) for one in stored] == [(None, {"at": 41})]


def test_a_cleanup_waits_while_etcd_refuses_to_read_the_checkpoint(tmp_path: Path) -> None:
    """Such as while a role is revoked: the job was reported as failed, but never cleaned up."""
    refused: list[float] = []

    async def main() -> None:
        here = HoldingExecutor(tmp_path, Rules(resumable=True))
        assert await here.jobs._checkpoints.save(here.op, 0, {"at": 41})
        read = here.etcd.read

        async def refuse(*gets: Any) -> Any:
            if now() < 60.0 and len(refused) < 200:
                refused.append(now())
                raise EtcdRejected("permission denied")
            return await read(*gets)

        here.etcd.read = refuse  # type: ignore[method-assign]
        here.child.script = lambda send: send([JobEnded(0, "fatal", None, "no such column")])
        await here.jobs.run(here.op, [0])
        await here.jobs.drain()
        assert [item.progress for item in here.child.cleaned] == [{"at": 41}]
        assert here.state(0) == "failed"

    in_virtual_time(main, limit=90.0)
    assert 5 < len(refused) < 200


def test_jobs_that_wait_for_a_slow_job_in_their_slot_are_left_to_others(tmp_path: Path) -> None:
    """All were expected to be short. The job that has begun continues."""
    calls: list[tuple[str, float]] = []

    async def main() -> None:
        here = HoldingExecutor(tmp_path)
        other = OperationRef("t", "noop", "", 2)
        chunks = chunked([PartitionPlan(0, "p=0")])
        second = OpenOperation(other, 2, here.op.spec, {}, Plan(1, "", "", 1), chunks, [0])
        second.held[0] = here.op.held[0]

        async def run_in_turn(asked: list[Any]) -> None:
            await asyncio.sleep(20.0)

        here.child.run_in_turn = run_in_turn  # type: ignore[attr-defined]
        here.child.pause = lambda op: calls.append((op, now()))  # type: ignore[attr-defined]
        await here.jobs.run_in_turn([(here.op, [0]), (second, [0])], lambda: calls.append(("slow", now())))

    in_virtual_time(main)
    assert [what for what, _ in calls] == ["slow", "t/noop/1", "t/noop/2"]
    assert all(0.1 < when < 5.0 for _, when in calls)


async def test_no_cleanup_runs_if_the_checkpoint_cannot_be_abandoned(tmp_path: Path) -> None:
    here = HoldingExecutor(tmp_path, Rules(resumable=True))
    assert await here.jobs._checkpoints.save(here.op, 0, {"at": 41})
    other = Claim("ex-other", "other", 2, 1)
    here.etcd.store.apply(Txn((), (Put(here.keys.claim(REF, 0), other.encode()),)))
    here.child.script = lambda send: send([JobEnded(0, "fatal", None, "no such column")])
    await here.jobs.run(here.op, [0])
    await here.jobs.drain()
    assert (here.child.cleaned, here.state(0), here.claim(0)) == ([], "", other)


@pytest.mark.parametrize(("attempts", "states"), [(2, ("", "success")), (1, ("failed", "success"))])
async def test_an_end_that_cannot_be_encoded_is_an_error_of_its_job_alone(
    attempts: int, states: tuple[str, str], tmp_path: Path
) -> None:
    here = HoldingExecutor(tmp_path, Rules(retry=Retry(attempts=attempts), cleans=False))
    here.child.script = lambda send: send([JobEnded(0, "success", object()), JobEnded(1, "success")])
    await here.jobs.run(here.op, [0, 1])
    await here.jobs.drain()
    assert (here.state(0), here.state(1)) == states
    assert sorted(here.op.held) == [2, 3]
    claim = here.claim(0)
    error = claim.error if claim is not None else here.outcome(0).error
    assert "the end of the job could not be encoded" in error


@pytest.mark.parametrize(("least", "share"), [(False, 1.0), (True, 0.5)])
@pytest.mark.parametrize(("failures", "pause"), [(1, 2.0), (2, 4.0), (3, 8.0), (4, 10.0)])
async def test_the_pause_before_the_next_attempt_doubles_and_is_random(
    failures: int, pause: float, least: bool, share: float, clock: StandingClock, tmp_path: Path
) -> None:
    """The pause written after this many failures: doubled each time up to the maximum, and partly random."""
    clock.now, clock.least = 1e9, least
    rules = Rules(retry=Retry(attempts=9, initial=2.0, maximum=10.0))
    here = HoldingExecutor(tmp_path, rules, attempt=failures, failures=failures - 1)
    here.child.script = lambda send: send([JobEnded(0, "error", None, "it failed"), JobEnded(1, "crash")])
    await here.jobs.run(here.op, [0, 1])
    await here.jobs.drain()
    for claim in (here.claim(0), here.claim(1)):
        assert claim is not None
        assert (claim.waiting, claim.failures) == (True, failures)
        assert from_rfc3339(claim.retry_at) - clock.now == share * pause


async def test_a_momentary_failure_releases_the_job_without_counting_as_a_failure(tmp_path: Path) -> None:
    here = HoldingExecutor(tmp_path, Rules(cleans=False))
    here.cluster.nodes["other"] = Node("ex-other", "host", 1, ("noop",))
    here.child.script = lambda send: send([JobEnded(0, "unavailable", None, "its Spark session did not start")])
    await here.jobs.run(here.op, [0])
    await here.jobs.drain()
    lacks = Tried(1, "ex-me", "this executor could not run it: its Spark session did not start")
    assert here.claim(0) == Claim("ex-me", "", 1, 0, tried=(lacks,))
    assert not here.capability.serves("noop")
    assert here.capability.unable == {"noop": "its Spark session did not start"}


async def test_a_momentary_failure_counts_if_no_other_node_can_run_the_job(
    tmp_path: Path,
) -> None:
    here = HoldingExecutor(tmp_path, Rules(retry=Retry(attempts=2), cleans=False))
    here.child.script = lambda send: send([JobEnded(0, "unavailable", None, "its Spark session did not start")])
    await here.jobs.run(here.op, [0])
    await here.jobs.drain()
    claim = here.claim(0)
    assert claim is not None
    reason = "this executor could not run it: its Spark session did not start"
    assert (claim.failures, claim.error, here.capability.unable) == (1, reason, {})


async def test_a_failure_counts_if_each_node_has_given_the_job_back(tmp_path: Path) -> None:
    """The other node has run other jobs of the type, so its record names no failure."""
    here = HoldingExecutor(tmp_path, Rules(retry=Retry(attempts=3), cleans=False))
    here.cluster.nodes["other"] = Node("ex-other", "host", 1, ("noop",))
    given_back = job_claims.released(here.op.held[0].claim, "ex-other", "its Spark session did not start")
    assert given_back.failures == 0
    here.op.held[0] = replace(here.op.held[0], claim=replace(here.op.held[0].claim, tried=given_back.tried))
    here.child.script = lambda send: send([JobEnded(0, "unavailable", None, "its Spark session did not start")])
    await here.jobs.run(here.op, [0])
    await here.jobs.drain()
    claim = here.claim(0)
    assert claim is not None
    assert claim.failures == 1
    assert [one.executor for one in claim.tried] == ["ex-other", "ex-me"]


@pytest.mark.parametrize("can_fail", [True, False])
async def test_fatal_errors_count_neither_for_nor_against_a_node(can_fail: bool, tmp_path: Path) -> None:
    here = HoldingExecutor(tmp_path, Rules(can_fail=can_fail, cleans=False))
    calls: list[str] = []

    class Noted(IdleScheduler):
        def job_failed(self, ref: OperationRef) -> None:
            calls.append("failed")

        def succeeded(self, ref: OperationRef) -> None:
            calls.append("ended")

    here.jobs = Jobs(here, Noted())
    ends = [
        JobEnded(0, "fatal", None, "no"),
        JobEnded(1, "error", None, "x"),
        JobEnded(2, "verdict"),
        JobEnded(3, "crash"),
    ]
    here.child.script = lambda send: send(ends)
    await here.jobs.run(here.op, [0, 1, 2, 3])
    await here.jobs.drain()
    assert calls == ["failed", "ended", "failed"]


async def test_a_run_whose_checkpoints_cannot_be_read_is_not_recorded_after_its_release(tmp_path: Path) -> None:
    """It would seem to run forever, and never be reconciled."""
    here = HoldingExecutor(tmp_path, Rules(resumable=True), attempt=2)
    here.etcd.readable = False
    begin = here.local.begin

    async def later(*args: Any) -> None:
        await here.etcd.asked.wait()
        await begin(*args)

    here.local.begin = later  # type: ignore[method-assign]
    with pytest.raises(EtcdUnavailable):
        await here.jobs.run(here.op, [0])
    await here.jobs.drain()
    assert sorted(here.op.held) == [1, 2, 3]
    (left,) = here.local.former
    assert not here.local.running(left, 0)
    assert here.local._mine == {}


async def test_only_the_last_of_several_waiting_checkpoints_is_written(tmp_path: Path) -> None:
    here = HoldingExecutor(tmp_path, Rules(resumable=True))
    here.etcd.open.clear()
    saves = [asyncio.ensure_future(here.jobs._checkpoints.save(here.op, 0, n)) for n in (1, 2, 3)]
    await here.etcd.asked.wait()
    assert here.submitted[here.keys.claim(REF, 0)] == 1
    here.etcd.open.set()
    assert await asyncio.gather(*saves) == [True, False, True]
    key = here.keys.job(REF, 0, "progress")
    assert here.etcd.store.get(key).value == b"3"
    assert await here.jobs._checkpoints.save(here.op, 0, 4)
    assert here.etcd.store.get(key).value == b"4"


async def test_a_refused_checkpoint_does_not_block_the_next(tmp_path: Path) -> None:
    """Under the same fence; after its loss none is written."""
    here = HoldingExecutor(tmp_path, Rules(resumable=True))
    key = here.keys.job(REF, 0, "progress")
    assert await here.jobs._checkpoints.save(here.op, 0, 1)
    here.etcd.store.apply(Txn((), (Put(key, b"7"),)))  # such as a late copy of an abandoned write
    assert not await here.jobs._checkpoints.save(here.op, 0, 2)
    assert await here.jobs._checkpoints.save(here.op, 0, 3)
    assert here.etcd.store.get(key).value == b"3"
    here.etcd.store.apply(Txn((), (Put(here.keys.claim(REF, 0), Claim("o", "other", 2, 1).encode()),)))
    assert not await here.jobs._checkpoints.save(here.op, 0, 4)
    assert not await here.jobs._checkpoints.save(here.op, 0, 5)
    assert here.etcd.store.get(key).value == b"3"

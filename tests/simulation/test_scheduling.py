"""Which executor claims which job and when: production executors on the model etcd, with scripted jobs."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.executor.claimer import Claimer
from distop.decide import job_claims, work_shares
from distop.decide.backlog import Backlog
from distop.decide.circuit_breaker import IN_A_ROW
from distop.errors import UnreadableRecord
from distop.protocol.job_transitions import CLAIMS_PER_TXN
from distop.protocol.jobs import Claim
from distop.protocol.records import History
from distop.services.open_operation import OpenOperation
from distop.store.client import EtcdClient
from tests.simulator import Scenario, Simulation, simulated_behaviors
from tests.simulator.run import without_logs
from tests.simulator.scenario import Action, Submission, plain
from tests.simulator.sim_worker import SimWorker
from tests.simulator.simulated_behaviors import Script
from tests.simulator.virtual_loop import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.protocol.revisioned import Change
    from distop.protocol.txn import Txn
    from distop.worker.daemon_side.requests import Listener, RunRequest


def submission(type_name: str, partitions: int, after: float = 0.3, name: str = "x") -> Submission:
    arg = {"seed": 5, "partitions": partitions, "pace": 0.1, "trouble": 0.0, "chunk": 100_000, "calls": 0.05}
    return Submission(0, after, type_name, "a", {**arg, "name": name}, None, "collect_all", ())


def cluster(hosts: int, slots: int, *submissions: Submission) -> Scenario:
    return plain(11, hosts, submissions, slots=slots, poll=2.0)


class Watched:
    """A simulation that tracks all claims. ``seen`` is called with each change."""

    def __init__(self, scenario: Scenario, seen: Callable[[Change], None] = lambda _: None) -> None:
        self.sim = Simulation(scenario)
        self.held: dict[str, str] = {}
        """Claim → the executor that holds it."""
        self._seen = seen
        former = self.sim.etcd.committed
        assert former is not None

        def committed(revision: int, changes: tuple[Change, ...], sender: str) -> None:
            former(revision, changes, sender)
            for change in changes:
                key = change.kv.key
                if key.startswith("distOpClaim."):
                    claim = None if change.deleted else Claim.decode(change.kv.value)
                    self.held.pop(key, None)
                    if claim is not None and not claim.waiting:
                        self.held[key] = claim.executor
                self._seen(change)

        self.sim.etcd.committed = committed

    def run(self) -> list[str]:
        with without_logs():
            return list(map(str, self.sim.run().breaches))


# --------------------------------------------------------- unreadable operations


@pytest.mark.parametrize("hosts", [2, 3])
def test_jobs_of_an_unreadable_operation_are_not_claimed_unread_twice(
    hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each executor notices once that it cannot read an operation of one job, and then reads it before it claims.

    The coordinator's executor never claims unread, since it has the plan.
    """
    monkeypatch.setattr(simulated_behaviors, "script", lambda *_: Script(0.1, 1, "success"))
    watched = Watched(cluster(hosts, 8, submission("check", 1)))
    sim, former = watched.sim, OpenOperation.of
    unread: Counter[str] = Counter()
    looked: list[float] = []

    async def of(*args: Any) -> OpenOperation:
        looked.append(sim.loop.now)
        if sim.loop.now < 100:
            raise UnreadableRecord("the plan does not match its digest")
        return await former(*args)

    claim = Claimer.claim_fresh

    async def claim_fresh(self: Claimer, *args: Any) -> Any:
        unread[self._ctx.executor_id] += 1
        return await claim(self, *args)

    monkeypatch.setattr(OpenOperation, "of", of)
    monkeypatch.setattr(Claimer, "claim_fresh", claim_fresh)
    unreadable = "Cannot read the operation on this executor"
    breaches = [breach for breach in watched.run() if unreadable not in breach]
    assert breaches == [], "the operation did not end after it became readable"
    assert set(unread.values()) == {1}, unread
    assert len(looked) <= 12 * hosts, looked


# ---------------------------------------------------------------- exclusive jobs

SUSPECT = "distOpClaim.a.index.x.1.000000"


def backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the job of ``index`` fail once and then need to run alone; jobs of ``check`` last longer than a poll."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        if type_name == "index":
            return Script(9.0, 1, "error" if attempt == 1 else "success")
        return Script(3.0 + 4.0 * simulated_behaviors.draw("length", partition), 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    monkeypatch.setattr(job_claims, "suspect", lambda claim, lost, rules: rules.resumable and claim.failures > 0)


class ExclusiveJob(Watched):
    """Tracks a job that has to run alone beside a backlog. ``due(self)`` is called when it has failed."""

    def __init__(self, hosts: int, jobs: int, due: Callable[[ExclusiveJob], None] = lambda _: None) -> None:
        super().__init__(cluster(hosts, 3, submission("index", 1), submission("check", jobs, 0.4)), self._follow)
        self.broke = self.begun = self.ended = False
        self.meanwhile: Counter[str] = Counter()
        """Executor → number of backlog jobs that it claimed while the exclusive job waited."""
        self.beside: list[tuple[str, str]] = []
        """Other claims of its executor while it ran."""
        self.others: set[str] = set()
        """Other executors that held jobs while it ran."""
        self.left = 0
        """Number of unclaimed backlog jobs when it started."""
        self.holder = ""
        self._claimed = 0
        self._jobs = jobs
        self._due = due

    def _follow(self, change: Change) -> None:
        key = change.kv.key
        if not key.startswith("distOpClaim."):
            return
        claim = None if change.deleted else Claim.decode(change.kv.value)
        if key == SUSPECT:
            if claim is None:
                self.ended = True
            elif claim.waiting and not self.broke:
                self.broke = True
                self._due(self)
            elif self.broke and not claim.waiting:
                self.begun, self.holder, self.left = True, claim.executor, self._jobs - self._claimed
        elif claim is not None:
            self._claimed += 1
            if self.broke and not self.begun:
                self.meanwhile[claim.executor] += 1
        if self.begun and not self.ended:
            self.beside += [(k, who) for k, who in self.held.items() if who == self.holder and k != SUSPECT]
            self.others |= set(self.held.values()) - {self.holder}


@pytest.mark.parametrize("hosts", [1, 3])
def test_an_exclusive_job_runs_beside_a_backlog(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One executor stops claiming for it, also after polls; the others continue with the backlog."""
    backlog(monkeypatch)
    watched = ExclusiveJob(hosts, 60 * hosts)
    assert watched.run() == []
    assert watched.left > 30 * hosts, "the job waited for the end of the backlog"
    assert watched.beside == []
    assert len(watched.others) == hosts - 1
    went_on = watched.meanwhile.total() - watched.meanwhile[watched.holder]
    assert went_on > 2 * (hosts - 1) or hosts == 1, "other executors stopped claiming too"


def first_for(watched: ExclusiveJob) -> str:
    """The executor that stops claiming for the job."""
    kv = watched.sim.etcd.store.get(SUSPECT)
    assert kv is not None
    claim, names = Claim.decode(kv.value), [host.name for host in watched.sim.scenario.hosts]

    def place(name: str) -> int:
        return work_shares.place_for_suspect(claim, name, [other for other in names if other != name], "a/index/x/1/0")

    return min(names, key=place)


def test_an_exclusive_job_runs_although_the_executor_that_waits_for_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog(monkeypatch)
    fell: list[str] = []

    def due(watched: ExclusiveJob) -> None:
        sim, name = watched.sim, first_for(watched)
        fell.append(name)
        machine = next(machine for machine in sim.machines if machine.name == name)

        def die() -> None:
            machine.crash()
            sim.loop.world_at(sim.loop.now + 60.0, machine.start)

        sim.loop.world_at(sim.loop.now + 4.0, die)  # while it waits for the last of its own jobs

    watched = ExclusiveJob(3, 300, due)
    assert watched.run() == []
    assert watched.left > 100
    assert watched.beside == []
    assert watched.holder not in fell


def test_an_exclusive_job_runs_although_the_first_executor_is_never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a reason that no other executor sees. After a while the next executor takes its turn."""
    backlog(monkeypatch)
    monkeypatch.setattr(work_shares, "QUIET_TURN", 40.0)
    never: list[str] = []
    former = Backlog._alone

    def alone(self: Backlog, *mine: int) -> bool:
        return self._around.executor_id not in never and former(self, *mine)

    monkeypatch.setattr(Backlog, "_alone", alone)
    watched = ExclusiveJob(3, 300, lambda watched: never.append(first_for(watched)))
    assert watched.run() == []
    assert never
    assert watched.holder not in never
    assert watched.left > 50
    assert watched.beside == []


def test_no_executor_waits_for_an_exclusive_job_of_an_ended_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by seed 20262712: the executor stopped claiming for it after it had seen the end of its gate."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        return Script(0.5, 1, "error") if type_name == "index" else Script(20.0, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    monkeypatch.setattr(job_claims, "suspect", lambda claim, lost, rules: rules.resumable and claim.failures > 0)
    former, looks = OpenOperation.look, [0.0]

    async def look(self: OpenOperation, *args: Any) -> None:
        await former(self, *args)
        if self.suspects:
            looks.append(watched.sim.loop.now)
            await asyncio.sleep(6.0)

    monkeypatch.setattr(OpenOperation, "look", look)
    broken = replace(submission("index", 1), actions=(Action(4.0, "cancel"),))
    watched = Watched(cluster(1, 3, broken, submission("check", 2, 0.4)))
    assert watched.run() == []
    assert sorted(watched.sim.answers.ended.values()) == ["cancelled", "success"]
    assert looks[1] < 0.3 + 4.0 < looks[1] + 6.0, "the cancel did not come during the look"


# --------------------------------------------------------------- circuit breaker


class FailingAttempts(Watched):
    """Counts failed attempts, and records the ends of operations."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, self._follow)
        self.broke: Counter[str] = Counter()
        """Executor → number of attempts that failed there."""
        self.ended: dict[str, float] = {}
        """Type → virtual time of its operation's end."""
        self.states: dict[str, str] = {}

    def _follow(self, change: Change) -> None:
        key = change.kv.key
        if key.startswith("distOpClaim.") and not change.deleted:
            claim = Claim.decode(change.kv.value)
            self.broke[claim.executor] += claim.waiting and bool(claim.error)
        if key.startswith("distOpHistory.") and key.endswith(".1") and not change.deleted:
            history = History.decode(change.kv.value)
            self.ended[key.split(".")[2]] = self.sim.loop.now
            self.states[key.split(".")[2]] = history.state


def test_a_node_whose_jobs_all_fail_leaves_the_work_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs of two operations fail on it, so it claims nothing for a while."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        here = PROCESS.get().name.startswith("exec-0/")
        return Script(0.05, 1, "error") if here else Script(0.8, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    watched = FailingAttempts(cluster(2, 4, submission("check", 150), submission("check-all", 150)))
    assert watched.run() == []
    assert watched.states == {"check": "success", "check-all": "success"}
    assert IN_A_ROW <= watched.broke["exec-0"] <= 3 * IN_A_ROW
    assert watched.broke["exec-1"] == 0


def test_a_node_whose_jobs_all_fail_leaves_few_jobs_to_one_with_fewer_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It always had free slots, and took each attempt while the other node was busy."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        here = PROCESS.get().name.startswith("exec-0/")
        return Script(0.05, 1, "error") if here else Script(8.0, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    scenario = cluster(2, 8, submission("check", 6))
    broken, busy = scenario.hosts
    watched = FailingAttempts(replace(scenario, hosts=(broken, replace(busy, slots=1))))
    assert watched.run() == []
    assert watched.states == {"check": "success"}
    assert watched.broke["exec-0"] > 0
    assert watched.broke["exec-1"] == 0


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_failing_operation_delays_no_other(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive failures of one operation on all nodes do not open a node's circuit breaker."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        return Script(0.05, 1, "success" if type_name == "check" or attempt > 4 else "error")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    watched = FailingAttempts(cluster(hosts, 4, submission("check-all", 60), submission("check", 20, after=5.0)))
    assert watched.run() == []
    assert watched.states == {"check": "success", "check-all": "success"}
    assert sum(watched.broke.values()) == 60 * 4
    assert watched.ended["check"] < 10
    if hosts == 1:
        assert watched.ended["check-all"] < 30, "the only node left its jobs to other nodes"


# ------------------------------------------------------------------------ blocks


def test_the_jobs_of_a_block_are_run_in_the_order_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are claimed in groups, whose answers may arrive in any order.

    A child's caches for a batch, such as a listing of files, rely on the order.
    """
    monkeypatch.setattr(simulated_behaviors, "script", lambda *_: Script(0.05, 1, "success"))
    watched, runs = Watched(cluster(1, 2, submission("purge", 1500))), []
    run, commit = SimWorker.run_in_turn, EtcdClient.commit
    claims = itertools.count()

    async def run_in_turn(self: SimWorker, asked: Sequence[tuple[RunRequest, Listener]]) -> None:
        runs.extend([item.ordinal for item in request.items] for request, _ in asked)
        await run(self, asked)

    async def answered_in_reverse(self: EtcdClient, txn: Txn, **options: Any) -> Any:
        if txn.label == "claim":
            await asyncio.sleep(max(0.0, 0.5 - 0.1 * next(claims)))
        return await commit(self, txn, **options)

    monkeypatch.setattr(SimWorker, "run_in_turn", run_in_turn)
    monkeypatch.setattr(EtcdClient, "commit", answered_in_reverse)
    assert watched.run() == []
    assert len(max(runs, key=len)) > 2 * CLAIMS_PER_TXN
    assert all(ordinals == sorted(ordinals) for ordinals in runs)

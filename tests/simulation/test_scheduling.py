"""Which executor claims what, and when: the production executors on the model etcd, with jobs made for the purpose."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.executor.claimer import Claimer
from distop.decide import next_steps
from distop.decide.backlog import Backlog
from distop.decide.executor import IN_A_ROW
from distop.errors import UnreadableRecord
from distop.protocol.job_transitions import CLAIMS_PER_TXN
from distop.protocol.jobs import Claim
from distop.protocol.records import History
from distop.services.open_operation import OpenOperation
from distop.store.client import EtcdClient
from tests.simulator import Scenario, Simulation, simulated_behaviors
from tests.simulator.run import quietly
from tests.simulator.scenario import Act, Wish, plain
from tests.simulator.sim_worker import SimWorker
from tests.simulator.simulated_behaviors import Script
from tests.simulator.virtual_loop import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.protocol.revisioned import Change
    from distop.protocol.txn import Txn
    from distop.worker.daemon_side.requests import Listener, RunRequest


def wish(type_name: str, partitions: int, after: float = 0.3, name: str = "x") -> Wish:
    arg = {"seed": 5, "partitions": partitions, "pace": 0.1, "trouble": 0.0, "chunk": 100_000, "calls": 0.05}
    return Wish(0, after, type_name, "a", {**arg, "name": name}, None, "collect_all", ())


def cluster(hosts: int, slots: int, *wishes: Wish) -> Scenario:
    return plain(11, hosts, wishes, slots=slots, poll=2.0)


class Watched:
    """A simulation whose claims are followed. ``seen`` is called with each change."""

    def __init__(self, wanted: Scenario, seen: Callable[[Change], None] = lambda _: None) -> None:
        self.sim = Simulation(wanted)
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
        with quietly():
            return list(map(str, self.sim.run().breaches))


# -------------------------------------------------------------- cannot be read


@pytest.mark.parametrize("hosts", [2, 3])
def test_jobs_that_cannot_be_read_are_not_claimed_unread_twice(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each executor but the coordinator's, which brings the plan, finds out once that it cannot read the operation, and
    then looks before it claims.
    """
    monkeypatch.setattr(simulated_behaviors, "script", lambda *_: Script(0.1, 1, "success"))
    watched = Watched(cluster(hosts, 8, wish("check", 6)))
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
    told = [breach for breach in watched.run() if "skipping it until its records change" not in breach]
    assert told == [], "it ends once it can be read"
    assert set(unread.values()) == {1}, unread
    assert len(looked) <= 12 * hosts, looked


# ---------------------------------------------------------------- runs alone

SUSPECT = "distOpClaim.a.index.x.1.000000"


def backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job of ``index`` breaks once and is then to run alone; those of ``check`` take longer than the poll."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        if type_name == "index":
            return Script(9.0, 1, "error" if attempt == 1 else "success")
        return Script(3.0 + 4.0 * simulated_behaviors.draw("length", partition), 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    monkeypatch.setattr(next_steps, "suspect", lambda claim, lost, rules: rules.resumable and claim.failures > 0)


class Alone(Watched):
    """Follows a job that is to run alone beside a backlog. ``due()`` is called when it has broken."""

    def __init__(self, hosts: int, jobs: int, due: Callable[[Alone], None] = lambda _: None) -> None:
        super().__init__(cluster(hosts, 3, wish("index", 1), wish("check", jobs, 0.4)), self._follow)
        self.broke = self.begun = self.ended = False
        self.meanwhile: Counter[str] = Counter()
        """Executors by the jobs of the backlog that they claimed while it waited."""
        self.beside: list[tuple[str, str]] = []
        """What else its executor held while it ran."""
        self.others: set[str] = set()
        """Who held jobs while it ran."""
        self.left = 0
        """Jobs of the backlog that had not been claimed when it began."""
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
def test_a_job_that_is_to_run_alone_runs_beside_a_backlog(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One executor falls quiet for it and stays so over each poll; the others go on with the backlog."""
    backlog(monkeypatch)
    watched = Alone(hosts, 60 * hosts)
    assert watched.run() == []
    assert watched.left > 30 * hosts, "it did not wait for the end of the backlog"
    assert watched.beside == []
    assert len(watched.others) == hosts - 1
    went_on = watched.meanwhile.total() - watched.meanwhile[watched.holder]
    assert went_on > 2 * (hosts - 1) or hosts == 1, "nobody else stood still while it waited"


def first_for(watched: Alone) -> str:
    """The executor that falls quiet for the job."""
    kv = watched.sim.etcd.store.get(SUSPECT)
    assert kv is not None
    claim, names = Claim.decode(kv.value), [host.name for host in watched.sim.scenario.hosts]

    def place(name: str) -> int:
        return next_steps.place_for_suspect(claim, name, [other for other in names if other != name], "a/index/x/1/0")

    return min(names, key=place)


def test_it_runs_alone_though_the_executor_that_fell_quiet_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog(monkeypatch)
    fell: list[str] = []

    def due(watched: Alone) -> None:
        sim, name = watched.sim, first_for(watched)
        fell.append(name)
        machine = next(machine for machine in sim.machines if machine.name == name)

        def die() -> None:
            machine.crash()
            sim.loop.world_at(sim.loop.now + 60.0, machine.start)

        sim.loop.world_at(sim.loop.now + 4.0, die)  # it waits for the last of its own jobs

    watched = Alone(3, 300, due)
    assert watched.run() == []
    assert watched.left > 100
    assert watched.beside == []
    assert watched.holder not in fell


def test_it_runs_alone_though_the_first_executor_never_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whatever reason; and nobody else can see it. After a while it is the next one's turn."""
    backlog(monkeypatch)
    monkeypatch.setattr(next_steps, "QUIET_TURN", 40.0)
    never: list[str] = []
    former = Backlog._alone

    def alone(self: Backlog, *mine: int) -> bool:
        return self._around.executor_id not in never and former(self, *mine)

    monkeypatch.setattr(Backlog, "_alone", alone)
    watched = Alone(3, 300, lambda watched: never.append(first_for(watched)))
    assert watched.run() == []
    assert never
    assert watched.holder not in never
    assert watched.left > 50
    assert watched.beside == []


def test_nobody_stays_quiet_for_an_operation_that_went_while_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by seed 20262712: the executor fell quiet for it after it had heard that its gate was gone."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        return Script(0.5, 1, "error") if type_name == "index" else Script(20.0, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    monkeypatch.setattr(next_steps, "suspect", lambda claim, lost, rules: rules.resumable and claim.failures > 0)
    former, looks = OpenOperation.look, [0.0]

    async def look(self: OpenOperation, *args: Any) -> None:
        await former(self, *args)
        if self.suspects:
            looks.append(watched.sim.loop.now)
            await asyncio.sleep(6.0)

    monkeypatch.setattr(OpenOperation, "look", look)
    broken = replace(wish("index", 1), acts=(Act(4.0, "cancel"),))
    watched = Watched(cluster(1, 3, broken, wish("check", 2, 0.4)))
    assert watched.run() == []
    assert sorted(watched.sim.told.ended.values()) == ["cancelled", "success"]
    assert looks[1] < 0.3 + 4.0 < looks[1] + 6.0, "it was looked at when it was cancelled"


# ------------------------------------------------------------ suspects itself


class Breaking(Watched):
    """Attempts that broke, and when operations ended."""

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted, self._follow)
        self.broke: Counter[str] = Counter()
        """Executor → attempts that broke there."""
        self.ended: dict[str, float] = {}
        """Type → when its operation ended, in virtual seconds."""
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


def test_a_node_that_breaks_everything_leaves_the_work_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of two operations break on it, and none ends: it claims nothing for a while."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        here = PROCESS.get().name.startswith("exec-0/")
        return Script(0.05, 1, "error") if here else Script(0.8, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    watched = Breaking(cluster(2, 4, wish("check", 150), wish("check-all", 150)))
    assert watched.run() == []
    assert watched.states == {"check": "success", "check-all": "success"}
    assert IN_A_ROW <= watched.broke["exec-0"] <= 3 * IN_A_ROW
    assert watched.broke["exec-1"] == 0


def test_a_node_that_breaks_everything_leaves_its_few_jobs_to_one_with_fewer_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has free slots at once, and took every attempt while the other node was busy."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        here = PROCESS.get().name.startswith("exec-0/")
        return Script(0.05, 1, "error") if here else Script(8.0, 1, "success")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    wanted = cluster(2, 8, wish("check", 6))
    broken, busy = wanted.hosts
    watched = Breaking(replace(wanted, hosts=(broken, replace(busy, slots=1))))
    assert watched.run() == []
    assert watched.states == {"check": "success"}
    assert watched.broke["exec-0"] > 0
    assert watched.broke["exec-1"] == 0


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_broken_operation_holds_up_no_other(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its jobs break in a row, wherever they run: that tells nothing of the nodes."""

    def script(type_name: str, arg: Mapping[str, Any], partition: int, attempt: int) -> Script:
        return Script(0.05, 1, "success" if type_name == "check" or attempt > 4 else "error")

    monkeypatch.setattr(simulated_behaviors, "script", script)
    watched = Breaking(cluster(hosts, 4, wish("check-all", 60), wish("check", 20, after=5.0)))
    assert watched.run() == []
    assert watched.states == {"check": "success", "check-all": "success"}
    assert sum(watched.broke.values()) == 60 * 4
    assert watched.ended["check"] < 10
    if hosts == 1:
        assert watched.ended["check-all"] < 30, "nobody else could run them, so that they were not left to others"


# ------------------------------------------------------------------ in a block


def test_the_jobs_of_a_block_are_run_in_the_order_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are claimed in groups, which are answered in any order: what a child keeps of a batch, such as the listing
    of its files, it finds again by the files in their order.
    """
    monkeypatch.setattr(simulated_behaviors, "script", lambda *_: Script(0.05, 1, "success"))
    watched, runs = Watched(cluster(1, 2, wish("purge", 1500))), []
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

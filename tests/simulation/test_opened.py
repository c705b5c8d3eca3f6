"""The first jobs of an operation are claimed by the transaction that writes its plan. Whatever happens before the
executor hears of that, each of them is run once or is released unblamed, and nothing of the operation is left in the
executor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from distop.daemon.executor.executor_role import Executor
from distop.protocol import keys as K
from distop.protocol.jobs import Claim
from distop.protocol.records import OperationRef
from distop.protocol.txn import Put, Txn
from tests.simulation.test_scenarios import argument, small
from tests.simulator import Scenario, Simulation
from tests.simulator.machine import Machine
from tests.simulator.network import Fate
from tests.simulator.run import quietly
from tests.simulator.scenario import Act, DrainAct, Wish, plain
from tests.simulator.virtual_loop import Process

AFTER = 1.0
"""Seconds for which the answer is on its way."""
SLOTS = 4
JOBS = 3

Then = Callable[["Opening", Machine], None]
LATE = pytest.mark.parametrize("fate", [Fate("late", after=AFTER), Fate("lost", silent=True)], ids=["late", "lost"])
KINDS = pytest.mark.parametrize("kind", ["check", "quick"], ids=["one by one", "as a batch"])


def brings_claims(asked: object) -> bool:
    """It is the plan of an operation, with claims."""
    puts = {op.key.partition(".")[0] for op in asked.success if isinstance(op, Put)} if isinstance(asked, Txn) else ()
    return K.OPEN in puts and K.CLAIM in puts


@dataclass(slots=True)
class Left:
    """What an executor holds in memory in the end. ``over``: its incarnation has ended. ``operations``: those of which
    it sees no gate; that the others are gone it has not heard yet.
    """

    over: bool
    free: int
    serving: dict[Any, Any]
    operations: dict[Any, Any]

    @classmethod
    def of(cls, executor: Executor) -> Left:
        over = executor._ctx.lost.done()
        gates = executor._ctx.cluster.gates
        operations = {ref: op for ref, op in executor._operations.items() if ref not in gates}
        return cls(over, executor._free_slots, dict(executor._serving), operations)


@dataclass
class Executors:
    """All that there ever were, and the gates that they came to see."""

    all: list[Executor] = field(default_factory=list)
    gates: set[int] = field(default_factory=set)


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> Executors:
    known, init, changed = Executors(), Executor.__init__, Executor.cluster_changed

    def noted(self: Executor, ctx: Any) -> None:
        init(self, ctx)
        known.all.append(self)

    def looked(self: Executor, *, hint: bool, refs: Any = None) -> None:
        known.gates |= {gate.mod for gate in self._ctx.cluster.gates.values()}
        changed(self, hint=hint, refs=refs)

    monkeypatch.setattr(Executor, "__init__", noted)
    monkeypatch.setattr(Executor, "cluster_changed", looked)
    return known


class Opening:
    """A run. ``fate``: of the first copy of the first transaction that writes a plan with claims; ``first`` and
    ``then`` are called with the machine of whoever sends it, when it is sent and when it was applied.
    """

    def __init__(
        self, wanted: Scenario, fate: Fate | None = None, first: Then | None = None, then: Then | None = None
    ) -> None:
        self.sim = Simulation(wanted)
        self.machine: Machine | None = None
        """Who writes the plan."""
        self.revision = 0
        """At which it was applied, ``at`` this time; or, where its first copy was late, refused."""
        self.at = 0.0
        self.sent: list[float] = []
        """When it was sent, and sent again."""
        self.arrived: list[float] = []
        """When its copies came to etcd."""
        self.left: list[Left] = []
        self._fate = fate
        self._first = first
        self._then = then
        self._txn: object = None
        self._sends = False
        network = self.sim.network
        network.sending, network.fate, network.applied = self._sending, self._fated, self._applied

    def run(self, executors: Executors | None = None) -> None:
        end = self.sim.loop.end
        if executors is not None:
            executors.all.clear()
            executors.gates.clear()

        def ended() -> None:
            # What is under way is closed next, and gives back slots on its way out.
            self.left = [Left.of(one) for one in executors.all] if executors is not None else []
            end()

        self.sim.loop.end = ended  # type: ignore[method-assign]
        with quietly():
            assert self.sim.run().breaches == []
        assert self.revision, "a plan was written with claims"

    def _sending(self, process: Process, path: str, asked: Any) -> float:
        self._sends = brings_claims(asked) and self._txn in (None, asked)
        if self._sends:
            self._txn = asked
            self.sent.append(self.sim.loop.now)
            self.machine = next(one for one in self.sim.machines if one.process is process)
            if self._first is not None and len(self.sent) == 1:
                self._first(self, self.machine)
        return 0.0

    def _fated(self, process: Process, path: str) -> Fate | None:
        return self._fate if self._sends and len(self.sent) == 1 else None

    def _applied(self, process: Process, path: str, asked: Any) -> None:
        if self._txn is None or asked != self._txn:
            return
        self.arrived.append(self.sim.loop.now)
        if len(self.arrived) == 1:
            self.revision, self.at = self.sim.etcd.revision, self.sim.loop.now
            if self._then is not None and self.machine is not None:
                self._then(self, self.machine)

    # ------------------------------------------------------------- afterwards

    @property
    def unknown_until(self) -> float:
        """No answer was there before."""
        return self.sent[1] if len(self.sent) > 1 else self.at + AFTER

    def times(self, key: str, *, deleted: bool = False) -> list[float]:
        """When a key was written, or deleted."""
        when = {revision: at for at, revision, _, _ in self.sim.log if revision}
        return [
            when[revision]
            for revision, changes in self.sim.etcd.store.history
            if any(one.kv.key == key and one.deleted is deleted for one in changes)
        ]

    def claims(self, op: str) -> list[list[str]]:
        """All claims that each job had, in short: the attempt, that it waits, that it is held against the job."""
        first, after = self.sim.keys.claims_range(OperationRef.parse(op))
        found: dict[str, list[str]] = {}
        for _, changes in self.sim.etcd.store.history:
            for one in changes:
                if first <= one.kv.key < after and not one.deleted:
                    claim = Claim.decode(one.kv.value)
                    told = f"{claim.attempt}{' waits' if claim.waiting else ''}{' blamed' if claim.failures else ''}"
                    found.setdefault(one.kv.key, []).append(told)
        return [told for _, told in sorted(found.items())]

    def runs(self, op: str, jobs: int = JOBS) -> list[list[str]]:
        """Of each job: who ran it, and how that went."""
        names = {incarnation: machine.name for machine in self.sim.machines for incarnation in machine.incarnations}
        return [
            [f"{names[one.incarnation]}: {one.how}" for one in self.sim.effects.of(op, p) if one.kind == "job"]
            for p in range(jobs)
        ]

    def assert_tidy(self) -> None:
        """No executor holds anything of it in memory."""
        assert len(self.left) >= len(self.sim.machines)
        for left in self.left:
            assert (left.free, left.serving) == (SLOTS, {})
            assert left.over or not left.operations


def wish(kind: str, *acts: Act, jobs: int = JOBS, pace: float = 0.3, calls: float = 0.05) -> Wish:
    return Wish(0, 0.5, kind, "a", {**argument(3, jobs, pace), "calls": calls}, None, "collect_all", acts)


def undisturbed(hosts: int, kind: str, **given: Any) -> tuple[float, float, str]:
    """When the plan is written, from the beginning, and from the start of the operation; and who writes it."""
    run = Opening(small(3, hosts, wish(kind, **given), slots=SLOTS))
    run.run()
    assert run.machine is not None
    return run.at, run.at - run.times(f"distOp.a.{kind}.1.spec")[0], run.machine.name


def acted(kind: str, what: tuple[str, ...], fate: Fate, executors: Executors) -> Opening:
    """Somebody does all of this before the answer, and resumes the operation after it."""
    _, planned, _ = undisturbed(1, kind)
    first, *rest = what
    acts = (Act(planned + 0.1, first), *(Act(0.1, one) for one in rest), Act(8.0, "resume"))
    run = Opening(small(3, 1, wish(kind, *acts), slots=SLOTS), fate)
    run.run(executors)
    run.assert_tidy()
    # The start wrote it first.
    changed = run.times(f"distOp.a.{kind}.1.state")[1 : 1 + len(what)]
    assert run.at < changed[0] <= changed[-1] < run.unknown_until, "all of it before the answer"
    return run


@LATE
@KINDS
def test_a_cancel_before_the_answer(kind: str, fate: Fate, executors: Executors) -> None:
    run = acted(kind, ("cancel",), fate, executors)
    assert run.sim.told.ended == {f"a/{kind}/1": "cancelled"}
    assert run.claims(f"a/{kind}/1") == [["1", "1 waits"]] * JOBS
    assert run.runs(f"a/{kind}/1") == [[]] * JOBS


@LATE
@KINDS
@pytest.mark.parametrize("how", ["pause", "pause-now"])
def test_a_pause_before_the_answer(how: str, kind: str, fate: Fate, executors: Executors) -> None:
    run = acted(kind, (how,), fate, executors)
    assert run.sim.told.ended == {f"a/{kind}/1": "success"}
    assert run.claims(f"a/{kind}/1") == [["1", "1 waits", "2"]] * JOBS
    assert run.runs(f"a/{kind}/1") == [["exec-0: success"]] * JOBS


@LATE
@KINDS
@pytest.mark.parametrize("how", ["pause", "pause-now"])
def test_a_pause_and_its_end_before_the_answer(how: str, kind: str, fate: Fate, executors: Executors) -> None:
    """Behind the new gate the claims hold as they did behind the one that came with them."""
    run = acted(kind, (how, "resume"), fate, executors)
    assert len(run.times(f"distOpOpen.a.{kind}.1")) == 2
    assert run.sim.told.ended == {f"a/{kind}/1": "success"}
    assert run.claims(f"a/{kind}/1") == [["1"]] * JOBS
    assert run.runs(f"a/{kind}/1") == [["exec-0: success"]] * JOBS


@KINDS
def test_a_copy_that_comes_after_a_pause_and_its_end(kind: str, executors: Executors) -> None:
    """The repetition was refused. Then the operation is resumed, and is as it was when the first copy was sent: that
    must not apply, with claims that nobody knows of.
    """
    _, planned, _ = undisturbed(1, kind, calls=2.0)
    acts = (Act(planned + 0.1, "pause"), Act(5.2, "resume"))
    wanted = small(3, 1, wish(kind, *acts, calls=2.0), slots=SLOTS)
    # Until it is calm nobody else resumes it.
    run = Opening(replace(wanted, calm=20.0), Fate("late", before=5.5, silent=True))
    run.run(executors)
    (plan,) = run.times(f"distOp.a.{kind}.1.plan")
    _, paused, resumed = run.times(f"distOp.a.{kind}.1.state")[:3]
    again, late = run.arrived
    assert run.sent[0] < paused < again < resumed < late < plan
    assert run.sim.told.ended == {f"a/{kind}/1": "success"}
    assert run.claims(f"a/{kind}/1") == [["1"]] * JOBS
    assert run.runs(f"a/{kind}/1") == [["exec-0: success"]] * JOBS
    run.assert_tidy()


def left_to_the_other(run: Opening, kind: str, planner: str) -> None:
    """What the planner claimed it released, and the other executor ran all."""
    assert run.machine is not None
    assert run.machine.name == planner
    assert run.sim.told.ended == {f"a/{kind}/1": "success"}
    (other,) = {machine.name for machine in run.sim.machines} - {planner}
    assert run.runs(f"a/{kind}/1", 2 * JOBS) == [[f"{other}: success"]] * (2 * JOBS)
    assert sorted(run.claims(f"a/{kind}/1")) == JOBS * [["1"]] + JOBS * [["1", "1 waits", "2"]], "its share is half"
    run.assert_tidy()


@LATE
@KINDS
def test_a_drain_before_the_answer(kind: str, fate: Fate, executors: Executors) -> None:
    at, _, planner = undisturbed(2, kind, jobs=2 * JOBS)
    drain = DrainAct(at + 0.1, planner, 30.0, False)
    run = Opening(replace(small(3, 2, wish(kind, jobs=2 * JOBS), slots=SLOTS), drains=(drain,)), fate)
    run.run(executors)
    assert run.at < run.times(f"distOpNodeDrain.{planner}")[0] < run.unknown_until
    left_to_the_other(run, kind, planner)


@LATE
@KINDS
def test_a_stop_before_the_answer(kind: str, fate: Fate, executors: Executors) -> None:
    """By SIGTERM. Nothing is known yet of what is to be released: the stop waits for it."""
    _, _, planner = undisturbed(2, kind, jobs=2 * JOBS)
    wanted = small(3, 2, wish(kind, jobs=2 * JOBS), slots=SLOTS)
    run = Opening(wanted, fate, then=lambda _, machine: machine.stop())
    run.run(executors)
    assert run.machine is not None
    assert [left.over for left in run.left].count(True) == 1
    left_to_the_other(run, kind, planner)


@LATE
@KINDS
def test_the_election_is_lost_before_the_answer(kind: str, fate: Fate, executors: Executors) -> None:
    """The planning of another operation of the type fails on this node, which hands the election over for that. What
    was claimed is run all the same.
    """
    op = f"a/{kind}/1"
    at, _, planner = undisturbed(2, kind, jobs=2 * JOBS)
    fails = {**argument(16, 4, 0.1), "trouble": 1.0}  # by its seed, each time
    other = replace(wish(kind), after=at + 0.05, arg=fails)
    wanted = plain(3, 2, [wish(kind, jobs=2 * JOBS), other], slots=SLOTS)
    run = Opening(replace(wanted, calm=7.0), fate)  # long after the last round for it, and a listing
    run.run(executors)
    assert run.machine is not None
    assert run.machine.name == planner
    resigned = run.times(f"distOpCoordinator.a.{kind}", deleted=True)[0]
    assert run.at < resigned < run.times(f"distOpCoordinator.a.{kind}")[1] < run.unknown_until
    assert run.sim.told.ended == {op: "success", f"a/{kind}/2": "failed"}
    assert run.claims(op) == [["1"]] * (2 * JOBS)
    assert sorted(run.runs(op, 2 * JOBS)) == JOBS * [["exec-0: success"]] + JOBS * [["exec-1: success"]]
    run.assert_tidy()


@KINDS
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_session_is_lost_before_the_answer(hosts: int, kind: str, executors: Executors) -> None:
    """Its jobs never began, which nobody can tell: they count as lost once, and are run once."""
    away = 8.0

    def cut_off(run: Opening, machine: Machine) -> None:
        assert machine.process is not None
        network, loop = run.sim.network, run.sim.loop
        holds = [network.hold(link, held=("Lease",), muted=("KV",)) for link in network.links(machine.process)]
        loop.world_at(loop.now + away, network.release, holds)

    run = Opening(small(3, hosts, wish(kind, jobs=hosts * JOBS), slots=SLOTS), then=cut_off)
    run.run(executors)
    op = f"a/{kind}/1"
    assert run.machine is not None
    assert run.at < run.times(f"distOpNode.{run.machine.incarnations[0]}", deleted=True)[0] < run.at + away
    assert run.sim.told.ended == {op: "success"}
    assert sorted(run.claims(op)) == (hosts - 1) * JOBS * [["1"]] + JOBS * [["1", "2 blamed"]]
    assert all(how == ["exec-0: success"] or how == ["exec-1: success"] for how in run.runs(op, hosts * JOBS))
    assert [left.over for left in run.left].count(True) == 1
    run.assert_tidy()


# ------------------------------------------------- the watch that tells of gates is silent


def silenced(seconds: float, then: Callable[[Opening, Machine], None]) -> Then:
    """From the plan on the planner hears of no gate; ``then`` is called when it is to."""

    def silence(run: Opening, machine: Machine) -> None:
        assert machine.process is not None
        begins, _ = run.sim.keys.family(K.HOLD)  # as the watch of gates does
        for link in run.sim.network.links(machine.process):
            run.sim.network.hold(link, muted=(begins,))
        run.sim.loop.world_at(run.sim.loop.now + seconds, then, run, machine)

    return silence


@KINDS
@pytest.mark.parametrize("what", ["", "cancel", "pause", "pause-now"])
def test_an_operation_that_is_over_before_its_gate_is_heard_of(kind: str, what: str, executors: Executors) -> None:
    """Its jobs run to their ends, each once, whatever others do: nobody here hears of it."""
    op = f"a/{kind}/1"
    _, planned, _ = undisturbed(1, kind)
    behind: list[bool] = []

    def speak(run: Opening, machine: Machine) -> None:
        (executor,) = executors.all
        over = not run.sim.at_work
        behind.append(over and executor._ctx.gates_at < run.revision and OperationRef.parse(op) in executor._operations)
        for link in run.sim.network.links(machine.process):
            run.sim.network.heal(link)

    acts = (Act(planned + 0.1, what),) if what else ()
    wanted = small(3, 1, wish(kind, *acts, pace=0.5), slots=SLOTS)
    run = Opening(replace(wanted, calm=20.0), first=silenced(8.0, speak))
    run.run(executors)
    assert behind == [True], "it was over, and the executor knew nothing of the gate"
    if what:
        changed = run.times(f"distOp.a.{kind}.1.state")[1]
        assert run.at < changed < min(one.ended or 0.0 for one in run.sim.effects.all if one.kind == "job")
    assert run.sim.told.ended == {op: "cancelled" if what == "cancel" else "success"}
    assert run.claims(op) == [["1"]] * JOBS
    assert run.runs(op) == [["exec-0: success"]] * JOBS
    run.assert_tidy()


@KINDS
@pytest.mark.parametrize("what", ["cancel", "pause-now"])
def test_a_gate_that_came_and_went_unseen_is_gone(kind: str, what: str, executors: Executors) -> None:
    """The watch breaks, and the one that follows tells at once of a gate that came and that went. Its jobs stop."""
    op = f"a/{kind}/1"
    _, planned, _ = undisturbed(1, kind)

    def speak(run: Opening, machine: Machine) -> None:
        for link in run.sim.network.links(machine.process):
            run.sim.network.cut(link)
            run.sim.network.heal(link)

    acts = (Act(planned + 0.1, what), Act(5.0, "cancel"))
    run = Opening(small(3, 1, wish(kind, *acts, pace=100.0), slots=SLOTS), first=silenced(1.0, speak))
    run.run(executors)
    assert run.revision not in executors.gates, "nobody saw it"
    assert run.sim.told.ended == {op: "cancelled"}
    assert run.claims(op) == [["1", "1 waits"]] * JOBS
    assert run.runs(op) == [["exec-0: cancelled"]] * JOBS
    run.assert_tidy()

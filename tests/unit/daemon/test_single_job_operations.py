"""Operations of one job that go together: who takes which, how many at once, and what is served one by one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.daemon.executor.single_job_operations import HEAD_STARTS, Small
from distop.daemon.incarnation_context import Context
from distop.decide.view import ClusterView
from distop.protocol.batch_claims import PLANNED_PER_CLAIM
from distop.protocol.keys import Keys
from distop.protocol.operation_options import Options
from distop.protocol.plan import Gate
from distop.protocol.records import Node, OperationRef
from distop.protocol.revisioned import Seen
from distop.protocol.size_limits import DEFAULT
from distop.runtime import logs
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig
from distop.worker.daemon_side.requests import JobEnded

if TYPE_CHECKING:
    from tests.support.clock import StandingClock

TOGETHER = DEFAULT.together


def ref(number: int, type_name: str = "noop") -> OperationRef:
    return OperationRef("@cluster", type_name, "", number)


class Here(Context):
    """One of some executors, all of which offer two types."""

    def __init__(self, name: str = "ann", names: tuple[str, ...] = ("ann",)) -> None:
        self.keys = Keys()
        self.cluster = ClusterView(self.keys)
        for one in names:
            self.cluster.nodes[one] = Node(one, "host", 2, ("noop", "other"))
        self.incarnation = self.executor_id = name
        self.types = frozenset({"noop", "other"})
        self.capability: Any = type("Able", (), {"serves": staticmethod(lambda *_: True), "unable": {}})
        self.log = logs.get("distop.test")
        self.limits = DEFAULT
        self.caught_up_at = 4
        self.config = ExecutorConfig(EtcdConfig(("nowhere:2379",)), Path("/nowhere"), slots=2)


def small(ctx: Here, count: int, known: frozenset[OperationRef] = frozenset()) -> Small:
    """With so many fresh operations of one job."""
    one = Small(ctx, lambda ref: ref in known)
    for number in range(1, count + 1):
        ctx.cluster.gates[ref(number)] = Seen(Gate(1), 5)
    one.changed(ctx.cluster.gates, list(ctx.cluster.gates))
    return one


def quick(one: Small, seconds: float = 0.0) -> None:
    """Learns that jobs take so long."""
    for _ in range(10):
        one.ran("noop", [JobEnded(0, "success", started=0.0, finished=seconds)])


def now(ref: OperationRef) -> float:
    return 0.0


def test_each_falls_to_one_executor_and_the_others_leave_it_to_that_one_for_a_moment(clock: StandingClock) -> None:
    names = ("ann", "ben", "cat")
    each = {name: small(Here(name, names), 200) for name in names}
    taken: dict[str, list[OperationRef]] = {}
    for name, one in each.items():
        quick(one)
        taken[name] = []
        while chosen := one.choose(1, now)[0]:
            assert len(chosen) <= TOGETHER
            taken[name] += chosen
    assert sorted(ref for some in taken.values() for ref in some) == [ref(n) for n in range(1, 201)]
    assert all(len(some) > 40 for some in taken.values())
    pause = each["ann"].choose(1, now)[1]
    assert pause == HEAD_STARTS[0]
    assert 0.0 < pause < 5.0
    clock.now += HEAD_STARTS[0]
    last = max(taken["ben"] + taken["cat"])
    assert each["ann"].choose(1, now)[0][0] == last, "from the end: those to whom they fall come to it last"


def test_how_many_go_together_is_learned_from_what_they_take(clock: StandingClock) -> None:
    one = small(Here(), 500)
    sizes = []
    for _ in range(7):
        chosen, _ = one.choose(1, now)
        sizes.append(len(chosen))
        one.ran("noop", [JobEnded(0, "success", started=0.0, finished=0.001) for _ in chosen])
    assert sizes == [1, 2, 4, 8, 16, 32, TOGETHER], "at first nobody knows"
    one.ran("noop", [JobEnded(0, "success", started=0.0, finished=0.1 / 3)])
    assert len(one.choose(1, now)[0]) == 3
    one.took_long("noop")
    assert len(one.choose(1, now)[0]) == 1


def test_of_those_on_a_table_fewer_go_together_since_their_plans_are_read(clock: StandingClock) -> None:
    ctx = Here()
    refs = [OperationRef("t", "noop", "", n) for n in range(1, 60)]
    ctx.cluster.gates |= {one: Seen(Gate(1), 9) for one in refs}
    one = Small(ctx, lambda seen: False)
    one.changed(ctx.cluster.gates, None)
    quick(one)
    assert one.choose(1, now)[0] == refs[:PLANNED_PER_CLAIM]
    assert one.choose(1, now)[0] == refs[PLANNED_PER_CLAIM : 2 * PLANNED_PER_CLAIM]


def test_few_are_shared_out_among_the_free_slots(clock: StandingClock) -> None:
    one = small(Here(), 4)
    quick(one)
    assert [len(one.choose(slots, now)[0]) for slots in (2, 1)] == [2, 2]


def test_a_type_that_has_to_wait_holds_up_no_other(clock: StandingClock) -> None:
    ctx = Here()
    one = small(ctx, 3)
    ctx.cluster.gates[ref(9, "other")] = Seen(Gate(1), 6)
    one.changed(ctx.cluster.gates, [ref(9, "other")])
    chosen, _ = one.choose(2, lambda ref: 7.0 if ref.type == "noop" else 0.0)
    assert chosen == [ref(9, "other")]
    assert one.choose(2, lambda ref: 7.0) == ([], 7.0)


def test_what_is_large_or_old_or_known_is_served_one_by_one(clock: StandingClock) -> None:
    ctx = Here()
    ctx.cluster.gates |= {
        ref(1): Seen(Gate(2), 9),
        ref(2): Seen(Gate(1), 4),
        ref(3): Seen(Gate(1), 9),
        ref(4): Seen(Gate(0), 9),
    }
    one = Small(ctx, lambda seen: seen == ref(3))
    one.changed(ctx.cluster.gates, None)
    assert one.choose(2, now) == ([], None)
    assert list(one.general) == [ref(1), ref(2), ref(3), ref(4)]


def test_what_has_terms_of_its_own_is_served_one_by_one(clock: StandingClock) -> None:
    ctx = Here()
    terms = (Gate(1, Options(priority=5)), Gate(1, Options(max_jobs=1)), Gate(1, where={"zone": "a"}))
    for number, gate in enumerate(terms, 1):
        ctx.cluster.gates[ref(number)] = Seen(gate, 9)
    one = Small(ctx, lambda seen: False)
    one.changed(ctx.cluster.gates, None)
    assert one.choose(2, now) == ([], None)
    assert list(one.general) == [ref(1), ref(2), ref(3)]


def test_what_was_given_terms_while_nobody_looked_is_served_one_by_one(clock: StandingClock) -> None:
    ctx = Here()
    one = small(ctx, 3)
    ctx.cluster.gates[ref(1)] = Seen(Gate(1, Options(priority=5)), 9)
    ctx.cluster.gates[ref(2)] = Seen(Gate(1, Options(max_jobs=1)), 9)
    one.changed(ctx.cluster.gates, None)
    quick(one)
    assert list(one.urgent) == [ref(1)]
    assert one.choose(1, now)[0] == [ref(3)]
    ctx.cluster.gates[ref(2)] = Seen(Gate(1, Options(priority=7)), 10)
    one.changed(ctx.cluster.gates, None)
    assert set(one.urgent) == {ref(1), ref(2)}
    one.done(ref(1))
    assert list(one.urgent) == [ref(2)]
    del ctx.cluster.gates[ref(2)]
    one.changed(ctx.cluster.gates, [ref(2)])
    assert not one.urgent


def test_nothing_is_kept_of_a_gate_that_went(clock: StandingClock) -> None:
    ctx = Here()
    one = small(ctx, 4)
    del ctx.cluster.gates[ref(1)]
    one.changed(ctx.cluster.gates, [ref(1)])
    del ctx.cluster.gates[ref(2)]
    one.changed(ctx.cluster.gates, None)
    quick(one)
    assert one.choose(1, now)[0] == [ref(3), ref(4)]
    assert set(one.taken) == {ref(3), ref(4)}, "they are looked at now"
    assert not one.general, "there is nothing else to do for them"
    one.one_by_one([ref(4)])
    assert (set(one.taken), set(one.general)) == ({ref(3)}, {ref(4)})
    ctx.cluster.gates.clear()
    one.changed(ctx.cluster.gates, [ref(3), ref(4)])
    assert not one.taken
    assert not one.general


def test_what_fell_to_a_node_that_went_falls_to_another(clock: StandingClock) -> None:
    ctx = Here("ann", ("ann", "ben"))
    one = small(ctx, 40)
    quick(one)
    mine: list[OperationRef] = []
    while chosen := one.choose(1, now)[0]:
        mine += chosen
    assert 0 < len(mine) < 40
    del ctx.cluster.nodes["ben"]
    one.divide_anew()
    rest: list[OperationRef] = []
    while chosen := one.choose(1, now)[0]:
        rest += chosen
    assert sorted(mine + rest) == [ref(n) for n in range(1, 41)]

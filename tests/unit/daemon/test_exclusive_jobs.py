"""When an executor falls quiet, so that a job can run alone in it, and when it goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.clock import source
from distop.daemon.executor.claimer import Won
from distop.daemon.executor.exclusive_jobs import Quiet
from distop.daemon.executor.executor_role import Executor
from distop.daemon.incarnation_context import Context
from distop.daemon.rejected_writes import RejectedWrites
from distop.decide import next_steps
from distop.decide.view import ClusterView
from distop.protocol.behavior_declaration import Rules
from distop.protocol.jobs import Claim
from distop.protocol.keys import Keys
from distop.protocol.plan import Gate, PartitionPlan, Plan, chunked
from distop.protocol.records import Node, OperationRef, Spec
from distop.protocol.revisioned import Seen
from distop.runtime import logs
from distop.services.open_operation import Held, OpenOperation
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig

if TYPE_CHECKING:
    from tests.support.clock import StandingClock

A, B = OperationRef("t", "a", "", 1), OperationRef("t", "b", "", 1)
NAMES = ["ann", "ben", "cat"]


class Here(Context):
    """One of three executors, which all offer both types."""

    def __init__(self, name: str) -> None:
        self.keys = Keys()
        self.cluster = ClusterView(self.keys)
        for one in NAMES:
            self.cluster.nodes[one] = Node(one, "host", 2, ("a", "b"))
        self.cluster.gates = {A: Seen(Gate(), 5), B: Seen(Gate(), 6)}
        self.incarnation = self.executor_id = name
        self.types = frozenset({"a", "b"})
        self.capability: Any = type("Able", (), {"serves": staticmethod(lambda *_: True), "unable": {}})
        self.log = logs.get("distop.test")
        self.rejected_writes = RejectedWrites(self.log, lambda: None)
        self.config = ExecutorConfig(EtcdConfig(("nowhere:2379",)), Path("/nowhere"), slots=2)


def operation(ref: OperationRef) -> OpenOperation:
    chunks = chunked([PartitionPlan(n, f"p={n}") for n in range(40)])
    return OpenOperation(ref, 5, Spec("request", "", "", Rules()), {}, Plan(40, "", "", 1), chunks, [0])


def suspected(op: OpenOperation, *partitions: int) -> OpenOperation:
    """As after a look that found nothing but these."""
    claim = Seen(Claim("gone", "gone#1", 2, 1), 7)
    op.suspects = dict.fromkeys(partitions, (claim, True))
    op._first_seen = {p: (7, source.get().monotonic()) for p in partitions}
    op.exhausted = False
    return op


def first(job: str) -> str:
    return min(NAMES, key=lambda name: next_steps.turn([one for one in NAMES if one != name], name, job))


def test_one_of_all_falls_quiet_for_a_job_and_the_others_only_long_after(clock: StandingClock) -> None:
    quiet = {name: Quiet(Here(name)) for name in NAMES}
    ops = {name: suspected(operation(A), 3) for name in NAMES}
    for name in NAMES:
        assert quiet[name].concerns(ops[name])
        assert not quiet[name].claims(ops[name], alone=False)
    assert [name for name in NAMES if quiet[name].ref == A] == [first(f"{A}/3")]
    fell = 1
    for _ in range(2):
        seen = clock.now
        clock.now += next_steps.QUIET_TURN
        for name in NAMES:
            suspected(ops[name], 3)._first_seen[3] = (7, seen - (fell - 1) * next_steps.QUIET_TURN)
            quiet[name].claims(ops[name], alone=False)
        fell += 1
        assert sum(quiet[name].ref == A for name in NAMES) == fell


def test_who_broke_a_job_comes_last_for_it() -> None:
    broke = Claim("ann", "", 2, 2)
    places = {n: next_steps.place_for_suspect(broke, n, [one for one in NAMES if one != n], "job") for n in NAMES}
    assert sorted(places.values()) == [0, 1, 2]
    assert places["ann"] == 2
    assert next_steps.place_for_suspect(broke, "ann", [], "job") == 0, "there is nobody else"


def test_quiet_outlives_hints_and_ends_when_a_look_shows_that_the_job_is_gone(clock: StandingClock) -> None:
    mine = Quiet(Here(first(f"{A}/3")))
    op = suspected(operation(A), 3)
    assert not mine.claims(op, alone=False)
    mine.keep({A, B})
    assert mine.blocks(B)
    assert not mine.blocks(A)
    assert not mine.concerns(op), "somebody else has it: nothing is left in the look"
    assert not mine.blocks(B)


def test_the_jobs_of_an_operation_that_went_are_nothing_to_be_quiet_for(clock: StandingClock) -> None:
    mine = Quiet(Here(first(f"{A}/3")))
    mine.claims(suspected(operation(A), 3), alone=False)
    mine.keep({B})
    assert mine.ref is None
    assert mine.claims(suspected(operation(A), 3), alone=True)
    mine.keep({B})
    assert mine.blocks(B), "it runs on while the operation is paused, and alone"
    mine.over(A)
    assert not mine.blocks(B)


def test_whoever_is_alone_takes_it_at_once(clock: StandingClock) -> None:
    last = max(NAMES, key=lambda name: next_steps.turn([one for one in NAMES if one != name], name, f"{A}/3"))
    mine = Quiet(Here(last))
    op = suspected(operation(A), 3)
    assert not mine.claims(op, alone=False)
    assert mine.ref is None
    mine.fall(lambda ref: ref == B)
    assert mine.ref is None
    mine.fall(lambda ref: True)
    assert mine.ref == A
    assert mine.claims(suspected(op, 3), alone=True)
    assert (mine.running, list(op.suspects)) == (True, [3])


async def test_what_was_being_looked_at_is_not_claimed_beside_a_job_that_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round for B was under way when the executor found itself alone with a suspect of A."""
    ctx = Here(first(f"{A}/3"))
    executor = Executor(ctx)
    executor._operations = {A: operation(A), B: operation(B)}
    looked, claimed = asyncio.Event(), []

    async def look(op: OpenOperation) -> None:
        if op.ref == B:
            await looked.wait()
            op.assume_free("x", [])
        else:
            suspected(op, 3)

    async def claim(op: OpenOperation, slots: int, *, alone: bool = False) -> Won:
        claimed.append((op.ref, slots, alone))
        op.held[3] = Held(Claim("x", "x", 3, 2), 9, "p=3")
        return Won([3])

    monkeypatch.setattr(executor, "_look", look)
    monkeypatch.setattr(executor._claimer, "claim", claim)
    monkeypatch.setattr(executor, "_start", lambda op, block: None)
    of_b = asyncio.ensure_future(executor._serve(B, 0))
    await executor._serve(A, 0)
    looked.set()
    await of_b
    assert [(ref, alone) for ref, _, alone in claimed] == [(A, True)]

"""A node on which jobs break suspects itself only where that says something about the node (F38)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from distop.daemon.executor.circuit_breaker import PAUSE, REMEMBERED, Suspicion
from distop.daemon.incarnation_context import Context
from distop.decide.executor import FROM_ONE, IN_A_ROW, Suspected, suspected
from distop.decide.view import ClusterView
from distop.protocol.keys import Keys
from distop.protocol.records import Node, OperationRef
from distop.runtime import logs

if TYPE_CHECKING:
    from tests.support.clock import StandingClock

A, B, C = (OperationRef("t", name, "", 1) for name in "abc")


class Here(Context):
    """A node in a cluster whose other nodes offer these types."""

    def __init__(self, *offered: str) -> None:
        self.cluster = ClusterView(Keys())
        self.cluster.nodes["me"] = Node("ex-me", "host", 4, ("a", "b", "c"))
        self.cluster.nodes["other"] = Node("ex-other", "host", 4, offered)
        self.incarnation = "me"
        self.log = logs.get("distop.test")


def test_what_is_suspected() -> None:
    assert suspected({A: IN_A_ROW - 1}, IN_A_ROW - 1) is None
    assert suspected({A: IN_A_ROW}, IN_A_ROW) is Suspected.OPERATION
    assert suspected({A: 1000}, 3) is None, "one operation says nothing of the node"
    assert suspected({A: 1000, B: IN_A_ROW - FROM_ONE - 1}, 3) is None
    assert suspected({A: 1000, B: IN_A_ROW - FROM_ONE}, 3) is Suspected.NODE
    assert suspected({OperationRef("t", "a", "", n): 2 for n in range(IN_A_ROW // 2)}, 2) is Suspected.NODE


def test_one_broken_operation_is_left_to_others_and_the_rest_goes_on(
    clock: StandingClock, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Suspicion(Here("a", "b"))
    with caplog.at_level(logging.INFO, "distop"):
        for _ in range(IN_A_ROW):
            assert mine.wait(A) == 0
            mine.ended(B)
            mine.broke(A)
    assert (mine.wait(A), mine.wait(B)) == (PAUSE, 0)
    (record,) = caplog.records
    assert "leaves it to others" in record.getMessage()
    clock.now = PAUSE
    assert mine.wait(A) == 0


def test_a_node_on_which_jobs_of_several_operations_break_claims_nothing(
    clock: StandingClock, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Suspicion(Here("a", "b"))
    with caplog.at_level(logging.INFO, "distop"):
        for _ in range(IN_A_ROW // 2):
            assert mine.wait(A) == 0
            mine.broke(A)
            mine.broke(B)
    assert [mine.wait(ref) for ref in (A, B)] == [PAUSE, PAUSE]
    assert mine.wait(C) == 0, "nobody else could run those"
    (record,) = caplog.records
    assert "this node claims nothing" in record.getMessage()


def test_any_job_that_ends_speaks_for_the_node_and_its_operation(clock: StandingClock) -> None:
    mine = Suspicion(Here("a", "b"))
    for _ in range(IN_A_ROW):
        for ref in (A, B):
            for _ in range(IN_A_ROW // 2 - 1):
                mine.broke(ref)
            mine.ended(ref)
    assert (mine.wait(A), mine.wait(B)) == (0, 0)


def test_where_nobody_else_lives_nothing_is_held_back(clock: StandingClock) -> None:
    ctx = Here()
    mine = Suspicion(ctx)
    for _ in range(3 * IN_A_ROW):
        mine.broke(A)
        mine.broke(B)
    assert (mine.wait(A), mine.wait(B)) == (0, 0)
    ctx.cluster.nodes["other"] = Node("ex-other", "host", 4, ("a", "b"))
    assert (mine.wait(A), mine.wait(B)) == (0, 0), "what broke before tells nothing of this node alone"
    for _ in range(IN_A_ROW):
        mine.broke(A)
    assert mine.wait(A) == PAUSE
    del ctx.cluster.nodes["other"]
    assert mine.wait(A) == 0, "the others are gone"


def test_what_is_remembered_is_bounded(clock: StandingClock) -> None:
    mine = Suspicion(Here("a"))
    for number in range(1, 10 * REMEMBERED):
        mine.broke(OperationRef("t", "a", "", number))
        mine.keep(())
    assert len(mine._broke) <= REMEMBERED
    assert mine._of_one == mine._until == {}

"""The circuit breaker of a node opens only if the errors say something about the node (F38)."""

from __future__ import annotations

from distop.decide.circuit_breaker import (
    FROM_ONE,
    IN_A_ROW,
    PAUSE,
    REMEMBERED,
    BreakerScope,
    CircuitBreaker,
    breaker_scope,
)
from distop.protocol.records import OperationRef

A, B, C = (OperationRef("t", name, "", 1) for name in "abc")


def node(*offered: str) -> CircuitBreaker:
    """A node in a cluster whose other nodes offer these types."""
    return CircuitBreaker(lambda ref: ref.type in offered)


def waits(mine: CircuitBreaker, *refs: OperationRef, now: float = 0.0) -> list[float]:
    return [mine.wait(ref, now) for ref in refs]


def test_the_circuit_breaker_opens_for_a_node_or_an_operation() -> None:
    assert breaker_scope({A: IN_A_ROW - 1}, IN_A_ROW - 1) is None
    assert breaker_scope({A: IN_A_ROW}, IN_A_ROW) is BreakerScope.OPERATION
    assert breaker_scope({A: 1000}, 3) is None, "one operation says nothing of the node"
    assert breaker_scope({A: 1000, B: IN_A_ROW - FROM_ONE - 1}, 3) is None
    assert breaker_scope({A: 1000, B: IN_A_ROW - FROM_ONE}, 3) is BreakerScope.NODE
    assert breaker_scope({OperationRef("t", "a", "", n): 2 for n in range(IN_A_ROW // 2)}, 2) is BreakerScope.NODE


def test_one_failing_operation_is_left_to_others_and_the_rest_continues() -> None:
    mine, answers = node("a", "b"), []
    for _ in range(IN_A_ROW):
        assert waits(mine, A) == [0]
        mine.job_ended(B)
        answers.append(mine.job_failed(A, 0.0))
    assert waits(mine, A, B) == [PAUSE, 0]
    assert [one for one in answers if one[0] is not None] == [(BreakerScope.OPERATION, IN_A_ROW, 1)]
    assert mine.wait(A, PAUSE) == 0


def test_a_node_on_which_several_operations_fail_claims_nothing() -> None:
    mine, answers = node("a", "b"), []
    for _ in range(IN_A_ROW // 2):
        assert waits(mine, A) == [0]
        answers += [mine.job_failed(A, 0.0), mine.job_failed(B, 0.0)]
    assert waits(mine, A, B) == [PAUSE, PAUSE]
    assert waits(mine, C) == [0], "nobody else could run those"
    assert [one for one in answers if one[0] is not None] == [(BreakerScope.NODE, IN_A_ROW, 2)]


def test_any_ended_job_clears_the_node_and_its_operation() -> None:
    mine = node("a", "b")
    for _ in range(IN_A_ROW):
        for ref in (A, B):
            for _ in range(IN_A_ROW // 2 - 1):
                mine.job_failed(ref, 0.0)
            mine.job_ended(ref)
    assert waits(mine, A, B) == [0, 0]


def test_errors_open_no_circuit_breaker_without_other_executors() -> None:
    offered: set[str] = set()
    mine = CircuitBreaker(lambda ref: ref.type in offered)
    for _ in range(3 * IN_A_ROW):
        mine.job_failed(A, 0.0)
        mine.job_failed(B, 0.0)
    assert waits(mine, A, B) == [0, 0]
    offered |= {"a", "b"}
    assert waits(mine, A, B) == [0, 0], "what broke before tells nothing of this node alone"
    for _ in range(IN_A_ROW):
        mine.job_failed(A, 0.0)
    assert waits(mine, A) == [PAUSE]
    offered.clear()
    assert waits(mine, A) == [0], "the others are gone"


def test_remembered_errors_are_bounded() -> None:
    mine = node("a")
    for number in range(1, 10 * REMEMBERED):
        ref = OperationRef("t", "a", "", number)
        mine.job_failed(ref, 0.0)
        mine.forget(ref)
    assert len(mine._failures) <= REMEMBERED
    assert mine._failures_of == mine._until == {}

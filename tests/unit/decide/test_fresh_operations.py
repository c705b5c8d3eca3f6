"""New one-job operations: which of them an executor takes next."""

from __future__ import annotations

from distop.decide import work_shares
from distop.decide.fresh_operations import HEAD_STARTS, FreshOperations
from distop.protocol.records import CLUSTER_TABLE, OperationRef
from distop.protocol.size_limits import DEFAULT


def test_all_overdue_operations_of_other_executors_are_taken_the_newest_first() -> None:
    fresh = FreshOperations("ann", DEFAULT, lambda type_name, table: ["bob"])
    every = (OperationRef(CLUSTER_TABLE, "noop", "", n) for n in range(1, 1000))
    first, second = [ref for ref in every if not work_shares.shares(1, "ann", ("bob",), str(ref))[1]][:2]
    fresh.add(first, 0.0)
    fresh.add(second, 0.01)

    overdue = 0.01 + HEAD_STARTS[0]
    assert fresh.choose(1, overdue, lambda ref: 0.0) == ([second], True, None)
    assert fresh.choose(1, overdue, lambda ref: 0.0) == ([first], True, None)
    assert fresh.choose(1, overdue, lambda ref: 0.0) == ([], False, None)


def test_no_operation_of_another_executor_is_taken_before_its_head_start() -> None:
    fresh = FreshOperations("ann", DEFAULT, lambda type_name, table: ["bob"])
    every = (OperationRef(CLUSTER_TABLE, "noop", "", n) for n in range(1, 1000))
    others = next(ref for ref in every if not work_shares.shares(1, "ann", ("bob",), str(ref))[1])
    fresh.add(others, 0.0)

    assert fresh.choose(1, HEAD_STARTS[0] / 2, lambda ref: 0.0) == ([], False, HEAD_STARTS[0] / 2)

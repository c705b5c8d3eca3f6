"""What the invariants of an operation do with records that are not of their form."""

from __future__ import annotations

import pytest

from distop.invariants.cluster_invariants import ClusterTrace
from distop.invariants.dependency_invariants import left_to_wait_for
from distop.invariants.operation_invariants import UnreadableChunk, unfit_plan
from distop.invariants.replay_state import OperationTrace
from distop.protocol.dependencies import Edge
from distop.protocol.identity import plan_digest
from distop.protocol.plan import Plan
from distop.protocol.records import OperationRef


@pytest.mark.parametrize("files", [b"[[]]", b"[1]", b"[" * 100_000 + b"]" * 100_000])
def test_a_chunk_with_invalid_files_is_named(files: bytes) -> None:
    """A file without a path is an IndexError, which ended the audit."""
    chunk = b'[{"partition":0,"name":"a","files":%b}]' % files
    op = OperationTrace(OperationRef("t", "noop", "", 1))
    op.plan, op.chunks = Plan(1, "", plan_digest([chunk]), 1), {0: chunk}
    with pytest.raises(UnreadableChunk) as caught:
        unfit_plan(op)
    assert caught.value.number == 0


def test_the_first_three_predecessors_that_an_operation_did_not_wait_for_are_named() -> None:
    op = OperationTrace(OperationRef("t", "noop", "", 5))
    op.after = {edge: Edge(f"t/noop/{number}") for edge, number in {"d": 4, "a": 1, "c": 3, "b": 2}.items()}
    assert list(left_to_wait_for(op, ClusterTrace())) == [
        "the operation began while it still waited for t/noop/1, t/noop/2, t/noop/3"
    ]

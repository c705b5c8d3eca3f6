"""What the invariants of an operation do with records that are not of their form."""

from __future__ import annotations

import pytest

from distop.invariants.operation_invariants import UnreadableChunk, unfit_plan
from distop.invariants.replay_state import OperationTrace
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

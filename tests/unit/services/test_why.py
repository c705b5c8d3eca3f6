"""What ``why`` reads about an operation beyond its status."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import Node
from tests.unit.support.model_submission import KEYS, TABLE, Etcd, run

if TYPE_CHECKING:
    from distop.aio import Operation

REJECTED = "a write of executor e{} about {}, which retries with back-off: ends: too large"


async def successor_of(etcd: Etcd, number: int) -> tuple[list[Operation], Operation]:
    """So many pending operations, and one that waits for all of them."""
    before = [await etcd.client.start_operation("noop", TABLE, {}, delay=60.0) for _ in range(number)]
    return before, await etcd.client.start_operation("noop", TABLE, {}, after=before)


def node(number: int, *rejected: str) -> Node:
    return Node(f"e{number}", "h", 1, ("noop",), refused=dict.fromkeys(rejected, "ends: too large"))


@pytest.mark.parametrize("which", range(6))
def test_the_rejected_end_of_each_predecessor_is_reported(which: int) -> None:
    """Only the first three predecessors were looked at, which are named."""

    async def work(etcd: Etcd) -> None:
        before, last = await successor_of(etcd, 6)
        other = await etcd.client.start_operation("noop", TABLE, {}, delay=60.0)
        found = str(before[which].ref)
        etcd.put(KEYS.node("i1"), node(1, found, str(other.ref), "hold g").encode())
        why = await last.why()
        assert [reason.text for reason in why.reasons if reason.code == "refused-by-etcd"] == [
            f"etcd to accept {REJECTED.format(1, found)}"
        ]
        assert "6 operations to end (" in " ".join(reason.text for reason in why.reasons)
        status = await last.status()
        assert status.waiting_for == f"etcd to accept {REJECTED.format(1, found)}"

    run(work)


def test_rejected_ends_of_many_executors_are_read_in_pages() -> None:
    """One transaction reads at most 128 keys."""

    async def work(etcd: Etcd) -> None:
        before, last = await successor_of(etcd, 4)
        for n in range(40):
            others = (f"{TABLE}/noop/{100 + 8 * n + k}" for k in range(8))
            etcd.put(KEYS.node(f"i{n}"), node(n, *others).encode())
        etcd.put(KEYS.node("i99"), node(99, *(str(op.ref) for op in before)).encode())
        why = await last.why()
        assert {reason.text for reason in why.reasons if reason.code == "refused-by-etcd"} == {
            f"etcd to accept {REJECTED.format(99, op.ref)}" for op in before
        }

    run(work)

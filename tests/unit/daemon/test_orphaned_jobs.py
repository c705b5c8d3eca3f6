"""The partitions of a plan that are read for a cleanup."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distop.daemon.coordinator.orphaned_jobs import PlanRows
from distop.protocol.plan import PartitionPlan, chunked


@given(count=st.integers(0, 60), limit=st.integers(60, 400), wanted=st.sets(st.integers(0, 70)))
def test_only_the_wanted_partitions_are_read(count: int, limit: int, wanted: set[int]) -> None:
    plan = [PartitionPlan(n, f"p={n}", n) for n in range(count)]
    rows = PlanRows(chunked(plan, limit))
    assert list(rows.of(sorted(wanted))) == [p.to_json() for p in plan if p.partition in wanted]


def test_chunks_without_a_wanted_partition_are_not_decoded() -> None:
    first, *_ = chunked([PartitionPlan(0, "p=0")])
    broken = b'[{"partition":1,"name":"p=1","bytes":0,"files":[]}, and so on'
    rows = PlanRows([first, broken])
    assert [row["name"] for row in rows.of([0])] == ["p=0"]
    assert list(PlanRows([b"[]"]).of([0])) == []

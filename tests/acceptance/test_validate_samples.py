"""The samples of a report are the first violating rows in partition order, whatever the order of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from distop.tables import plan_table
from distop_behaviors.validate import Validate
from tests.support.context import run_operation

if TYPE_CHECKING:
    from tests.acceptance.checked import Table

pytestmark = pytest.mark.spark

CHECK = {"not_null": "a"}


def sampled_rows(table: Table, sample: int, *, batches: int = 1) -> list[tuple[str, int]]:
    """Partition and row of each sample, if the partitions are validated in reverse order."""
    plans = list(reversed(plan_table(table.record).partitions))
    arg: dict[str, Any] = {"checks": [CHECK], "sample": sample}
    ran = run_operation(Validate(), table.record, arg, table.context, partitions=plans, batches=batches)
    return [(s["partition"], s["row_index"]) for s in ran.report["checks"][0]["samples"]]


@pytest.mark.parametrize("batches", [1, 2])
def test_samples_do_not_depend_on_the_order_of_claims(table: Table, batches: int) -> None:
    for n in range(1, 6):
        table.add(f"p={n}/x.parquet", {"a": pa.array([1, None, None])})
    assert sampled_rows(table, 3, batches=batches) == [("p=1", 1), ("p=1", 2), ("p=2", 1)]


def test_samples_do_not_depend_on_the_types_of_files(table: Table) -> None:
    """Files of one type share a query, which must not affect the samples."""
    for n, kind in enumerate((pa.int32(), pa.int64(), pa.int32()), 1):
        table.add(f"p={n}/x.parquet", {"a": pa.array([1, None], kind)})
    assert sampled_rows(table, 2) == [("p=1", 1), ("p=2", 1)]


def test_samples_come_from_the_first_files_even_if_a_later_one_has_many_violations(table: Table) -> None:
    """Such a file is read only as far as needed, and Spark starts with the largest file."""
    table.add("p=1/x.parquet", {"a": pa.array([1, None])})
    table.add("p=2/x.parquet", {"a": pa.array([None] * 5_000, pa.int64()), "b": pa.array(range(5_000))})
    table.add("p=3/x.parquet", {"a": pa.array([None])})
    assert sampled_rows(table, 3) == [("p=1", 1), ("p=2", 0), ("p=2", 1)]

"""The eight tables of TPC-H from its generator: the counts of validate equal those of pyarrow."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from distop.behavior import TableRecord
from distop_behaviors.validate import Validate
from tests.acceptance.checked import between
from tests.support.context import FakeContext, run_operation
from tests.support.needs import need

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.usefixtures("generated_code")]

SCALE = 0.01
EACH_RUN = {"customer"}
KEYS = {
    "region": ["r_regionkey"],
    "nation": ["n_nationkey"],
    "supplier": ["s_suppkey"],
    "customer": ["c_custkey"],
    "part": ["p_partkey"],
    "partsupp": ["ps_partkey", "ps_suppkey"],
    "orders": ["o_orderkey"],
    "lineitem": ["l_orderkey", "l_linenumber"],
}
SOME_OR_ALL = [name if name in EACH_RUN else pytest.param(name, marks=pytest.mark.slow) for name in KEYS]
FOREIGN = [
    ("nation", ["n_regionkey"], "region", ["r_regionkey"]),
    ("supplier", ["s_nationkey"], "nation", ["n_nationkey"]),
    ("customer", ["c_nationkey"], "nation", ["n_nationkey"]),
    ("partsupp", ["ps_partkey"], "part", ["p_partkey"]),
    ("partsupp", ["ps_suppkey"], "supplier", ["s_suppkey"]),
    ("orders", ["o_custkey"], "customer", ["c_custkey"]),
    ("lineitem", ["l_orderkey"], "orders", ["o_orderkey"]),
    ("lineitem", ["l_partkey", "l_suppkey"], "partsupp", ["ps_partkey", "ps_suppkey"]),
    # A third of the customers have no order.
    ("customer", ["c_custkey"], "orders", ["o_custkey"]),
]


@pytest.fixture(scope="module")
def tpch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TableRecord]:
    tool = Path(sys.executable).with_name("tpchgen-cli")
    need(tool.exists(), "TPC-H's generator: pip install tpchgen-cli")
    folder = tmp_path_factory.mktemp("tpch")
    command = [str(tool), "parquet", "-s", str(SCALE), "--parts=3", "--row-group-bytes=256KB", f"--output-dir={folder}"]
    subprocess.run(command, check=True, capture_output=True)
    return {name: TableRecord(name, "parquet", str(folder / name)) for name in KEYS}


def rows_of(record: TableRecord) -> pa.Table:
    table = ds.dataset(record.location, format="parquet").to_table()
    plain = [f.with_type(pa.string()) if f.type == pa.string_view() else f for f in table.schema]
    return table.cast(pa.schema(plain))


def count_true(wrong: Any) -> int:
    return int(pc.sum(pc.fill_null(wrong, False)).as_py() or 0)


Case = tuple[dict[str, Any], Any]
"""A check, and a mask of the rows that violate it (NULL counts as false)."""


def cases(rows: pa.Table) -> Iterator[Case]:
    for name in rows.column_names:
        column = rows[name]
        yield {"not_null": name}, pc.is_null(column)
        if pa.types.is_string(column.type):
            longest = pc.max(pc.utf8_length(column)).as_py()
            yield {"length": {"column": name, "max": longest}}, pc.greater(pc.utf8_length(column), longest)
            yield {"length": {"column": name, "max": longest - 1}}, pc.greater(pc.utf8_length(column), longest - 1)
            first = column[0].as_py()[:2]
            found = pc.match_substring_regex(column, "^" + re.escape(first))
            yield {"matches": {"column": name, "pattern": "^" + re.escape(first)}}, pc.invert(found)
            yield {"in_set": {"column": name, "values": [column[0].as_py()]}}, pc.not_equal(column, column[0])
        else:
            low, high = pc.min(column), pc.max(column)
            middle = column[len(column) // 2]
            for least, most in ((low, high), (low, middle), (middle, high)):
                outside = pc.or_(pc.less(column, least), pc.greater(column, most))
                yield between(name, bound(least), bound(most)), outside
        if pa.types.is_integer(column.type):
            yield {"fits": {"column": name, "type": "tinyint"}}, pc.greater(column, 127)
            yield {"fits": {"column": name, "type": "smallint"}}, pc.greater(column, 32_767)


def bound(value: pa.Scalar) -> Any:
    found = value.as_py()
    return str(found) if isinstance(found, datetime.date | Decimal) else found


@pytest.mark.parametrize("name", SOME_OR_ALL)
def test_checks_of_each_column_of_tpch_equal_counts_of_pyarrow(
    tpch: dict[str, TableRecord], name: str, context: Callable[[TableRecord], FakeContext]
) -> None:
    rows = rows_of(tpch[name])
    found = [(dict(check, name=f"c{n}"), count_true(wrong)) for n, (check, wrong) in enumerate(cases(rows))]
    assert any(count for _, count in found)
    for mode in ("auto", "never"):
        arg = {"checks": [check for check, _ in found], "statistics": mode, "sample": 0}
        report = run_operation(Validate(), tpch[name], arg, context).report
        assert report["rows"] == len(rows)
        counts = [(check["violations"], check["exact"]) for check in report["checks"]]
        assert counts == [(count, True) for _, count in found], mode
    arg = {"checks": [check for check, _ in found], "statistics": "only", "sample": 0}
    report = run_operation(Validate(), tpch[name], arg, context).report
    for check, (_, count) in zip(report["checks"], found, strict=True):
        assert check["verdict"] != "error"
        assert check["violations"] == count if check["exact"] else check["violations"] <= count
        assert check["verdict"] != "valid" or count == 0


@pytest.mark.parametrize("name", SOME_OR_ALL)
def test_keys_of_tpch_are_counted_as_pyarrow_groups_them(
    tpch: dict[str, TableRecord], name: str, context: Callable[[TableRecord], FakeContext]
) -> None:
    rows = rows_of(tpch[name])
    keys = [KEYS[name], KEYS[name][:1], rows.column_names[-2:], [rows.column_names[1]]]
    checks = [{"unique": key, "name": f"u{n}"} for n, key in enumerate(keys)]
    expected = [len(rows) - len(rows.group_by(key).aggregate([])) for key in keys]
    assert expected[0] == 0
    for mode in ("auto", "never"):
        ran = run_operation(Validate(), tpch[name], {"checks": checks, "statistics": mode}, context)
        assert [(c["violations"], c["exact"]) for c in ran.report["checks"]] == [(n, True) for n in expected], mode


@pytest.mark.parametrize(("name", "columns", "other", "to"), FOREIGN)
def test_references_of_tpch_are_found_as_pyarrow_joins_them(
    tpch: dict[str, TableRecord],
    name: str,
    columns: list[str],
    other: str,
    to: list[str],
    context: Callable[[TableRecord], FakeContext],
) -> None:
    unmatched = rows_of(tpch[name]).join(rows_of(tpch[other]), columns, to, join_type="left anti")

    def make(record: TableRecord) -> FakeContext:
        ctx = context(record)
        ctx.tables = dict(tpch)
        return ctx

    check = {"references": {"columns": columns, "table": other, "to": to}}
    ran = run_operation(Validate(), tpch[name], {"checks": [check]}, make)
    assert [(c["violations"], c["exact"]) for c in ran.report["checks"]] == [(len(unmatched), True)]
    assert bool(len(unmatched)) == (name == "customer" and other == "orders")

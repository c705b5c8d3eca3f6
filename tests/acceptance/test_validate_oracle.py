"""The oracle: verdicts by statistics and by scans equal those of plain Python on every row.

Each seed generates a table of very different files, and checks of every kind. ``auto`` and ``never`` must agree exactly
with plain Python. (tests/unit/behaviors/test_validate_statistics.py tests ``only``, without Spark. ``scripts/oracle``
does both for any number of tables.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import TableRecord
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate import Validate
from scripts.validate_oracle.random_tables import ODD_NAMES, generate
from scripts.validate_oracle.row_oracle import mistakes, mistakes_with_condition, mistakes_with_failing_check
from tests.support.context import run_operation
from tests.support.tables import FLIGHTS_NULLS, FLIGHTS_ROWS, lay_out_flights

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from scripts.validate_oracle.random_tables import Generated

pytestmark = [pytest.mark.spark, pytest.mark.rotating]

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))]


@pytest.fixture(scope="module", params=SEEDS, ids=lambda s: f"seed={s}")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generated:
    print(f"the table of seed {request.param}")
    folder = ODD_NAMES[request.param % len(ODD_NAMES)]
    return generate(request.param, tmp_path_factory.mktemp(f"table{request.param}") / folder)


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_counts_equal_those_of_plain_python(
    made: Generated, mode: str, context: Any, request: pytest.FixtureRequest
) -> None:
    """Every second table is validated with generated code, as in production."""
    if request.node.callspec.params["made"] % 2:
        request.getfixturevalue("generated_code")
    assert mistakes(made, context, mode) == []


@pytest.mark.parametrize("generates", [False, True])
def test_spark_generates_code_only_with_the_fixture(
    spark: SparkSession, request: pytest.FixtureRequest, generates: bool
) -> None:
    if generates:
        request.getfixturevalue("generated_code")
    frame: Any = session_of(spark).range(10).groupBy("id").count()
    frame.collect()
    assert ("*(1)" in frame._jdf.queryExecution().executedPlan().toString()) == generates


@pytest.mark.slow
def test_where_selects_the_rows_of_plain_python(made: Generated, context: Any) -> None:
    assert mistakes_with_condition(made, context) == []


def test_an_expression_on_which_spark_fails_changes_no_other_check(made: Generated, context: Any) -> None:
    assert mistakes_with_failing_check(made, context) == []


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> TableRecord:
    directory: Path = lay_out_flights(tmp_path_factory.mktemp("flights"))
    return TableRecord("nyc.flights", "parquet", str(directory))


COLUMNS = [
    *[
        "year",
        "dep_time",
        "sched_dep_time",
        "dep_delay",
        "arr_time",
        "sched_arr_time",
        "arr_delay",
        "carrier",
        "flight",
    ],
    *["tailnum", "origin", "dest", "air_time", "distance", "hour", "minute", "time_hour", "month", "day"],
]


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.slow), "never", "only"])
def test_the_flights_have_their_known_nulls(flights: TableRecord, mode: str, context: Any) -> None:
    arg = {"checks": [{"not_null": c} for c in COLUMNS], "statistics": mode, "sample": 2}
    ran = run_operation(Validate(), flights, arg, context)
    assert ran.report["rows"] == FLIGHTS_ROWS
    found = {c["check"]["not_null"]: c["violations"] for c in ran.report["checks"]}
    assert found == {column: FLIGHTS_NULLS.get(column, 0) for column in COLUMNS}
    assert all(c["exact"] for c in ran.report["checks"])
    assert "tailnum_not_null: 2512 violations" in ran.message

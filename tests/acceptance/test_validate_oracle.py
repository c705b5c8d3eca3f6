"""The oracle: what statistics say equals what a look at every row says.

Each seed makes a table in which files differ in all that files differ in, and checks of every kind. The rows are
judged in plain Python, and ``auto`` and ``never`` must agree with it exactly. (That statistics alone never say more
than is so needs no Spark: tests/unit/test_validate_statistics.py.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import TableRecord
from distop_behaviors.validate import Validate
from tests.support.context import run_operation
from tests.support.generated import generate
from tests.support.tables import FLIGHTS_NULLS, FLIGHTS_ROWS, lay_out_flights

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.generated import Generated

pytestmark = pytest.mark.spark

SEEDS = range(1, 6)


@pytest.fixture(scope="module", params=SEEDS, ids=lambda s: f"seed={s}")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generated:
    print(f"the table of seed {request.param}")
    return generate(request.param, tmp_path_factory.mktemp(f"table{request.param}"))


def _expected(made: Generated, n: int, where: Any = lambda row: True) -> dict[str, int]:
    """Violations of a check by partition."""
    case = made.cases[n]
    return {
        name: sum(
            case.violates({**row, "p": name[2:]}) and where({**row, "p": name[2:]})
            for rows in files.values()
            for row in rows
        )
        for name, files in made.rows.items()
    }


def _argument(made: Generated, **more: Any) -> dict[str, Any]:
    checks = [{**case.check, "name": f"c{n}"} for n, case in enumerate(made.cases)]
    return {"checks": checks, **more}


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_counts_equal_those_of_every_row(made: Generated, mode: str, context: Any) -> None:
    table = TableRecord("t", "parquet", str(made.directory))
    ran = run_operation(Validate(), table, _argument(made, statistics=mode, sample=3), context)
    assert ran.report["rows"] == sum(len(r) for files in made.rows.values() for r in files.values())
    for n, case in enumerate(made.cases):
        expected = _expected(made, n)
        entry = ran.report["checks"][n]
        found = {name: o.result["checks"][n].get("violations", 0) for name, o in ran.by_name.items()}
        assert found == expected, case.check
        total = sum(expected.values())
        assert (entry["verdict"], entry["violations"], entry["exact"]) == (
            "violated" if total else "valid",
            total,
            True,
        ), (case.check, entry)
        assert len(entry["samples"]) == min(total, 3), case.check
        for sample in entry["samples"]:
            row = made.rows[sample["partition"]][sample["file"]][sample["row_index"]]
            assert case.violates({**row, "p": sample["partition"][2:]}), (case.check, sample)
        if mode == "never":
            assert entry["evidence"]["files_statistics"] == 0


def test_where_picks_rows(made: Generated, context: Any) -> None:
    table = TableRecord("t", "parquet", str(made.directory))
    arg = _argument(made, where="i32 > 0 AND p <> '0'", sample=0)
    ran = run_operation(Validate(), table, arg, context, batches=2)

    def where(row: Any) -> bool:
        return row["i32"] is not None and row["i32"] > 0 and row["p"] != "0"

    picked = sum(
        where({**row, "p": name[2:]}) for name, files in made.rows.items() for rows in files.values() for row in rows
    )
    assert ran.report["rows"] == picked
    for n, case in enumerate(made.cases):
        assert ran.report["checks"][n]["violations"] == sum(_expected(made, n, where).values()), case.check


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


@pytest.mark.parametrize("mode", ["auto", "never", "only"])
def test_the_flights_have_their_known_nulls(flights: TableRecord, mode: str, context: Any) -> None:
    arg = {"checks": [{"not_null": c} for c in COLUMNS], "statistics": mode, "sample": 2}
    ran = run_operation(Validate(), flights, arg, context)
    assert ran.report["rows"] == FLIGHTS_ROWS
    found = {c["check"]["not_null"]: c["violations"] for c in ran.report["checks"]}
    assert found == {column: FLIGHTS_NULLS.get(column, 0) for column in COLUMNS}
    assert all(c["exact"] for c in ran.report["checks"])
    assert "tailnum_not_null: 2512 violations" in ran.message

"""validate on tables of unusual shapes, as Parquet files and as Iceberg tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
from pyiceberg.schema import assign_fresh_schema_ids

from distop.behavior import TableRecord
from distop_behaviors.validate import Validate
from tests.acceptance.checked import between
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.lake import MAVEN, Folder, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


class BothFormats:
    """The same rows as a folder of Parquet files and as an Iceberg table."""

    def __init__(self, root: Path, context: Callable[[TableRecord], FakeContext], rows: pa.Table) -> None:
        self._context = context
        (root / "parquet").mkdir(parents=True)
        pq.write_table(rows, root / "parquet" / "f.parquet")
        schema = assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(rows.schema))
        Folder(root / "iceberg").new(schema).append(rows)
        self.records = {kind: TableRecord("t", kind, str(root / kind)) for kind in ("parquet", "iceberg")}

    def run(self, *checks: dict[str, Any], **arg: Any) -> dict[str, Ran]:
        argument = {"checks": list(checks), **arg}
        return {
            kind: run_operation(Validate(), record, argument, self._context) for kind, record in self.records.items()
        }


@pytest.fixture
def both(tmp_path: Path, context: Callable[[TableRecord], FakeContext]) -> Callable[[pa.Table], BothFormats]:
    need(jar(), MAVEN)
    return lambda rows: BothFormats(tmp_path, context, rows)


def verdicts(ran: Ran) -> list[tuple[str, int]]:
    return [(c["verdict"], c["violations"]) for c in ran.report["checks"]]


def test_a_table_with_two_thousand_columns_is_validated(both: Callable[[pa.Table], BothFormats]) -> None:
    columns: dict[str, Any] = {f"c{n}": pa.array([n, None, n + 2], pa.int32()) for n in range(1_999)}
    table = both(pa.table({**columns, "word": ["a", "b", None]}))
    checks = [{"not_null": "c1998"}, {"check": "c0 + c1000 < 1002 or word is not null"}, {"not_null": "word"}]
    for kind, ran in table.run(*checks, between("c7", high=8)).items():
        assert verdicts(ran) == [("violated", 1), ("violated", 1), ("violated", 1), ("violated", 1)], kind
        assert [s["row_index"] for c in ran.report["checks"] for s in c["samples"]] == [1, 2, 2, 2]
    every = [{"not_null": f"c{n}"} for n in range(0, 1_999, 40)]
    for kind, ran in table.run(*every, sample=0).items():
        assert verdicts(ran) == [("violated", 1)] * len(every), kind


def test_columns_with_reserved_names_are_validated_in_parquet_and_an_error_in_iceberg(
    both: Callable[[pa.Table], BothFormats],
) -> None:
    names = ("_metadata", "_file", "_pos", "_partition", "file")
    table = both(pa.table({name: pa.array([1, None, 3], pa.int64()) for name in (*names, "id")}))
    checks = [{"not_null": name} for name in names]
    checks += [{"check": f"{name} + 1 < 4 and 6 / (id - 4) < 0"} for name in names]
    ran = table.run(*checks, statistics="never")
    assert verdicts(ran["parquet"]) == [("violated", 1)] * len(checks)
    for check, name in zip(ran["parquet"].report["checks"][len(names) :], names, strict=True):
        assert [(s["row_index"], s["values"]) for s in check["samples"]] == [(2, {name: 3, "id": 3})]
    # Rows on which a check throws are counted one by one.
    throwing = table.run({"check": "_metadata / (id - 3) < 0"}, {"not_null": "_metadata"})
    assert [c["verdict"] for c in throwing["parquet"].report["checks"]] == ["error", "violated"]
    # Iceberg cannot read such a table together with its metadata columns.
    assert {c["verdict"] for c in ran["iceberg"].report["checks"]} == {"error"}
    assert "conflict with names reserved for Iceberg metadata columns" in ran["iceberg"].report["checks"][0]["error"]


def test_nested_types_are_validated(both: Callable[[pa.Table], BothFormats]) -> None:
    point = pa.struct([("x", pa.int32()), ("deep", pa.struct([("y", pa.string())]))])
    rows = pa.table(
        {
            "s": pa.array([{"x": 1, "deep": {"y": "a"}}, {"x": None, "deep": None}, None], point),
            "l": pa.array([[1, None], [], None], pa.list_(pa.int32())),
            "m": pa.array([[("k", 1)], [("k", None)], None], pa.map_(pa.string(), pa.int32())),
            "_metadata": pa.array([None, {"file_path": "x"}, None], pa.struct([("file_path", pa.string())])),
            "ls": pa.array([[{"z": 1}], [{"z": None}], []], pa.list_(pa.struct([("z", pa.int32())]))),
        }
    )
    checks: dict[str, tuple[dict[str, Any], int]] = {
        "s": ({"not_null": "s"}, 1),
        "s.x": ({"not_null": "s.x"}, 2),
        "s.deep.y": ({"not_null": "s.deep.y"}, 2),
        "range": (between("s.x", low=2), 1),
        "l": ({"not_null": "l"}, 1),
        "in l": ({"check": "not exists(l, i -> i is null)"}, 1),
        "m": ({"not_null": "m"}, 1),
        "_metadata": ({"not_null": "_metadata"}, 2),
        "_metadata.file_path": ({"check": "_metadata.file_path is null"}, 1),
        "in m": ({"check": "m['k'] is not null or m is null"}, 1),
        "ls": ({"check": "forall(ls, e -> e.z is not null)"}, 1),
    }
    table = both(rows)
    for mode in ("auto", "never"):
        for kind, ran in table.run(*(check for check, _ in checks.values()), statistics=mode).items():
            assert verdicts(ran) == [("violated", n) for _, n in checks.values()], (kind, mode)

"""validate on an Iceberg table in a catalog: after planning, the catalog is not called."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from distop.behavior import TableRecord
from distop.tables import plan_table
from distop_behaviors.validate import Validate
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.icebergrest import RestCatalogServer, configure
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]


def test_the_planned_snapshot_is_validated_after_changes_in_the_catalog(
    tmp_path: Path, context: Callable[[TableRecord], FakeContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    need(jar(), MAVEN)
    rows = pa.table({"id": pa.array([1, 2, None], pa.int64()), "c": ["a", None, None]})
    with RestCatalogServer(tmp_path) as rest:
        rest.tables.create_namespace("sales")
        made = rest.tables.create_table("sales.orders", rows.schema)
        made.append(rows)
        made.delete("id = 2")
        table = TableRecord("t", "iceberg", "sales.orders", configure(monkeypatch, uri=rest.uri))
        planned = plan_table(table).partitions

        def run() -> Ran:
            argument: dict[str, Any] = {"checks": [{"not_null": "id"}, {"not_null": "c"}]}
            return run_operation(Validate(), table, argument, context, partitions=planned)

        expected = [("violated", 1), ("violated", 1)]
        assert verdicts(run()) == expected
        made.append(rows)
        rest.tables.rename_table("sales.orders", "sales.old")
        rest.status = 503
        assert verdicts(run()) == expected
        rest.status = 0
        rest.tables.drop_table("sales.old")
        shutil.rmtree(tmp_path / "warehouse" / "sales" / "orders" / "data")
        ran = run()
        assert [c["verdict"] for c in ran.report["checks"]] == ["error", "error"]
        assert "is gone" in str(ran.outcomes[0].result["reasons"][0])
        assert "or the table was dropped" in str(ran.outcomes[0].result["reasons"][0])


def verdicts(ran: Ran) -> list[tuple[str, int]]:
    return [(c["verdict"], c["violations"]) for c in ran.report["checks"]]

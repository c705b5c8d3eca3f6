"""validate on an Iceberg table that a catalog knows: once planned, the catalog is asked no more."""

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

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def test_what_was_planned_is_judged_whatever_the_catalog_says_then(
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
        assert told(run()) == expected
        made.append(rows)
        rest.tables.rename_table("sales.orders", "sales.old")
        rest.status = 503
        assert told(run()) == expected
        rest.status = 0
        rest.tables.drop_table("sales.old")
        shutil.rmtree(tmp_path / "warehouse" / "sales" / "orders" / "data")
        ran = run()
        assert [c["verdict"] for c in ran.report["checks"]] == ["error", "error"]
        assert "is gone" in str(ran.outcomes[0].result["reasons"][0])
        assert "or the table was dropped" in str(ran.outcomes[0].result["reasons"][0])


def told(ran: Ran) -> list[tuple[str, int]]:
    return [(c["verdict"], c["violations"]) for c in ran.report["checks"]]

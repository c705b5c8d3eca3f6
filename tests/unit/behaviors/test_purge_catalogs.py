"""``purge`` of tables in catalogs: the entry goes after the plan and before the first file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop import testing
from distop.behavior import TableRecord
from distop.errors import InvalidArgument, TableUnavailable
from distop.tables import place_of
from distop_behaviors.purge import Purge
from tests.support.icebergrest import RestCatalogServer, configure
from tests.support.orphan_runs import snapshot
from tests.support.table_files import on_disk
from tests.unit.behaviors.test_purge import Purging, iceberg, left
from tests.unit.tables.iceberg.test_tables_catalogs import BY_K, ROWS, SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = ("sql", "rest")


class Lake:
    """The table ``sales.orders`` of a catalog, with another one beside it, and the records that name both."""

    def __init__(self, rest: RestCatalogServer, options: dict[str, str], work: Path) -> None:
        self.rest, self.tables, self.work = rest, rest.tables, work
        self.tables.create_namespace("sales")
        self.made = self.tables.create_table("sales.orders", SCHEMA, partition_spec=BY_K)
        self.tables.create_table("sales.other", SCHEMA, partition_spec=BY_K).append(ROWS)
        self.made.append(ROWS)
        self.made.append(ROWS)
        self.unpinned = TableRecord("t", "iceberg", "sales.orders", options)
        place = place_of(self.unpinned)
        self.record = TableRecord("t", "iceberg", "sales.orders", {**options, "folder": place})
        self.folder = rest.folder / "warehouse" / place.rpartition("/warehouse/")[2]

    def purging(self, **arg: Any) -> Purging:
        return Purging(self.record, self.work, **{"catalog": "drop", **arg})

    @property
    def has_entry(self) -> bool:
        return bool(self.tables.table_exists("sales.orders"))

    def drops(self) -> int:
        return sum(method == "DELETE" for method, *_ in self.rest.requests)


@pytest.fixture(params=KINDS)
def lake(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lake]:
    with RestCatalogServer(tmp_path / "lake") as rest:
        uri = rest.uri if request.param == "rest" else f"sqlite:///{tmp_path}/lake/catalog.db"
        yield Lake(rest, configure(monkeypatch, type=request.param, uri=uri), tmp_path / "work")


over_rest = pytest.mark.parametrize("lake", ["rest"], indirect=True)


def test_the_entry_and_all_files_go_and_nothing_else(lake: Lake) -> None:
    reached, before = on_disk(lake.folder), snapshot(lake.rest.folder / "warehouse")
    run = testing.run_operation(Purge, {"catalog": "drop"}, table=lake.record)
    assert (run.state, list(run.errors)) == ("success", [])
    assert (run.report["complete"], run.report["catalog"], run.report["missing"]) == (True, "dropped", 0)
    assert run.report["deleted_digest"] == run.report["digest"]
    assert not lake.has_entry
    assert lake.tables.table_exists("sales.other")
    after = snapshot(lake.rest.folder / "warehouse")
    assert after == {path: data for path, data in before.items() if path not in reached}
    assert on_disk(lake.folder) == set()


def test_the_entry_is_kept_until_the_plan_is_durable_and_gone_before_the_first_file(lake: Lake) -> None:
    before = snapshot(lake.folder)
    run = lake.purging().plan()
    assert lake.has_entry
    assert snapshot(lake.folder) == before
    seen: list[bool] = []
    context = run.context

    def observed() -> Any:
        ctx = context()
        status = ctx.status

        def noted(text: str) -> None:
            if text.startswith("deleting"):
                seen.append(lake.has_entry)
            status(text)

        ctx.status = noted  # type: ignore[method-assign]
        return ctx

    run.context = observed  # type: ignore[method-assign]
    report, message = run.run_jobs().complete()
    assert (message, report.complete) == ("", True)
    assert seen
    assert not any(seen)


def test_without_the_argument_it_is_refused_and_so_is_the_argument_without_a_catalog(lake: Lake) -> None:
    before = snapshot(lake.rest.folder / "warehouse")
    with pytest.raises(InvalidArgument, match="use 'catalog': 'drop'"):
        lake.purging(catalog=None).plan()
    with pytest.raises(InvalidArgument, match=f"option folder={place_of(lake.record)}"):
        Purging(lake.unpinned, lake.work, catalog="drop").plan()
    parquet = lake.work / "p"
    parquet.mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="omit 'catalog'"):
        Purging(TableRecord("p", "parquet", str(parquet)), lake.work, catalog="drop").plan()
    with pytest.raises(InvalidArgument, match="use DROP TABLE there"):
        Purging(TableRecord("s", "spark", "db.t"), lake.work, catalog="drop").plan()
    assert lake.has_entry
    assert snapshot(lake.rest.folder / "warehouse") == before


def test_a_dry_run_keeps_the_entry(lake: Lake) -> None:
    before = snapshot(lake.folder)
    report, _ = lake.purging(dry_run=True).plan().run_jobs().complete()
    assert (report.dry_run, report.complete, report.catalog) == (True, False, "")
    assert lake.has_entry
    assert {path: data for path, data in snapshot(lake.folder).items() if "/_distop/" not in path} == before


def test_a_commit_after_the_plan_keeps_the_entry_and_all_files(lake: Lake) -> None:
    run = lake.purging().plan()
    lake.made.append(ROWS)
    before = on_disk(lake.folder)
    run.run_jobs()
    assert not any(row.success for row in run.outcomes[1:2])
    assert "was changed in its catalog since the plan" in run.outcomes[1].error
    report, _ = run.complete()
    assert (report.complete, report.catalog, report.deleted) == (False, "kept", {})
    assert lake.has_entry
    assert left(lake.folder) == before
    again, message = lake.purging().plan().run_jobs().complete()
    assert (message, again.complete, again.catalog) == ("", True, "dropped")
    assert on_disk(lake.folder) == set()


def test_a_new_table_of_the_same_name_keeps_its_entry_and_its_files(lake: Lake) -> None:
    run = lake.purging().plan()
    planned = on_disk(lake.folder)
    run.run_jobs()
    lake.tables.create_table("sales.orders", SCHEMA, partition_spec=BY_K).append(ROWS)
    new = {path for path in on_disk(lake.folder) if "/_distop/" not in path} - planned
    report, message = run.complete()
    assert "came after the plan" in message
    assert not report.complete
    assert lake.tables.load_table("sales.orders").scan().to_arrow().num_rows == ROWS.num_rows
    assert new <= on_disk(lake.folder)


def test_a_table_without_files_loses_its_entry_in_the_completion(lake: Lake) -> None:
    lake.tables.create_table("sales.empty", SCHEMA)
    options = {"catalog": "prod"}
    place = place_of(TableRecord("e", "iceberg", "sales.empty", options))
    table = TableRecord("e", "iceberg", "sales.empty", {**options, "folder": place})
    report, message = Purging(table, lake.work, catalog="drop").plan().run_jobs().complete()
    assert (message, report.complete, report.catalog) == ("", True, "dropped")
    assert not lake.tables.table_exists("sales.empty")


def test_the_folder_is_the_entry_of_a_catalog_of_type_hadoop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = configure(monkeypatch, type="hadoop", warehouse=str(tmp_path / "warehouse"))
    folder = tmp_path / "warehouse" / "sales" / "orders"
    iceberg(folder)
    table = TableRecord("t", "iceberg", "sales.orders", options)
    with pytest.raises(InvalidArgument, match="omit 'catalog'"):
        Purging(table, tmp_path / "work", catalog="drop").plan()
    run = testing.run_operation(Purge, {}, table=table)
    assert (run.state, run.report["complete"], run.report["catalog"]) == ("success", True, "")
    assert on_disk(folder) == set()


@over_rest
def test_a_lost_answer_to_the_drop_is_settled_by_reading(lake: Lake) -> None:
    run = lake.purging().plan()
    lake.rest.lose_answers = True
    report, message = run.run_jobs().complete()
    assert (message, report.complete, report.catalog) == ("", True, "dropped")
    assert not lake.has_entry
    assert lake.drops() == 1, "it is not repeated blindly"


@over_rest
def test_a_drop_that_was_not_done_deletes_nothing_and_is_tried_again(lake: Lake) -> None:
    run = lake.purging().plan()
    before = on_disk(lake.folder)
    lake.rest.lose_drops = True
    with pytest.raises(TableUnavailable, match="still in its catalog"):
        run.run_jobs()
    assert lake.has_entry
    assert left(lake.folder) == before
    lake.rest.lose_drops = False
    report, message = run.run_jobs().complete()
    assert (message, report.complete) == ("", True)


@over_rest
def test_a_refused_drop_deletes_nothing(lake: Lake) -> None:
    run = lake.purging().plan()
    before = on_disk(lake.folder)
    lake.rest.refuse_drops = True
    with pytest.raises(TableUnavailable, match="rejects this node's credentials"):
        run.run_jobs()
    assert lake.has_entry
    assert left(lake.folder) == before

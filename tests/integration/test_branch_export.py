"""``export`` on real daemons: the story of branches (next, start, done), and tables at the target."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.records import TableRecord
from distop.tables import plan_table

if TYPE_CHECKING:
    from types import ModuleType

    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

EXAMPLE = Path(__file__).parents[2] / "examples" / "branch_export.py"
LIMIT = 240
DAYS = 20


@pytest.fixture(scope="module")
def story() -> ModuleType:
    spec = importlib.util.spec_from_file_location("branch_export", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table(group: Daemons, tmp_path: Path, story: ModuleType) -> Any:
    """An Iceberg table that is registered as ``orders``."""
    made = story.FolderTable(tmp_path / "lake" / "orders").create()
    group.client.remove_table("t")  # its folder is that of all files of the test
    group.client.add_table(TableRecord("orders", "iceberg", str(tmp_path / "lake" / "orders")))
    return made


def options(tmp_path: Path) -> tuple[str, ...]:
    return ("--export-to", str(tmp_path / "exports"), "--shared-dir", str(tmp_path / "shared"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("files", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_L32_next_start_done(group: Daemons, tmp_path: Path, story: ModuleType, table: Any, files: int) -> None:
    exports = tmp_path / "exports"
    story.add_files(table, "etl", files, DAYS)
    # No executor runs meanwhile, so that the first export cannot end before the other requests.
    (first,) = group.start("a", options=options(tmp_path))
    first.kill()
    requests = [story.request(group.client, "orders", "etl", exports)]
    for n in range(3):
        story.add_files(table, "etl", 10, DAYS, files + 10 * n)
        requests.append(story.request(group.client, "orders", "etl", exports))
    assert len({one.ref for one in requests}) == 2
    (killed,) = group.start("b", options=options(tmp_path))
    group.eventually(lambda: any(exports.glob("etl/data/*/_SUCCESS")), "a complete folder", "b")
    killed.kill()
    group.start("c", options=options(tmp_path))
    ended = requests[-1].wait(LIMIT).raise_for_state()
    assert story.check(exports / "etl") == ended.report["files"]["files"] == files + 30
    assert len(list(exports.glob("etl/data/*/_SUCCESS"))) == DAYS


def test_lakeFS_2089_a_missing_source_fails_the_export_of_a_branch(
    group: Daemons, tmp_path: Path, story: ModuleType, table: Any
) -> None:
    story.add_files(table, "etl", 40, DAYS)
    (tmp_path / "lake" / "orders" / "data" / "day=3" / "000003.parquet").unlink()
    group.start("a", options=options(tmp_path))
    ended = story.request(group.client, "orders", "etl", tmp_path / "exports").wait(LIMIT)
    assert ended.state == "failed"
    assert "day=3/000003.parquet is missing" in str(ended.errors)
    found = {str(one.relative_to(tmp_path / "exports" / "etl")) for one in (tmp_path / "exports").rglob("_SUCCESS")}
    assert found == {f"data/day={n}/_SUCCESS" for n in range(DAYS) if n != 3}
    assert not list((tmp_path / "exports").rglob("_EXPORT.json"))


def test_a_table_is_registered_at_the_target_before_the_operation_ends(
    group: Daemons, tmp_path: Path, story: ModuleType, table: Any
) -> None:
    story.add_files(table, "main", 40, DAYS)
    group.start("a", options=options(tmp_path))
    arg = {"to": str(tmp_path / "exports" / "orders"), "register": {"name": "copies.orders"}}
    for _ in range(2):
        op = group.client.start_operation("export", "orders", arg)
        report = op.wait(LIMIT).raise_for_state().report
        assert (report["complete"], report["registered"]) == (True, "copies.orders")
        [record] = [one for one in group.client.tables() if one.name == "copies.orders"]
        assert record == TableRecord("copies.orders", "iceberg", arg["to"])
        assert sum(len(one.files) for one in plan_table(record).partitions) == 40
    added = [one for one in group.client.actions() if one["name"] == "copies.orders"]
    assert [one["action"] for one in added] == ["add_table"]
    assert added[0]["by"].startswith("orders/export/")


def test_a_name_that_is_taken_is_refused(group: Daemons, tmp_path: Path, story: ModuleType, table: Any) -> None:
    story.add_files(table, "main", 10, DAYS)
    target = tmp_path / "exports" / "orders"
    group.client.add_table(TableRecord("copy", "iceberg", str(tmp_path / "lake" / "orders")))
    group.start("a", options=options(tmp_path))
    ended = group.client.start_operation("export", "orders", {"to": str(target), "register": {"name": "copy"}}).wait(
        LIMIT
    )
    assert ended.state == "failed"
    assert "register the export under another name" in str(ended.errors) + str(ended.record)
    assert not target.exists()


def test_the_example_runs(
    group: Daemons,
    tmp_path: Path,
    story: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    group.client.remove_table("t")  # its folder is that of all files of the test
    group.start(
        "a", options=("--export-to", str(tmp_path / "run" / "exports"), "--shared-dir", str(tmp_path / "shared"))
    )
    monkeypatch.setenv("DISTOP_ETCD", group.endpoint)
    monkeypatch.setattr("sys.argv", ["branch_export", str(tmp_path / "run"), "--files", "200", "--days", "10"])
    story.main()
    printed = capsys.readouterr().out
    assert "4 requests became the exports" in printed
    assert "230 files in 10 folders" in printed
    assert "failed: 9 of 10 folders are marked, complete: False" in printed
    assert "day=0/000000.parquet is missing" in printed

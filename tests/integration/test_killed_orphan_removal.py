"""``remove-orphans`` on real daemons: an executor is killed in the middle, and cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from distop.protocol.records import TableRecord
from tests.support.orphan_runs import NOW, snapshot, wait_until_older

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

ORPHANS = 1_200


@pytest.fixture
def planted(group: Daemons, tmp_path: Path) -> tuple[Path, dict[str, bytes | str]]:
    """The folder of a registered table with orphans, and the files that must stay."""
    folder = tmp_path / "lake"
    write_deltalake(folder, pa.table({"k": ["a", "b"], "v": [1, 2]}), partition_by=["k"])
    group.client.remove_table("t")  # its folder is that of all files of the test
    group.client.add_table(TableRecord("lake", "delta", str(folder)))
    kept = snapshot(folder)
    for n in range(ORPHANS):
        (folder / "k=a" / f"left-{n:04}").write_bytes(b"x")
    wait_until_older(str(folder))
    return folder, kept


def count(folder: Path) -> int:
    return sum(1 for path in folder.rglob("left-*") if "_distop" not in path.parts)


@pytest.mark.parametrize("quarantine", [False, True])
def test_the_removal_of_a_killed_executor_is_completed(
    group: Daemons, planted: tuple[Path, dict[str, bytes | str]], quarantine: bool
) -> None:
    folder, kept = planted
    (killed,) = group.start("a")
    argument = {**NOW, "max_per_second": 200, "quarantine": quarantine}
    op = group.client.start_operation("remove-orphans", "lake", argument)
    group.eventually(lambda: count(folder) < ORPHANS, "some orphans removed", "a")
    killed.kill()
    assert count(folder) > 0
    group.start("b")
    report = op.wait(100).raise_for_state().report
    assert (report["removed"]["files"], report["missing"], report["changed"]) == (ORPHANS, 0, 0)
    assert count(folder) == 0
    left = snapshot(folder)
    assert {path: data for path, data in left.items() if "/_distop/" not in path} == kept
    if quarantine:
        back = group.client.start_operation("restore", "lake", {"operation": str(op.ref)}).wait(100).raise_for_state()
        assert back.report["restored"]["files"] == ORPHANS
        assert count(folder) == ORPHANS


def test_a_cancelled_removal_keeps_what_it_has_not_removed(
    group: Daemons, planted: tuple[Path, dict[str, bytes | str]]
) -> None:
    folder, kept = planted
    group.start("a")
    op = group.client.start_operation("remove-orphans", "lake", {**NOW, "max_per_second": 50})
    group.eventually(lambda: count(folder) < ORPHANS, "some orphans removed", "a")
    op.cancel()
    assert op.wait(60).state == "cancelled"
    assert 0 < count(folder) < ORPHANS
    assert kept.items() <= snapshot(folder).items()

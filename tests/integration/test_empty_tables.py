"""Tables whose data is gone, everywhere or on one node: nothing is promised of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from distop.protocol.records import TableRecord
from tests.support.behaviors import ROOT, python_path
from tests.support.command import distop_command  # noqa: F401
from tests.support.contract import dump

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.command import Ran
    from tests.support.daemons import Daemons

CHECKS = {"checks": [{"not_null": "a"}], "statistics": "only"}
EACH_ITS_OWN = "/proc/self/cwd/data"
"""A location at which each process has another folder, as each machine has its own at a mount point."""


def fill(folder: Path) -> None:
    """Two partitions of two rows each."""
    for n in range(2):
        (folder / f"p={n}").mkdir(parents=True)
        pq.write_table(pa.table({"a": [1, 2]}), folder / f"p={n}" / "a.parquet")


def test_a_table_that_was_emptied_is_not_valid(
    group: Daemons,
    distop_command: Callable[..., Ran],  # noqa: F811
    tmp_path: Path,
) -> None:
    fill(tmp_path / "data")
    group.client.add_table(TableRecord("d", "parquet", str(tmp_path / "data")))
    group.start("ann")
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "data" / "_distop").mkdir(parents=True)
    checks = '{"checks": [{"not_null": "never_was"}]}'
    ran = distop_command("start", "validate", "d", "--etcd", group.endpoint, "--arg", checks, "--wait", "--json")
    assert ran.code == 1, group.tails()
    assert (ran.json["state"], ran.json["report"]) == ("failed", None)
    (error,) = ran.json["errors"]
    reason = (
        f"the location {str(tmp_path / 'data')!r} is empty: its files were removed, or its disk is not mounted here"
    )
    assert error["text"] == f"planning failed: {reason}"


def test_a_node_without_the_tables_disk_leaves_the_planning_to_another(group: Daemons, tmp_path: Path) -> None:
    fill(tmp_path / "disk")
    homes = {name: tmp_path / "homes" / name for name in ("ann", "bob")}
    for home in homes.values():
        home.mkdir(parents=True)
        (home / "data").symlink_to(tmp_path / "disk")
    group.client.add_table(TableRecord("d", "parquet", EACH_ITS_OWN), check=False)

    def start(name: str) -> None:
        group.spawn(name, env=python_path(ROOT), through=("env", "-C", str(homes[name])))
        group.await_ready(name)

    def coordinator() -> str:
        leaders = dump(group.endpoint, "distOpCoordinator.d.validate").values()
        return next((node.executor for i, node in group.client.nodes().items() if i in leaders), "")

    start("ann")
    assert group.client.start_operation("validate", "d", CHECKS).wait(60).state == "success", group.tails()
    start("bob")
    here = homes["ann"] / "data"
    here.unlink()
    here.mkdir()
    operation = group.client.start_operation("validate", "d", CHECKS, retry_attempts=8)
    group.eventually(lambda: coordinator() == "bob", "ann leaves the planning to bob")
    here.rmdir()
    here.symlink_to(tmp_path / "disk")
    result = operation.wait(60)
    assert result.state == "success", group.tails()
    assert (result.report["verdict"], result.report["rows"]) == ("valid", 4)
    assert f"planning failed: the location {EACH_ITS_OWN!r} is empty" in (tmp_path / "ann.log").read_text()

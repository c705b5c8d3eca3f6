"""Tables whose data is missing, on all nodes or on one: validation does not report them as valid."""

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
LOCATION_PER_PROCESS = "/proc/self/cwd/data"
"""A location with a different folder in each process, as a mount point has on each machine."""


def write_table(folder: Path) -> None:
    """Write two partitions with two rows each."""
    for n in range(2):
        (folder / f"p={n}").mkdir(parents=True)
        pq.write_table(pa.table({"a": [1, 2]}), folder / f"p={n}" / "a.parquet")


def test_validation_of_an_emptied_table_fails(
    group: Daemons,
    distop_command: Callable[..., Ran],  # noqa: F811
    tmp_path: Path,
) -> None:
    write_table(tmp_path / "data")
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


def test_a_node_without_the_tables_disk_hands_planning_over(group: Daemons, tmp_path: Path) -> None:
    write_table(tmp_path / "disk")
    working_folders = {name: tmp_path / "homes" / name for name in ("ann", "bob")}
    for working_folder in working_folders.values():
        working_folder.mkdir(parents=True)
        (working_folder / "data").symlink_to(tmp_path / "disk")
    group.client.add_table(TableRecord("d", "parquet", LOCATION_PER_PROCESS), check=False)

    def start(name: str) -> None:
        group.spawn(name, env=python_path(ROOT), through=("env", "-C", str(working_folders[name])))
        group.await_ready(name)

    def coordinator() -> str:
        leaders = dump(group.endpoint, "distOpCoordinator.d.validate").values()
        return next((node.executor for i, node in group.client.nodes().items() if i in leaders), "")

    start("ann")
    assert group.client.start_operation("validate", "d", CHECKS).wait(60).state == "success", group.tails()
    start("bob")
    data_of_ann = working_folders["ann"] / "data"
    data_of_ann.unlink()
    data_of_ann.mkdir()
    operation = group.client.start_operation("validate", "d", CHECKS, retry_attempts=8)
    group.eventually(lambda: coordinator() == "bob", "bob takes over the planning")
    data_of_ann.rmdir()
    data_of_ann.symlink_to(tmp_path / "disk")
    result = operation.wait(60)
    assert result.state == "success", group.tails()
    assert (result.report["verdict"], result.report["rows"]) == ("valid", 4)
    assert f"planning failed: the location {LOCATION_PER_PROCESS!r} is empty" in (tmp_path / "ann.log").read_text()

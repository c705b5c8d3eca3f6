"""The kernel's counters of processes killed for lack of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.worker.daemon_side import oom_kills
from distop.worker.daemon_side.oom_kills import OomKills

if TYPE_CHECKING:
    from pathlib import Path

V2 = "low 0\nhigh 0\nmax 12\noom 1\noom_kill {}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
LAYOUTS = {
    "v2": ("0::/system.slice/distop.service\n", "system.slice/distop.service/memory.events", V2),
    "v2 in a container": ("0::/\n", "memory.events", V2),
    "v1": ("5:cpu,cpuacct:/a\n4:memory:/a\n0::/a\n", "memory/a/memory.oom_control", V1),
    "v1 in a container": ("4:memory:/docker/0123\n", "memory/memory.oom_control", V1),
    "hybrid": ("4:cpu:/b\n0::/b\n", "unified/b/memory.events", V2),
}


class Machine:
    """The files of a machine that have the counters."""

    def __init__(self, folder: Path, group: str) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.write(self.proc / "self" / "cgroup", group)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def kills(self) -> OomKills | None:
        return oom_kills.read_oom_kills(self.proc, self.cgroups)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_counter_of_the_control_group_is_read(tmp_path: Path, layout: str) -> None:
    group, name, text = LAYOUTS[layout]
    machine = Machine(tmp_path, group)
    machine.write(machine.proc / "vmstat", "oom_kill 99\n")
    machine.write(machine.cgroups / name, text.format(3))
    before = machine.kills()
    assert before == OomKills(machine.cgroups / name, 3)
    assert oom_kills.describe(before, machine.kills()) == "", "unchanged"
    machine.write(machine.cgroups / name, text.format(4))
    message = oom_kills.describe(before, machine.kills())
    assert message.startswith("the kernel killed 1 process of this executor's control group for lack of memory"), (
        message
    )


def test_without_its_own_control_group_the_counter_of_the_machine_is_read(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n")
    assert machine.kills() is None
    machine.write(machine.proc / "vmstat", "nr_free_pages 7\noom_kill 1\n")
    before = machine.kills()
    machine.write(machine.proc / "vmstat", "nr_free_pages 7\noom_kill 3\n")
    message = oom_kills.describe(before, machine.kills())
    assert message.startswith("the kernel killed 2 processes on this machine for lack of memory"), message


def test_different_counters_and_smaller_counts_are_not_compared(tmp_path: Path) -> None:
    one, other = OomKills(tmp_path / "memory.events", 1), OomKills(tmp_path / "vmstat", 5)
    assert oom_kills.describe(one, other) == oom_kills.describe(other, OomKills(other.where, 2)) == ""
    assert oom_kills.describe(None, other) == oom_kills.describe(one, None) == ""


def test_a_counter_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a\n")
    for text in ("", "oom_kill\n", "oom_kill many\n"):
        machine.write(machine.cgroups / "a" / "memory.events", text)
        assert machine.kills() is None

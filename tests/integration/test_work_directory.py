"""The work directory of an executor: one daemon locks it, and an unusable one is refused or reported."""

from __future__ import annotations

import shutil
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.behaviors import sample_env

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemon, Daemons

pytestmark = pytest.mark.rotating

__all__ = ["sample_env"]

TABLE = "t"


def assert_refused(daemon: Daemon, code: int, sentence: str) -> None:
    """Assert that the daemon has ended with this exit code and logged only this error."""
    assert daemon.process.wait(30) == code, daemon.log.read_text()
    assert daemon.log.read_text() == f"error: {sentence}\n"


def test_a_second_daemon_with_the_same_work_directory_is_refused(group: Daemons) -> None:
    """This holds for a daemon with another id, and the first daemon keeps its session."""
    (ann,) = group.start("ann")
    before = set(group.client.nodes())
    taken = group.folder / "ann"
    operation = group.client.start_operation("noop", TABLE, {"jobs": 8, "sleep": 0.2})
    bob = group.spawn("bob", "--work-dir", str(taken))
    assert_refused(bob, 5, f"the work directory {taken} is in use by a running executor: give another --work-dir")
    assert operation.wait(60).state == "success", group.tails()
    assert ann.process.poll() is None
    assert set(group.client.nodes()) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_is_released_when_the_daemon_ends(group: Daemons, number: signal.Signals) -> None:
    """The lock file stays, and the next daemon can use the directory."""
    (ann,) = group.start("ann")
    group.eventually(lambda: "ready: " in ann.log.read_text(), "ann is ready", "ann")
    ann.process.send_signal(number)
    ann.process.wait(30)
    assert (group.folder / "ann" / "lock").exists()
    ann.start()
    group.eventually(lambda: ann.log.read_text().count("ready: ") == 2, "ann is ready again", "ann")
    assert group.client.start_operation("noop", TABLE, {"jobs": 2}).wait(60).state == "success", group.tails()


@pytest.mark.parametrize("below", ["", "executor"])
def test_an_unwritable_work_directory_is_refused(group: Daemons, tmp_path: Path, below: str) -> None:
    """A file is in the place of the directory or of its parent."""
    file = tmp_path / "occupied"
    file.write_text("not ours")
    work_dir = file / below
    ann = group.spawn("ann", "--work-dir", str(work_dir))
    reason = "Not a directory" if below else "File exists"
    assert_refused(ann, 2, f"cannot use the work directory {work_dir}: {reason}")
    assert file.read_text() == "not ours"
    assert not group.client.nodes()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2775])
def test_hole_4_a_work_directory_that_others_can_write_is_refused(group: Daemons, tmp_path: Path, mode: int) -> None:
    """A user who can write there could replace the JVM's settings, which can run code."""
    work = tmp_path / "work"
    work.mkdir()
    work.chmod(mode)
    ann = group.spawn("ann", "--work-dir", str(work))
    assert_refused(
        ann,
        2,
        f"cannot use the work directory {work}: {work} is writable by its group or by others (mode {mode:04o}), "
        "so other users could control what runs here: give --work-dir a folder that only this user and root can "
        "change or replace",
    )
    assert list(work.iterdir()) == []


def test_an_executor_ends_when_its_work_directory_is_replaced(group: Daemons) -> None:
    """Otherwise a second daemon would use files that the first one writes there."""
    (ann,) = group.start("ann")
    group.eventually(lambda: "ready: " in ann.log.read_text(), "ann is ready", "ann")
    taken = group.folder / "ann"
    taken.rename(group.folder / "aside")
    bob = group.spawn("bob", "--work-dir", str(taken))
    group.eventually(lambda: "ready: " in bob.log.read_text(), "bob is ready in the new directory", "bob")
    assert ann.process.wait(60) == 0
    assert f"stopping: the work directory {taken} was replaced while this executor used it" in ann.log.read_text()
    assert group.client.start_operation("noop", TABLE, {"jobs": 2}).wait(60).state == "success", group.tails()
    assert bob.process.poll() is None


def test_an_unusable_work_directory_is_reported_until_it_is_usable_again(
    group: Daemons, tmp_path: Path, sample_env: dict[str, str]
) -> None:
    """`why` once reported a lack of slots instead of the cause."""
    group.start("ann", env=sample_env)
    runs = group.folder / "ann" / "runs"
    shutil.rmtree(runs)
    runs.write_text("in the way")
    arg = {"names": ["a"], "does": {}, "diary": str(tmp_path / "diary")}
    operation = group.client.start_operation("sample", TABLE, arg)
    group.eventually(
        lambda: any("the work directory cannot be used" in one.text for one in operation.why().reasons),
        "why names the work directory",
        "ann",
    )
    runs.unlink()
    runs.mkdir(mode=0o700)
    assert operation.wait(60).state == "success", group.tails()
    group.eventually(
        lambda: not any(node.failing for node in group.client.nodes().values()), "the node reports no failure", "ann"
    )

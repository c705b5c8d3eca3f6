"""The guardian kills the child's whole session: at the deadline, on request, and when the child or daemon ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop.worker import guardian
from distop.worker.daemon_side.host import WorkerConfig, WorkerHost
from distop.worker.guardian import boottime, session_members
from tests.support.behaviors import sample_env
from tests.support.processes import children, children_of_guardian, machine, signal_all, suspend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["sample_env"]

CHILD_SCRIPT = Path(__file__).parent / "guarded_child.py"

# A child with descendants: one in its own process group (as PySpark's workers), one that ignores signals, and an
# orphaned grandchild. It writes the file `ready` once all have started.
CHILD_WITH_DESCENDANTS = """
import json, os, signal, sys, time
def spawn(prepare):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        prepare()
        os.write(w, b'x')
        while True: time.sleep(60)
    os.read(r, 1)
    return pid
def orphan():
    if os.fork(): os._exit(0)
def deaf():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
spawn(lambda: os.setpgid(0, 0)); spawn(deaf)
# The parent of the orphan must be gone before the members of the session are counted.
os.waitpid(spawn(orphan), 0)
open({ready!r} + '.part', 'w').write(str(os.getpid()))
os.rename({ready!r} + '.part', {ready!r})
{then}
"""
FOREVER = "while True: time.sleep(60)"
HOLDING_THE_GIL = "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')"


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, f"not reached: {what}"
        time.sleep(0.005)


class Guarded:
    """A stand-in for the daemon, with a guardian and a child."""

    def __init__(self, tmp_path: Path, deadline: float, then: str) -> None:
        self.ready = tmp_path / "ready"
        code = CHILD_WITH_DESCENDANTS.format(ready=str(self.ready), then=then)
        command = [sys.executable, str(CHILD_SCRIPT), str(deadline), code]
        self.daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.daemon.stdout is not None
        first, _, child = self.daemon.stdout.readline().split()
        self.guardian, self.child = int(first), int(child)
        wait_for(lambda: self.ready.exists() or gone(self.guardian), "all descendants have started")

    def alive(self) -> list[int]:
        return session_members(self.child)

    def send(self, line: str) -> None:
        assert self.daemon.stdin is not None
        assert self.daemon.stdout is not None
        self.daemon.stdin.write(line + "\n")
        self.daemon.stdin.flush()
        assert self.daemon.stdout.readline() == "sent\n"

    def last_message(self) -> str:
        assert self.daemon.stdin is not None
        assert self.daemon.stdout is not None
        self.daemon.stdin.close()
        return self.daemon.stdout.readline().strip()

    def close(self) -> None:
        self.daemon.kill()
        self.daemon.wait()
        for pipe in (self.daemon.stdin, self.daemon.stdout):
            assert pipe is not None
            pipe.close()

    def wait_dead(self) -> None:
        wait_for(lambda: not self.alive(), "all processes of the session are dead")
        wait_for(lambda: gone(self.guardian), "the guardian ended")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def gone(pid: int) -> bool:
    try:
        return state(pid) in ("Z", "X")
    except OSError:
        return True


def second_process_of(pid: int) -> int:
    """The pid of the guardian's second process."""
    (second,) = [p for p in children(pid) if b"guardian.py" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return second


@contextmanager
def guarded(tmp_path: Path, deadline: float = 0.0, then: str = FOREVER) -> Iterator[Guarded]:
    it = Guarded(tmp_path, deadline, then)
    try:
        yield it
    finally:
        it.daemon.kill()
        it.wait_dead()
        it.close()


def test_the_session_is_killed_on_request(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        assert len(it.alive()) == 4
        it.send("K enough")
        it.wait_dead()
        assert it.last_message() == f"X enough {int(signal.SIGKILL)}"


def test_the_session_is_killed_at_the_deadline(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        it.send(f"D {boottime() + 0.3}")
        it.wait_dead()
        assert it.last_message().startswith("X deadline")


def test_a_deadline_can_be_moved_and_removed(tmp_path: Path) -> None:
    with guarded(tmp_path, boottime() + 3600) as it:
        it.send(f"D {boottime() + 7200}")
        it.send("D 0")
        assert len(it.alive()) == 4
        it.send("D 1.0")
        it.wait_dead()


def test_the_session_is_killed_at_once_if_the_deadline_has_passed(tmp_path: Path) -> None:
    with guarded(tmp_path, 1.0) as it:
        it.wait_dead()


def test_the_session_is_killed_at_the_deadline_while_the_daemon_is_frozen(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        it.send(f"D {boottime() + 0.5}")
        os.kill(it.daemon.pid, signal.SIGSTOP)
        it.wait_dead()
        os.kill(it.daemon.pid, signal.SIGCONT)


def test_the_session_is_killed_after_a_suspension_beyond_the_deadline(tmp_path: Path) -> None:
    """All processes are stopped past the deadline, and the guardian is the last to continue."""
    with guarded(tmp_path) as it:
        second = second_process_of(it.guardian)
        it.send(f"D {boottime() + 0.5}")
        suspended = suspend(it.daemon.pid)
        assert {it.daemon.pid, it.guardian, second, *it.alive()} == set(suspended)
        wait_for(lambda: {state(pid) for pid in suspended} == {"T"}, "all processes are stopped")
        signal_all([pid for pid in suspended if pid != it.guardian], signal.SIGCONT)
        assert len(it.alive()) == 4, "without the guardian, no process kills the session"
        signal_all([it.guardian], signal.SIGCONT)
        it.wait_dead()
        assert it.last_message().startswith("X deadline")


def test_the_child_is_distinguished_from_other_children_of_the_guardian(tmp_path: Path) -> None:
    """The guardian also has an older second process, and adopts orphans of the session."""
    with guarded(tmp_path) as it:
        wait_for(lambda: len(children(it.guardian)) == 3, "the guardian has adopted the orphan")
        assert children_of_guardian(it.guardian) == [it.child]
        assert machine(it.daemon.pid)[:2] == [it.guardian, it.daemon.pid]


def test_the_session_is_killed_after_the_daemon_was_killed(tmp_path: Path) -> None:
    with guarded(tmp_path, boottime() + 3600) as it:
        it.daemon.kill()
        it.wait_dead()


@pytest.mark.parametrize("end", ["D", "K now"])
def test_a_child_that_holds_the_gil_is_killed(tmp_path: Path, end: str) -> None:
    with guarded(tmp_path, then=HOLDING_THE_GIL) as it:
        it.send(end if end.startswith("K") else f"D {boottime() + 0.2}")
        it.wait_dead()


def test_the_session_is_killed_when_the_child_exits(tmp_path: Path) -> None:
    with guarded(tmp_path, then="sys.exit(7)") as it:
        it.wait_dead()
        assert it.last_message() == f"X exited {7 << 8}"


def test_a_stopped_child_is_killed(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        os.kill(it.child, signal.SIGSTOP)
        it.send("K now")
        it.wait_dead()


def test_signals_to_the_guardian_do_not_end_it(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(it.guardian, number)
        it.send("K asked")
        it.wait_dead()
        assert it.last_message().startswith("X asked")


@pytest.mark.parametrize("daemon", ["at work", "frozen", "killed"])
def test_the_session_is_killed_after_the_guardian_was_killed(tmp_path: Path, daemon: str) -> None:
    """The kernel may kill the guardian when memory is short. The session must die whatever the daemon's state is.

    The stand-in for the daemon never kills the session itself.
    """
    with guarded(tmp_path) as it:
        os.kill(it.child, signal.SIGSTOP)
        if daemon == "frozen":
            os.kill(it.daemon.pid, signal.SIGSTOP)
        os.kill(it.guardian, signal.SIGKILL)
        if daemon == "killed":
            it.daemon.kill()
        wait_for(lambda: not it.alive(), "all processes of the session are dead")


def test_a_guardian_that_ends_normally_leaves_no_second_process(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        second = second_process_of(it.guardian)
        it.send("K enough")
        it.wait_dead()
        assert gone(second)


@pytest.mark.parametrize("end", ["asked", "deadline", "child exited", "daemon frozen", "daemon killed"])
def test_a_guardian_without_its_second_process_kills_the_session(tmp_path: Path, end: str) -> None:
    with guarded(tmp_path) as it:
        os.kill(second_process_of(it.guardian), signal.SIGKILL)
        if end == "asked":
            it.send("K asked")
        elif end == "child exited":
            os.kill(it.child, signal.SIGTERM)
        elif end == "daemon killed":
            it.daemon.kill()
        else:
            it.send(f"D {boottime() + 0.3}")
        if end == "daemon frozen":
            os.kill(it.daemon.pid, signal.SIGSTOP)
        it.wait_dead()
        if end == "daemon frozen":
            os.kill(it.daemon.pid, signal.SIGCONT)
        words = {"asked": "X asked 9", "child exited": "X exited 15"}.get(end, "X deadline 9")
        assert end == "daemon killed" or it.last_message() == words


def test_the_child_dies_when_daemon_and_guardian_are_killed_at_once(tmp_path: Path) -> None:
    """The guardian's second process is killed, too. Other processes of the session may survive this."""
    with guarded(tmp_path) as it:
        second = second_process_of(it.guardian)
        for pid in (it.child, it.guardian):
            os.kill(pid, signal.SIGSTOP)
        try:
            for pid in (it.daemon.pid, second, it.guardian):
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: gone(it.child), "the child is dead")
        finally:
            guardian.kill_session(it.child)


def test_processes_that_do_not_die_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root can create such processes, so the test simulates them: they survive three kills."""
    listings = iter([[11, 12], [11, 12], [12], [], []])
    monkeypatch.setattr(guardian, "session_members", lambda sid: next(listings))
    monkeypatch.setattr(guardian, "UNKILLABLE", 0.0)
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        killed.append(pid)
        if pid == 12:
            raise PermissionError("the process belongs to another user")

    monkeypatch.setattr(os, "kill", kill)
    reported: list[list[int]] = []
    guardian.kill_session(10, report=reported.append)
    assert reported == [[11, 12], [11, 12], [12]]
    assert killed == [11, 12, 11, 12, 12]


async def test_the_daemon_logs_processes_that_do_not_die(
    tmp_path: Path, sample_env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A script in place of the guardian reports two such processes."""
    python = tmp_path / "python"
    report = f'if [ "$1" = -I ]; then printf "W {os.getpid()} 999999999\\n" >&$4; fi'
    python.write_text(f'#!/bin/bash\n{report}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    worker = WorkerHost(WorkerConfig(tmp_path, "ex", "inc-1", env=sample_env, python=str(python)))
    await worker.start()
    await worker.stop(10)
    names = f"{os.getpid()} ({guardian.command(os.getpid())}), 999999999 ()"
    assert "Waiting for killed processes that do not die" in caplog.text
    assert f"no job starts on this node until then: {names}" in caplog.text


def test_the_guardian_uses_little_memory(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        status = Path(f"/proc/{it.guardian}/status").read_text()
        kilobytes = int(status.partition("VmRSS:")[2].split()[0])
        assert kilobytes < 16_000
        maps = Path(f"/proc/{it.guardian}/maps").read_text()
        assert "grpc" not in maps

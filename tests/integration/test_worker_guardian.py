"""The guardian kills all of the child's session: at the deadline, when the daemon is gone or frozen, on request, and
when the child ends by itself."""

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
from distop.worker.daemon_side.host import Worker, WorkerConfig
from distop.worker.guardian import boottime, session_members
from tests.support.behaviors import sample_env
from tests.support.processes import children, children_of_guardian, machine, signal_all, suspend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["sample_env"]

STAND_IN = Path(__file__).parent / "guarded_child.py"

# A child with company: one process in a group of its own (as PySpark's workers), one that ignores signals, one that
# is an orphan of the second generation. It tells their pids once all are there.
FAMILY = """
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
spawn(lambda: os.setpgid(0, 0)); spawn(deaf); spawn(orphan)
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
    """A stand-in for the daemon with a guardian and a child."""

    def __init__(self, tmp_path: Path, deadline: float, then: str) -> None:
        self.ready = tmp_path / "ready"
        code = FAMILY.format(ready=str(self.ready), then=then)
        command = [sys.executable, str(STAND_IN), str(deadline), code]
        self.daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.daemon.stdout is not None
        first, _, child = self.daemon.stdout.readline().split()
        self.guardian, self.child = int(first), int(child)
        wait_for(lambda: self.ready.exists() or gone(self.guardian), "the family is there")

    def alive(self) -> list[int]:
        return session_members(self.child)

    def tell(self, line: str) -> None:
        assert self.daemon.stdin is not None
        assert self.daemon.stdout is not None
        self.daemon.stdin.write(line + "\n")
        self.daemon.stdin.flush()
        assert self.daemon.stdout.readline() == "told\n"

    def last_words(self) -> str:
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
        wait_for(lambda: not self.alive(), "all of the session is dead")
        wait_for(lambda: gone(self.guardian), "the guardian ended")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def gone(pid: int) -> bool:
    try:
        return state(pid) in ("Z", "X")
    except OSError:
        return True


def second_of(pid: int) -> int:
    """The process that stands by a guardian."""
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


def test_on_request(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        assert len(it.alive()) == 4
        it.tell("K enough")
        it.wait_dead()
        assert it.last_words() == f"X enough {int(signal.SIGKILL)}"


def test_at_the_deadline(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        it.tell(f"D {boottime() + 0.3}")
        it.wait_dead()
        assert it.last_words().startswith("X deadline")


def test_a_deadline_moves_and_goes(tmp_path: Path) -> None:
    with guarded(tmp_path, boottime() + 3600) as it:
        it.tell(f"D {boottime() + 7200}")
        it.tell("D 0")
        assert len(it.alive()) == 4
        it.tell("D 1.0")
        it.wait_dead()


def test_a_deadline_that_has_passed_at_the_start(tmp_path: Path) -> None:
    with guarded(tmp_path, 1.0) as it:
        it.wait_dead()


def test_at_the_deadline_while_the_daemon_is_frozen(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        it.tell(f"D {boottime() + 0.5}")
        os.kill(it.daemon.pid, signal.SIGSTOP)
        it.wait_dead()
        os.kill(it.daemon.pid, signal.SIGCONT)


def test_a_machine_that_is_suspended_beyond_the_deadline(tmp_path: Path) -> None:
    """All of its processes stand still, and nothing of it happens. The guardian is the last to go on."""
    with guarded(tmp_path) as it:
        second = second_of(it.guardian)
        it.tell(f"D {boottime() + 0.5}")
        suspended = suspend(it.daemon.pid)
        assert {it.daemon.pid, it.guardian, second, *it.alive()} == set(suspended)
        wait_for(lambda: {state(pid) for pid in suspended} == {"T"}, "all stand still")
        signal_all([pid for pid in suspended if pid != it.guardian], signal.SIGCONT)
        assert len(it.alive()) == 4, "nobody is left to kill them"
        signal_all([it.guardian], signal.SIGCONT)
        it.wait_dead()
        assert it.last_words().startswith("X deadline")


def test_the_child_is_told_from_what_stands_beside_it(tmp_path: Path) -> None:
    """From the second process of its guardian, which began before it, and from orphans of its session."""
    with guarded(tmp_path) as it:
        wait_for(lambda: len(children(it.guardian)) == 3, "the orphan was left to the guardian")
        assert children_of_guardian(it.guardian) == [it.child]
        assert machine(it.daemon.pid)[:2] == [it.guardian, it.daemon.pid]


def test_when_the_daemon_is_killed(tmp_path: Path) -> None:
    with guarded(tmp_path, boottime() + 3600) as it:
        it.daemon.kill()
        it.wait_dead()


@pytest.mark.parametrize("end", ["D", "K now"])
def test_a_child_that_holds_the_gil(tmp_path: Path, end: str) -> None:
    with guarded(tmp_path, then=HOLDING_THE_GIL) as it:
        it.tell(end if end.startswith("K") else f"D {boottime() + 0.2}")
        it.wait_dead()


def test_when_the_child_ends_by_itself_its_company_dies_too(tmp_path: Path) -> None:
    with guarded(tmp_path, then="sys.exit(7)") as it:
        it.wait_dead()
        assert it.last_words() == f"X exited {7 << 8}"


def test_a_stopped_child_dies_too(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        os.kill(it.child, signal.SIGSTOP)
        it.tell("K now")
        it.wait_dead()


def test_signals_to_the_guardian_do_not_end_it(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(it.guardian, number)
        it.tell("K asked")
        it.wait_dead()
        assert it.last_words().startswith("X asked")


@pytest.mark.parametrize("daemon", ["at work", "frozen", "killed"])
def test_all_of_the_session_dies_after_a_killed_guardian(tmp_path: Path, daemon: str) -> None:
    """The kernel kills where memory is short, and not only one: whatever the daemon does, nothing is left. The stand-in
    for it does nothing about it even when it is at work."""
    with guarded(tmp_path) as it:
        os.kill(it.child, signal.SIGSTOP)
        if daemon == "frozen":
            os.kill(it.daemon.pid, signal.SIGSTOP)
        os.kill(it.guardian, signal.SIGKILL)
        if daemon == "killed":
            it.daemon.kill()
        wait_for(lambda: not it.alive(), "all of the session is dead")


def test_a_guardian_that_ends_in_order_leaves_no_process(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        second = second_of(it.guardian)
        it.tell("K enough")
        it.wait_dead()
        assert gone(second)


@pytest.mark.parametrize("end", ["asked", "deadline", "child exited", "daemon frozen", "daemon killed"])
def test_a_guardian_whose_second_process_was_killed_does_its_work(tmp_path: Path, end: str) -> None:
    with guarded(tmp_path) as it:
        os.kill(second_of(it.guardian), signal.SIGKILL)
        if end == "asked":
            it.tell("K asked")
        elif end == "child exited":
            os.kill(it.child, signal.SIGTERM)
        elif end == "daemon killed":
            it.daemon.kill()
        else:
            it.tell(f"D {boottime() + 0.3}")
        if end == "daemon frozen":
            os.kill(it.daemon.pid, signal.SIGSTOP)
        it.wait_dead()
        if end == "daemon frozen":
            os.kill(it.daemon.pid, signal.SIGCONT)
        words = {"asked": "X asked 9", "child exited": "X exited 15"}.get(end, "X deadline 9")
        assert end == "daemon killed" or it.last_words() == words


def test_the_first_process_of_a_child_dies_where_nobody_is_left_to_kill_it(tmp_path: Path) -> None:
    """Daemon, guardian and second process are killed at once. What else the child started is not covered."""
    with guarded(tmp_path) as it:
        second = second_of(it.guardian)
        for pid in (it.child, it.guardian):
            os.kill(pid, signal.SIGSTOP)
        try:
            for pid in (it.daemon.pid, second, it.guardian):
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: gone(it.child), "the first process is dead")
        finally:
            guardian.kill_session(it.child)


def test_processes_that_do_not_die_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """None can be made without root's help: these are there for three looks, whatever is done to them."""
    looks = iter([[11, 12], [11, 12], [12], [], []])
    monkeypatch.setattr(guardian, "session_members", lambda sid: next(looks))
    monkeypatch.setattr(guardian, "UNKILLABLE", 0.0)
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        killed.append(pid)
        if pid == 12:
            raise PermissionError("it is another user's")

    monkeypatch.setattr(os, "kill", kill)
    told: list[list[int]] = []
    guardian.kill_session(10, report=told.append)
    assert told == [[11, 12], [11, 12], [12]]
    assert killed == [11, 12, 11, 12, 12]


async def test_the_daemon_says_which_processes_do_not_die(
    tmp_path: Path, sample_env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A guardian that says so, of processes that are no such."""
    python = tmp_path / "python"
    says = f'if [ "$1" = -I ]; then printf "W {os.getpid()} 999999999\\n" >&$4; fi'
    python.write_text(f'#!/bin/bash\n{says}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    worker = Worker(WorkerConfig(tmp_path, "ex", "inc-1", env=sample_env, python=str(python)))
    await worker.start()
    await worker.stop(10)
    names = f"{os.getpid()} ({guardian.command(os.getpid())}), 999999999 ()"
    assert "Waiting for killed processes that do not die" in caplog.text
    assert f"no job starts on this node until then: {names}" in caplog.text


def test_the_guardian_is_small(tmp_path: Path) -> None:
    with guarded(tmp_path) as it:
        status = Path(f"/proc/{it.guardian}/status").read_text()
        kilobytes = int(status.partition("VmRSS:")[2].split()[0])
        assert kilobytes < 16_000
        maps = Path(f"/proc/{it.guardian}/maps").read_text()
        assert "grpc" not in maps

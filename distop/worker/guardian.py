"""The guardian: the process between the daemon and the child, which stops the child in time.

It kills every process of the child's Unix session when the deadline has passed, when the daemon is gone (end of
file on the control socket), when it is told to, or when the child itself ended, until none is left; then it exits.
A thread of the child could not do that (it does not run while the GIL is held), nor could the daemon (it may be
frozen). PySpark's Python workers and the JVM leave the child's process group but not its session.

A second process, forked from the first and as small, stands by: should the guardian be killed (the kernel may, where
memory is short), it kills the session in its place, whatever the daemon is doing by then.

It runs as ``python -I -S guardian.py CONTROL DATA DEADLINE -- COMMAND…``: the standard library alone, about 10 MB.
CONTROL is a stream socket to the daemon, DATA a descriptor that the child inherits, DEADLINE in seconds of
CLOCK_BOOTTIME (0: none yet). On CONTROL the daemon writes lines ``D <seconds>`` (a new deadline, 0: none) and
``K <reason>``; the guardian writes ``P <pid>`` when the child runs, ``W <pid>…`` again and again while it waits for
processes that do not die, and ``X <reason> <wait status>`` when all of the session is dead.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

# Not typing.TYPE_CHECKING: importing typing would cost this process memory for nothing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TICK = 0.2
"""Seconds between two looks at the deadline, at most."""

UNKILLABLE = 10.0
"""Seconds of waiting for killed processes between two words about it."""
_EXEC_LOOKS = 50
"""How often the environment of a process is looked at, a millisecond apart, where nothing is shown."""
MARKER = "DISTOP_CHILD"
"""The environment variable that tells the processes of one child from all others."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def boottime() -> float:
    """Seconds of the clock that also counts while the host is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def session_members(sid: int) -> list[int]:
    """The processes of a Unix session that are not dead yet (zombies do nothing any more)."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                stat = file.read()
        except OSError:
            continue
        state, _ppid, _group, session = stat[stat.rindex(b")") + 2 :].split(None, 4)[:4]
        if int(session) == sid and state not in (b"Z", b"X"):
            found.append(int(name))
    return found


def kill_session(
    sid: int,
    reap: "Callable[[], None] | None" = None,
    marker: bytes = b"",
    tell: "Callable[[list[int]], None] | None" = None,
) -> None:
    """Kill all of a session, and return when none of it is left. A process that the kernel keeps, such as in a read of
    a network file system that hangs, dies when that returns: until then ``tell`` is called with those that are left.

    Two empty looks in a row are needed: in one, a process may fork into a number already passed and exit before
    its own is reached. ``marker`` limits it to processes whose environment holds it, for a caller who cannot rule
    out that the number was given to another session meanwhile. ``reap`` is called between the looks.
    """
    pause, empty = 0.001, 0
    said = time.monotonic()
    while empty < 2:
        members = session_members(sid)
        if marker:
            members = [pid for pid in members if marker in environment(pid)]
        empty = 0 if members else empty + 1
        for pid in members:
            # One that became another user's (by sudo, say) cannot be killed by us: it is waited for, and told of.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if reap is not None:
            reap()
        if members and tell is not None and time.monotonic() - said >= UNKILLABLE:
            said = time.monotonic()
            tell(members)
        if members:
            time.sleep(pause)
            pause = min(pause * 2, 0.05)


def command(pid: int) -> str:
    """The name of a process's program, or "" where it is gone."""
    try:
        with open(f"/proc/{pid}/comm") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


def environment(pid: int) -> bytes:
    """What a process was started with, as /proc has it; empty where it is gone. In the middle of an exec, as of
    spark-class when it becomes Java, /proc shows nothing: another look tells.
    """
    try:
        for _ in range(_EXEC_LOOKS):
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
                if found := file.read():
                    return found
            time.sleep(0.001)
    except OSError:
        pass
    return b""


class Guardian:
    """The loop, and what it knows: the child, the deadline, the socket to the daemon."""

    def __init__(self, control: int, deadline: float) -> None:
        self.control = control
        self.deadline = deadline
        self.pid = 0
        self._input = b""
        self._second = 0
        self._alive = -1
        """What the second process reads from: its end tells it that this one is no more."""

    def stand_by(self, connection: int) -> None:
        """Start the second process, before there is anything to kill. It does not hold the child's connection open."""
        reading, self._alive = os.pipe()
        # The guardian has one thread and no library with threads of its own, so fork is safe here.
        self._second = os.fork()
        if self._second:
            os.close(reading)
            return
        try:
            os.close(self._alive)
            os.close(self.control)
            os.close(connection)
            told = b""
            while data := os.read(reading, 64):
                told += data
            session, _, ended = told.partition(b"\n")
            if session and not ended:
                own = os.environ.get(MARKER, "")
                kill_session(int(session), None, f"{MARKER}={own}".encode() if own else b"")
        finally:
            os._exit(0)

    def spawn(self, command: list[str], data: int) -> None:
        """Start the child in a session of its own; it dies with the guardian, should that be killed."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.set_inheritable(self.control, False)
        os.set_inheritable(data, True)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os.execv(command[0], command)
            except BaseException as error:
                os.write(2, f"cannot start {command[0]}: {error}\n".encode())
            os._exit(127)
        os.close(data)
        self.tell_second(f"{self.pid}\n".encode())

    def tell_second(self, words: bytes) -> None:
        # Should it have been killed, this one works on without it.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._alive, words)

    def say(self, line: str) -> None:
        # Should the daemon be gone, there is nobody to tell.
        with contextlib.suppress(OSError):
            os.write(self.control, line.encode() + b"\n")

    def hear(self) -> str:
        """Read what the daemon wrote; the reason to stop now, or "" for none."""
        try:
            data = os.read(self.control, 4096)
        except OSError:
            data = b""
        if not data:
            return "daemon-gone"
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            word, _, rest = line.partition(b" ")
            if word == b"D":
                self.deadline = float(rest)
            elif word == b"K":
                return rest.decode() or "requested"
        return ""

    def watch(self) -> str:
        """Wait until the child must stop or has stopped; the reason, in one word."""
        child = os.pidfd_open(self.pid)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(child, select.POLLIN)
        wait = TICK
        while True:
            ready = [fd for fd, _ in poll.poll(wait * 1000)]
            # Control first: a new deadline that arrived in time counts.
            if self.control in ready and (reason := self.hear()):
                return reason
            wait = TICK
            if self.deadline:
                left = self.deadline - boottime()
                if left <= 0:
                    return "deadline"
                wait = min(TICK, left)
            if child in ready:
                return "exited"
            self.reap_orphans()

    def reap_orphans(self) -> None:
        """Reap what was left to this subreaper, but not the child: while it is a zombie, its number, which is the
        session's, cannot be given to anybody else."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid == self.pid:
                return
            os.waitpid(found.si_pid, os.WNOHANG)

    def finish(self) -> int:
        """Kill the session, reap the child; its wait status."""
        # It may not have reached setsid yet, so that the session would not name it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
        kill_session(self.pid, self.reap_orphans, tell=lambda pids: self.say(" ".join(["W", *map(str, pids)])))
        # All is dead, and the number of the session still taken: the second process must not look for it any more.
        self.tell_second(b"ended")
        os.close(self._alive)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._second, 0)
        return os.waitpid(self.pid, 0)[1]


def main(argv: list[str]) -> None:
    control, data, deadline = int(argv[0]), int(argv[1]), float(argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # Who stops the daemon with these means the daemon; it tells the guardian, or its end does.
        signal.signal(number, signal.SIG_IGN)
    guardian = Guardian(control, deadline)
    guardian.stand_by(data)
    guardian.spawn(argv[argv.index("--") + 1 :], data)
    guardian.say(f"P {guardian.pid}")
    reason = guardian.watch()
    status = guardian.finish()
    guardian.say(f"X {reason} {status}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The guardian: a process between the daemon and the child that kills the child in time.

It kills all processes of the child's Unix session when the deadline has passed, when the daemon is gone (end of
file on the control socket), on the daemon's request, or when the child itself has exited; then it exits. A thread of
the child could not do that (it does not run while the GIL is held), nor could the daemon (it may be frozen). PySpark's
Python workers and the JVM leave the child's process group but not its session.

A standby process, forked from the guardian, kills the session if the guardian itself is killed (by the kernel when
memory is short, for example), independent of the daemon.

It runs as ``python -I -S guardian.py CONTROL DATA DEADLINE -- COMMAND…`` with only the standard library, about 10 MB.
CONTROL is a stream socket to the daemon, DATA a descriptor that the child inherits, DEADLINE in seconds of
CLOCK_BOOTTIME (0: none yet). On CONTROL the daemon writes lines ``D <seconds>`` (a new deadline, 0: none) and
``K <reason>`` (kill); the guardian writes ``P <pid>`` when the child runs, ``W <pid>…`` every few seconds while it
waits for processes that do not die, and ``X <reason> <wait status>`` when all processes of the session are dead.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

# Not typing.TYPE_CHECKING: importing typing would only cost memory.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TICK = 0.2
"""Maximum seconds between two checks of the deadline."""

UNKILLABLE = 10.0
"""Seconds between two reports about killed processes that do not die."""
_EXEC_LOOKS = 50
"""Maximum attempts, a millisecond apart, to read an environment that /proc shows as empty."""
MARKER = "DISTOP_CHILD"
"""The environment variable that identifies the processes of one child."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def boottime() -> float:
    """Seconds of the clock that also counts while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def session_members(sid: int) -> list[int]:
    """The processes of a Unix session, without zombies."""
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
    report: "Callable[[list[int]], None] | None" = None,
) -> None:
    """Kill all processes of a session, and return when none is left.

    A process in a blocking kernel call, such as a read of a hanging network file system, dies when the call returns.
    Until then ``report`` is called with the remaining processes. ``reap`` is called between the scans. ``marker``
    restricts the kills to processes whose environment contains it, since the session's number may have been reused.

    Two empty scans in a row are needed: during one scan, a process may fork into a number that was already scanned, and
    exit before its own number is reached.
    """
    pause, empty = 0.001, 0
    reported = time.monotonic()
    while empty < 2:
        members = session_members(sid)
        if marker:
            members = [pid for pid in members if marker in environment(pid)]
        empty = 0 if members else empty + 1
        for pid in members:
            # A process that changed its user, with sudo for example, cannot be killed: wait for it, and report it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if reap is not None:
            reap()
        if members and report is not None and time.monotonic() - reported >= UNKILLABLE:
            reported = time.monotonic()
            report(members)
        if members:
            time.sleep(pause)
            pause = min(pause * 2, 0.05)


def command(pid: int) -> str:
    """The name of a process's program; "" if the process is gone."""
    try:
        with open(f"/proc/{pid}/comm") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


def environment(pid: int) -> bytes:
    """The initial environment of a process from /proc; empty if the process is gone.

    During an exec, such as spark-class starting Java, /proc shows an empty environment; so it is read again.
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
    """Watches the child, the deadline and the control socket."""

    def __init__(self, control: int, deadline: float) -> None:
        self.control = control
        self.deadline = deadline
        self.pid = 0
        self._input = b""
        self._standby = 0
        self._alive = -1
        """The pipe to the standby process: its end of file means that this process has ended."""

    def start_standby(self, connection: int) -> None:
        """Start the standby process, before the child. It does not hold the child's connection open."""
        reading, self._alive = os.pipe()
        # The guardian has one thread and no library that starts threads, so fork is safe here.
        self._standby = os.fork()
        if self._standby:
            os.close(reading)
            return
        try:
            os.close(self._alive)
            os.close(self.control)
            os.close(connection)
            received = b""
            while data := os.read(reading, 64):
                received += data
            session, _, ended = received.partition(b"\n")
            if session and not ended:
                own = os.environ.get(MARKER, "")
                kill_session(int(session), None, f"{MARKER}={own}".encode() if own else b"")
        finally:
            os._exit(0)

    def spawn(self, command: list[str], data: int) -> None:
        """Start the child in a new session; it dies if the guardian is killed."""
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
        self.write_to_standby(f"{self.pid}\n".encode())

    def write_to_standby(self, data: bytes) -> None:
        # The guardian works without the standby process, if that was killed.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._alive, data)

    def send(self, line: str) -> None:
        # An error means that the daemon is gone, which the guardian detects elsewhere.
        with contextlib.suppress(OSError):
            os.write(self.control, line.encode() + b"\n")

    def receive(self) -> str:
        """Read the daemon's lines. Returns the reason to kill the child now, "" for none."""
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
        """Wait until the child must stop or has exited. Returns the reason, one word."""
        child = os.pidfd_open(self.pid)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(child, select.POLLIN)
        wait = TICK
        while True:
            ready = [fd for fd, _ in poll.poll(wait * 1000)]
            # Read the control socket first: a new deadline that arrived in time counts.
            if self.control in ready and (reason := self.receive()):
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
        """Reap orphans of the session, but not the child.

        While the child is a zombie, its process id, which is the session's id, is not reused.
        """
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid == self.pid:
                return
            os.waitpid(found.si_pid, os.WNOHANG)

    def finish(self) -> int:
        """Kill the session and reap the child; returns its wait status."""
        # The child may not have called setsid yet, and would then not be in the session.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
        kill_session(self.pid, self.reap_orphans, report=lambda pids: self.send(" ".join(["W", *map(str, pids)])))
        # The session is dead, and its id is not reused yet: the standby process must not kill it later.
        self.write_to_standby(b"ended")
        os.close(self._alive)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._standby, 0)
        return os.waitpid(self.pid, 0)[1]


def main(argv: list[str]) -> None:
    control, data, deadline = int(argv[0]), int(argv[1]), float(argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # These signals are for the daemon, which stops the guardian or closes the control socket.
        signal.signal(number, signal.SIG_IGN)
    guardian = Guardian(control, deadline)
    guardian.start_standby(data)
    guardian.spawn(argv[argv.index("--") + 1 :], data)
    guardian.send(f"P {guardian.pid}")
    reason = guardian.watch()
    status = guardian.finish()
    guardian.send(f"X {reason} {status}")


if __name__ == "__main__":
    main(sys.argv[1:])

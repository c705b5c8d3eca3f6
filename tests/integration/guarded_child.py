"""A stand-in for the daemon: it starts a guardian over a test's child process, and tests stop and kill it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from distop.worker import guardian


def main() -> None:
    """``guarded_child.py DEADLINE CODE``: print the guardian's first line (``P <pid>``), then pass on stdin."""
    control, guardian_end = socket.socketpair()
    mine, data = socket.socketpair()
    command = [
        *(sys.executable, "-I", "-S", guardian.__file__, str(guardian_end.fileno()), str(data.fileno()), sys.argv[1]),
        *("--", sys.executable, "-c", sys.argv[2]),
    ]
    process = subprocess.Popen(command, pass_fds=(guardian_end.fileno(), data.fileno()), start_new_session=True)
    guardian_end.close()
    data.close()
    line = control.recv(100).decode().strip()
    print(process.pid, line, flush=True)
    while line := sys.stdin.readline():
        control.sendall(line.encode())
        print("sent", flush=True)
    os.set_blocking(mine.fileno(), True)
    process.wait()
    print(control.recv(100).decode().strip(), flush=True)


if __name__ == "__main__":
    main()

"""Command lines in processes of their own, forked from one that has imported distop already: a daemon is ready after a
quarter of the processor time that it takes otherwise. What is new in them is what a process has that was just started:
no threads, no connections, its own session, environment, arguments and output. What is not: ``/proc`` shows the
environment and the words of the process that it was forked from, and what acts when Python starts or a module is loaded
(``PYTHON…`` variables, say) has acted there. Where that matters, and in scripts, a program is started as ever
(``Daemon(…, forked=False)``).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.process import BaseProcess
    from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "distop.cli.commands",
        "distop.cli.interrupts",
        "distop.cli.main",
        "distop.client.async_client",
        "distop.settings",
        "distop.daemon.hardening",
        "distop.daemon.process",
        "grpc.aio",
        "jsonschema",
    ]
)


class Forked:
    """``distop WORDS…``, with what a test needs of :class:`subprocess.Popen`. What it prints is appended to ``log``;
    where there are ``errors``, what it prints as such is appended to that.
    """

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str], errors: Path | None = None) -> None:
        self.args = ["distop", *words]
        outputs = [str(log), str(errors or log)]
        log.touch()
        self._process: BaseProcess = _SERVER.Process(target=_run, args=(self.args, outputs, dict(env)), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        # Whoever ends waits for its processes, one that a test has left frozen among them.
        atexit.register(self.kill)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(argv: list[str], outputs: list[str], env: dict[str, str]) -> None:
    os.setsid()
    for stream, path in enumerate(outputs, 1):
        output = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, stream)
        os.close(output)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    from distop.cli.main import main

    main()

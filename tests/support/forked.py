"""Runs command lines in processes that are forked from one with distop already imported.

A daemon then needs a quarter of the processor time until it is ready. The process has no threads or connections, and
has its own session, environment, arguments and output. Two differences from a new program: ``/proc`` shows the
environment and arguments of the process that it was forked from, and settings that act when Python starts or a module
is imported (such as ``PYTHON…`` variables) have no effect. If these matter, use ``Daemon(…, forked=False)``.
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
    """A process of ``distop ARGV…`` with part of the interface of :class:`subprocess.Popen`.

    Its output is appended to ``log``; its errors to ``errors`` if given.
    """

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str], errors: Path | None = None) -> None:
        self.args = ["distop", *argv]
        outputs = [str(log), str(errors or log)]
        log.touch()
        self._process: BaseProcess = _SERVER.Process(target=_run, args=(self.args, outputs, dict(env)), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        # At its exit Python waits for child processes, also for frozen ones.
        atexit.register(self.kill)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code. Raises TimeoutExpired."""
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

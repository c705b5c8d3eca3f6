"""``distop dev``: runs a private etcd, one executor and a service, which start and stop together."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from distop.behavior_source import BehaviorSource
from distop.cli import output
from distop.cli.command_context import current
from distop.cli.main import NONE
from distop.daemon.process import ending_signals, locked
from distop.errors import DistopError, InvalidArgument, NotAllowed, UnsafePath
from distop.runtime import secret_settings
from distop.storage.files import open_fixed
from distop.storage.folder_ownership import make_own
from distop.store.embedded import EmbeddedEtcd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_USUAL_PORT = 2379
_PAGE_PORT = 7782
_STOP_LIMIT = 30.0
"""Seconds for the executor to release its claims and end."""
_FORMER_SECONDS = 30.0

# The executor ends with this process even if it is killed: its etcd ends, too, and it would wait for etcd for ever.
_CHILD = """
import ctypes, json, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
behaviors = json.loads(sys.argv[2])
sys.argv[:3] = ["distop"]
from distop.cli.main import main
main(behaviors)
"""


def behaviors_of(named: Sequence[str]) -> dict[str, str]:
    """The behaviors of ``--behavior``: type → place of its class (``distop.behavior_source``).

    Each is loaded in a process of its own, as the executor's child does; nothing is imported here. Raises
    InvalidArgument if one cannot be loaded, or two have the same type.
    """
    found: dict[str, str] = {}
    for text in named:
        place = str(BehaviorSource.parse(text))
        command = [sys.executable, "-P", "-m", "distop.behavior_source", text]
        # -P only: packages installed for this user count, modules of the current folder do not.
        loading = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=secret_settings.environment(os.environ),
            check=False,
        )
        try:
            declared = json.loads(loading.stdout)
        except ValueError:
            declared = {"error": f"--behavior {text} cannot be loaded: Python exited with code {loading.returncode}"}
        if "error" in declared:
            raise InvalidArgument(declared["error"])
        if (other := found.setdefault(declared["type"], place)) != place:
            raise InvalidArgument(f"--behavior {other} and {place} have the same type {declared['type']}: rename one")
    return found


class Dev:
    """Runs etcd, an executor and a service until etcd or the executor ends, or a signal comes.

    ``folder``: for the data. ``port``: etcd's; None: 2379, or a free one. ``behaviors``: see :func:`behaviors_of`.
    ``page``: the host and port of the service's page; None: 127.0.0.1:7782, or a free port.
    """

    def __init__(
        self,
        folder: Path,
        port: int | None,
        executor_options: Sequence[str],
        global_options: Sequence[str],
        behaviors: Mapping[str, str] = NONE,
        page: tuple[str, int] | None = None,
    ) -> None:
        self._folder = folder.absolute()
        self._work_dir = self._folder / "executor"
        self._port = port
        self._behaviors = behaviors
        self._options = [*executor_options, *global_options]
        self._globals = global_options
        self._page = page
        self._stopping = threading.Event()

    def run(self) -> int:
        """Run until a signal ends both; returns the exit code.

        Raises DistopError if etcd or the executor ends by itself, or if the port or the folder cannot be used.
        """
        with self._locked():
            port = self._choose_port()
            for signum in ending_signals():
                signal.signal(signum, lambda *_: self._stopping.set())
            self._await_former()
            with EmbeddedEtcd(self._folder / "etcd", port=port) as etcd:
                return self._with_executor(etcd)

    def _with_executor(self, etcd: EmbeddedEtcd) -> int:
        if self._stopping.is_set():
            return 0
        command = [
            *child_command(os.getpid(), self._behaviors),
            *("executor", "--id", "dev", "--work-dir", str(self._work_dir), *self._options),
            f"--etcd={etcd.endpoint}",
        ]
        # A session of its own: Ctrl-C reaches only this process, which then stops the executor in order.
        host, page_port = self._page or ("127.0.0.1", _PAGE_PORT if _free(_PAGE_PORT) else _any_free())
        service_command = [
            *child_command(os.getpid()),
            *("serve", "--listen=127.0.0.1:0", f"--http={host}:{page_port}", *self._globals),
            f"--etcd={etcd.endpoint}",
        ]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        service = subprocess.Popen(service_command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            for type_name, place in self._behaviors.items():
                output.note(f"serving {type_name} from {place}; restart `distop dev` to load a changed file")
            self._greet(etcd, f"http://{host}:{page_port}/")
            served = True
            while not self._stopping.wait(0.2):
                if served and service.poll() is not None:
                    served = False
                    output.note(f"the page is not served: the service ended (exit code {service.returncode})")
                if child.poll() is not None:
                    raise DistopError(f"the executor ended unexpectedly (exit code {child.returncode}): see its log")
                if not etcd.running:
                    raise DistopError(f"etcd ended unexpectedly: see {etcd.log_file}")
            output.note("stopping")
            return 0
        finally:
            _stop(service)
            _stop(child)

    @staticmethod
    def _greet(etcd: EmbeddedEtcd, page: str) -> None:
        if current.json:
            output.write_json({"etcd": etcd.endpoint, "folder": str(etcd.folder.parent), "page": page})
            return
        output.say(f"export DISTOP_ETCD={etcd.endpoint}")
        output.note("run that line in other shells. Ctrl-C stops etcd and the executor; the data is kept")
        output.note(f"the page is at {page}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            make_own(self._folder, "--data-dir")
            lock = open_fixed(self._folder / "lock", os.O_RDWR | os.O_CREAT)
        except (OSError, UnsafePath) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidArgument(f"the folder {self._folder} cannot be used: {why}") from None
        with os.fdopen(lock, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise NotAllowed(
                    f"another `distop dev` uses {self._folder}: stop it, or name another folder with --data-dir"
                ) from None
            yield

    def _await_former(self) -> None:
        """Wait for the executor of a killed `distop dev`, which ends at the latest with its session."""
        deadline, noted = time.monotonic() + _FORMER_SECONDS, False
        while time.monotonic() < deadline:
            try:
                with locked(self._work_dir):
                    return
            except NotAllowed:
                if not noted:
                    output.note("waiting for the executor of a killed `distop dev` to end")
                noted = True
            if self._stopping.wait(0.1):
                return

    def _choose_port(self) -> int | None:
        if self._port is None:
            return _USUAL_PORT if _free(_USUAL_PORT) else None
        if not _free(self._port):
            raise InvalidArgument(f"the port {self._port} is in use: choose another one with --port, or leave it out")
        return self._port


def child_command(parent: int, behaviors: Mapping[str, str] = NONE) -> list[str]:
    """A command line that runs ``distop`` with these behaviors; the caller appends the arguments of ``distop``.

    The process ends with the process ``parent``.
    """
    # -P: modules of the current folder are not imported
    return [sys.executable, "-P", "-c", _CHILD, str(parent), json.dumps(dict(behaviors))]


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _any_free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_STOP_LIMIT)
        except subprocess.TimeoutExpired:
            child.kill()
    child.wait()

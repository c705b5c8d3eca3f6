"""The daemon's handle on one child and its guardian: start, messages, kill, and the confirmed death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distop.errors import describe
from distop.protocol.behavior_declaration import Declaration
from distop.runtime import secret_settings
from distop.storage import storage_options
from distop.worker import child_messages, guardian, spark_settings
from distop.worker.daemon_side import child_logs, oom_kills
from distop.worker.daemon_side.requests import Death, WorkerError, no_history

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.runtime.logs import Log
    from distop.worker.daemon_side.requests import FindHistory, WorkerConfig


REPLACED_AFTER = 300.0
"""Seconds for which a stuck child is kept for its other jobs and calls, which may never end.

Until it is replaced, its executor takes no work.
"""

FROZEN_AFTER = 30.0
"""Time-out in seconds for a child's answer to a ping. After two time-outs the child is killed.

Some call in it blocks all its threads, so neither a cancel nor a time limit reaches its jobs.
"""


class Sink(Protocol):
    """Receives the frames of one run or call."""

    def on_frame(self, message: dict[str, Any]) -> None: ...


class ChildProcess:
    """A running child. ``died`` is done when all its processes are dead."""

    def __init__(self, config: WorkerConfig, log: Log) -> None:
        self._config = config
        self._log = log
        self._path = Path()
        self._marker = uuid.uuid4().hex
        self._unparsed = b""
        self._sid = 0
        self._reason = ""
        self._killing = ""
        self._status = 0
        self._oom_kills: oom_kills.OomKills | None = None
        """The kernel's counter of OOM kills before the start."""
        self.declarations: tuple[Declaration, ...] = ()
        self.skipped: dict[str, str] = {}
        """Installed behaviors that cannot be loaded, with the reasons."""
        self.runs: dict[int, Sink] = {}
        self.calls: dict[int, Sink] = {}
        loop = asyncio.get_running_loop()
        self.died: asyncio.Future[Death] = loop.create_future()
        self._hello: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.trouble = ""
        """The current problem of its Spark session, "" for none."""
        self.on_trouble: Callable[[], None] = _nothing
        """Called when ``trouble`` has changed."""
        self.find_history: FindHistory = no_history
        self._answering: set[asyncio.Task[None]] = set()
        self.hung_up = False
        """Its connection has ended: the child has exited or will, but some of its processes may still live."""
        self.stuck = ""
        """The work in it that does not stop, "" for none.

        A stuck child takes no new jobs, and is replaced when its other jobs have ended, or after
        :data:`REPLACED_AFTER`.
        """
        self._replacing: asyncio.TimerHandle | None = None
        self._pong: asyncio.Future[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._control: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    async def start(self, deadline: float) -> None:
        """Start the child, and wait for its hello. Raises WorkerError with the end of its log."""
        self._oom_kills = oom_kills.read_oom_kills()
        try:
            process, data = await self._spawn(deadline)
        except BaseException as error:
            # If the guardian runs, it handles the end of its control socket like the end of the daemon.
            if self._control is not None:
                self._control.close()
                self._control = None
            self.died.set_result(Death("stopped", f"it was not started: {error}"))
            if isinstance(error, OSError):
                raise WorkerError("transient", f"cannot start the guardian process: {error}") from error
            raise
        assert self._control is not None
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._read_control)
        reader, self._writer = await asyncio.open_unix_connection(sock=data)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._reap(process))]
        self.send(_config_message(self._config))
        hello = await self._wait_for_hello()
        self._watching = asyncio.create_task(self._ping_regularly())
        try:
            self.skipped = hello["skipped"]
            self.declarations = tuple(Declaration.decode(text.encode()) for text in hello["declarations"])
        except Exception as error:
            self.kill("protocol-error")
            raise WorkerError("crash", f"cannot read the worker process's hello: {describe(error)}") from error

    async def _wait_for_hello(self) -> dict[str, Any]:
        """The child's hello. Raises WorkerError if the child dies, or does not send it in time and is killed."""
        limit = self._config.start_timeout
        try:
            either: set[asyncio.Future[Any]] = {self._hello, self.died}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not self._hello.done():
                self.kill("slow-start")
                death = await asyncio.shield(self.died)
                why = death.with_log()  # the log has no lines of other tables: no job has run in it
                if death.reason == "slow-start":
                    why = f"no hello within {limit:g} s; the end of its log:\n{death.tail}"
                raise WorkerError("crash", f"cannot start the worker process: {why}")
        except asyncio.CancelledError:
            self.kill("stopped")
            raise
        return self._hello.result()

    async def _spawn(self, deadline: float) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Start the guardian; returns its process and our end of the child's connection. Raises OSError."""
        config = self._config
        self._path = child_logs.new_log(config.work_dir)
        self._control, control = socket.socketpair()
        with control, child_logs.open_for_append(self._path) as log_file:
            data, theirs = socket.socketpair()
            with theirs:
                command = [
                    *(config.python, "-I", "-S", guardian.__file__, str(control.fileno()), str(theirs.fileno())),
                    *(
                        str(deadline),
                        "--",
                        config.python,
                        "-P",
                        "-m",
                        "distop.worker.child_side.child",
                        str(theirs.fileno()),
                    ),
                ]
                added = {**config.env, guardian.MARKER: self._marker, "PYTHONUNBUFFERED": "1"}
                # Spark starts Python workers with -m, which would otherwise import modules of the current folder.
                added["PYTHONSAFEPATH"] = "1"
                try:
                    process = await asyncio.create_subprocess_exec(
                        *command,
                        stdin=subprocess.DEVNULL,
                        stdout=log_file,
                        stderr=log_file,
                        env=secret_settings.environment({**os.environ, **added}),
                        pass_fds=(control.fileno(), theirs.fileno()),
                        start_new_session=True,
                    )
                except BaseException:
                    data.close()
                    raise
                return process, data

    @property
    def sid(self) -> int:
        """The Unix session of the child; 0 before its guardian has reported it."""
        return self._sid

    def send(self, message: child_messages.ToChild) -> None:
        """Send a message; it is dropped if the child is dying (``died`` is done then)."""
        self.send_frame(child_messages.encode(message))

    def send_frame(self, frame: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    def set_deadline(self, boottime: float) -> None:
        """Send a new deadline to the guardian, which kills the child then, and to the child, which starts no job then.

        Each run has the deadline of its time, so a child that is not connected yet misses nothing.
        """
        self._send_control(f"D {boottime!r}")
        self.send(child_messages.DeadlineMessage(t="deadline", boottime=boottime))

    def kill(self, reason: str) -> None:
        """Let the guardian kill all processes of the session. The first reason counts."""
        if not self._killing:
            self._killing = reason
            self._send_control(f"K {reason}")

    def _mark_stuck(self, why: str) -> None:
        if not self.stuck:
            message = "Not starting new jobs in the worker process, and replacing it when its other jobs end: %s"
            self._log.warning(message, why)
            self.stuck = why
            self._replacing = asyncio.get_running_loop().call_later(REPLACED_AFTER, self._replace)
        self.kill_if_stuck()

    def kill_if_stuck(self) -> None:
        """Kill a stuck child if it has no other runs and calls."""
        if self.stuck and not self.runs and not self.calls:
            self.kill("replaced")

    def _replace(self) -> None:
        """Kill a stuck child with its other runs and calls, which run again in the next child."""
        count = len(self.runs) + len(self.calls)
        others = "1 other run or call" if count == 1 else f"{count} other runs and calls"
        message = "Replacing the worker process: %s; repeating %s in the next one, not ended within %g s"
        self._log.warning(message, self.stuck, others, REPLACED_AFTER)
        self.kill("replaced")

    async def _ping_regularly(self) -> None:
        while not self.died.done():
            await asyncio.sleep(FROZEN_AFTER)
            # Two pings: if the daemon itself was frozen, the time of the first one is up.
            if await self._ping(FROZEN_AFTER) or await self._ping(FROZEN_AFTER):
                continue
            if not self._killing and not self.hung_up:
                message = "Killing and replacing the worker process: it did not answer for %g s"
                self._log.warning(message, 2 * FROZEN_AFTER)
                self.kill("frozen")
            return

    async def _ping(self, limit: float) -> bool:
        """Whether the child answers a ping within ``limit`` seconds."""
        if self._pong is None or self._pong.done():
            self._pong = asyncio.get_running_loop().create_future()
            self.send(child_messages.PingMessage(t="ping"))
        pong = self._pong
        either: set[asyncio.Future[Any]] = {pong, self.died}
        await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        return pong.done() or self.died.done()

    def _send_control(self, line: str) -> None:
        if self._control is not None:
            # An error means that the guardian is gone, which `_reap` handles, or does not read, so its deadline passes.
            with contextlib.suppress(OSError):
                self._control.send(line.encode() + b"\n")

    def _read_control(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            return
        *lines, self._unparsed = (self._unparsed + data).split(b"\n")
        for line in lines:
            words = line.decode().split()
            if words[0] == "P":
                self._sid = int(words[1])
            elif words[0] == "W":
                self._log_unkillable([int(word) for word in words[1:]])
            elif words[0] == "X":
                self._reason, self._status = words[1], int(words[2])

    def _log_unkillable(self, pids: list[int]) -> None:
        """Log killed processes that do not die: no job runs before they are dead."""
        self._log.error(
            "Waiting for killed processes that do not die, possibly because a network file system hangs; no job "
            "starts on this node until then: %s",
            ", ".join(f"{pid} ({guardian.command(pid)})" for pid in pids),
        )

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = child_messages.Decoder()
        try:
            while data := await reader.read(256 * 1024):
                for message in decoder.feed(data):
                    self._dispatch(message)
        except OSError:
            pass  # like the end of the connection
        except Exception:
            self._log.exception("Replacing the worker process: it sent an invalid message")
            self.kill("protocol-error")
        self.hung_up = True

    def _dispatch(self, message: dict[str, Any]) -> None:
        if message["t"] == "hello":
            if not self._hello.done():
                self._hello.set_result(message)
            return
        if message["t"] == "history":
            task = asyncio.ensure_future(self._send_history(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        if message["t"] == "stuck":
            self._mark_stuck(message["why"])
            return
        if message["t"] == "pong":
            if self._pong is not None and not self._pong.done():
                self._pong.set_result(None)
            return
        if message["t"] == "spark":
            self.trouble = message["trouble"]
            self.on_trouble()
            return
        sinks, number = (self.runs, message["run"]) if "run" in message else (self.calls, message["call"])
        if (sink := sinks.get(number)) is not None:
            sink.on_frame(message)

    async def _send_history(self, message: dict[str, Any]) -> None:
        seq = message["seq"]
        try:
            self.send(child_messages.ReplyMessage(t="reply", seq=seq, value=await self.find_history(message["op"])))
        except Exception as error:
            text = f"cannot read the history record of {message['op']!r}: {describe(error)}"
            self.send(child_messages.ReplyMessage(t="reply", seq=seq, value=None, error=text))

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            # The event loop ends, so the child's death cannot be observed. The guardian handles the end of its control
            # socket like the end of the daemon, and kills the child.
            self._close()
            if not self.died.done():
                self.died.set_result(Death("daemon-gone", runs=tuple(self.runs), calls=tuple(self.calls)))
            raise
        # The last frames and the guardian's last line may not have been read yet.
        self._read_rest_of_control()
        await asyncio.wait(self._tasks[:1], timeout=5)
        reason, detail = self._reason, ""
        if not reason:
            reason = "guardian-died"
            detail = f"its guardian ended with code {code}"
            if self._sid:
                marker = f"{guardian.MARKER}={self._marker}".encode()
                await asyncio.to_thread(guardian.kill_session, self._sid, None, marker, self._log_unkillable)
        elif reason == "exited":
            code = os.waitstatus_to_exitcode(self._status)
            reason = _REASONS.get(code, reason)
            detail = self.trouble if code in _REASONS and self.trouble else _status_text(code)
        if killed := oom_kills.describe(self._oom_kills, oom_kills.read_oom_kills()):
            detail = f"{detail}; {killed}" if detail else killed
        if self._killing and reason in ("exited", "guardian-died"):
            # We were killing it; the final cause of its death does not matter.
            reason = self._killing
        if reason == "frozen":
            detail = f"it did not answer for {2 * FROZEN_AFTER:g} s"
        self._close()
        with contextlib.suppress(OSError):
            spark_settings.remove(self._config.work_dir)
        if not self.died.done():
            runs, calls = tuple(self.runs), tuple(self.calls)
            self.died.set_result(Death(reason, detail, child_logs.tail(self._path), runs, calls))

    def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._replacing is not None:
            self._replacing.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None

    def _read_rest_of_control(self) -> None:
        while self._control is not None and not self._reason:
            try:
                data = self._control.recv(4096, socket.MSG_PEEK)
            except OSError:
                return
            if not data:
                return
            self._read_control()

    def truncate_log(self) -> None:
        child_logs.truncate_if_large(self._path)


_REASONS = {child_messages.EXIT_SPARK_START: "no-spark", child_messages.EXIT_SPARK_STALLED: "spark-stalled"}
"""Exit code of the child → reason of its death."""


def _config_message(config: WorkerConfig) -> child_messages.ConfigMessage:
    return child_messages.ConfigMessage(
        t="config",
        work_dir=str(config.work_dir),
        shared_dir=config.shared_dir,
        storage=storage_options.as_given(config.storage),
        space=config.space,
        spark_master=config.spark_master,
        spark_conf=dict(config.spark_conf),
        ttl=config.ttl,
        executor=config.executor,
        log_level=config.log_level,
        verifier_urls=list(config.verifier_urls),
        trusted_spark_catalogs=list(config.trusted_spark_catalogs),
        export_to=list(config.export_to),
        serves=config.serves.to_json(),
        behaviors=dict(config.behaviors),
        environment=secret_settings.of_catalogs({**os.environ, **config.env}),
    )


def _nothing() -> None:
    """The default of ``on_trouble``."""


def _status_text(code: int) -> str:
    if code == child_messages.EXIT_SPARK_DIED:
        return "its JVM died, hung or ran out of memory, or its Spark session became unusable"
    if code == child_messages.EXIT_SPARK_START:
        return "its Spark session did not start"
    if code == child_messages.EXIT_SPARK_STALLED:
        return "its Spark session completed no tasks"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

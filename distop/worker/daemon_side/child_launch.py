"""One guardian with its child, as the daemon sees them: started, spoken to, and dead for certain."""

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
from distop.worker import child_messages, guardian, spark_settings
from distop.worker.daemon_side import child_logs, oom_kills
from distop.worker.daemon_side.requests import Death, WorkerError, no_history

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.runtime.logs import Log
    from distop.worker.daemon_side.requests import FindHistory, WorkerConfig


REPLACED_AFTER = 300.0
"""Seconds that a child in which something is stuck is kept for its other jobs and calls: until it is replaced, its
executor takes no work, and those others may have no end of their own."""

FROZEN_AFTER = 30.0
"""Seconds for an answer of a child. One that gives none twice is killed: some call lets no other thread of it run, so
that neither a cancel nor a time limit reaches any job in it.
"""


class Sink(Protocol):
    """What takes the frames of one run or call."""

    def on_frame(self, message: dict[str, Any]) -> None: ...


class Child:
    """A running child. ``died`` is set once all of its processes are dead."""

    def __init__(self, config: WorkerConfig, log: Log) -> None:
        self._config = config
        self._log = log
        self._path = Path()
        self._marker = uuid.uuid4().hex
        self._said = b""
        self._sid = 0
        self._reason = ""
        self._killing = ""
        self._status = 0
        self._oom_kills: oom_kills.OomKills | None = None
        """The kernel's counter before the start."""
        self.declarations: tuple[Declaration, ...] = ()
        self.skipped: dict[str, str] = {}
        """Installed behaviors that cannot be loaded, and why."""
        self.runs: dict[int, Sink] = {}
        self.calls: dict[int, Sink] = {}
        loop = asyncio.get_running_loop()
        self.died: asyncio.Future[Death] = loop.create_future()
        self._hello: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.trouble = ""
        """What is wrong with its Spark session now."""
        self.on_trouble: Callable[[], None] = _nothing
        """Called when ``trouble`` has changed."""
        self.find_history: FindHistory = no_history
        self._asked: set[asyncio.Task[None]] = set()
        self.hung_up = False
        """It says nothing any more: it has ended, or is about to, though not all of its processes are dead yet."""
        self.stuck = ""
        """What does not stop in it: it takes no new jobs, and is replaced once those that it has have ended, or after
        :data:`REPLACED_AFTER`."""
        self._replacing: asyncio.TimerHandle | None = None
        self._pong: asyncio.Future[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._control: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    async def start(self, deadline: float) -> None:
        """Spawn, and wait for hello. Raises WorkerError (with the end of the log) where none comes."""
        config = self._config
        self._oom_kills = oom_kills.read_oom_kills()
        try:
            process, data = await self._spawn(deadline)
        except BaseException as error:
            # The guardian, should it have been started, takes the end of its control socket as the daemon's.
            if self._control is not None:
                self._control.close()
                self._control = None
            self.died.set_result(Death("stopped", f"it was not started: {error}"))
            if isinstance(error, OSError):
                raise WorkerError("transient", f"the guardian cannot be started: {error}") from error
            raise
        assert self._control is not None
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._hear)
        reader, self._writer = await asyncio.open_unix_connection(sock=data)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._reap(process))]
        self.send(
            child_messages.ConfigMessage(
                t="config",
                work_dir=str(config.work_dir),
                shared_dir=config.shared_dir,
                space=config.space,
                spark_master=config.spark_master,
                spark_conf=dict(config.spark_conf),
                ttl=config.ttl,
                executor=config.executor,
                log_level=config.log_level,
                verifier_urls=list(config.verifier_urls),
                trusted_spark_catalogs=list(config.trusted_spark_catalogs),
                serves=config.serves.to_json(),
                behaviors=dict(config.behaviors),
                environment=secret_settings.of_catalogs({**os.environ, **config.env}),
            )
        )
        try:
            either: set[asyncio.Future[Any]] = {self._hello, self.died}
            await asyncio.wait(either, timeout=config.start_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not self._hello.done():
                self.kill("slow-start")
                death = await asyncio.shield(self.died)
                what = death.with_log()  # nothing else has run in it
                if death.reason == "slow-start":
                    what = f"no hello within {config.start_timeout:g} s; the end of its log:\n{death.tail}"
                raise WorkerError("crash", f"the worker process cannot be started: {what}")
        except asyncio.CancelledError:
            self.kill("stopped")
            raise
        self._watching = asyncio.create_task(self._watch())
        hello = self._hello.result()
        try:
            self.skipped = hello["skipped"]
            self.declarations = tuple(Declaration.decode(text.encode()) for text in hello["declarations"])
        except Exception as error:
            self.kill("protocol-error")
            raise WorkerError("crash", f"what the worker process offers cannot be read: {describe(error)}") from error

    async def _spawn(self, deadline: float) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """The guardian's process, and our end of the child's connection. Raises OSError."""
        config = self._config
        self._path = child_logs.new_log(config.work_dir)
        self._control, control = socket.socketpair()
        with control, child_logs.appended(self._path) as log_file:
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
                # Spark starts Python workers with -m, which alone would import modules of the current folder.
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
        """The Unix session of the child; 0 before its guardian has told it."""
        return self._sid

    def send(self, message: child_messages.ToChild) -> None:
        """Send a message; silently dropped once the child is dying (``died`` tells)."""
        self.send_frame(child_messages.encode(message))

    def send_frame(self, frame: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    def set_deadline(self, boottime: float) -> None:
        """Tell the guardian, which kills by it, and the child, which starts no job after it (each run brings the
        deadline of its time, so that nothing is missed by what is not yet connected)."""
        self._tell(f"D {boottime!r}")
        self.send(child_messages.DeadlineMessage(t="deadline", boottime=boottime))

    def kill(self, reason: str) -> None:
        """Have the guardian kill all of the session. The first reason counts."""
        if not self._killing:
            self._killing = reason
            self._tell(f"K {reason}")

    def _retire(self, why: str) -> None:
        if not self.stuck:
            self._log.warning("%s: the worker process takes no new jobs, and is replaced when the others end", why)
            self.stuck = why
            self._replacing = asyncio.get_running_loop().call_later(REPLACED_AFTER, self._replace)
        self.end_if_stuck()

    def end_if_stuck(self) -> None:
        """Kill it where something is stuck in it, and nothing else goes on there."""
        if self.stuck and not self.runs and not self.calls:
            self.kill("replaced")

    def _replace(self) -> None:
        """Kill it with what still goes on there, which runs again in the next child."""
        said = "%s: the worker process is replaced now, as %d other runs and calls go on after %g s; they run again"
        self._log.warning(said, self.stuck, len(self.runs) + len(self.calls), REPLACED_AFTER)
        self.kill("replaced")

    async def _watch(self) -> None:
        while not self.died.done():
            await asyncio.sleep(FROZEN_AFTER)
            # Asked twice: a daemon that stood still itself finds the time of the first question over.
            if await self._answers(FROZEN_AFTER) or await self._answers(FROZEN_AFTER):
                continue
            if not self._killing and not self.hung_up:
                said = "The worker process did not answer for %g s: it is killed and replaced"
                self._log.warning(said, 2 * FROZEN_AFTER)
                self.kill("frozen")
            return

    async def _answers(self, limit: float) -> bool:
        """Whether it answers within ``limit`` seconds."""
        if self._pong is None or self._pong.done():
            self._pong = asyncio.get_running_loop().create_future()
            self.send(child_messages.PingMessage(t="ping"))
        pong = self._pong
        either: set[asyncio.Future[Any]] = {pong, self.died}
        await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        return pong.done() or self.died.done()

    def _tell(self, line: str) -> None:
        if self._control is not None:
            # Should the guardian be gone, `died` tells; should it read nothing, its deadline passes.
            with contextlib.suppress(OSError):
                self._control.send(line.encode() + b"\n")

    def _hear(self) -> None:
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
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            words = line.decode().split()
            if words[0] == "P":
                self._sid = int(words[1])
            elif words[0] == "W":
                self._tell_unkillable([int(word) for word in words[1:]])
            elif words[0] == "X":
                self._reason, self._status = words[1], int(words[2])

    def _tell_unkillable(self, pids: list[int]) -> None:
        """Nothing goes on before they are dead: a person has to know why."""
        self._log.error(
            "these processes were killed and do not die: %s; nothing is run here until what they wait for returns, "
            "such as a network file system that hangs",
            ", ".join(f"{pid} ({guardian.command(pid)})" for pid in pids),
        )

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = child_messages.Decoder()
        try:
            while data := await reader.read(256 * 1024):
                for message in decoder.feed(data):
                    self._dispatch(message)
        except OSError:
            pass  # the same as its end
        except Exception:
            self._log.exception("the worker process sent what cannot be understood; it is replaced")
            self.kill("protocol-error")
        self.hung_up = True

    def _dispatch(self, message: dict[str, Any]) -> None:
        if message["t"] == "hello":
            if not self._hello.done():
                self._hello.set_result(message)
            return
        if message["t"] == "history":
            task = asyncio.ensure_future(self._tell_history(message))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
            return
        if message["t"] == "stuck":
            self._retire(message["why"])
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

    async def _tell_history(self, message: dict[str, Any]) -> None:
        seq = message["seq"]
        try:
            self.send(child_messages.ReplyMessage(t="reply", seq=seq, value=await self.find_history(message["op"])))
        except Exception as error:
            text = f"the history record of {message['op']!r} could not be read: {describe(error)}"
            self.send(child_messages.ReplyMessage(t="reply", seq=seq, value=None, error=text))

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            # The loop is ending: nobody could see the child dead any more. The guardian takes the end of its control
            # socket as the daemon's, and kills it all.
            self._close()
            if not self.died.done():
                self.died.set_result(Death("daemon-gone", runs=tuple(self.runs), calls=tuple(self.calls)))
            raise
        # Frames and the guardian's last words may still be on their way to this loop.
        self._hear_rest()
        await asyncio.wait(self._tasks[:1], timeout=5)
        reason, detail = self._reason, ""
        if not reason:
            reason = "guardian-died"
            detail = f"its guardian ended with code {code}"
            if self._sid:
                marker = f"{guardian.MARKER}={self._marker}".encode()
                await asyncio.to_thread(guardian.kill_session, self._sid, None, marker, self._tell_unkillable)
        elif reason == "exited":
            code = os.waitstatus_to_exitcode(self._status)
            reason = _REASONS.get(code, reason)
            detail = self.trouble if code in _REASONS and self.trouble else _status_text(code)
        if killed := oom_kills.describe(self._oom_kills, oom_kills.read_oom_kills()):
            detail = f"{detail}; {killed}" if detail else killed
        if self._killing and reason in ("exited", "guardian-died"):
            # It was on its way out at our word; what it died of in the end does not matter.
            reason = self._killing
        if reason == "frozen":
            detail = f"it answered nothing for {2 * FROZEN_AFTER:g} s"
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

    def _hear_rest(self) -> None:
        while self._control is not None and not self._reason:
            try:
                data = self._control.recv(4096, socket.MSG_PEEK)
            except OSError:
                return
            if not data:
                return
            self._hear()

    def bound_log(self) -> None:
        child_logs.bound(self._path)


_REASONS = {child_messages.EXIT_SPARK_START: "no-spark", child_messages.EXIT_SPARK_STALLED: "spark-stalled"}
"""Exit code of the child → reason of its death."""


def _nothing() -> None:
    """The default of ``on_trouble``."""


def _status_text(code: int) -> str:
    if code == child_messages.EXIT_SPARK_DIED:
        return "its JVM died, hung or had no memory left, or its Spark session was of no more use"
    if code == child_messages.EXIT_SPARK_START:
        return "its Spark session did not start"
    if code == child_messages.EXIT_SPARK_STALLED:
        return "its Spark session completed no tasks"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

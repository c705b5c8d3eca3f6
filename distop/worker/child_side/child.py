"""The child: the process that imports behaviors, runs their code and has the JVM. Its main thread reads what the
daemon says; every run and call has a thread of its own.

Started by the guardian as ``python -m distop.worker.child_side.child FD``, where FD is its end of the socket pair.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.runtime import gc_tuning, logs, secret_settings
from distop.storage import confinement
from distop.worker import child_messages
from distop.worker.child_side import redacted_output
from distop.worker.child_side.call_handlers import Call
from distop.worker.child_side.error_texts import headline
from distop.worker.child_side.job_context import Environment
from distop.worker.child_side.outbox import Outbox
from distop.worker.child_side.run_queue import Lines
from distop.worker.child_side.runner import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INTERRUPT_SECONDS = 1.0
"""How often the Spark jobs of what was cancelled are cancelled again: a job may have been about to start one."""

TRACK_SECONDS = 1.0
"""How often Spark is asked how far it is with what runs."""

LAST_LINES_SECONDS = 0.5
"""For what a JVM that is lost has printed: one that hangs does not end it."""


class Child:
    """The reader's loop, and the runs and calls that go on."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox = Outbox(connection)
        self._runs: dict[int, Run] = {}
        self._calls: dict[int, Call] = {}
        self._lines = Lines(lambda run: self._do(run, self._runs), self._flush)
        self._env: Environment | None = None

    def serve(self) -> int:
        """Until told to stop (0) or the daemon is gone."""
        messages = self._messages()
        config = next(messages, None)
        if config is None:
            return child_messages.EXIT_DAEMON_GONE
        os.environ.update(config["environment"])
        secret_settings.hide_settings(config["spark_conf"])
        secret_settings.hide_variables(os.environ, config["spark_conf"].get(secret_settings.PATTERN_SETTING, ""))
        # Also where nothing is hidden yet: catalogs and Spark's own files have secrets, too, and are read later.
        sys.stdout, sys.stderr = redacted_output.stream(sys.stdout), redacted_output.stream(sys.stderr)
        logging.basicConfig(
            level=config["log_level"].upper(),
            stream=sys.stderr,
        )
        # It tells of every connection that a thread opens and closes.
        logging.getLogger("py4j").setLevel(logging.WARNING)
        for handler in logging.getLogger().handlers:
            handler.addFilter(_with_context)
            handler.setFormatter(logs.Plain("%(asctime)s %(levelname)s %(name)s %(context)s%(message)s"))
        env = self._env = Environment(config, Path(config["work_dir"]), self._outbox)
        confinement.confine(env.serves.tables is not None)
        self._outbox.start()
        self._outbox.send(hello(env))
        gc_tuning.settle(look=False)
        threading.Thread(target=self._interrupt_again, daemon=True).start()
        threading.Thread(target=self._track, daemon=True).start()
        threading.Thread(target=env.spark.watch, args=(self._spark_lost, self._spark_trouble), daemon=True).start()
        for message in messages:
            if message["t"] == "stop":
                env.stopping = True
                self._outbox.flush()
                env.spark.stop()
                return 0
            self._dispatch(env, message)
        return child_messages.EXIT_DAEMON_GONE

    def _messages(self) -> Iterator[dict[str, Any]]:
        decoder = child_messages.Decoder()
        while data := self._connection.recv(256 * 1024):
            yield from decoder.feed(data)

    def _dispatch(self, env: Environment, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "run":
            run = self._runs.get(message["run"])
            if run is None:
                run = self._runs[message["run"]] = Run(env, message, self._spark_died)
            else:
                run.add(message)
            if message["more"]:
                return
            if run.line:
                self._lines.add(run)
            else:
                self._start(f"run-{run.number}", run, self._runs)
        elif kind in ("plan", "complete", "cleanup", "sweep", "results", "verify"):
            call = self._calls.get(message["call"])
            if call is None:
                call = self._calls[message["call"]] = Call(env, message, self._spark_died)
            else:
                call.add(message)
            if not message.get("more"):
                self._start(f"{kind}-{call.number}", call, self._calls)
        elif kind == "cancel":
            if "run" in message:
                if (run := self._runs.get(message["run"])) is not None:
                    run.cancel(message.get("partitions"), keep=message.get("keep", False))
                    self._out_of_turn(run)
            elif (call := self._calls.get(message["call"])) is not None:
                call.cancel()
        elif kind == "pause":
            if (run := self._runs.get(message["run"])) is not None:
                run.pause()
                self._out_of_turn(run)
        elif kind == "probe":
            run = self._runs.get(message["run"])
            stubborn = run is not None and run.stubborn(message["grace"])
            self._outbox.send(child_messages.ProbedMessage(t="probed", run=message["run"], stubborn=stubborn))
        elif kind == "ping":
            self._outbox.send(child_messages.PongMessage(t="pong"))
        elif kind == "deadline":
            env.deadline = message["boottime"]
        elif kind == "reply":
            self._outbox.answer(message)

    def _start(self, name: str, work: Run | Call, running: dict[int, Any]) -> None:
        # Plain threads: a thread takes part in Spark's pools and tags from its first ctx.spark on.
        threading.Thread(target=self._do, args=(work, running), name=name, daemon=True).start()

    def _do(self, work: Run | Call, running: dict[int, Any]) -> None:
        try:
            work.run()
        except OSError:
            pass  # the daemon is gone: the reader sees it too
        finally:
            running.pop(work.number, None)

    def _out_of_turn(self, run: Run) -> None:
        """A run that was told to stop before it began has its end without waiting for those before it."""
        if self._lines.take_out(run):
            self._start(f"run-{run.number}", run, self._runs)

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone: the reader sees it too
            self._outbox.flush()

    def _interrupt_again(self) -> None:
        pause = threading.Event()
        while not pause.wait(INTERRUPT_SECONDS):
            at_work: list[Run | Call] = [*self._runs.values(), *self._calls.values()]
            for work in at_work:
                if isinstance(work, Run) and work.enforce_limit():
                    self._give_up(work)
                work.interrupt()

    def _give_up(self, run: Run) -> None:
        """A run whose job does not stop: what waits behind it in its thread does not wait for it."""
        self._runs.pop(run.number, None)
        for other in self._lines.take_all(run.line):
            self._start(f"run-{other.number}", other, self._runs)

    def _track(self) -> None:
        """Apart from all else: a JVM that hangs does not answer."""
        pause = threading.Event()
        while not pause.wait(TRACK_SECONDS):
            try:
                for run in list(self._runs.values()):
                    run.track()
            except OSError:
                return  # the daemon is gone: the reader sees it too

    def _spark_lost(self, why: str, *, stalled: bool = False) -> None:
        if self._env is not None and not self._env.stopping:
            self._spark_died(why, child_messages.EXIT_SPARK_STALLED if stalled else child_messages.EXIT_SPARK_DIED)

    def _spark_trouble(self, what: str) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone: the reader sees it too
            self._outbox.send(child_messages.SparkMessage(t="spark", trouble=what))

    def _spark_died(self, why: str, code: int = child_messages.EXIT_SPARK_DIED) -> None:
        """Leave at once, with a code that tells why; what had ended before is still told."""
        logging.getLogger("distop.child").error("Spark is lost in this process, which therefore ends: %s", why)
        if self._env is not None and self._env.spark.not_started:
            code = child_messages.EXIT_SPARK_START
        try:
            self._outbox.flush()
            self._outbox.send(child_messages.SparkMessage(t="spark", trouble=why))
        finally:
            # Why a JVM ended is in what it printed last.
            redacted_output.finish(LAST_LINES_SECONDS)
            os._exit(code)


def hello(env: Environment) -> child_messages.HelloMessage:
    """The declarations of all installed behaviors; one that cannot be loaded is skipped, with the reason."""
    declarations: list[str] = []
    skipped: dict[str, str] = {}
    for name in sorted(env.installed):
        try:
            declarations.append(type(env.behavior(name)).declaration().encode().decode())
        except BaseException as error:
            env.log.warning("the behavior %s cannot be loaded: %s", name, headline(error))
            env.log.debug("that is because of", exc_info=error)
            skipped[name] = headline(error)
    return child_messages.HelloMessage(t="hello", declarations=declarations, skipped=skipped)


def _with_context(record: logging.LogRecord) -> bool:
    fields: Mapping[str, Any] = record.__dict__
    parts = [str(fields[name]) for name in ("operation", "partition") if name in fields]
    if "attempt" in fields:
        parts.append(f"#{fields['attempt']}")
    record.context = " ".join(parts) + ": " if parts else ""
    return True


def main(argv: list[str]) -> None:
    gc_tuning.begin()
    descriptor = int(argv[0])
    # Neither the JVM nor any other program started here may hold the connection open.
    os.set_inheritable(descriptor, False)
    try:
        code = Child(socket.socket(fileno=descriptor)).serve()
    except ConnectionError:
        code = child_messages.EXIT_DAEMON_GONE
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of jobs may still run, and nothing that they do counts any more.
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

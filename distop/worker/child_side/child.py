"""The child: the process that imports behaviors, runs their code and owns the JVM.

Its main thread reads the daemon's messages; every run and call has its own thread. The guardian starts it as
``python -m distop.worker.child_side.child FD``, where FD is its end of the socket pair.
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
from distop.storage import confinement, export_targets, storage_options
from distop.worker import child_messages
from distop.worker.child_side import redacted_output
from distop.worker.child_side.call_handlers import Call
from distop.worker.child_side.environment import Environment
from distop.worker.child_side.error_texts import headline
from distop.worker.child_side.outbox import Outbox
from distop.worker.child_side.run_queue import RunQueues
from distop.worker.child_side.runner import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INTERRUPT_SECONDS = 1.0
"""Interval at which Spark jobs of cancelled runs are cancelled again: a job may have been about to start one."""

TRACK_SECONDS = 1.0
"""Interval at which Spark's task progress is read."""

LAST_LINES_SECONDS = 0.5
"""Maximum seconds to wait for the last output of a lost JVM, which may hang and never end it."""


class Child:
    """The message loop of the child, with its running runs and calls."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox = Outbox(connection)
        self._runs: dict[int, Run] = {}
        self._calls: dict[int, Call] = {}
        self._queues = RunQueues(lambda run: self._do(run, self._runs), self._flush)
        self._env: Environment | None = None

    def serve(self) -> int:
        """Process messages until a stop (returns 0) or the end of the connection."""
        messages = self._messages()
        config = next(messages, None)
        if config is None:
            return child_messages.EXIT_DAEMON_GONE
        os.environ.update(config["environment"])
        secret_settings.hide_settings(config["spark_conf"])
        secret_settings.hide_variables(os.environ, config["spark_conf"].get(secret_settings.PATTERN_SETTING, ""))
        # Needed even if there is no secret yet: catalogs and Spark's files, which are read later, have secrets, too.
        sys.stdout, sys.stderr = (
            redacted_output.redacting_stream(sys.stdout),
            redacted_output.redacting_stream(sys.stderr),
        )
        logging.basicConfig(level=config["log_level"].upper(), stream=sys.stderr)
        # py4j logs every connection that a thread opens or closes.
        logging.getLogger("py4j").setLevel(logging.WARNING)
        for handler in logging.getLogger().handlers:
            handler.addFilter(_with_context)
            handler.setFormatter(logs.Plain("%(asctime)s %(levelname)s %(name)s %(context)s%(message)s"))
        storage_options.configure(storage_options.read_settings(config["storage"]))
        export_targets.configure(config["export_to"])
        env = self._env = Environment(config, Path(config["work_dir"]), self._outbox)
        confinement.confine(env.serves.tables is not None)
        self._outbox.start()
        self._outbox.send(hello(env))
        gc_tuning.freeze_loaded(collect=False)
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
            self._receive_run(env, message)
        elif kind in ("plan", "complete", "cleanup", "sweep", "results", "verify", "statistics"):
            self._receive_call(env, message)
        elif kind == "cancel":
            self._cancel(message)
        elif kind == "pause":
            if (run := self._runs.get(message["run"])) is not None:
                run.pause()
                self._start_if_queued(run)
        elif kind == "probe":
            run = self._runs.get(message["run"])
            stubborn = run is not None and run.ignores_cancel(message["grace"])
            self._outbox.send(child_messages.ProbedMessage(t="probed", run=message["run"], stubborn=stubborn))
        elif kind == "ping":
            self._outbox.send(child_messages.PongMessage(t="pong"))
        elif kind == "deadline":
            env.deadline = message["boottime"]
        elif kind == "reply":
            self._outbox.answer(message)

    def _receive_run(self, env: Environment, message: dict[str, Any]) -> None:
        """Receive a run, or more of its items; start or queue it if it is complete."""
        run = self._runs.get(message["run"])
        if run is None:
            run = self._runs[message["run"]] = Run(env, message, self._spark_died)
        else:
            run.add(message)
        if message["more"]:
            return
        if run.line:
            self._queues.add(run)
        else:
            self._start(f"run-{run.number}", run, self._runs)

    def _receive_call(self, env: Environment, message: dict[str, Any]) -> None:
        """Receive a call, or more of its items; start it if it is complete."""
        call = self._calls.get(message["call"])
        if call is None:
            call = self._calls[message["call"]] = Call(env, message, self._spark_died)
        else:
            call.add(message)
        if not message.get("more"):
            self._start(f"{message['t']}-{call.number}", call, self._calls)

    def _cancel(self, message: dict[str, Any]) -> None:
        if "run" in message:
            if (run := self._runs.get(message["run"])) is not None:
                run.cancel(message.get("partitions"), keep=message.get("keep", False))
                self._start_if_queued(run)
        elif (call := self._calls.get(message["call"])) is not None:
            call.cancel()

    def _start(self, name: str, work: Run | Call, running: dict[int, Any]) -> None:
        # Plain threads: a thread uses Spark's pools and tags from its first ctx.spark on.
        threading.Thread(target=self._do, args=(work, running), name=name, daemon=True).start()

    def _do(self, work: Run | Call, running: dict[int, Any]) -> None:
        try:
            work.run()
        except OSError:
            pass  # the daemon is gone: the message loop ends, too
        finally:
            running.pop(work.number, None)

    def _start_if_queued(self, run: Run) -> None:
        """Let a run that was stopped before its start report its end now, not after the runs before it."""
        if self._queues.remove(run):
            self._start(f"run-{run.number}", run, self._runs)

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone: the message loop ends, too
            self._outbox.flush()

    def _interrupt_again(self) -> None:
        pause = threading.Event()
        while not pause.wait(INTERRUPT_SECONDS):
            running: list[Run | Call] = [*self._runs.values(), *self._calls.values()]
            for work in running:
                if isinstance(work, Run) and work.enforce_limit():
                    self._abandon(work)
                work.interrupt()

    def _abandon(self, run: Run) -> None:
        """Abandon a run whose job does not stop, and start the runs that are queued behind it."""
        self._runs.pop(run.number, None)
        for other in self._queues.remove_all(run.line):
            self._start(f"run-{other.number}", other, self._runs)

    def _track(self) -> None:
        """Report status and task progress, in a separate thread because a hanging JVM does not answer."""
        pause = threading.Event()
        while not pause.wait(TRACK_SECONDS):
            try:
                running: list[Run | Call] = [*self._calls.values(), *self._runs.values()]
                for work in running:
                    work.track()
            except OSError:
                return  # the daemon is gone: the message loop ends, too

    def _spark_lost(self, why: str, *, stalled: bool = False) -> None:
        if self._env is not None and not self._env.stopping:
            self._spark_died(why, child_messages.EXIT_SPARK_STALLED if stalled else child_messages.EXIT_SPARK_DIED)

    def _spark_trouble(self, what: str) -> None:
        with contextlib.suppress(OSError):  # the daemon is gone: the message loop ends, too
            self._outbox.send(child_messages.SparkMessage(t="spark", trouble=what))

    def _spark_died(self, why: str, code: int = child_messages.EXIT_SPARK_DIED) -> None:
        """Exit at once with the code of the reason, after reporting the jobs that have ended."""
        logging.getLogger("distop.child").error("Exiting: Spark is unusable in this process: %s", why)
        if self._env is not None and self._env.spark.not_started:
            code = child_messages.EXIT_SPARK_START
        try:
            self._outbox.flush()
            self._outbox.send(child_messages.SparkMessage(t="spark", trouble=why))
        finally:
            # The JVM's last output has the reason of its end.
            redacted_output.wait_for_output(LAST_LINES_SECONDS)
            os._exit(code)


def hello(env: Environment) -> child_messages.HelloMessage:
    """The declarations of all installed behaviors; behaviors that cannot be loaded are skipped, with the reason."""
    declarations: list[str] = []
    skipped: dict[str, str] = {}
    for name in sorted(env.installed):
        try:
            declarations.append(type(env.behavior(name)).declaration().encode().decode())
        except BaseException as error:
            env.log.warning("Skipping behavior %s, which cannot be loaded: %s", name, headline(error))
            env.log.debug("Traceback of behavior %s", name, exc_info=error)
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
    gc_tuning.tune_for_start()
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
    # Threads of jobs may still run; their results no longer count.
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

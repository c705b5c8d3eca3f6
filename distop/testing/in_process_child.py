"""An executor's child without a process.

The code of the child runs in a thread of the test's process.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.worker import child_messages
from distop.worker.child_side.call_handlers import Call
from distop.worker.child_side.environment import Environment
from distop.worker.child_side.outbox import Outbox
from distop.worker.child_side.runner import Run
from distop.worker.child_side.spark_session import SparkHolder
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import SparkSession

    from distop.behavior import Behavior

EXECUTOR = "test"

_lock = threading.Lock()
_own: SparkHolder | None = None
"""The holder of the session that this module has started: a process can have only one session."""


def spark_for(session: SparkSession | None) -> SparkHolder:
    """A holder of ``session``; or, if None, of the active session, or of a new one.

    A new session starts on first use, with the settings of an executor's child, and lives until the process ends.
    """
    global _own
    with _lock:
        if session is None and _own is None and "pyspark.sql" in sys.modules:
            session = sys.modules["pyspark.sql"].SparkSession.getActiveSession()
        if session is None and _own is not None:
            return _own
        folder = Path(tempfile.mkdtemp(prefix="distop-test-spark-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        holder = SparkHolder("local[*]", EXECUTOR, folder, 10.0, {}, session)
        if session is None:
            _own = holder
            atexit.register(holder.stop)  # before the folder is removed
        return holder


@frozen
class _Loaded:
    """An installed behavior for :func:`distop.behavior.load`."""

    behavior: type[Behavior]

    def load(self) -> type[Behavior]:
        return self.behavior


class InProcessChild:
    """A child with one behavior.

    ``ended`` is called in the job's thread after each job (partition, kind, result, error, started, finished).
    ``answer`` answers a question of the child to its daemon (a message of ``worker.child_messages``).
    """

    def __init__(
        self,
        behavior: type[Behavior],
        folder: Path,
        spark: SparkSession | None,
        ended: Callable[[Sequence[Any]], None],
        answer: Callable[[Mapping[str, Any]], Any],
    ) -> None:
        self._ended = ended
        self._answer = answer
        self._outbox = Outbox(self)
        self._decoder = child_messages.Decoder()
        self._broken: BaseException | None = None
        self._messages: list[Mapping[str, Any]] = []
        work, self.shared = folder / "work", folder / "shared"
        for one in (work, self.shared):
            one.mkdir(mode=0o700, exist_ok=True, parents=True)
        config = {
            "shared_dir": str(self.shared),
            "space": "",
            "verifier_urls": (),
            "trusted_spark_catalogs": (),
            "serves": {},
            "behaviors": {},
            "executor": EXECUTOR,
            "spark_master": "local",
            "spark_conf": {},
            "ttl": 10.0,
        }
        self._env = Environment(config, work, self._outbox)
        self._env.installed = {behavior.type_name: _Loaded(behavior)}
        self._env.spark = spark_for(spark)
        self._number = 0

    def run(self, message: Mapping[str, Any]) -> Run:
        """Create a run for :meth:`start`.

        ``message``: a ``worker.child_messages.RunMessage`` without its number.
        """
        self._number += 1
        fixed = {"t": "run", "run": self._number, "careful": True, "deadline": 0.0, "cancelled": [], "more": False}
        return Run(self._env, {**message, **fixed}, self._spark_died)

    def start(self, run: Run) -> None:
        """Execute the run, and wait for its end.

        An interrupt (Ctrl-C) stops its jobs and is raised.
        """
        self._in_thread(run.run, lambda: run.cancel(None))

    def call(self, message: Mapping[str, Any]) -> tuple[Any, list[bytes]]:
        """Make a call, and return its value and the chunks of a plan. Raises WorkerError.

        ``message``: a message of ``worker.child_messages`` without its number.
        """
        self._number += 1
        self._messages.clear()
        call = Call(self._env, {**message, "call": self._number}, self._spark_died)
        self._in_thread(call.run, call.cancel)
        chunks = [one["data"].encode() for one in self._messages if one["t"] == "chunk"]
        last = self._messages[-1]
        if last["t"] == "failed":
            raise WorkerError(last["kind"], last["message"])
        return last["value"], chunks

    def sendall(self, data: bytes, /) -> None:
        """Receive what the child's outbox sends.

        A question is answered before this returns.
        """
        for message in self._decoder.feed(data):
            try:
                self._take(message)
            except BaseException as error:
                self._broken = self._broken or error
                raise

    def _take(self, message: dict[str, Any]) -> None:
        if message["t"] == "ended":
            for end in message["jobs"]:
                self._ended(end)
        elif "seq" in message:
            reply = {"t": "reply", "seq": message["seq"], **self._answer(message)}
            self._outbox.answer(reply)
        else:
            self._messages.append(message)

    def _in_thread(self, work: Callable[[], None], stop: Callable[[], None]) -> None:
        """Run in a thread, as a child does.

        Spark keeps pools and tags by thread, and Ctrl-C must not fail a job.
        """

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._broken = self._broken or error

        thread = threading.Thread(target=run, name="distop-test-job", daemon=True)
        try:
            thread.start()
            thread.join()
        except BaseException:
            stop()
            raise
        if self._broken is not None:
            raise self._broken

    def _spark_died(self, why: str) -> None:
        # A real child would end here, and a new child would run the job again.
        raise WorkerError("crash", f"Spark is lost: {why}")

"""The child's side of the connection: messages out from any thread, and answers waited for.

Ends of jobs are gathered and go out in groups, by count or by age, so that a behavior that does nothing is not
slowed down by a frame for each job.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from typing import Any, Protocol

from distop.protocol.job_transitions import REPORTS_PER_TXN
from distop.runtime import secret_settings
from distop.worker import child_messages

FLUSH_COUNT = REPORTS_PER_TXN
"""Ends that fill a transaction."""
FLUSH_SECONDS = 0.02
FLUSH_BYTES = 1024 * 1024


_TEXTS = ("text", "message", "trouble")
"""Fields of messages that people read, in records and logs."""


def _redacted(message: child_messages.FromChild) -> Any:
    """The message without secret values in the texts for people. Data passes as it is: a job goes on by it."""
    changed: dict[str, Any] = {
        name: secret_settings.redact(text) for name in _TEXTS if isinstance(text := message.get(name), str) and text
    }
    if message["t"] == "hello":
        changed["skipped"] = {name: secret_settings.redact(why) for name, why in message["skipped"].items()}
    return {**message, **changed} if changed else message


class Connection(Protocol):
    """What an outbox needs of a socket."""

    def sendall(self, data: bytes, /) -> None: ...


class Outbox:
    """Thread-safe. ``start`` starts the thread that sends what has waited long enough."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting = threading.Event()
        self._ended: dict[int, list[bytes]] = {}
        self._bytes = 0
        self._later: list[bytes] = []
        """Frames that go out with the next ends, after them."""
        self._sequence = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}

    def start(self) -> None:
        threading.Thread(target=self._flush_late, name="outbox", daemon=True).start()

    def send(self, message: child_messages.FromChild) -> None:
        """Send now. What the run ended before goes first."""
        self._write(child_messages.encode(_redacted(message)), first=message.get("run"))

    def ended(self, run: int, partition: int, kind: str, result: bytes, error: str, started: float) -> None:
        """A job's end; ``result`` is JSON already. Sent a little later, with others."""
        text = json.dumps(secret_settings.redact(error), ensure_ascii=False).encode() if error else b'""'
        row = b'[%d,"%b",%b,%b,%.6f,%.6f]' % (partition, kind.encode(), result, text, started, time.time())
        with self._lock:
            rows = self._ended.setdefault(run, [])
            rows.append(row)
            self._bytes += len(row)
            full = len(rows) >= FLUSH_COUNT or self._bytes >= FLUSH_BYTES
        if full:
            self.flush()
        elif not self._waiting.is_set():
            self._waiting.set()

    def send_later(self, message: child_messages.FromChild) -> None:
        """Send with the ends that wait, after them."""
        with self._lock:
            self._later.append(child_messages.encode(_redacted(message)))
        if not self._waiting.is_set():
            self._waiting.set()

    def flush(self) -> None:
        """Send every end that waits."""
        self._write(b"")

    def _write(self, data: bytes, first: object = None) -> None:
        # Ends are taken under the send lock, so that a run's last end cannot be overtaken by its "done".
        with self._send_lock:
            with self._lock:
                taken: dict[int, list[bytes]] = {}
                later: list[bytes] = []
                if first is not None or not data:
                    taken, self._ended, self._bytes = self._ended, {}, 0
                    later, self._later = self._later, []
            frames = [
                child_messages.frame(b'{"t":"ended","run":%d,"jobs":[%b]}' % (run, b",".join(rows)))
                for run, rows in taken.items()
            ]
            self._connection.sendall(b"".join([*frames, *later, data]))

    def _flush_late(self) -> None:
        while True:
            self._waiting.wait()
            time.sleep(FLUSH_SECONDS)
            self._waiting.clear()
            try:
                self.flush()
            except OSError:
                return

    def ask(
        self,
        message: child_messages.ProgressMessage
        | child_messages.FetchMessage
        | child_messages.TableMessage
        | child_messages.HistoryMessage,
        timeout: float,
    ) -> Any:
        """Send a question, wait for the answer's value; where the answer has rows, (value, rows of all its frames).
        Raises TimeoutError, or RuntimeError with the daemon's reason."""
        message["seq"] = seq = next(self._sequence)
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers[seq] = answers
        rows: list[Any] = []
        try:
            self.send(message)
            while True:
                try:
                    answer = answers.get(timeout=timeout)
                except queue.Empty:
                    raise TimeoutError(f"the daemon gave no answer within {timeout:g} s") from None
                if answer.get("error"):
                    raise RuntimeError(answer["error"])
                if "items" not in answer:
                    return answer["value"]
                rows += answer["items"]
                if not answer["more"]:
                    return answer["value"], rows
        finally:
            del self._answers[seq]

    def answer(self, message: dict[str, Any]) -> None:
        """An answer arrived (called by the reader)."""
        if (answers := self._answers.get(message["seq"])) is not None:
            answers.put(message)

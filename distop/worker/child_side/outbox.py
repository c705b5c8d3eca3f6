"""The child's side of the connection: sends messages of all threads, and waits for answers.

Ends of jobs are sent in groups, by count or by age, because one frame per job would slow down short jobs.
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
"""Number of ends in one of the daemon's transactions."""
ANSWER_SECONDS = 60.0
"""Time-out for the daemon's answer to a checkpoint or a request for outcomes."""
FLUSH_SECONDS = 0.02
FLUSH_BYTES = 1024 * 1024


_TEXTS = ("text", "message", "trouble")
"""Message fields with texts for people, which go to records and logs."""


def _redacted(message: child_messages.FromChild) -> Any:
    """The message without secrets in its texts for people. Data stays unchanged: jobs depend on it."""
    changed: dict[str, Any] = {
        name: secret_settings.redact(text) for name in _TEXTS if isinstance(text := message.get(name), str) and text
    }
    if message["t"] == "hello":
        changed["skipped"] = {name: secret_settings.redact(why) for name, why in message["skipped"].items()}
    return {**message, **changed} if changed else message


class Connection(Protocol):
    """The methods of a socket that an outbox uses."""

    def sendall(self, data: bytes, /) -> None: ...


class Outbox:
    """Sends the child's messages. Thread-safe. ``start`` starts the thread that sends groups by age."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting = threading.Event()
        self._ended: dict[int, list[bytes]] = {}
        self._bytes = 0
        self._later: list[bytes] = []
        """Frames to send with the next ends, after them."""
        self._sequence = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}

    def start(self) -> None:
        threading.Thread(target=self._flush_late, name="outbox", daemon=True).start()

    def send(self, message: child_messages.FromChild) -> None:
        """Send a message now, after the pending ends of its run."""
        self._write(child_messages.encode(_redacted(message)), first=message.get("run"))

    def ended(self, run: int, partition: int, kind: str, result: bytes, error: str, started: float) -> None:
        """Queue a job's end, to be sent with others. ``result`` is JSON."""
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
        """Send a message after the pending ends, together with them."""
        with self._lock:
            self._later.append(child_messages.encode(_redacted(message)))
        if not self._waiting.is_set():
            self._waiting.set()

    def flush(self) -> None:
        """Send all pending ends."""
        self._write(b"")

    def _write(self, data: bytes, first: object = None) -> None:
        # Pending ends are taken under the send lock, so that a run's "done" cannot overtake its last end.
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
        """Send a request, and wait for the answer's value; (value, rows of all frames) if the answer has rows.

        Raises TimeoutError, and RuntimeError with the daemon's reason.
        """
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
                    raise TimeoutError(f"the daemon did not answer within {timeout:g} s") from None
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
        """Deliver an answer that arrived; called by the child's main thread."""
        if (answers := self._answers.get(message["seq"])) is not None:
            answers.put(message)

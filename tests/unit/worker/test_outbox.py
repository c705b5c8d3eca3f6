"""The child's outbox: when it sends the ends of jobs, and how long it waits for the daemon's answers."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.worker import child_messages
from distop.worker.child_side import outbox
from distop.worker.child_side.checkpoints import JobProgress
from distop.worker.child_side.outbox import Outbox
from tests.unit.support.running import Sent

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_SLEEPS = 10


class Idle(Exception):
    """The outbox's thread would wait for the next end."""


class SendingThread:
    """The outbox's thread, which runs in the test's thread and in virtual time until it would wait for the next end.

    ``during_sleep``: what another thread does during the first sleep, and after how many seconds of it.
    """

    def __init__(self, patch: pytest.MonkeyPatch, after: float = 0.0, during_sleep: Callable[[], None] | None = None):
        self.frames: list[bytes] = []
        self.sleeps, self.slept = 0, 0.0
        self._after, self._during_sleep = after, during_sleep
        patch.setattr(outbox, "threading", SimpleNamespace(Lock=threading.Lock, Event=self._event, Thread=self._thread))
        patch.setattr(outbox, "time", SimpleNamespace(sleep=self._sleep, time=time.time))
        self.outbox = Outbox(self)

    def sendall(self, data: bytes) -> None:
        self.frames.append(data)

    @property
    def ended(self) -> list[list[int]]:
        """The jobs whose ends each frame has."""
        found = [list(child_messages.Decoder().feed(frame)) for frame in self.frames]
        return [[row[0] for message in messages for row in message["jobs"]] for messages in found]

    def _event(self) -> Any:
        class Event(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                if not self.is_set():
                    raise Idle
                return True

        return Event()

    def _thread(self, target: Callable[[], None], **_: Any) -> Any:
        def start() -> None:
            with pytest.raises(Idle):
                target()

        return SimpleNamespace(start=start)

    def _sleep(self, seconds: float) -> None:
        self.sleeps, self.slept = self.sleeps + 1, self.slept + seconds
        assert self.sleeps <= MOST_SLEEPS, "the thread does not wait for the next end"
        if self._during_sleep is not None and seconds >= self._after:
            during, self._during_sleep = self._during_sleep, None
            during()


def end(to: Outbox, partition: int) -> None:
    to.ended(1, partition, "success", b"null", "", 0.0)


def test_ends_within_some_milliseconds_are_sent_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = SendingThread(monkeypatch, 0.01, lambda: end(thread.outbox, 1))
    end(thread.outbox, 0)
    thread.outbox.start()
    assert thread.ended == [[0, 1]]
    assert thread.slept < 1.0


def test_the_thread_waits_after_it_has_sent_all_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = SendingThread(monkeypatch)
    end(thread.outbox, 0)
    thread.outbox.start()
    assert (thread.ended, thread.sleeps) == ([[0]], 1)


def test_the_daemon_has_a_minute_to_answer() -> None:
    class Asked(Sent):
        limit = 0.0

        def ask(self, message: Any, timeout: float) -> Any:
            self.limit = timeout
            return True

    asked = Asked()
    JobProgress(asked, 1, 0, None).save({"at": 3}, force=True)
    assert asked.limit == 60.0

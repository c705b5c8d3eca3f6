"""Forked processes: each does one piece of work and answers with JSON.

A child starts with everything imported. A timer of its own ends a child that makes no progress, after a limit of
processor time and a limit of real time, so that a hang differs from every other end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

COMPUTES, WAITS = 20.0, 90.0
"""Seconds of processor time, and of real time, that one step of a child may take."""


@dataclass
class Ended:
    """The result of a piece of work, or why there is none. ``step``: its last step."""

    work: Any
    answer: Any = None
    hung: bool = False
    step: str = ""
    error: str = ""


@dataclass
class _Child:
    pid: int
    work: Any
    output: bytearray = field(default_factory=bytearray)


class Steps:
    """The child's side: announces each step, and starts its time limits."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def begin(self, step: str) -> None:
        """A step begins."""
        signal.setitimer(signal.ITIMER_PROF, COMPUTES)
        signal.setitimer(signal.ITIMER_REAL, WAITS)
        self._send({"step": step})

    def answer(self, answer: Any) -> None:
        """The work is done."""
        self._send({"answer": answer})

    def failed(self, error: str) -> None:
        """The work ended in an error of its own."""
        self._send({"error": error})

    def _send(self, message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]


def in_children(work: Iterable[Any], jobs: int, do: Callable[[Any, Steps], Any]) -> Iterator[Ended]:
    """Do each piece of work in its own child, ``jobs`` at a time; yields as they end."""
    waiting, children = iter(work), dict[int, _Child]()
    while True:
        while len(children) < jobs:
            one = next(waiting, None)
            if one is None:
                break
            fd, child = _fork(one, do)
            children[fd] = child
        if not children:
            return
        for fd in select.select(list(children), [], [])[0]:
            read = os.read(fd, 1 << 20)
            if read:
                children[fd].output += read
                continue
            os.close(fd)
            yield _ended(children.pop(fd))


def _fork(work: Any, do: Callable[[Any, Steps], Any]) -> tuple[int, _Child]:
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writes)
        return reads, _Child(pid, work)
    code = 1
    try:
        os.close(reads)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        steps = Steps(writes)
        try:
            steps.answer(do(work, steps))
            code = 0
        except BaseException as error:
            steps.failed(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def _ended(child: _Child) -> Ended:
    _, status = os.waitpid(child.pid, 0)
    ended = Ended(child.work)
    for line in child.output.splitlines():
        message = json.loads(line)
        ended.step = message.get("step", ended.step)
        ended.answer = message.get("answer", ended.answer)
        ended.error = message.get("error", ended.error)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ended.hung = number in (signal.SIGPROF, signal.SIGALRM)
        ended.error = "" if ended.hung else f"ended by {signal.Signals(number).name}"
    return ended

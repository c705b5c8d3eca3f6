"""etcd's history of distop's keys by revision, read from ``etcdctl watch``."""

from __future__ import annotations

import base64
import json
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


COMPACTED = "required revision has been compacted"
"""etcd's message about a revision that it has compacted."""


class Revision(NamedTuple):
    """What one revision changed: key → its new value; None: the key was deleted."""

    number: int
    changes: dict[str, str | None]


class HistoryLost(Exception):
    """Revisions that were not read yet are no longer available."""


class WatchEnded(Exception):
    """The watch ended; another one can be started at the next revision."""


def watch_command(etcdctl: str, options: Sequence[str] = (), namespace: str = "", start: int = 1) -> list[str]:
    """The command that prints every change of distop's keys from ``start`` on."""
    prefix = f"{namespace}/distOp" if namespace else "distOp"
    return [etcdctl, *options, "watch", f"--rev={start}", "--prefix", "--write-out=json", prefix]


def revisions(lines: Iterable[str]) -> Iterator[Revision]:
    """The revisions in what ``etcdctl watch --write-out=json`` prints, in order.

    Raises HistoryLost where etcd has compacted revisions that were asked for, or where they come in a wrong order;
    WatchEnded where etcd cancels the watch.
    """
    last = 0
    for line in lines:
        answer = json.loads(line)
        if compacted := answer.get("CompactRevision", 0):
            raise HistoryLost(f"etcd has compacted its history up to revision {compacted}")
        if answer.get("Canceled"):
            raise WatchEnded(f"etcd has cancelled the watch: {answer.get('CancelReason') or 'no reason given'}")
        for revision in _grouped(answer.get("Events") or []):
            if revision.number <= last:
                raise HistoryLost(f"revision {revision.number} came after revision {last}")
            last = revision.number
            yield revision


def _grouped(events: Iterable[dict[str, Any]]) -> Iterator[Revision]:
    """etcd puts all events of a revision into one answer."""
    number, changes = 0, dict[str, str | None]()
    for event in events:
        kv = event["kv"]
        if kv["mod_revision"] != number and changes:
            yield Revision(number, changes)
            changes = {}
        number = kv["mod_revision"]
        deleted = event.get("type") in (1, "DELETE")
        changes[_text(kv["key"])] = None if deleted else _text(kv.get("value", ""))
    if changes:
        yield Revision(number, changes)


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


class Watch:
    """A running ``etcdctl watch``, as a context manager."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._command = list(command)
        self._environment = environment
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Watch:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        process = self.process
        assert process is not None
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def lines(self) -> Iterator[str]:
        """Each line that the command prints.

        Raises WatchEnded where the command exits, and HistoryLost where etcd has compacted the history.
        """
        process = self.process
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        yield from process.stdout
        code, errors = process.wait(), process.stderr.read().strip()[-500:]
        if COMPACTED in errors:
            raise HistoryLost(errors)
        raise WatchEnded(f"etcdctl ended with the exit code {code}: {errors}")

    def stop(self) -> None:
        """End the command; who reads its lines gets WatchEnded."""
        if self.process is not None:
            self.process.terminate()

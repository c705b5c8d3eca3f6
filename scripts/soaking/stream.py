"""A stream of operations of every kind, with commands to them, and the comparison of what they wrote."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.core.model import OperationRef
from distop.errors import DistopError, NotAllowed, NotFound
from soaking.cluster import TABLES
from tests.support.writing import Journal, digest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from soaking.cluster import SoakCluster

AT_ONCE = 5
LIMIT = 420.0
"""Seconds for all that is left to end, once everything is healed."""


@dataclass(slots=True)
class Started:
    """An operation of the stream."""

    ref: OperationRef
    kind: str
    rows: int
    journal: Journal | None
    paused: bool = False


class Stream:
    """Keeps some operations going; ``say`` tells what it does."""

    def __init__(self, cluster: SoakCluster, rng: random.Random, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._rng = rng
        self._say = say
        self._all: list[Started] = []
        self._open: list[Started] = []
        self._number = 0
        self._unknown: tuple[str, str, str, dict[str, Any], int, Journal | None] | None = None
        self._next = 0.0
        self.compared = 0

    @property
    def started(self) -> int:
        return len(self._all)

    def ended(self) -> Counter[str]:
        """State → operations."""
        return Counter(self._cluster.records.get(op.ref, "not ended") for op in self._all)

    def tend(self) -> None:
        """Start what is missing, and now and then give a command."""
        self._open = [op for op in self._open if op.ref not in self._cluster.records]
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._rng.uniform(0.2, 1.5)
        try:
            if self._unknown is not None or len(self._open) < AT_ONCE:
                self._start()
            elif self._rng.random() < 0.3:
                self._command(self._rng.choice(self._open))
        except (NotAllowed, NotFound):
            pass  # it ended meanwhile
        except DistopError as error:
            self._say(f"a client met {type(error).__name__}: {str(error)[:100]}")

    def _start(self) -> None:
        if self._unknown is None:
            self._number += 1
            kind, type_name, arg, rows, journal = self._draw()
            self._unknown = (f"soak-{self._number}", kind, type_name, arg, rows, journal)
        request, kind, type_name, arg, rows, journal = self._unknown
        table = TABLES[self._number % len(TABLES)]
        # Repeated with the same request id until the answer is known: it is one operation all the same.
        started = self._cluster.client.start_operation(type_name, table, arg, request_id=request)
        self._unknown = None
        op = Started(OperationRef.parse(started.ref), kind, rows, journal)
        self._all.append(op)
        self._open.append(op)

    def _draw(self) -> tuple[str, str, dict[str, Any], int, Journal | None]:
        rng = self._rng
        kinds = ["writing"] * 4 + ["deaf", "noop", "noop", "large", "crash", "break", "error"]
        if self._cluster.spark:
            kinds += ["spark", "spark"]
            if not any(op.kind == "spark-killed" for op in self._open):
                kinds.append(
                    "spark-killed"
                )  # one at a time: each takes several starts of a JVM, with nothing beside it
        kind = rng.choice(kinds)
        path = self._cluster.folder / f"journal-{self._number}.jsonl"
        rows = rng.randrange(2, 12)
        journal = Journal(path)
        arg: dict[str, Any] = {"jobs": rng.randrange(1, 16), "rows": rows, "journal": str(path)}
        if kind == "writing":
            return kind, "writing", {**arg, "pause": rng.uniform(0.01, 0.3)}, rows, journal
        if kind == "deaf":
            return kind, "writing", {**arg, "does": {"p=0": "deaf"}}, rows, journal
        if kind == "spark":
            return kind, "sparkwriting", {**arg, "pause": 0.05, "jobs": min(arg["jobs"], 6)}, rows, journal
        if kind == "spark-killed":
            return kind, "sparkwriting", {**arg, "jobs": 2, "does": {"p=1": "kill-jvm"}}, rows, journal
        jobs = rng.randrange(1, 40)
        one = str(rng.randrange(jobs))
        noop: dict[str, Any] = {"jobs": jobs, "sleep": rng.uniform(0, 0.2)}
        if kind == "large":
            noop = {"jobs": 1_500}
        elif kind == "crash":
            noop["crash"] = [one]
        elif kind == "break":
            noop["batch_error"] = [one]
        elif kind == "error":
            noop |= {"error": [one], "fail": [str(rng.randrange(jobs))]}
        return kind, "noop", noop, 0, None

    def _command(self, op: Started) -> None:
        operation = self._cluster.client.operation(str(op.ref))
        if op.paused:
            operation.resume()
            op.paused = False
        elif op.kind == "deaf" or self._rng.random() < 0.4:
            operation.cancel("soaking")
        else:
            op.paused = True  # also where the answer gets lost: resuming what is not paused is refused
            operation.pause()

    # ----------------------------------------------------------------- finish

    def finish(self) -> list[str]:
        """Let everything end; what did not, and what was written wrongly."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and self._cluster.audit.violation is None:
            self._open = [op for op in self._open if op.ref not in self._cluster.records]
            if not self._open:
                break
            for op in self._open:
                self._let_end(op)
            time.sleep(0.5)
        problems = [f"{op.ref} ({op.kind}) does not end: {self._status(op)}" for op in self._open]
        for op in self._all:
            problems += self._compare(op)
        return problems

    def _let_end(self, op: Started) -> None:
        operation = self._cluster.client.operation(str(op.ref))
        try:
            if op.kind == "deaf":
                operation.cancel("the end")
                op.kind = "deaf, cancelled"
            elif op.paused:
                op.paused = False
                operation.resume()
        except (NotAllowed, NotFound):
            pass
        except DistopError as error:
            self._say(f"a client met {type(error).__name__}: {str(error)[:100]}")

    def _status(self, op: Started) -> str:
        try:
            status = self._cluster.client.operation(str(op.ref)).status()
            return json.dumps(status.to_json(), default=str)
        except DistopError as error:
            return str(error)

    def _compare(self, op: Started) -> list[str]:
        """One outcome for each job, what it names is whole, and no two attempts wrote at the same time."""
        problems = []
        for partition, written in self._cluster.outcomes.get(op.ref, {}).items():
            if len(written) > 1:
                problems.append(f"{op.ref}: job {partition} has {len(written)} outcomes")
            outcome = json.loads(written[-1])
            if op.journal is None or outcome.get("result") is None:
                continue
            file = Path(outcome["result"]["file"])
            expected = "".join(f"p={partition} {row}\n" for row in range(op.rows))
            if not file.exists() or file.read_text() != expected or digest(file) != outcome["result"]["sha256"]:
                problems.append(f"{op.ref}: what the outcome of job {partition} names is not whole: {file}")
            self.compared += 1
        if op.journal is not None and not op.kind.startswith("spark"):
            problems += [f"{op.ref}: {text}" for text in op.journal.overlaps()]
        return problems

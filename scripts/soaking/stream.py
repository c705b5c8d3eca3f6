"""Runs a stream of operations of all kinds, with commands to operations and executors, and checks their output."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, Incompatible, NotAllowed, NotFound
from distop.protocol.records import OperationRef
from soaking.cluster import NAMES
from soaking.operation_checks import compare, recovered, successes, uncleaned
from soaking.operations import OF_JVM, ROUGH, draw
from soaking.tables import TABLES, decided

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from soaking.cluster import SoakCluster
    from soaking.operations import Submission
    from soaking.suspensions import Allowed

AT_ONCE = {"plain": 5, "lone": 2, "spark": 2}
"""Lane → number of concurrent operations."""
LIMIT = 420.0
"""Time limit in seconds for the end of all operations, after all faults are undone."""
DRAINS = (15.0, 40.0)
"""Minimum and maximum seconds between two drains."""
DRAINED = (2.0, 15.0)
"""Minimum and maximum seconds of a drain."""


@dataclass(slots=True)
class Started:
    """A started operation. ``due``: the time of its next action."""

    ref: OperationRef
    submission: Submission
    actions: list[tuple[float, str]]
    due: float
    paused: bool = False


@dataclass(slots=True)
class Lane:
    """A sequence of operations. ``submission``: the next one, until its start is acknowledged; ``again``: the operation
    that it reruns.
    """

    name: str
    number: int = 0
    submission: Submission | None = None
    again: OperationRef | None = None


@dataclass(slots=True)
class Draining:
    """The drained executor, and the time of the next drain or undrain. The random generator serves only this."""

    chance: random.Random
    at: float
    victim: str = ""
    ever: set[str] = field(default_factory=set)


class Stream:
    """Keeps some operations running, in its own thread. ``say``: prints progress."""

    def __init__(self, cluster: SoakCluster, seed: int, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._records = cluster.follower.records
        self._seed = seed
        self._say = say
        self._pace = random.Random(f"{seed}/pace")
        self._all: list[Started] = []
        self._open: list[Started] = []
        self._lanes = [Lane("plain"), Lane("lone"), *([Lane("spark")] if cluster.spark else [])]
        self._again: set[OperationRef] = set()
        self._refused: set[str] = set()
        self._gentle = float("inf")
        chance = random.Random(f"{seed}/drains")
        self._draining = Draining(chance, time.monotonic() + chance.uniform(*DRAINS))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.commands: Counter[str] = Counter()
        self.compared = 0
        self.judged = 0
        self.resumed = 0
        """Attempts that resumed from a checkpoint."""
        self.followed = 0
        self.recovered = 0
        """Operations that succeeded after their planning or completion had failed on one node."""
        self.garbage = 0
        """Operations with remaining output after a logged failure of their cleanup."""
        self.failure: BaseException | None = None
        """The error that ended the thread."""

    @property
    def started(self) -> int:
        return len(self._all)

    @property
    def refused(self) -> int:
        """Number of operations whose start had to wait for the end of another one of its object."""
        return len(self._refused)

    def kinds(self) -> Counter[str]:
        """Kind → number of operations."""
        return Counter(op.submission.kind for op in self._all)

    def ended(self) -> Counter[str]:
        """Final state → number of operations."""
        return Counter(self._records.get(op.ref, {"state": "not ended"})["state"] for op in self._all)

    def begin(self, seconds: float) -> None:
        """Start the thread, which starts operations until :meth:`stop`.

        In the second half of ``seconds``, no operation kills a child, except on the executor with Spark.
        """
        self._gentle = time.monotonic() + seconds / 2
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.wait(self._pace.uniform(0.1, 0.8)):
                self._step()
        except BaseException as error:
            self.failure = error

    def _step(self) -> None:
        """Send the due commands, and start the missing operations."""
        self._open = [op for op in self._open if op.ref not in self._records]
        self._guarded(self._drain)
        for op in list(self._open):
            if op.actions and op.due <= time.monotonic():
                self._guarded(self._act, op)
        for lane in self._lanes:
            going = sum(op.submission.name.startswith(lane.name) for op in self._open)
            if lane.submission is not None or going < AT_ONCE[lane.name]:
                self._guarded(self._start, lane)

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except DistopError as error:
            self._say(f"a client got {type(error).__name__}: {str(error)[:100]}")

    # ----------------------------------------------------------------- starts

    def _start(self, lane: Lane) -> None:
        submission = lane.submission or self._next(lane)
        if submission is None:
            return
        lane.submission = submission
        request = f"soak-{submission.name}"
        # Repeated with the same request id until the answer is known, so it stays one operation.
        try:
            if lane.again is not None:
                started = self._cluster.client.rerun(lane.again, request_id=request)
            else:
                table = TABLES[submission.number % len(TABLES)]
                if "held" in submission.arg:
                    Path(submission.arg["held"]).mkdir(exist_ok=True)
                started = self._cluster.client.start_operation(
                    submission.type, table, submission.arg, request_id=request, failure_policy=submission.policy
                )
        except Incompatible:
            self._refused.add(submission.name)
            return
        except (NotAllowed, NotFound) as error:
            if lane.again is None:
                raise
            self._say(f"{lane.again} is not rerun: {error}")
            lane.submission = None
            return
        lane.submission = None
        actions = list(submission.actions)
        op = Started(
            OperationRef.parse(started.ref), submission, actions, time.monotonic() + (actions[0][0] if actions else 0.0)
        )
        self._all.append(op)
        self._open.append(op)

    def _next(self, lane: Lane) -> Submission | None:
        """The next operation of a lane; None: it has to wait."""
        while True:
            submission = draw(self._seed, lane.name, lane.number, self._cluster.folder)
            if submission.kind in OF_JVM and any(op.submission.kind in OF_JVM for op in self._open):
                return None
            lane.number += 1
            lane.again = self._to_rerun() if submission.kind == "rerun" else None
            nothing = submission.kind == "rerun" and lane.again is None
            if not nothing and not (submission.kind in ROUGH and time.monotonic() > self._gentle):
                return submission

    def _to_rerun(self) -> OperationRef | None:
        """The newest failed operation without a journal, whose lines would not distinguish attempts of a rerun."""
        for op in reversed(self._all):
            failed = self._records.get(op.ref, {}).get("failed")
            if failed and op.submission.journal is None and op.ref not in self._again:
                self._again.add(op.ref)
                return op.ref
        return None

    # --------------------------------------------------------------- commands

    def _act(self, op: Started) -> None:
        """Send the next command, repeated until its outcome is known."""
        what = op.actions[0][1]
        operation = self._cluster.client.operation(str(op.ref))
        try:
            if what == "cancel":
                operation.cancel("soaking")
            elif what == "resume":
                operation.resume()
                op.paused = False
            else:
                op.paused = True  # even if the answer is lost: a resume of a running operation is refused
                operation.pause(now=what == "pause now")
            self.commands[what] += 1
        except (NotAllowed, NotFound):
            pass  # the operation has ended
        op.actions.pop(0)
        if op.actions:
            op.due = time.monotonic() + op.actions[0][0]

    def _drain(self) -> None:
        """Drain one executor after the other, each for some seconds."""
        drain, client = self._draining, self._cluster.client
        if time.monotonic() < drain.at:
            return
        if not drain.victim:
            drain.victim = drain.chance.choice(NAMES)
            drain.ever.add(drain.victim)
            drain.at = time.monotonic() + drain.chance.uniform(*DRAINED)
            with contextlib.suppress(NotFound):  # the executor is not alive
                client.drain(drain.victim)
                self.commands["drain"] += 1
        else:
            with contextlib.suppress(NotAllowed, NotFound):  # the executor was not drained
                client.undrain(drain.victim)
                self.commands["undrain"] += 1
            drain.victim = ""
            drain.at = time.monotonic() + drain.chance.uniform(*DRAINS)

    # ----------------------------------------------------------------- finish

    def stop(self) -> None:
        """Start no more operations."""
        self._over.set()
        self._thread.join(120)

    def finish(self) -> list[str]:
        """Wait for the end of all operations, and check them; returns the problems."""
        problems = [f"the stream failed: {self.failure!r}"] if self.failure is not None else []
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and self._cluster.follower.audit.violation is None:
            self._open = [op for op in self._open if op.ref not in self._records]
            if not self._open and not self._to_follow():
                break
            for name in self._draining.ever:  # again, since a drain may arrive late
                self._guarded(self._undrain, name)
            for op in self._open:
                self._guarded(self._let_end, op)
            time.sleep(0.5)
        problems += [f"{op.ref} ({op.submission.kind}) does not end: {self._status(op)}" for op in self._open]
        problems += [f"{ref} does not end" for ref in self._to_follow()]
        for op in self._all:
            problems += self._compare(op)
        return problems

    def left(self, logs: Sequence[Path]) -> list[str]:
        """The remaining output after all cleanups, as problems. Called after the end of the daemons, which may clean up
        until then.
        """
        problems = []
        for op in self._all:
            found, logged = uncleaned(op.ref, op.submission, logs, self._allowed(op))
            problems += found
            self.garbage += logged
        return problems

    def _to_follow(self) -> list[OperationRef | str]:
        """The follow-up operations that have not ended; a text for each one that has not started."""
        followers, waiting = self._cluster.follower.followers, list[OperationRef | str]()
        for op in self._all:
            if op.submission.then and self._records.get(op.ref, {}).get("state") == "success":
                begun = followers.get(op.submission.name, [])
                waiting += [ref for ref in begun if ref not in self._records]
                waiting += [] if begun else [f"the operation after {op.ref}"]
        return waiting

    def _undrain(self, name: str) -> None:
        with contextlib.suppress(NotAllowed, NotFound):
            self._cluster.client.undrain(name)

    def _let_end(self, op: Started) -> None:
        operation = self._cluster.client.operation(str(op.ref))
        with contextlib.suppress(NotAllowed, NotFound):
            if op.submission.kind == "deaf" and op.actions:
                operation.cancel("end of the soak")
                op.actions.clear()
            elif op.paused:
                operation.resume()
                op.paused = False

    def _status(self, op: Started) -> str:
        try:
            status = self._cluster.client.operation(str(op.ref)).status()
            return json.dumps(status.to_json(), default=str)
        except DistopError as error:
            return str(error)

    def _compare(self, op: Started) -> list[str]:
        follower, submission = self._cluster.follower, op.submission
        outcomes, followers = follower.outcomes.get(op.ref, {}), follower.followers.get(submission.name, [])
        record = self._records.get(op.ref, {})
        self.followed += len(followers)
        if submission.journal is not None:
            self.compared += len(successes(outcomes))
            self.resumed += submission.journal.resumed()
        if op.ref.type == "validate":
            self.judged += decided(record.get("report"))
        counted = follower.counted.get(op.ref, [])
        self.recovered += recovered(record, counted)
        return compare(op.ref, submission, record, outcomes, followers, counted, self._allowed(op))

    def _allowed(self, op: Started) -> Allowed:
        return self._cluster.suspensions.of(self._cluster.follower.held.get(op.ref, {}))

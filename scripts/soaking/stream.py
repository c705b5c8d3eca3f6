"""A stream of operations of every kind, with commands to them and to executors, and what they wrote compared."""

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
from soaking.comparing import compare, recovered, successes, uncleaned
from soaking.operations import OF_JVM, ROUGH, draw
from soaking.tables import TABLES, decided

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from soaking.cluster import SoakCluster
    from soaking.operations import Wish
    from soaking.standstills import Allowed

AT_ONCE = {"plain": 5, "lone": 2, "spark": 2}
"""Lane → operations that go on at a time."""
LIMIT = 420.0
"""Seconds for all that is left to end, once everything is healed."""
DRAINS = (15.0, 40.0)
"""Seconds between two drains."""
DRAINED = (2.0, 15.0)
"""Seconds for which an executor stays drained."""


@dataclass(slots=True)
class Started:
    """An operation of the stream. ``due``: when its next act is."""

    ref: OperationRef
    wish: Wish
    acts: list[tuple[float, str]]
    due: float
    paused: bool = False


@dataclass(slots=True)
class Lane:
    """Operations that follow each other. ``wish``: the next one, until it is known to have begun; ``again``: which one
    it runs again.
    """

    name: str
    number: int = 0
    wish: Wish | None = None
    again: OperationRef | None = None


@dataclass(slots=True)
class Draining:
    """Whom the next drain strikes, and what is drained. Its chance is moved by nothing else."""

    chance: random.Random
    at: float
    victim: str = ""
    ever: set[str] = field(default_factory=set)


class Stream:
    """Keeps some operations going, in a thread of its own; ``say`` tells what it does."""

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
        """Attempts that went on from a checkpoint."""
        self.followed = 0
        self.recovered = 0
        """Operations that succeeded after their planning or completion had failed on one node."""
        self.garbage = 0
        """Operations of which something is left, since their cleanup failed and a daemon has said so."""
        self.failure: BaseException | None = None
        """What ended it before its time."""

    @property
    def started(self) -> int:
        return len(self._all)

    @property
    def refused(self) -> int:
        """Operations whose start had to wait for the end of another one of its object."""
        return len(self._refused)

    def kinds(self) -> Counter[str]:
        """Kind → operations."""
        return Counter(op.wish.kind for op in self._all)

    def ended(self) -> Counter[str]:
        """State → operations."""
        return Counter(self._records.get(op.ref, {"state": "not ended"})["state"] for op in self._all)

    def begin(self, seconds: float) -> None:
        """Start operations from now on, until :meth:`stop`. In the second half of so many seconds there are none that
        cost a child its life, but on the executor that has Spark.
        """
        self._gentle = time.monotonic() + seconds / 2
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.wait(self._pace.uniform(0.1, 0.8)):
                self._tend()
        except BaseException as error:
            self.failure = error

    def _tend(self) -> None:
        """Do what is due, and start what is missing."""
        self._open = [op for op in self._open if op.ref not in self._records]
        self._guarded(self._drain)
        for op in list(self._open):
            if op.acts and op.due <= time.monotonic():
                self._guarded(self._act, op)
        for lane in self._lanes:
            going = sum(op.wish.name.startswith(lane.name) for op in self._open)
            if lane.wish is not None or going < AT_ONCE[lane.name]:
                self._guarded(self._start, lane)

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except DistopError as error:
            self._say(f"a client met {type(error).__name__}: {str(error)[:100]}")

    # ----------------------------------------------------------------- starts

    def _start(self, lane: Lane) -> None:
        wish = lane.wish or self._next(lane)
        if wish is None:
            return
        lane.wish = wish
        request = f"soak-{wish.name}"
        # Repeated with the same request id until the answer is known: it is one operation all the same.
        try:
            if lane.again is not None:
                started = self._cluster.client.rerun(lane.again, request_id=request)
            else:
                table = TABLES[wish.number % len(TABLES)]
                if "held" in wish.arg:
                    Path(wish.arg["held"]).mkdir(exist_ok=True)
                started = self._cluster.client.start_operation(
                    wish.type, table, wish.arg, request_id=request, failure_policy=wish.policy
                )
        except Incompatible:
            self._refused.add(wish.name)
            return
        except (NotAllowed, NotFound) as error:
            if lane.again is None:
                raise
            self._say(f"{lane.again} is not run again: {error}")
            lane.wish = None
            return
        lane.wish = None
        acts = list(wish.acts)
        op = Started(OperationRef.parse(started.ref), wish, acts, time.monotonic() + (acts[0][0] if acts else 0.0))
        self._all.append(op)
        self._open.append(op)

    def _next(self, lane: Lane) -> Wish | None:
        """The next one that can be; None where it has to wait."""
        while True:
            wish = draw(self._seed, lane.name, lane.number, self._cluster.folder)
            if wish.kind in OF_JVM and any(op.wish.kind in OF_JVM for op in self._open):
                return None
            lane.number += 1
            lane.again = self._to_rerun() if wish.kind == "rerun" else None
            nothing = wish.kind == "rerun" and lane.again is None
            if not nothing and not (wish.kind in ROUGH and time.monotonic() > self._gentle):
                return wish

    def _to_rerun(self) -> OperationRef | None:
        """The newest operation that failed and wrote no journal, whose lines tell attempts by their numbers alone."""
        for op in reversed(self._all):
            failed = self._records.get(op.ref, {}).get("failed")
            if failed and op.wish.journal is None and op.ref not in self._again:
                self._again.add(op.ref)
                return op.ref
        return None

    # --------------------------------------------------------------- commands

    def _act(self, op: Started) -> None:
        """Its next act, repeated until it is known whether it was done."""
        what = op.acts[0][1]
        operation = self._cluster.client.operation(str(op.ref))
        try:
            if what == "cancel":
                operation.cancel("soaking")
            elif what == "resume":
                operation.resume()
                op.paused = False
            else:
                op.paused = True  # also where the answer gets lost: resuming what is not paused is refused
                operation.pause(now=what == "pause now")
            self.commands[what] += 1
        except (NotAllowed, NotFound):
            pass  # it ended meanwhile
        op.acts.pop(0)
        if op.acts:
            op.due = time.monotonic() + op.acts[0][0]

    def _drain(self) -> None:
        """Drain one executor after the other, each for some seconds."""
        drain, client = self._draining, self._cluster.client
        if time.monotonic() < drain.at:
            return
        if not drain.victim:
            drain.victim = drain.chance.choice(NAMES)
            drain.ever.add(drain.victim)
            drain.at = time.monotonic() + drain.chance.uniform(*DRAINED)
            with contextlib.suppress(NotFound):  # it is not there just now
                client.drain(drain.victim)
                self.commands["drain"] += 1
        else:
            with contextlib.suppress(NotAllowed, NotFound):  # it was not drained
                client.undrain(drain.victim)
                self.commands["undrain"] += 1
            drain.victim = ""
            drain.at = time.monotonic() + drain.chance.uniform(*DRAINS)

    # ----------------------------------------------------------------- finish

    def stop(self) -> None:
        """Start nothing more."""
        self._over.set()
        self._thread.join(120)

    def finish(self) -> list[str]:
        """Let everything end; what did not, and what was written wrongly."""
        problems = [f"the stream ended: {self.failure!r}"] if self.failure is not None else []
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and self._cluster.follower.audit.violation is None:
            self._open = [op for op in self._open if op.ref not in self._records]
            if not self._open and not self._to_follow():
                break
            for name in self._draining.ever:  # also where a drain arrived late
                self._guarded(self._undrain, name)
            for op in self._open:
                self._guarded(self._let_end, op)
            time.sleep(0.5)
        problems += [f"{op.ref} ({op.wish.kind}) does not end: {self._status(op)}" for op in self._open]
        problems += [f"{ref} does not end" for ref in self._to_follow()]
        for op in self._all:
            problems += self._compare(op)
        return problems

    def left(self, logs: Sequence[Path]) -> list[str]:
        """What cleanup left behind, once the daemons have ended: until then one may be at it."""
        problems = []
        for op in self._all:
            found, told = uncleaned(op.ref, op.wish, logs, self._allowed(op))
            problems += found
            self.garbage += told
        return problems

    def _to_follow(self) -> list[OperationRef | str]:
        """What follows an operation and has not ended; the name of the operation where it has not even begun."""
        followers, waiting = self._cluster.follower.followers, list[OperationRef | str]()
        for op in self._all:
            if op.wish.then and self._records.get(op.ref, {}).get("state") == "success":
                begun = followers.get(op.wish.name, [])
                waiting += [ref for ref in begun if ref not in self._records]
                waiting += [] if begun else [f"what follows {op.ref}"]
        return waiting

    def _undrain(self, name: str) -> None:
        with contextlib.suppress(NotAllowed, NotFound):
            self._cluster.client.undrain(name)

    def _let_end(self, op: Started) -> None:
        operation = self._cluster.client.operation(str(op.ref))
        with contextlib.suppress(NotAllowed, NotFound):
            if op.wish.kind == "deaf" and op.acts:
                operation.cancel("the end")
                op.acts.clear()
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
        follower, wish = self._cluster.follower, op.wish
        outcomes, followers = follower.outcomes.get(op.ref, {}), follower.followers.get(wish.name, [])
        record = self._records.get(op.ref, {})
        self.followed += len(followers)
        if wish.journal is not None:
            self.compared += len(successes(outcomes))
            self.resumed += wish.journal.resumed()
        if op.ref.type == "validate":
            self.judged += decided(record.get("report"))
        counted = follower.counted.get(op.ref, [])
        self.recovered += recovered(record, counted)
        return compare(op.ref, wish, record, outcomes, followers, counted, self._allowed(op))

    def _allowed(self, op: Started) -> Allowed:
        return self._cluster.standstills.of(self._cluster.follower.held.get(op.ref, {}))

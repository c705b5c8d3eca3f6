"""Checks that drained executors and operations that were paused now have stopped.

Two rules hold under all faults: an executor whose record says "drained" holds no claim, and a stopped job counts no
failure. That a stop completes soon is checked only after the faults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol import keys as K
from distop.protocol.executor_nodes import Drain, NodeState
from distop.protocol.jobs import Claim
from distop.protocol.records import Node, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distop.protocol.keys import Keys, ParsedKey
    from distop.protocol.revisioned import Change
    from tests.simulator.job_effects import Ends
    from tests.simulator.virtual_loop import VirtualLoop

SOON = 45.0
"""Maximum seconds from a stop, after all faults, until nothing runs: the grace period of a job that ignores a cancel,
the reconnection of a daemon, and two polls.
"""
STOPPED = ("cancelled", "refused")
"""Ends of attempts that must not count as failures."""


class StopChecks:
    """Folds each revision. ``claims``: the existing claims; ``ends``: the ends of attempts, as reported to daemons;
    ``found(kind, key, text, op, partition)`` is called for each breach.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        keys: Keys,
        claims: Mapping[str, tuple[Claim, int]],
        ends: Ends,
        found: Callable[..., None],
    ) -> None:
        self._loop = loop
        self._keys = keys
        self._claims = claims
        self._ends = ends
        self._found = found
        self._nodes: dict[str, Node] = {}
        self._drained: dict[str, int] = {}
        """Draining executor → the revision of the drain."""
        self._undone: dict[str, int] = {}
        """Executor → the revision of its last undrain."""
        self._halted: dict[str, tuple[int, ParsedKey]] = {}
        """Pending key of an operation that was paused now → (revision, parsed key)."""
        self._calm = False

    def step(self, revision: int, parsed: Sequence[tuple[ParsedKey, Change]], sender: str) -> None:
        """Fold one whole revision, before ``claims`` is updated."""
        for key, change in parsed:
            if key.family == K.NODE:
                self._node(key.id, change)
            elif key.family == K.NODE_DRAIN:
                self._drain(key.id, revision, change)
            elif key.family == K.PENDING:
                self._pending(key, revision, change)
            elif key.partition >= 0 and not change.deleted and (key.family == K.CLAIM or key.name == "outcome"):
                self._job(key, change, sender)

    def calm(self) -> None:
        """Start the checks that a stop completes soon: all faults have ended."""
        self._calm = True
        for executor, revision in self._drained.items():
            self._loop.world_at(self._loop.now + SOON, self._check_drained, executor, revision)
        for place, (revision, _) in self._halted.items():
            self._loop.world_at(self._loop.now + SOON, self._check_halted, place, revision)

    # ------------------------------------------------------------------ drains

    def _node(self, incarnation: str, change: Change) -> None:
        if change.deleted:
            self._nodes.pop(incarnation, None)
            return
        node = self._nodes[incarnation] = Node.decode(change.kv.value)
        if node.state is not NodeState.DRAINED or node.executor not in self._drained:
            return
        for place, claim, fence in self._held(incarnation):
            # The record may be older than an undrain, after which the executor claimed jobs.
            if fence < self._undone.get(node.executor, fence + 1):
                text = f"{node.executor} reports that it is drained, but holds {place}: {claim.encode().decode()}"
                self._found("drained but busy", place, text, *self._of(place))

    def _drain(self, executor: str, revision: int, change: Change) -> None:
        if not change.deleted and Drain.decode(change.kv.value).drain:
            self._drained[executor] = revision
            if self._calm:
                self._loop.world_at(self._loop.now + SOON, self._check_drained, executor, revision)
        else:
            self._drained.pop(executor, None)
            self._undone[executor] = revision

    def _check_drained(self, executor: str, revision: int) -> None:
        if self._drained.get(executor) != revision:
            return
        for incarnation, node in self._nodes.items():
            for place, claim, _ in self._held(incarnation) if node.executor == executor else ():
                text = f"{executor} was drained {SOON:g} s ago, but still holds it: {claim.encode().decode()}"
                self._found("not drained", place, text, *self._of(place))

    # ------------------------------------------------------------------ pauses

    def _pending(self, key: ParsedKey, revision: int, change: Change) -> None:
        place = change.kv.key
        if not change.deleted and change.kv.value == Phase.HALTED.encode():
            self._halted[place] = (revision, key)
            if self._calm:
                self._loop.world_at(self._loop.now + SOON, self._check_halted, place, revision)
        else:
            self._halted.pop(place, None)

    def _check_halted(self, place: str, revision: int) -> None:
        halted = self._halted.get(place)
        if halted is None or halted[0] != revision or halted[1].ref is None:
            return
        first, after = self._keys.claims_range(halted[1].ref)
        for incarnation in self._nodes:
            for held, claim, _ in self._held(incarnation):
                if first <= held < after:
                    text = f"its operation was paused now {SOON:g} s ago: {claim.encode().decode()}"
                    self._found("not stopped", held, text, *self._of(held))

    # ------------------------------------------------------------------- blame

    def _job(self, key: ParsedKey, change: Change, sender: str) -> None:
        """Check a write by a claim's holder at the end of an attempt: a stopped attempt counts no failure."""
        assert key.ref is not None
        former, fence = self._claims.get(self._keys.claim(key.ref, key.partition), (None, 0))
        if former is None or former.incarnation != sender:
            return
        how = self._ends.get((str(key.ref), key.partition, fence))
        if how in STOPPED and (key.family != K.CLAIM or Claim.decode(change.kv.value).failures > former.failures):
            text = f"attempt {former.attempt} was {how}, but counts as a failure"
            self._found("wrongly blamed", change.kv.key, text, str(key.ref), key.partition)

    # ----------------------------------------------------------------- helpers

    def _held(self, incarnation: str) -> Iterator[tuple[str, Claim, int]]:
        for place, (claim, fence) in self._claims.items():
            if claim.incarnation == incarnation:
                yield place, claim, fence

    def _of(self, place: str) -> tuple[str, int]:
        key = self._keys.parse(place)
        return str(key.ref), key.partition

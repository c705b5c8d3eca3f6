"""What jobs do beside etcd: who worked on what, from when to when, under which fence; and what must not be seen there.

etcd cannot fence a job's side effects; the session's deadline and the guardian do, while the clock counts. So here no
two attempts at a job may ever be at work at once, none without its claim, and none may lose a checkpoint. What an
attempt leaves is cleaned up before another one starts over, or when the job is given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from distop.protocol.jobs import Claim, Outcome
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.testing.model_store import ModelStore


Ends = dict[tuple[str, int, int], str]
"""How an attempt ended, as its daemon was told: (operation, partition, fence) → the kind of end."""


@dataclass(slots=True)
class Effect:
    """One attempt at work. ``ended`` None: still."""

    op: str
    partition: int
    fence: int
    incarnation: str
    attempt: int
    begun: float
    kind: str = "job"
    ended: float | None = None
    how: str = ""

    def __str__(self) -> str:
        until = f"{self.ended:.3f}" if self.ended is not None else "now"
        return (
            f"{self.begun:.3f}–{until} {self.kind} of {self.op} partition {self.partition}, attempt {self.attempt}, "
            f"fence {self.fence}, by {self.incarnation}: {self.how or 'at work'}"
        )


class Effects:
    """The record. ``found(kind, key, text, op, partition)`` is called for each breach."""

    def __init__(self, store: ModelStore, keys: Keys, now: Callable[[], float], found: Callable[..., None]) -> None:
        self._store = store
        self._keys = keys
        self._now = now
        self._found = found
        self.all: list[Effect] = []
        self.ends: Ends = {}
        self._active: dict[tuple[str, int], list[Effect]] = {}
        self._saved: dict[tuple[str, int], int] = {}
        self._latest: dict[tuple[str, int], Effect] = {}
        self._cleaned: dict[tuple[str, int], float] = {}
        """When cleanups after jobs that were given up began. Nothing of before is left: not what a checkpoint speaks of
        either.
        """
        self._left: dict[tuple[str, int], Effect] = {}
        """The last attempts that have begun, of jobs that have neither succeeded nor been cleaned up since."""
        self._forsaken: dict[str, float] = {}

    def forsake(self, incarnation: str) -> None:
        """Its session ends while it cannot know: nothing is promised of what it does beside etcd until it
        :meth:`knows`. All that others do is judged as ever, and so are checkpoints.
        """
        self._forsaken[incarnation] = inf

    def knows(self, incarnation: str, since: float) -> None:
        """What it begins from then on is judged again."""
        if incarnation in self._forsaken:
            self._forsaken[incarnation] = min(since, self._forsaken[incarnation])

    def _counts(self, effect: Effect) -> bool:
        return effect.begun >= self._forsaken.get(effect.incarnation, 0.0)

    def begin(
        self, ref: OperationRef, partition: int, fence: int, incarnation: str, attempt: int, kind: str = "job"
    ) -> Effect:
        """Somebody begins to work on a job."""
        op = str(ref)
        effect = Effect(op, partition, fence, incarnation, attempt, self._now(), kind)
        self.all.append(effect)
        active = self._active.setdefault((op, partition), [])
        for other in active:
            if "job" in (kind, other.kind) and self._counts(effect) and self._counts(other):
                text = f"two are at work at once: {other}; {effect}"
                self._found("two at once", self._keys.claim(ref, partition), text, op, partition)
        active.append(effect)
        if kind == "cleanup":
            self._cleaned[op, partition] = effect.begun
        if kind == "job" and self._counts(effect):
            claim = self._store.get(self._keys.claim(ref, partition))
            if claim is None or claim.mod_revision != fence:
                what = f"{claim.mod_revision}: {claim.value.decode()}" if claim is not None else "absent"
                text = f"a job began without its claim, which is {what}: {effect}"
                self._found("job without claim", self._keys.claim(ref, partition), text, op, partition)
        return effect

    def unwritten(self, ref: OperationRef, effect: Effect) -> None:
        """It began, and its node would not know of what it leaves (I29)."""
        text = f"a job began that is not written down on its node: {effect}"
        self._found("job not written down", self._keys.claim(ref, effect.partition), text, effect.op, effect.partition)

    def unserved(self, ref: OperationRef, incarnation: str, what: str, why: str) -> None:
        """A child was asked for something that its executor does not serve: the real one refuses."""
        text = f"{incarnation} was asked for {what} of {ref}: {why}"
        self._found("not served", self._keys.of(ref, "spec"), text, str(ref), -1)

    def end(self, effect: Effect, how: str) -> None:
        """It has stopped."""
        if effect.ended is None:
            effect.ended, effect.how = self._now(), how
            self._active[effect.op, effect.partition].remove(effect)
            place = effect.op, effect.partition
            # The child cleans up after a verdict, before it tells of it.
            if how in ("success", "verdict") and self._left.get(place) is effect:
                del self._left[place]

    def starts_over(self, ref: OperationRef, partition: int, effect: Effect, *, cleaned: bool) -> None:
        """The job starts from its beginning. ``cleaned``: what attempts before have left is removed first."""
        former = self._left.get((str(ref), partition))
        if former is not None and not cleaned and self._counts(effect):
            text = f"a job started over beside what an attempt before has left: {former}; {effect}"
            self._found("left behind", self._keys.claim(ref, partition), text, str(ref), partition)

    def leaves(self, ref: OperationRef, partition: int, effect: Effect) -> None:
        """From now on something of this attempt is left where it stops."""
        self._left[str(ref), partition] = effect

    def excuse(self, ref: OperationRef, partition: int) -> None:
        """The cleanup of a job failed, which a log says; or its actor has it, who cleans up after others itself."""
        self._left.pop((str(ref), partition), None)

    def left_behind(self, ended: Collection[str]) -> Iterator[Effect]:
        """What attempts at jobs of these operations have left, which is in nobody's hands any more."""
        for (op, _), effect in self._left.items():
            if op in ended and self._counts(effect):
                yield effect

    def resumed(self, ref: OperationRef, partition: int, progress: Any, effect: Effect) -> None:
        """A resumable job goes on from this checkpoint (None: from its beginning)."""
        saved = self._saved.get((str(ref), partition), 0)
        self._saved[str(ref), partition] = int(progress or 0)
        self._latest[str(ref), partition] = effect
        if (progress or 0) < saved:
            text = f"a job went on from {progress or 0}, though {saved} had been saved"
            self._found("checkpoint lost", self._keys.job(ref, partition, "progress"), text, str(ref), partition)
        if not progress:
            self._cleaned.pop((str(ref), partition), None)
        elif (str(ref), partition) in self._cleaned:
            text = f"a job went on from {progress}, and what that speaks of had been cleaned up"
            self._found("checkpoint lost", self._keys.job(ref, partition, "progress"), text, str(ref), partition)

    def gives_up(self, ref: OperationRef, partition: int) -> None:
        """From now on its checkpoint may be gone: it may start over."""
        self._saved.pop((str(ref), partition), None)

    def saved(self, ref: OperationRef, partition: int, progress: int, effect: Effect) -> None:
        """A checkpoint was acknowledged. One of an attempt that has been begun anew meanwhile does not count."""
        key = (str(ref), partition)
        if self._latest.get(key) is effect:
            self._saved[key] = max(self._saved.get(key, 0), progress)

    def cleaned(self, ref: OperationRef, partition: int) -> None:
        """What a job had left was removed: it is given up."""
        self._cleaned.setdefault((str(ref), partition), self._now())
        self._left.pop((str(ref), partition), None)

    def succeeded(self, ref: OperationRef, partition: int, outcome: Outcome) -> None:
        """An executor reports a result."""
        cleaned = self._cleaned.get((str(ref), partition), -inf)
        if any(one.fence == outcome.fence and one.begun < cleaned for one in self.of(str(ref), partition)):
            text = f"attempt {outcome.attempt} is reported as a success, and its output had been cleaned up"
            self._found("output lost", self._keys.job(ref, partition, "outcome"), text, str(ref), partition)

    def claim_left(self, ref: OperationRef, partition: int, old: Claim, fence: int) -> None:
        """A claim was given up, reported under or taken over: its job must have stopped."""
        if old.actor:
            self.excuse(ref, partition)
        for effect in self._active.get((str(ref), partition), ()):
            if effect.kind == "job" and effect.fence == fence and self._counts(effect):
                text = f"the claim of {old.incarnation} (attempt {old.attempt}) ended while its job ran: {effect}"
                self._found("stopped too late", self._keys.claim(ref, partition), text, str(ref), partition)

    def of(self, op: str, partition: int) -> list[Effect]:
        """All that was done for one job."""
        return [effect for effect in self.all if (effect.op, effect.partition) == (op, partition)]

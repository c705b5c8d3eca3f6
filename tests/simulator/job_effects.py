"""Records the side effects of jobs (who worked on which job, when, under which fence), and checks them.

etcd cannot fence side effects; the session's deadline and the guardian do. So no two attempts of one job may ever run
at the same time, no attempt may run without its claim, and no checkpoint may be lost. The output of an attempt is
cleaned up before another one starts over, or when the job is abandoned.
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
"""The end of each attempt, as reported to its daemon: (operation, partition, fence) → the kind of end."""


@dataclass(slots=True)
class Effect:
    """One piece of work with side effects: a job attempt or a cleanup. ``ended`` None: it still runs."""

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
            f"fence {self.fence}, by {self.incarnation}: {self.how or 'running'}"
        )


class Effects:
    """The record of all side effects. ``found(kind, key, text, op, partition)`` is called for each breach."""

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
        """Job → when its cleanup started. No earlier output is left, nor the output that a checkpoint describes."""
        self._left: dict[tuple[str, int], Effect] = {}
        """The latest attempt of each job that has neither succeeded nor been cleaned up since."""
        self._exempt: dict[str, float] = {}
        """Incarnation → until when its work is not checked."""

    def exempt(self, incarnation: str) -> None:
        """Stop checking an incarnation that cannot know that its session has ended.

        The work of others, and checkpoints, are still checked. Ends with :meth:`end_exemption`.
        """
        self._exempt[incarnation] = inf

    def end_exemption(self, incarnation: str, since: float) -> None:
        """Check the work again that the incarnation starts from ``since`` on."""
        if incarnation in self._exempt:
            self._exempt[incarnation] = min(since, self._exempt[incarnation])

    def _checked(self, effect: Effect) -> bool:
        return effect.begun >= self._exempt.get(effect.incarnation, 0.0)

    def begin(
        self, ref: OperationRef, partition: int, fence: int, incarnation: str, attempt: int, kind: str = "job"
    ) -> Effect:
        """Record the start of a job attempt or of a cleanup."""
        op = str(ref)
        effect = Effect(op, partition, fence, incarnation, attempt, self._now(), kind)
        self.all.append(effect)
        active = self._active.setdefault((op, partition), [])
        for other in active:
            if "job" in (kind, other.kind) and self._checked(effect) and self._checked(other):
                text = f"both run at the same time: {other}; {effect}"
                self._found("two attempts at once", self._keys.claim(ref, partition), text, op, partition)
        active.append(effect)
        if kind == "cleanup":
            self._cleaned[op, partition] = effect.begun
        if kind == "job" and self._checked(effect):
            claim = self._store.get(self._keys.claim(ref, partition))
            if claim is None or claim.mod_revision != fence:
                what = f"{claim.mod_revision}: {claim.value.decode()}" if claim is not None else "absent"
                text = f"a job started without its claim, which is {what}: {effect}"
                self._found("job without claim", self._keys.claim(ref, partition), text, op, partition)
        return effect

    def not_on_disk(self, ref: OperationRef, effect: Effect) -> None:
        """Report a job that started before its run was written to disk: its output could be orphaned (I29)."""
        text = f"a job started whose run is not on its node's disk: {effect}"
        self._found("job not on disk", self._keys.claim(ref, effect.partition), text, effect.op, effect.partition)

    def not_served(self, ref: OperationRef, incarnation: str, what: str, why: str) -> None:
        """Report a request to a child for something that its executor does not serve; the real child refuses it."""
        text = f"{incarnation} was asked for {what} of {ref}: {why}"
        self._found("not served", self._keys.of(ref, "spec"), text, str(ref), -1)

    def end(self, effect: Effect, how: str) -> None:
        """Record the end of a piece of work."""
        if effect.ended is None:
            effect.ended, effect.how = self._now(), how
            self._active[effect.op, effect.partition].remove(effect)
            place = effect.op, effect.partition
            # The child cleans up after a verdict before it reports the verdict.
            if how in ("success", "verdict") and self._left.get(place) is effect:
                del self._left[place]

    def starts_over(self, ref: OperationRef, partition: int, effect: Effect, *, cleaned: bool) -> None:
        """Check a job that starts from its beginning. ``cleaned``: the output of earlier attempts is removed first."""
        former = self._left.get((str(ref), partition))
        if former is not None and not cleaned and self._checked(effect):
            text = f"a job started over without a cleanup of the attempt before: {former}; {effect}"
            self._found("output not cleaned up", self._keys.claim(ref, partition), text, str(ref), partition)

    def writes_output(self, ref: OperationRef, partition: int, effect: Effect) -> None:
        """Record that this attempt has output, which has to be cleaned up if the attempt does not succeed."""
        self._left[str(ref), partition] = effect

    def drop_output(self, ref: OperationRef, partition: int) -> None:
        """Expect no cleanup: it failed, which is logged, or the job went to an actor, which cleans up itself."""
        self._left.pop((str(ref), partition), None)

    def not_cleaned_up(self, ended: Collection[str]) -> Iterator[Effect]:
        """The attempts at jobs of these ended operations whose output was not cleaned up."""
        for (op, _), effect in self._left.items():
            if op in ended and self._checked(effect):
                yield effect

    def resumed(self, ref: OperationRef, partition: int, progress: Any, effect: Effect) -> None:
        """Check the checkpoint from which a resumable job resumes (None: from its beginning)."""
        saved = self._saved.get((str(ref), partition), 0)
        self._saved[str(ref), partition] = int(progress or 0)
        self._latest[str(ref), partition] = effect
        if (progress or 0) < saved:
            text = f"a job resumed from {progress or 0}, although {saved} had been saved"
            self._found("checkpoint lost", self._keys.job(ref, partition, "progress"), text, str(ref), partition)
        if not progress:
            self._cleaned.pop((str(ref), partition), None)
        elif (str(ref), partition) in self._cleaned:
            text = f"a job resumed from {progress}, although the output of that checkpoint had been cleaned up"
            self._found("checkpoint lost", self._keys.job(ref, partition, "progress"), text, str(ref), partition)

    def abandons_checkpoint(self, ref: OperationRef, partition: int) -> None:
        """Allow the job to start over: its checkpoint is being abandoned."""
        self._saved.pop((str(ref), partition), None)

    def saved(self, ref: OperationRef, partition: int, progress: int, effect: Effect) -> None:
        """Record an acknowledged checkpoint, unless the job was restarted meanwhile."""
        key = (str(ref), partition)
        if self._latest.get(key) is effect:
            self._saved[key] = max(self._saved.get(key, 0), progress)

    def cleaned(self, ref: OperationRef, partition: int) -> None:
        """Record that the output of an abandoned job was removed."""
        self._cleaned.setdefault((str(ref), partition), self._now())
        self._left.pop((str(ref), partition), None)

    def succeeded(self, ref: OperationRef, partition: int, outcome: Outcome) -> None:
        """Check a reported success: the job's output must not have been cleaned up."""
        cleaned = self._cleaned.get((str(ref), partition), -inf)
        if any(one.fence == outcome.fence and one.begun < cleaned for one in self.of(str(ref), partition)):
            text = f"attempt {outcome.attempt} is reported as a success, but its output had been cleaned up"
            self._found("output lost", self._keys.job(ref, partition, "outcome"), text, str(ref), partition)

    def claim_ended(self, ref: OperationRef, partition: int, old: Claim, fence: int) -> None:
        """Check that the job of a released, reported or taken-over claim has stopped."""
        if old.actor:
            self.drop_output(ref, partition)
        for effect in self._active.get((str(ref), partition), ()):
            if effect.kind == "job" and effect.fence == fence and self._checked(effect):
                text = f"the claim of {old.incarnation} (attempt {old.attempt}) ended while its job ran: {effect}"
                self._found("stopped too late", self._keys.claim(ref, partition), text, str(ref), partition)

    def of(self, op: str, partition: int) -> list[Effect]:
        """All work for one job."""
        return [effect for effect in self.all if (effect.op, effect.partition) == (op, partition)]

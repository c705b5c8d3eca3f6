"""Who wrote what: the part of the invariants that etcd's history cannot show (invariants 3 and 8).

Here the sender of each transaction is known. What is written for a job comes from the incarnation that held its claim,
and names the fence under which the job ran; what a coordinator writes comes from the incarnation that is elected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.decide.job_claims import EXPIRED, LOST
from distop.protocol import keys as K
from distop.protocol.jobs import Claim, Outcome, to_go_on_from
from distop.protocol.json_codec import loads
from distop.protocol.records import Cancel, History, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.keys import Keys, ParsedKey
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change


class Authors:
    """Folds each revision with its sender. ``claim_left(ref, partition, claim, fence)`` is called when a claim changes;
    ``succeeded(ref, partition, outcome)`` when an executor reports a success; ``found(kind, key, text, op, partition)``
    for each breach.
    """

    def __init__(
        self,
        keys: Keys,
        claim_left: Callable[..., None],
        succeeded: Callable[..., None],
        found: Callable[..., None],
        now: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._now = now
        self._written: dict[str, float] = {}
        """When each claim by an actor was written last."""
        self._claim_left = claim_left
        self._succeeded = succeeded
        self._found = found
        self.claims: dict[str, tuple[Claim, int]] = {}
        """Those that exist, with their fences."""
        self._elections: dict[tuple[str, str], str] = {}
        self._nodes: set[str] = set()
        self._cancelling: set[OperationRef] = set()
        self._waits: set[OperationRef] = set()
        """Operations that have not begun, or ended before they did."""
        self._saved: dict[str, tuple[int, int]] = {}

    def step(self, parsed: Sequence[tuple[ParsedKey, Change]], sender: str) -> None:
        """One revision, whole."""
        started = {key.ref for key, change in parsed if key.name == "spec" and not change.deleted}
        for key, change in parsed:
            if key.ref is not None and key.name == "state" and key.partition < 0 and not change.deleted:
                if change.kv.value == State.PENDING.encode():
                    self._waits.add(key.ref)
                elif change.kv.value == State.RUNNING.encode():
                    self._waits.discard(key.ref)
                elif change.kv.value == State.CANCELLING.encode():
                    self._cancelling.add(key.ref)
        for key, change in parsed:
            if key.ref is None:
                self._cluster(key, change, sender)
            elif key.partition >= 0:
                self._job(key.ref, key, change, sender)
            elif key.ref not in started:
                self._operation(key.ref, key, change, sender)
        for key, change in parsed:
            if key.family == K.CLAIM and key.ref is not None:
                self._claim(key.ref, key, change)

    def _cluster(self, key: ParsedKey, change: Change, sender: str) -> None:
        if key.family == K.COORDINATOR:
            if change.deleted:
                holder = self._elections.pop((key.table, key.type), sender)
                if holder != sender:
                    text = f"{sender} resigned from what {holder} was elected for"
                    self._found("not the coordinator", change.kv.key, text, "", -1)
            else:
                self._elections[key.table, key.type] = change.kv.value.decode()
        elif key.family == K.NODE:
            (self._nodes.discard if change.deleted else self._nodes.add)(key.id)

    # ------------------------------------------------------------------- jobs

    def _job(self, ref: OperationRef, key: ParsedKey, change: Change, sender: str) -> None:
        held = self.claims.get(self._keys.claim(ref, key.partition))
        if key.family == K.CLAIM:
            self._patience(ref, key, change, sender)
            if change.deleted or sender in ((new := Claim.decode(change.kv.value)).incarnation, new.actor):
                return  # with a report, which is judged; reaped, by a coordinator; or its own
            if not new.waiting:
                self._wrong(ref, key, change, f"{sender} claimed for {new.incarnation}")
            elif held is None or sender not in (held[0].incarnation, held[0].actor):
                if ref in self._cancelling and held is not None and held[0].incarnation not in self._nodes:
                    self._elected(ref, change, sender)  # it revokes
                    return
                if held is not None and self._lost(held[0], new):
                    return
                self._wrong(
                    ref, key, change, f"{sender} released a claim of {held[0].incarnation if held else 'nobody'}"
                )
        elif change.deleted:
            self._elected(ref, change, sender)
        elif key.name == "progress":
            if held is None or held[0].incarnation != sender:
                self._wrong(ref, key, change, f"{sender} saved the progress of a job that it did not hold")
            else:
                self._progress(ref, key, change, held[1])
        elif key.name == "outcome" and held is not None:
            self._report(ref, key, change, sender, *held)

    def _lost(self, held: Claim, new: Claim) -> bool:
        """An executor has set the claim of a lost holder to waiting, for whom there is no permit."""
        gone = not held.waiting and held.incarnation not in self._nodes
        return gone and bool(new.tried) and new.tried[-1].text in (LOST, EXPIRED) and new.failures == held.failures + 1

    def _patience(self, ref: OperationRef, key: ParsedKey, change: Change, sender: str) -> None:
        """What an actor has claimed, nobody else touches before its duration is over: here time is the same for all."""
        old, _ = self.claims.get(change.kv.key, (None, 0))
        if old is not None and old.actor and old.actor != sender:
            waited = self._now() - self._written[change.kv.key]
            if waited < old.duration:
                text = f"{sender} took it from {old.actor} after {waited:.3f} s of {old.duration:.3f} s"
                self._found("taken too early", change.kv.key, text, str(ref), key.partition)
        if not change.deleted:
            self._written[change.kv.key] = self._now()

    def _progress(self, ref: OperationRef, key: ParsedKey, change: Change, fence: int) -> None:
        """Here a checkpoint is a number of steps: under one fence it never gets smaller, unless it is given up."""
        value = int(to_go_on_from(loads(change.kv.value)) or 0)
        former = self._saved.get(change.kv.key, (0, 0))
        self._saved[change.kv.key] = (fence, value)
        if former[0] == fence and 0 < value < former[1]:
            text = f"the checkpoint went back from {former[1]} to {value}"
            self._found("checkpoint lost", change.kv.key, text, str(ref), key.partition)

    def _report(self, ref: OperationRef, key: ParsedKey, change: Change, sender: str, claim: Claim, fence: int) -> None:
        outcome = Outcome.decode(change.kv.value)
        if claim.actor:
            if claim.actor != sender and (outcome.grant or "did not extend" not in outcome.error):
                self._wrong(ref, key, change, f"{sender} reported a job that {claim.actor} held")
            return
        if claim.incarnation != sender:
            if claim.incarnation in self._nodes or "was lost" not in outcome.error:
                self._wrong(ref, key, change, f"{sender} reported a job that {claim.incarnation} held")
            return
        if not outcome.error:
            self._succeeded(ref, key.partition, outcome)
        ran = outcome.result.get("fence") if isinstance(outcome.result, dict) else None
        if ran is not None and ran != fence:
            self._wrong(ref, key, change, f"the result of fence {ran} was reported under fence {fence}")

    def _claim(self, ref: OperationRef, key: ParsedKey, change: Change) -> None:
        old = self.claims.pop(change.kv.key, None)
        if old is not None and not old[0].waiting:
            self._claim_left(ref, key.partition, *old)
        if not change.deleted:
            self.claims[change.kv.key] = (Claim.decode(change.kv.value), change.kv.mod_revision)

    # ------------------------------------------------------------- operations

    def _operation(self, ref: OperationRef, key: ParsedKey, change: Change, sender: str) -> None:
        name, value = key.name, change.kv.value
        if change.deleted:
            # Gate, pending, cancel and chunks go with commands of clients as well.
            if name in ("state", "spec", "arg", "decision") and key.family != K.HISTORY:
                self._elected(ref, change, sender)
        elif ref in self._waits and _cancelled_by_somebody(key, value):
            pass  # who cancels, or replaces, what has not begun ends it
        elif (
            name in ("plan", "planning", "decision")
            or key.family == K.HISTORY
            or (name == "cancel" and Cancel.decode(value).reason == "failed")
            or (name == "state" and State(value.decode()).terminal)
        ):
            self._elected(ref, change, sender)

    def _elected(self, ref: OperationRef, change: Change, sender: str) -> None:
        holder = self._elections.get((ref.table, ref.type))
        if holder != sender:
            text = f"{sender} wrote as coordinator, and {holder or 'nobody'} was elected"
            self._found("not the coordinator", change.kv.key, text, str(ref), -1)

    def _wrong(self, ref: OperationRef, key: ParsedKey, change: Change, text: str) -> None:
        self._found("not the holder", change.kv.key, text, str(ref), key.partition)


def _cancelled_by_somebody(key: ParsedKey, value: bytes) -> bool:
    """The end of an operation by a client: its state, and the record that tells of it."""
    if key.family == K.HISTORY and not key.name and key.chunk < 0:
        cancel = History.decode(value).cancel
        return cancel is not None and (cancel.reason == "user" or bool(cancel.replaced_by))
    return key.family == K.OP and key.name == "state" and State(value.decode()) is State.CANCELLED

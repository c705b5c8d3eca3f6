"""Checks who wrote what: the parts of invariants 3 and 8 that etcd's history cannot show.

The simulator knows the sender of each transaction. A write for a job must come from the incarnation that holds its
claim, and a result must name the fence of its claim. A coordinator's write must come from the elected incarnation.
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


class WriteAuthors:
    """Folds each revision with its sender.

    ``claim_ended(ref, partition, claim, fence)`` is called when a claim changes, ``succeeded(ref, partition, outcome)``
    when an executor reports a success, ``found(kind, key, text, op, partition)`` for each breach.
    """

    def __init__(
        self,
        keys: Keys,
        claim_ended: Callable[..., None],
        succeeded: Callable[..., None],
        found: Callable[..., None],
        now: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._now = now
        self._written: dict[str, float] = {}
        """Claim → when it was last written."""
        self._claim_ended = claim_ended
        self._succeeded = succeeded
        self._found = found
        self.claims: dict[str, tuple[Claim, int]] = {}
        """Key → the existing claim, and its fence."""
        self._elections: dict[tuple[str, str], str] = {}
        self._nodes: set[str] = set()
        self._cancelling: set[OperationRef] = set()
        self._not_started: set[OperationRef] = set()
        """Operations that are pending, or ended before they started."""
        self._saved: dict[str, tuple[int, int]] = {}

    def step(self, parsed: Sequence[tuple[ParsedKey, Change]], sender: str) -> None:
        """Fold one whole revision."""
        started = {key.ref for key, change in parsed if key.name == "spec" and not change.deleted}
        for key, change in parsed:
            if key.ref is not None and key.name == "state" and key.partition < 0 and not change.deleted:
                if change.kv.value == State.PENDING.encode():
                    self._not_started.add(key.ref)
                elif change.kv.value == State.RUNNING.encode():
                    self._not_started.discard(key.ref)
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
                    text = f"{sender} removed the election of {holder}"
                    self._found("not the coordinator", change.kv.key, text, "", -1)
            else:
                self._elections[key.table, key.type] = change.kv.value.decode()
        elif key.family == K.NODE:
            (self._nodes.discard if change.deleted else self._nodes.add)(key.id)

    # ------------------------------------------------------------------- jobs

    def _job(self, ref: OperationRef, key: ParsedKey, change: Change, sender: str) -> None:
        held = self.claims.get(self._keys.claim(ref, key.partition))
        if key.family == K.CLAIM:
            self._check_duration(ref, key, change, sender)
            if change.deleted or sender in ((new := Claim.decode(change.kv.value)).incarnation, new.actor):
                return  # deleted with a report, which is checked, or reaped by a coordinator; or the sender's own claim
            if not new.waiting:
                self._add_breach(ref, key, change, f"{sender} claimed for {new.incarnation}")
            elif held is None or sender not in (held[0].incarnation, held[0].actor):
                if ref in self._cancelling and held is not None and held[0].incarnation not in self._nodes:
                    self._elected(ref, change, sender)  # the coordinator revokes the claim
                    return
                if held is not None and self._lost(held[0], new):
                    return
                holder = held[0].incarnation if held else "no holder"
                self._add_breach(ref, key, change, f"{sender} released a claim of {holder}")
        elif change.deleted:
            self._elected(ref, change, sender)
        elif key.name == "progress":
            if held is None or held[0].incarnation != sender:
                self._add_breach(ref, key, change, f"{sender} saved a checkpoint of a job that it did not hold")
            else:
                self._progress(ref, key, change, held[1])
        elif key.name == "outcome" and held is not None:
            self._report(ref, key, change, sender, *held)

    def _lost(self, held: Claim, new: Claim) -> bool:
        """Whether an executor has set a lost claim without a permit to waiting."""
        gone = not held.waiting and held.incarnation not in self._nodes
        return gone and bool(new.tried) and new.tried[-1].text in (LOST, EXPIRED) and new.failures == held.failures + 1

    def _check_duration(self, ref: OperationRef, key: ParsedKey, change: Change, sender: str) -> None:
        """Check that no other process changes an actor's claim within its duration, in the simulation's own time."""
        old, _ = self.claims.get(change.kv.key, (None, 0))
        if old is not None and old.actor and old.actor != sender:
            waited = self._now() - self._written[change.kv.key]
            if waited < old.duration:
                text = f"{sender} took it from {old.actor} after {waited:.3f} s of {old.duration:.3f} s"
                self._found("claim taken too early", change.kv.key, text, str(ref), key.partition)
        if not change.deleted:
            self._written[change.kv.key] = self._now()

    def _progress(self, ref: OperationRef, key: ParsedKey, change: Change, fence: int) -> None:
        """Check that a checkpoint (a number of steps) never decreases under one fence, unless it is abandoned."""
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
                self._add_breach(ref, key, change, f"{sender} reported a job that {claim.actor} held")
            return
        if claim.incarnation != sender:
            if claim.incarnation in self._nodes or "was lost" not in outcome.error:
                self._add_breach(ref, key, change, f"{sender} reported a job that {claim.incarnation} held")
            return
        if not outcome.error:
            self._succeeded(ref, key.partition, outcome)
        ran = outcome.result.get("fence") if isinstance(outcome.result, dict) else None
        if ran is not None and ran != fence:
            self._add_breach(ref, key, change, f"the result of fence {ran} was reported under fence {fence}")

    def _claim(self, ref: OperationRef, key: ParsedKey, change: Change) -> None:
        old = self.claims.pop(change.kv.key, None)
        if old is not None and not old[0].waiting:
            self._claim_ended(ref, key.partition, *old)
        if not change.deleted:
            self.claims[change.kv.key] = (Claim.decode(change.kv.value), change.kv.mod_revision)

    # ------------------------------------------------------------- operations

    def _operation(self, ref: OperationRef, key: ParsedKey, change: Change, sender: str) -> None:
        name, value = key.name, change.kv.value
        if change.deleted:
            # Clients' commands may also delete the gate, pending, cancel and chunks.
            if name in ("state", "spec", "arg", "decision") and key.family != K.HISTORY:
                self._elected(ref, change, sender)
        elif ref in self._not_started and _ended_by_client(key, value):
            pass  # a client that cancels or replaces a pending operation ends it
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
            text = f"{sender} wrote as coordinator, but {holder or 'none'} was elected"
            self._found("not the coordinator", change.kv.key, text, str(ref), -1)

    def _add_breach(self, ref: OperationRef, key: ParsedKey, change: Change, text: str) -> None:
        self._found("not the holder", change.kv.key, text, str(ref), key.partition)


def _ended_by_client(key: ParsedKey, value: bytes) -> bool:
    """Whether this is the state or history record of an operation that a client cancelled or replaced."""
    if key.family == K.HISTORY and not key.name and key.chunk < 0:
        cancel = History.decode(value).cancel
        return cancel is not None and (cancel.reason == "user" or bool(cancel.replaced_by))
    return key.family == K.OP and key.name == "state" and State(value.decode()) is State.CANCELLED

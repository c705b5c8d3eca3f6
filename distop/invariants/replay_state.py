"""What the invariants look at: a history played back, transactions told apart, and a violation.

What a replay of etcd's history knows at one revision: the operations, their jobs and claims, nodes, elections.

The invariants (``invariants.checker``) are checked against it; it judges nothing itself.

Transactions that join two, taken apart: what a replay of the history judges is each of the two.

An operation that ends and is deleted in one transaction (``operation_finish.Final.gone``) shows neither its terminal
state nor that it was being cleaned up. It is judged as though it had shown both: the history record, which is written
in the same transaction, tells the state.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol.behavior_declaration import Rules
from distop.protocol.dependencies import Edge
from distop.protocol.frozen import frozen
from distop.protocol.jobs import Claim, JobState
from distop.protocol.json_codec import SCHEMA_VERSION, UNREADABLE, word
from distop.protocol.operation_options import DEFAULT, Options
from distop.protocol.plan import Gate, Plan
from distop.protocol.records import Attempts, Cancel, Decision, History, OperationRef, Phase, Spec, State
from distop.protocol.revisioned import Change
from distop.protocol.state_tables import Stage, stage_of
from distop.protocol.txn import KeyValue
from distop.protocol.user_actions import NO_ACTIONS, Actions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.keys import Keys


STORY = 12
"""Events of an operation, and of a job, that a violation tells at most: the last ones."""
_TOLD = 160
"""Bytes of a value that a story tells."""

ACTIVE = frozenset({State.RUNNING, State.PAUSED, State.CANCELLING})
"""The states that runOps counts (invariant 7)."""

_DEFAULT_RULES = Rules()


class JobTrace:
    """One job: its state, who holds it, who held it before, and what was written for it."""

    __slots__ = ("attempt", "claim", "ended", "extended", "former", "log", "state")

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.claim: Claim | None = None
        self.ended: Claim | None = None
        """The claim that the last write to it ended or replaced."""
        self.extended = False
        """Its holder had it before the last revision that wrote it, too."""
        self.attempt = 0
        """The highest attempt seen."""
        self.former: deque[tuple[str, int]] = deque(maxlen=STORY)
        """(holder, attempt) of claims that were taken over, or set to waiting: the last ones."""
        self.log: deque[tuple[int, Change]] = deque(maxlen=STORY)


class JobDelta:
    """What one revision did to one job."""

    __slots__ = ("claim", "outcome", "progress", "state")

    def __init__(self) -> None:
        self.state: Change | None = None
        self.outcome: Change | None = None
        self.progress: Change | None = None
        self.claim: Change | None = None


class OperationTrace:
    """One operation, from its start to the last page of its cleanup."""

    __slots__ = (
        "actions",
        "after",
        "began",
        "cancel",
        "chunks",
        "claims",
        "decision",
        "failed",
        "finished",
        "gate",
        "given",
        "holders",
        "jobs",
        "keys",
        "log",
        "opened",
        "options",
        "permits",
        "phase",
        "plan",
        "planning",
        "ref",
        "spec",
        "state",
        "success",
    )

    def __init__(self, ref: OperationRef) -> None:
        self.ref = ref
        self.spec: Spec | None = None
        self.given: Spec | None = None
        """The spec, also in the revision that deletes it."""
        self.began = 0
        """The revision of its spec."""
        self.state: State | None = None
        self.plan: Plan | None = None
        self.chunks: dict[int, bytes] = {}
        self.after: dict[str, Edge] = {}
        """What it waits for, by edge."""
        self.gate = False
        self.phase: Phase | None = None
        self.cancel: Cancel | None = None
        self.decision: Decision | None = None
        self.planning: Attempts | None = None
        self.jobs: dict[int, JobTrace] = {}
        self.success = 0
        self.failed: set[int] = set()
        self.finished = ""
        """Of one of a series: when it ended, as its history record tells; "" before."""
        self.claims = 0
        self.holders: Counter[str] = Counter()
        """Incarnation → how many claims it has."""
        self.opened = Gate()
        """What the gate says, where there is one."""
        self.options = DEFAULT
        self.actions = NO_ACTIONS
        self.permits: dict[int, int] = {}
        """Permit → the job that has it."""
        self.keys = 0
        """How many keys of the operation exist, its history aside."""
        self.log: deque[tuple[int, Change]] = deque(maxlen=STORY)

    @property
    def active(self) -> bool:
        """It is counted in runOps."""
        return self.state in ACTIVE

    @property
    def rules(self) -> Rules:
        return self.spec.rules if self.spec is not None else _DEFAULT_RULES

    @property
    def newer(self) -> bool:
        """Its records are of a newer release, whose rules are not known here."""
        return self.spec is not None and self.spec.version > SCHEMA_VERSION

    @property
    def stage(self) -> Stage:
        """What it is in, by its own keys; gate and pending must agree with that (invariant 12)."""
        return stage_of(self.state, decided=self.decision is not None, planned=self.plan is not None)

    def job(self, partition: int) -> JobTrace:
        job = self.jobs.get(partition)
        if job is None:
            job = self.jobs[partition] = JobTrace()
        return job

    def fold_job(self, revision: int, job: JobTrace, partition: int, delta: JobDelta) -> None:
        """Take one revision's writes into the job."""
        if delta.state is not None:
            before, job.state = job.state, None if delta.state.deleted else JobState(delta.state.kv.value.decode())
            if before is JobState.SUCCESS:
                self.success -= 1
            self.failed.discard(partition)
            if job.state is JobState.SUCCESS:
                self.success += 1
            elif job.state is JobState.FAILED:
                self.failed.add(partition)
        if delta.claim is not None:
            old, job.claim = job.claim, None if delta.claim.deleted else Claim.decode(delta.claim.kv.value)
            self.claims += (job.claim is not None) - (old is not None)
            for claim, count in ((old, -1), (job.claim, 1)):
                if claim is not None and claim.incarnation:
                    self.holders[claim.incarnation] += count
            job.ended = old
            job.extended = old is not None and job.claim is not None and job.claim.holder == old.holder
            if old is not None and old.holder and job.claim is not None and job.claim.holder != old.holder:
                job.former.append((old.holder, old.attempt))
            if job.claim is not None:
                job.attempt = max(job.attempt, job.claim.attempt)
        for change in (delta.claim, delta.state, delta.outcome, delta.progress):
            if change is not None:
                job.log.append((revision, brief(change)))

    def fold_permit(self, number: int, change: Change) -> None:
        """Take a write to a permit."""
        self.permits.pop(number, None)
        if not change.deleted and change.kv.value.isdigit():
            self.permits[number] = int(change.kv.value)

    def fold(self, name: str, chunk: int, edge: str, change: Change) -> None:
        """Take a write to one of the operation's own keys."""
        value = None if change.deleted else change.kv.value
        if name == "after":
            if value is None:
                self.after.pop(edge, None)
            else:
                self.after[edge] = Edge.decode(value)
            return
        if name == "state":
            self.state = State(value.decode()) if value is not None else None
        elif name == "spec":
            self.spec = Spec.decode(value) if value is not None else None
            if self.spec is not None:
                self.given, self.began = self.spec, change.kv.mod_revision
        elif name == "plan" and chunk >= 0:
            if value is None:
                self.chunks.pop(chunk, None)
            else:
                self.chunks[chunk] = value
        elif name == "plan":
            self.plan = Plan.decode(value) if value is not None else None
        elif name == "planning":
            self.planning = Attempts.decode(value) if value is not None else None
        elif name == "options":
            self.options = Options.decode(value) if value is not None else DEFAULT
        elif name == "actions":
            self.actions = Actions.decode(value) if value is not None else self.actions  # its last keys go at once
        elif name == "cancel":
            self.cancel = Cancel.decode(value) if value is not None else None
        elif name == "decision":
            self.decision = Decision.decode(value) if value is not None else None


def brief(change: Change) -> Change:
    """The change as far as a story tells it: an argument or an outcome may be large, and many are kept."""
    kv = change.kv
    if len(kv.value) <= _TOLD + 1:
        return change
    return replace(change, kv=replace(kv, value=kv.value[: _TOLD + 1]))


def tell(entry: tuple[int, Change]) -> str:
    """One event as a line for people."""
    revision, change = entry
    if change.deleted:
        return f"{revision}: {change.kv.key} deleted"
    value = change.kv.value[:_TOLD].decode(errors="replace")
    return f"{revision}: {change.kv.key} = {value}{'…' if len(change.kv.value) > _TOLD else ''}"


def apart(keys: Keys, changes: Sequence[Change], goes_on: Callable[[OperationRef], bool]) -> list[Sequence[Change]]:
    """What one revision did, as one transaction after the other would have. ``goes_on`` tells whether an operation had
    neither ended nor gone before.
    """
    family = keys.family(K.HISTORY)[0]
    records = [one for one in changes if not one.deleted and one.kv.key.startswith(family)]
    if not records:
        return [changes]
    deleted = {one.kv.key: one for one in changes if one.deleted}
    ended: list[Change] = []
    cleaned: list[Change] = []
    for record in records:
        try:
            key = keys.parse(record.kv.key)
            ref = key.ref
            if ref is None or key.name or key.chunk >= 0 or keys.of(ref, "state") not in deleted or not goes_on(ref):
                continue
            state = History.decode(record.kv.value).state
        except (InvalidArgument, *UNREADABLE):
            continue
        first, after = keys.own_range(ref)
        cleaned += [deleted.pop(one) for one in list(deleted) if first <= one < after]
        ended.append(_put(keys.of(ref, "state"), word(state), record))
        ended.append(_put(keys.pending(ref), word(Phase.CLEANING), record))
        cleaned.append(Change(KeyValue(keys.pending(ref), b"", record.kv.mod_revision), deleted=True))
    if not ended:
        return [changes]
    later = {id(one) for one in cleaned}
    return [[*(one for one in changes if id(one) not in later), *ended], cleaned]


def _put(key: str, value: bytes, beside: Change) -> Change:
    return Change(KeyValue(key, value, beside.kv.mod_revision))


NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 19)
"""The invariants that a history can show."""


@frozen
class Violation:
    """The number of the invariant, the revision that broke it, the key, what is wrong, and (``story``) the last events
    of the key: of its operation, and of the job where it is about one.
    """

    invariant: int
    revision: int
    key: str
    text: str
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"invariant {self.invariant} at revision {self.revision}: {self.key}: {self.text}"

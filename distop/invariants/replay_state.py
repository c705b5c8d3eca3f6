"""The state that a replay of etcd's history knows at one revision.

It consists of operations, jobs and claims. The invariants (``invariants.checker``) are checked against it; this module
judges nothing.

An operation that ends and is deleted in one transaction (``operation_finish.Final.gone``) never shows its terminal
state or the cleaning phase. :func:`apart` splits such a revision into the two transactions that it joins. The history
record, written in the same transaction, has the state.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

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


InvariantFault: TypeAlias = tuple[int, str]
"""(number of the invariant, what is wrong)."""
STORY = 12
"""Maximum number of events of an operation, and of a job, that a violation lists: the last ones."""
_SHOWN = 160
"""Maximum bytes of a value in such an event."""

ACTIVE = frozenset({State.RUNNING, State.PAUSED, State.CANCELLING})
"""The states that runOps counts (invariant 7)."""

_DEFAULT_RULES = Rules()


class JobTrace:
    """One job: its state, its holder, former holders, and its last writes."""

    __slots__ = ("attempt", "claim", "ended", "extended", "former", "log", "state")

    def __init__(self) -> None:
        self.state: JobState | None = None
        self.claim: Claim | None = None
        self.ended: Claim | None = None
        """The claim that the last write to it ended or replaced."""
        self.extended = False
        """Whether its holder already held it before the last revision that wrote it."""
        self.attempt = 0
        """The highest attempt seen."""
        self.former: deque[tuple[str, int]] = deque(maxlen=STORY)
        """(holder, attempt) of the last claims that were taken over or set to waiting."""
        self.log: deque[tuple[int, Change]] = deque(maxlen=STORY)


class JobDelta:
    """The changes of one revision to one job."""

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
        """The spec, kept also in the revision that deletes it."""
        self.began = 0
        """The revision of its spec."""
        self.state: State | None = None
        self.plan: Plan | None = None
        self.chunks: dict[int, bytes] = {}
        self.after: dict[str, Edge] = {}
        """Edges to its predecessors."""
        self.gate = False
        self.phase: Phase | None = None
        self.cancel: Cancel | None = None
        self.decision: Decision | None = None
        self.planning: Attempts | None = None
        self.jobs: dict[int, JobTrace] = {}
        self.success = 0
        self.failed: set[int] = set()
        self.finished = ""
        """When an operation of a series ended, by its history record; "" before."""
        self.claims = 0
        self.holders: Counter[str] = Counter()
        """Incarnation → number of its claims."""
        self.opened = Gate()
        """The value of the gate, if it exists."""
        self.options = DEFAULT
        self.actions = NO_ACTIONS
        self.permits: dict[int, int] = {}
        """Permit → the job that has it."""
        self.keys = 0
        """The number of the operation's keys, without its history."""
        self.log: deque[tuple[int, Change]] = deque(maxlen=STORY)

    @property
    def active(self) -> bool:
        """Whether runOps counts it."""
        return self.state in ACTIVE

    @property
    def rules(self) -> Rules:
        return self.spec.rules if self.spec is not None else _DEFAULT_RULES

    @property
    def newer(self) -> bool:
        """Whether its records are of a newer release, whose rules are unknown here."""
        return self.spec is not None and self.spec.version > SCHEMA_VERSION

    @property
    def stage(self) -> Stage:
        """The stage, from its own keys; gate and pending must agree with it (invariant 12)."""
        return stage_of(self.state, decided=self.decision is not None, planned=self.plan is not None)

    def job(self, partition: int) -> JobTrace:
        job = self.jobs.get(partition)
        if job is None:
            job = self.jobs[partition] = JobTrace()
        return job

    def fold_job(self, revision: int, job: JobTrace, partition: int, delta: JobDelta) -> None:
        """Apply one revision's writes to the job."""
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
        """Apply a write to a permit."""
        self.permits.pop(number, None)
        if not change.deleted and change.kv.value.isdigit():
            self.permits[number] = int(change.kv.value)

    def fold(self, name: str, chunk: int, edge: str, change: Change) -> None:
        """Apply a write to one of the operation's own keys."""
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
            self.actions = (
                Actions.decode(value) if value is not None else self.actions
            )  # kept: the last keys are deleted together
        elif name == "cancel":
            self.cancel = Cancel.decode(value) if value is not None else None
        elif name == "decision":
            self.decision = Decision.decode(value) if value is not None else None


def brief(change: Change) -> Change:
    """The change with a shortened value: many are kept, and arguments and outcomes may be large."""
    kv = change.kv
    if len(kv.value) <= _SHOWN + 1:
        return change
    return replace(change, kv=replace(kv, value=kv.value[: _SHOWN + 1]))


def event_line(entry: tuple[int, Change]) -> str:
    """One event as a line for people."""
    revision, change = entry
    if change.deleted:
        return f"{revision}: {change.kv.key} deleted"
    value = change.kv.value[:_SHOWN].decode(errors="replace")
    return f"{revision}: {change.kv.key} = {value}{'…' if len(change.kv.value) > _SHOWN else ''}"


def apart(keys: Keys, changes: Sequence[Change], goes_on: Callable[[OperationRef], bool]) -> list[Sequence[Change]]:
    """One revision as a sequence of transactions.

    ``goes_on``: whether an operation existed and had not ended before.
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


NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 19, 20)
"""The invariants whose violations a history can show."""


@frozen
class Violation:
    """A violation: the invariant, the revision, the key, and what is wrong.

    ``story``: the last events of the key, of its operation, and of the job concerned.
    """

    invariant: int
    revision: int
    key: str
    text: str
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"invariant {self.invariant} at revision {self.revision}: {self.key}: {self.text}"

"""Policies: rules that start operations on a table, and the transactions of their records.

A policy has triggers (an interval, new versions of the table, events of callers), and perhaps a condition over the
table's statistics. The executor that is elected for the table evaluates it. Four keys belong to a table's policies:

- ``distOpPolicy.<table>.<name>``: the policy. Only users' commands write it, so no evaluation can undo a pause.
- ``distOpPolicyState.<table>.<name>``: what was evaluated so far. It exists as long as the policy.
- ``distOpPolicyEvent.<table>.<name>``: events that wait for an evaluation.
- ``distOpPolicyEvaluator.<table>``: the elected incarnation.

An evaluation that starts an operation writes the state in the transaction that creates the operation. It compares the
policy and the state. So one trigger starts one operation, and none starts after a pause or a removal. The election
keeps executors from evaluating the same policy at once; it is not needed for safety, but each evaluation compares it.

A transaction that makes a policy compares and writes the *mark*, one key of the namespace. So a late copy does not
bring a removed policy back. All other commands compare the policy itself. Daemons watch the mark; they watch policies
only after it was written.

The clauses were explored in a model: without the compare of the policy an operation starts while it is paused; without
that of the state a version starts two operations; without the compare or the write of the mark a removed policy
returns; if start and state are two transactions, all of these happen. Pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from distop.protocol import keys as K
from distop.protocol import policy_condition
from distop.protocol.field_checks import LONGEST, checked
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import SCHEMA_VERSION, dumps, loads, shorten, word
from distop.protocol.operation_options import DEFAULT, Options
from distop.protocol.txn import Compare, Delete, Get, Put, Txn, absent, exists, unchanged
from distop.protocol.user_actions import NO_ACTIONS, Actions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.protocol.keys import Keys

SHORTEST = 1.0
"""Minimum seconds of an interval."""
VERSION = "version"
"""The trigger of a new version of the table."""
EVENT = "event:"
"""Prefix of the trigger of an event; its name follows."""
MOST_EVALUATIONS = 20
"""Maximum number of evaluations that a state keeps: the last ones."""
MOST_BYTES = 16 * 1024
"""Maximum bytes of these evaluations; the last one is always kept."""
LONGEST_WHY = 1_000
MOST_WAITING = 50
"""Maximum number of waiting events of a policy. One evaluation takes all of them, so further ones change nothing."""
MOST_CONSUMED = 50
"""Number of consumed events whose ids a state keeps: a repeated ``emit`` finds its event there."""
LONGEST_EVENT = 200
"""Maximum characters of an event's name, and of its id."""
MOST_TRIGGERS = 20
MOST_POLICIES = 30
"""Maximum number of policies that one transaction makes."""
REQUEST = "policy:"
"""Prefix of the request ids of operations that policies start."""
SUBMITTER = "policy:"
"""Prefix of the submitter of an operation that a policy starts; the policy's name follows."""


class PolicyStage(StrEnum):
    """The stage of a policy."""

    ABSENT = "absent"
    ACTIVE = "active"
    PAUSED = "paused"


class PolicyEvent(StrEnum):
    """The events of a policy."""

    SET = "set"
    CHANGE = "change"
    PAUSE = "pause"
    RESUME = "resume"
    EMIT = "emit"
    EVALUATE = "evaluate"
    """An evaluation that starts nothing."""
    START = "start"
    REMOVE = "remove"


POLICY_TABLE: Mapping[PolicyStage, Mapping[PolicyEvent, PolicyStage]] = {
    PolicyStage.ABSENT: {PolicyEvent.SET: PolicyStage.ACTIVE},
    PolicyStage.ACTIVE: {
        PolicyEvent.CHANGE: PolicyStage.ACTIVE,
        PolicyEvent.PAUSE: PolicyStage.PAUSED,
        PolicyEvent.EMIT: PolicyStage.ACTIVE,
        PolicyEvent.EVALUATE: PolicyStage.ACTIVE,
        PolicyEvent.START: PolicyStage.ACTIVE,
        PolicyEvent.REMOVE: PolicyStage.ABSENT,
    },
    PolicyStage.PAUSED: {
        PolicyEvent.CHANGE: PolicyStage.PAUSED,
        PolicyEvent.RESUME: PolicyStage.ACTIVE,
        PolicyEvent.EMIT: PolicyStage.PAUSED,
        PolicyEvent.REMOVE: PolicyStage.ABSENT,
    },
}
"""The stage to which each event leads a policy. The transactions below refuse all other events."""


class PolicyVerdict(StrEnum):
    """The verdict of an evaluation."""

    STARTED = "started"
    NO = "no"
    """The condition does not hold."""
    WAITS = "waits"
    """The trigger stays due: an operation is active, or the start was refused for now."""
    FAILED = "failed"
    """The trigger stays due: the inputs could not be read."""


@frozen
class Evaluation:
    """One evaluation: its triggers, the inputs that it looked at, and its verdict with a reason."""

    time: str
    verdict: PolicyVerdict
    why: str = ""
    triggers: tuple[str, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    op: str = ""
    """The started operation."""
    evaluator: str = ""
    """The incarnation that made the evaluation."""

    def to_json(self) -> dict[str, Any]:
        data = {
            "time": self.time,
            "verdict": str(self.verdict),
            "why": shorten(self.why, LONGEST_WHY),
            "triggers": list(self.triggers),
            "inputs": dict(self.inputs),
            "op": self.op,
            "evaluator": self.evaluator,
        }
        return {name: value for name, value in data.items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        triggers = tuple(data.get("triggers") or ())
        texts = (data["time"], PolicyVerdict(data["verdict"]), data.get("why", ""))
        by = (data.get("op", ""), data.get("evaluator", ""))
        return checked(cls(*texts, triggers, data.get("inputs") or {}, *by))

    def same_as(self, other: Evaluation) -> bool:
        """Whether it says the same as another one, at another time."""
        mine, theirs = ((one.verdict, shorten(one.why, LONGEST_WHY), one.triggers) for one in (self, other))
        return mine == theirs


@frozen
class Policy:
    """``distOpPolicy.<table>.<name>``: when to start which operation.

    ``start``, ``arg``, ``options``: the type, its argument, and priority and limits. ``every``: seconds of the
    interval, 0 for none. ``on``: further triggers, :data:`VERSION` or :data:`EVENT` and a name. ``when``: the condition
    (``policy_condition``); "": always. ``uid``: unique for each policy that is made, also of the same name.
    """

    start: str
    uid: str
    arg: Mapping[str, Any] = field(default_factory=dict)
    every: float = 0.0
    on: tuple[str, ...] = ()
    when: str = ""
    options: Options = DEFAULT
    paused: bool = False
    set_at: str = ""
    by: str = ""
    actions: Actions = NO_ACTIONS

    @property
    def stage(self) -> PolicyStage:
        return PolicyStage.PAUSED if self.paused else PolicyStage.ACTIVE

    @property
    def events(self) -> frozenset[str]:
        """The names of the events that trigger it."""
        return frozenset(one.removeprefix(EVENT) for one in self.on if one.startswith(EVENT))

    def definition(self) -> dict[str, Any]:
        """The fields that a user gives."""
        data = {
            "start": self.start,
            "arg": dict(self.arg),
            "every": self.every,
            "on": list(self.on),
            "when": self.when,
            **self.options.to_json(),
        }
        return {name: value for name, value in data.items() if value or name in ("start", "arg")}

    def to_json(self) -> dict[str, Any]:
        own = {"uid": self.uid, "paused": self.paused, "set_at": self.set_at, "by": self.by}
        return {**self.definition(), **own, **self.actions.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        policy = cls(
            K.check_type_name(data["start"]),
            data["uid"],
            data.get("arg") or {},
            float(data.get("every", 0.0)),
            tuple(data.get("on") or ()),
            data.get("when", ""),
            Options.from_json(data),
            bool(data.get("paused", False)),
            data.get("set_at", ""),
            data.get("by", ""),
            Actions.from_json(data),
        )
        check_triggers(checked(policy))
        if policy.when:
            policy_condition.parse(policy.when)
        return policy

    def encode(self) -> bytes:
        return dumps({"v": SCHEMA_VERSION, **self.to_json()})

    @classmethod
    def decode(cls, value: bytes) -> Policy:
        return cls.from_json(loads(value))


def check_triggers(policy: Policy) -> None:
    """Raises ValueError for a policy without a trigger, or with a wrong one."""
    if not policy.every and not policy.on:
        raise ValueError("a policy needs a trigger")
    if policy.every and not SHORTEST <= policy.every <= LONGEST:
        raise ValueError(f"an interval of {policy.every} s")
    if len(policy.on) > MOST_TRIGGERS:
        raise ValueError(f"{len(policy.on)} triggers: at most {MOST_TRIGGERS} are allowed")
    for one in policy.on:
        if one != VERSION and not (one.startswith(EVENT) and len(one) > len(EVENT)):
            raise ValueError(f"the trigger {one!r}")


@frozen
class PolicyState:
    """``distOpPolicyState.<table>.<name>``: what the evaluators of a policy know.

    ``every_at``: the begin of the last counted interval, in seconds since the epoch; 0: none. ``version``: the last
    version that was evaluated. ``consumed``: ids of the last consumed events. ``op``, ``partitions``: the operation
    that it started last, and the table's number of partitions at that time.
    """

    every_at: float = 0.0
    version: str = ""
    consumed: tuple[str, ...] = ()
    op: str = ""
    partitions: int = 0
    kept: tuple[Evaluation, ...] = ()
    dropped: int = 0

    def and_then(self, one: Evaluation) -> PolicyState:
        """The state with one more evaluation; the first ones are dropped if there are too many.

        An evaluation that says the same as the last one replaces it, unless it started an operation.
        """
        if self.kept and one.verdict is not PolicyVerdict.STARTED and one.same_as(self.kept[-1]):
            return replace(self, kept=(*self.kept[:-1], one))
        kept = (*self.kept, one)[-MOST_EVALUATIONS:]
        while len(kept) > 1 and len(dumps([each.to_json() for each in kept])) > MOST_BYTES:
            kept = kept[1:]
        return replace(self, kept=kept, dropped=self.dropped + len(self.kept) + 1 - len(kept))

    def to_json(self) -> dict[str, Any]:
        data = {
            "every_at": self.every_at,
            "version": self.version,
            "consumed": list(self.consumed),
            "op": self.op,
            "partitions": self.partitions,
            "evaluations": [one.to_json() for one in self.kept],
            "dropped": self.dropped,
        }
        return {name: value for name, value in data.items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PolicyState:
        return checked(
            cls(
                float(data.get("every_at", 0.0)),
                data.get("version", ""),
                tuple(data.get("consumed") or ()),
                data.get("op", ""),
                int(data.get("partitions", 0)),
                tuple(Evaluation.from_json(one) for one in data.get("evaluations") or ()),
                int(data.get("dropped", 0)),
            )
        )

    def encode(self) -> bytes:
        return dumps({"v": SCHEMA_VERSION, **self.to_json()})

    @classmethod
    def decode(cls, value: bytes) -> PolicyState:
        return cls.from_json(loads(value))


@frozen
class EmittedEvent:
    """An event that a caller has emitted."""

    id: str
    name: str
    time: str
    by: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "name": self.name, "time": self.time, "by": self.by}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EmittedEvent:
        return checked(cls(data["id"], data["name"], data["time"], data.get("by", "")))


@frozen
class WaitingEvents:
    """``distOpPolicyEvent.<table>.<name>``: the events that wait for an evaluation, oldest first."""

    waiting: tuple[EmittedEvent, ...] = ()

    def with_one(self, event: EmittedEvent) -> WaitingEvents:
        """The events with one more; beyond :data:`MOST_WAITING` the oldest is dropped."""
        return WaitingEvents((*self.waiting, event)[-MOST_WAITING:])

    def without(self, ids: Iterable[str]) -> WaitingEvents:
        """The events that are not among these."""
        taken = set(ids)
        return WaitingEvents(tuple(one for one in self.waiting if one.id not in taken))

    def encode(self) -> bytes:
        return dumps({"v": SCHEMA_VERSION, "waiting": [one.to_json() for one in self.waiting]})

    @classmethod
    def decode(cls, value: bytes) -> WaitingEvents:
        return cls(tuple(EmittedEvent.from_json(one) for one in loads(value).get("waiting") or ()))


NO_EVENTS = WaitingEvents()


@frozen
class SeenPolicy:
    """The keys of one policy as read, with their mod revisions (0: absent)."""

    policy: Policy | None
    mod: int
    state: PolicyState = PolicyState()
    state_mod: int = 0
    events: WaitingEvents = NO_EVENTS
    events_mod: int = 0

    @property
    def stage(self) -> PolicyStage:
        return self.policy.stage if self.policy is not None else PolicyStage.ABSENT


def allows(stage: PolicyStage, event: PolicyEvent) -> PolicyStage:
    """The stage to which an event leads. Raises ValueError if it does not happen in this stage."""
    after = POLICY_TABLE[stage].get(event)
    if after is None:
        raise ValueError(f"{event} does not happen to a policy that is {stage}")
    return after


# ------------------------------------------------------------ users' commands


def policy_reads(keys: Keys, table: str, name: str) -> tuple[Get, Get, Get]:
    """Reads of a policy, its state and its events (``record_reading.read_policy``)."""
    return (
        Get(keys.policy(table, name)),
        Get(keys.policy_state(table, name)),
        Get(keys.policy_event(table, name)),
    )


def set_policies(
    keys: Keys, table: str, new: Mapping[str, tuple[Policy, SeenPolicy]], mark_mod: int, table_mod: int
) -> Txn:
    """Make or change policies of a table, all or none. Of each: its new record, and what was read.

    A changed policy keeps its stage: whether it is paused. Its state stays, so that nothing is evaluated again.

    Guards: the table's record is unchanged, and each policy, which may be absent; if one is, the mark is unchanged.
    """
    mark, makes = keys.policy_mark(), any(seen.policy is None for _, seen in new.values())
    puts: list[Put] = [Put(mark, b"")] if makes else []
    for name, (policy, seen) in new.items():
        after = allows(seen.stage, PolicyEvent.SET if seen.policy is None else PolicyEvent.CHANGE)
        puts.append(Put(keys.policy(table, name), replace(policy, paused=after is PolicyStage.PAUSED).encode()))
        if seen.policy is None:
            puts.append(Put(keys.policy_state(table, name), PolicyState().encode()))
    return Txn(
        (
            *((unchanged(mark, mark_mod),) if makes else ()),
            unchanged(keys.table(table), table_mod),
            *(unchanged(keys.policy(table, name), seen.mod) for name, (_, seen) in new.items()),
        ),
        tuple(puts),
        (),
        "set_policy",
    )


def pause(keys: Keys, table: str, name: str, seen: SeenPolicy, actions: Actions) -> Txn:
    """Pause a policy: nothing is evaluated until it is resumed. Guard: the policy is unchanged."""
    return _in_stage(keys, table, name, seen, PolicyEvent.PAUSE, actions)


def resume(keys: Keys, table: str, name: str, seen: SeenPolicy, actions: Actions) -> Txn:
    """Resume a policy. Triggers that became due meanwhile count once. Guard: the policy is unchanged."""
    return _in_stage(keys, table, name, seen, PolicyEvent.RESUME, actions)


def _in_stage(keys: Keys, table: str, name: str, seen: SeenPolicy, event: PolicyEvent, actions: Actions) -> Txn:
    after = allows(seen.stage, event)
    assert seen.policy is not None
    key, policy = keys.policy(table, name), replace(seen.policy, paused=after is PolicyStage.PAUSED, actions=actions)
    return Txn(
        (unchanged(key, seen.mod),),
        (Put(key, policy.encode()),),
        (Get(key),),
        "pause_policy" if event is PolicyEvent.PAUSE else "resume_policy",
    )


def remove(keys: Keys, table: str, name: str, mod: int) -> Txn:
    """Remove a policy with its state and its events. Operations that it started continue.

    Guard: the policy is unchanged.
    """
    key = keys.policy(table, name)
    return Txn(
        (unchanged(key, mod),),
        (Delete(key), Delete(keys.policy_state(table, name)), Delete(keys.policy_event(table, name))),
        (),
        "remove_policy",
    )


def emit(keys: Keys, table: str, event: EmittedEvent, to: Mapping[str, SeenPolicy]) -> Txn:
    """Add an event to the waiting events of these policies, all or none.

    Guards: each policy and its waiting events are unchanged. An evaluation that consumes an event writes them, so a
    copy of this transaction that was refused after the event was consumed stays refused.
    """
    compares: list[Compare] = []
    puts: list[Put] = []
    for name, seen in to.items():
        allows(seen.stage, PolicyEvent.EMIT)
        compares += [
            unchanged(keys.policy(table, name), seen.mod),
            unchanged(keys.policy_event(table, name), seen.events_mod),
        ]
        puts.append(Put(keys.policy_event(table, name), seen.events.with_one(event).encode()))
    return Txn(tuple(compares), tuple(puts), (), "emit")


# ---------------------------------------------------------------- evaluations


def elect(keys: Keys, table: str, incarnation: str, seen_mod: int, holder: str) -> Txn:
    """Become the evaluator of a table's policies.

    Guards: the election is absent (``seen_mod`` 0), or unchanged and the node key of its incarnation is absent; my node
    key exists.
    """
    key = keys.policy_evaluator(table)
    gone = (absent(keys.node(holder)),) if seen_mod else ()
    return Txn(
        (unchanged(key, seen_mod), *gone, exists(keys.node(incarnation))),
        (Put(key, word(incarnation)),),
        (Get(key),),
        "elect_evaluator",
    )


def resign(keys: Keys, table: str, fence: int) -> Txn:
    """Resign as the evaluator of a table. Guard: the election is still mine."""
    key = keys.policy_evaluator(table)
    return Txn((unchanged(key, fence),), (Delete(key),), (), "resign_evaluator")


def evaluation_guards(keys: Keys, table: str, name: str, seen: SeenPolicy, fence: int) -> tuple[Compare, ...]:
    """Guards of each evaluation: my election; the policy and its state are unchanged, and so are consumed events."""
    return (
        unchanged(keys.policy_evaluator(table), fence),
        unchanged(keys.policy(table, name), seen.mod),
        unchanged(keys.policy_state(table, name), seen.state_mod),
        unchanged(keys.policy_event(table, name), seen.events_mod),
    )


def evaluation_writes(keys: Keys, table: str, name: str, seen: SeenPolicy, after: PolicyState) -> tuple[Put, ...]:
    """Writes of an evaluation: its state, and the waiting events without those that the state consumed."""
    left = seen.events.without(after.consumed)
    consumed = left != seen.events
    return (
        Put(keys.policy_state(table, name), after.encode()),
        *((Put(keys.policy_event(table, name), left.encode()),) if consumed else ()),
    )


def evaluate(keys: Keys, table: str, name: str, seen: SeenPolicy, after: PolicyState, fence: int) -> Txn:
    """Record an evaluation that starts nothing. Guards: :func:`evaluation_guards`."""
    allows(seen.stage, PolicyEvent.EVALUATE)
    return Txn(
        evaluation_guards(keys, table, name, seen, fence),
        evaluation_writes(keys, table, name, seen, after),
        (),
        "evaluate_policy",
    )


def start(keys: Keys, table: str, name: str, seen: SeenPolicy, after: PolicyState, fence: int, starts: Txn) -> Txn:
    """Record an evaluation, and start its operation. ``starts``: the transaction that starts it, as pending.

    Guards: :func:`evaluation_guards`, and those of the start.
    """
    allows(seen.stage, PolicyEvent.START)
    return Txn(
        (*evaluation_guards(keys, table, name, seen, fence), *starts.compares),
        (*evaluation_writes(keys, table, name, seen, after), *starts.success),
        (),
        "start_by_policy",
    )


def table_range(keys: Keys, family: str, table: str) -> tuple[str, str]:
    """The range of a family of policies' keys for one table."""
    first, _ = keys.family(family)
    return K.prefix_range(f"{first}{K.encode(table)}.")


def request_id(uid: str, triggers: Sequence[str], state_mod: int) -> str:
    """The request id of the operation that these due triggers start.

    It follows from the policy and its triggers. ``state_mod`` tells apart two evaluations of the same trigger, such as
    a version that the table returned to: each evaluation writes the state.
    """
    digest = hashlib.sha256(dumps([uid, sorted(triggers), state_mod])).hexdigest()[:32]
    return f"{REQUEST}{digest}"

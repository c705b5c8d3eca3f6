"""The invariants of policies (20): evaluations, the operations that they start, pauses, removals and elections."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from distop.protocol import keys as K
from distop.protocol import policy as p
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import UNREADABLE, dumps, parse_time
from distop.protocol.policy import EVENT, VERSION, Evaluation, Policy, PolicyState, PolicyVerdict, WaitingEvents

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from distop.protocol.keys import Keys, ParsedKey
    from distop.protocol.records import OperationRef, Spec
    from distop.protocol.revisioned import Change

PolicyPlace: TypeAlias = tuple[str, str]
"""(table, name) of a policy."""
PolicyFault: TypeAlias = tuple[int, str, str]
"""(number of the invariant, key, what is wrong)."""

FAMILIES = frozenset({K.POLICY, K.POLICY_STATE, K.POLICY_EVENT, K.POLICY_EVALUATOR})
REMOVED = 10_000
"""Maximum number of removed policies that are remembered, to notice one that returns (bounds memory)."""
NEAR = 2e-3
"""Seconds by which times may differ: those of evaluations have milliseconds."""


@frozen
class PolicyRecords:
    """The records of one policy at one revision; None: absent."""

    policy: Policy | None = None
    state: PolicyState | None = None
    state_mod: int = 0
    events: WaitingEvents | None = None


NONE = PolicyRecords()


class PolicyTrace:
    """The policies after the last revision that was folded."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._policies: dict[PolicyPlace, PolicyRecords] = {}
        self._evaluators: dict[str, str] = {}
        """Table → the incarnation that is elected to evaluate its policies."""
        self._removed: dict[str, None] = {}
        """Own ids of removed policies, in order."""

    def fold(
        self,
        writes: Sequence[tuple[ParsedKey, Change]],
        started: Mapping[OperationRef, Spec],
        live: Collection[str],
    ) -> Iterator[PolicyFault]:
        """Take the writes of one revision; yields their faults. ``started``: the operations that it starts."""
        before: dict[PolicyPlace, PolicyRecords] = {}
        written: dict[PolicyPlace, set[str]] = {}
        marked = any(key.family == K.NOTICE for key, _ in writes)
        elected = {key.table for key, _ in writes if key.family == K.POLICY_EVALUATOR}
        for key, change in writes:
            if key.family == K.POLICY_EVALUATOR:
                yield from self._election(key.table, change, live)
            elif key.family in FAMILIES:
                place = (key.table, key.id)
                before.setdefault(place, self._policies.get(place, NONE))
                written.setdefault(place, set()).add(key.family)
                yield from self._write(place, key.family, change)
        by_policies = {ref: spec for ref, spec in started.items() if spec.request_id.startswith(p.REQUEST)}
        for place, families in written.items():
            was, now = before[place], self._policies.get(place, NONE)
            if K.POLICY in families:
                yield from self._command(place, was, now, marked, K.POLICY_STATE in families)
            elif K.POLICY_STATE in families:
                yield from self._evaluation(place, was, now, place[0] not in elected, by_policies)
            elif now.policy is None and now.events is not None:
                yield 20, self._keys.policy_event(*place), "events wait for a policy that does not exist"
            yield from self._bounds(place, now)
        for ref, spec in by_policies.items():
            yield from self._start(ref, spec, before)

    def _election(self, table: str, change: Change, live: Collection[str]) -> Iterator[PolicyFault]:
        former = self._evaluators.pop(table, None)
        if change.deleted:
            return
        key, new = change.kv.key, change.kv.value.decode(errors="replace")
        self._evaluators[table] = new
        if former is not None and former != new and former in live:
            yield 20, key, f"{new} took the election from {former}, whose node key exists"
        if new not in live:
            yield 20, key, f"{new} was elected, but has no node key"

    def _write(self, place: PolicyPlace, family: str, change: Change) -> Iterator[PolicyFault]:
        """Applies a write to one of a policy's keys."""
        now = self._policies.get(place, NONE)
        value = None if change.deleted else change.kv.value
        policy, state, state_mod, events = now.policy, now.state, now.state_mod, now.events
        try:
            if family == K.POLICY:
                policy = Policy.decode(value) if value is not None else None
            elif family == K.POLICY_STATE:
                state, state_mod = PolicyState.decode(value) if value is not None else None, change.kv.mod_revision
            else:
                events = WaitingEvents.decode(value) if value is not None else None
        except UNREADABLE as error:
            yield 0, change.kv.key, f"the record cannot be read: {error}"
        self._policies[place] = PolicyRecords(policy, state, state_mod, events)
        if self._policies[place] == PolicyRecords(state_mod=state_mod):
            del self._policies[place]

    def _command(
        self, place: PolicyPlace, was: PolicyRecords, now: PolicyRecords, marked: bool, state_written: bool
    ) -> Iterator[PolicyFault]:
        """Checks that a policy is made, changed or removed as its commands do it."""
        key, former, policy = self._keys.policy(*place), was.policy, now.policy
        if former is None and policy is not None:
            if policy.uid in self._removed:
                yield 20, key, "the policy was removed, and exists again"
            if not marked:
                yield 20, key, "the policy was made without writing the mark"
            if now.state is None or now.state.kept or now.state.op:
                yield 20, key, "the policy was made without an empty state"
        elif former is not None and policy is None:
            self._removed[former.uid] = None
            if len(self._removed) > REMOVED:
                del self._removed[next(iter(self._removed))]
            if now.state is not None or now.events is not None:
                yield 20, key, "the policy was removed, but its state or its events are left"
        elif former is not None and policy is not None:
            if state_written:
                yield 20, key, "a command changed the policy, and its state was written in the same revision"
            if policy.uid != former.uid:
                yield 20, key, "the policy's own id was changed"
            last = policy.actions.kept[-1:]
            resumed = policy.actions.count > former.actions.count and last and last[0].action == "resume_policy"
            if former.paused and not policy.paused and not resumed:
                yield 20, key, "the policy is active again, but nobody resumed it"

    def _evaluation(
        self,
        place: PolicyPlace,
        was: PolicyRecords,
        now: PolicyRecords,
        elected_before: bool,
        started: Mapping[OperationRef, Spec],
    ) -> Iterator[PolicyFault]:
        """Checks that the elected evaluator evaluates an active policy, and that it consumes only what it evaluated."""
        key, policy, former, state = self._keys.policy_state(*place), was.policy, was.state, now.state
        if policy is None or former is None or state is None:
            yield 20, key, "the state was written, but the policy does not exist or was made without a state"
            return
        if policy.paused:
            yield 20, key, "the policy was evaluated while it was paused"
        last = state.kept[-1] if state.kept else Evaluation("", PolicyVerdict.FAILED)
        evaluator = self._evaluators.get(place[0], "") if elected_before else ""
        if last.evaluator != evaluator or not evaluator:
            text = f"the policy was evaluated by {last.evaluator or 'nobody'}, but {evaluator or 'nobody'} is elected"
            yield 20, key, text
        if last.verdict in (PolicyVerdict.WAITS, PolicyVerdict.FAILED) and _consumed(former) != _consumed(state):
            yield 20, key, f"an evaluation with the verdict {last.verdict} consumed its triggers"
        if last.verdict in (PolicyVerdict.STARTED, PolicyVerdict.NO):
            for trigger in last.triggers:
                if text := _unfit_trigger(trigger, was, now):
                    yield 20, key, f"{text} ({trigger})"
            looked_at = last.inputs.get("version", former.version)
            if VERSION in policy.on and looked_at != state.version:
                yield 20, key, f"the state notes the version {state.version}, but the evaluation looked at {looked_at}"
        if state.every_at != former.every_at:
            if text := _off_grid(policy.every, former.every_at, state.every_at):
                yield 20, key, text
            if parse_time(last.time) - state.every_at >= policy.every + NEAR:
                yield 20, key, f"the interval that began at {state.every_at} was counted after its end, at {last.time}"
        names = {str(ref) for ref in started}
        if state.op != former.op and state.op not in names:
            yield 20, key, f"the state names {state.op} as started, which did not start in this revision"

    def _bounds(self, place: PolicyPlace, now: PolicyRecords) -> Iterator[PolicyFault]:
        """Checks that the records of a policy stay small."""
        state, events = now.state or PolicyState(), now.events or WaitingEvents()
        counts = (
            (len(state.kept), p.MOST_EVALUATIONS, "evaluations"),
            (len(state.consumed), p.MOST_CONSUMED, "consumed events"),
            (len(events.waiting), p.MOST_WAITING, "waiting events"),
        )
        for count, most, what in counts:
            if count > most:
                yield 20, self._keys.policy_state(*place), f"{count} {what} are kept, at most {most} may be"
        size = len(dumps([one.to_json() for one in state.kept])) if len(state.kept) > 1 else 0
        if size > p.MOST_BYTES:
            text = f"the kept evaluations have {size} bytes, at most {p.MOST_BYTES} may be"
            yield 20, self._keys.policy_state(*place), text

    def _start(
        self, ref: OperationRef, spec: Spec, before: Mapping[PolicyPlace, PolicyRecords]
    ) -> Iterator[PolicyFault]:
        """Checks that an operation is started by an active policy, in the revision that records its evaluation."""
        place = (ref.table, spec.submitter.removeprefix(p.SUBMITTER))
        key, was = self._keys.policy(*place), before.get(place, self._policies.get(place, NONE))
        now = self._policies.get(place, NONE)
        last = now.state.kept[-1] if now.state is not None and now.state.kept else None
        if was.policy is None or was.policy.paused:
            yield 20, key, f"{ref} was started by a policy that is {'absent' if was.policy is None else 'paused'}"
        elif was.policy.start != ref.type:
            yield 20, key, f"{ref} was started by a policy that starts {was.policy.start}"
        elif place not in before or last is None or last.verdict is not PolicyVerdict.STARTED or last.op != str(ref):
            yield 20, key, f"{ref} was started by a policy without recording the evaluation"
        elif spec.request_id != p.request_id(was.policy.uid, last.triggers, was.state_mod):
            yield 20, key, f"the request id of {ref} does not follow from its policy, the triggers and the former state"


def _consumed(state: PolicyState) -> tuple[object, ...]:
    return state.every_at, state.version, state.consumed, state.op


def _unfit_trigger(trigger: str, was: PolicyRecords, now: PolicyRecords) -> str:
    """Why a trigger was not due, or is due again after its evaluation; ""."""
    former, state = was.state or PolicyState(), now.state or PolicyState()
    name, _, detail = trigger.partition("@")
    if name == "every":
        return "the interval was evaluated, and is not counted" if state.every_at == former.every_at else ""
    if name == VERSION:
        return "the version was evaluated before" if detail == former.version else ""
    waiting = {one.id for one in (was.events or WaitingEvents()).waiting}
    left = {one.id for one in (now.events or WaitingEvents()).waiting}
    if not name.startswith(EVENT) or detail not in waiting or detail in former.consumed:
        return "the event was not waiting"
    return "the event was evaluated, and waits again" if detail in left or detail not in state.consumed else ""


def _off_grid(every: float, former: float, counted: float) -> str:
    """Why this interval may not be counted after the former one, or "".

    One that was counted far in the future, by a wrong clock, is followed by any earlier one.
    """
    if not former or counted < former - NEAR:
        return ""
    passed = (counted - former) / every if every else 0.0
    if (passed - 1) * every < -NEAR or abs(passed - round(passed)) * every > NEAR * max(1.0, passed):
        return f"the interval of {every:g} s that began at {former} is followed by one at {counted}"
    return ""

"""Evaluates policies: which triggers are due, what has to be looked at, and the verdict. Pure.

The caller reads a policy with its state, finds what :func:`due` and :func:`wanted` ask for, and performs the
:class:`PolicyJudgement`: one transaction that records the evaluation, and starts the operation, if one is to start.
"""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from distop.protocol import policy_condition
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import parse_time, rfc3339
from distop.protocol.policy import EVENT, MOST_CONSUMED, VERSION, Evaluation, PolicyState, PolicyVerdict
from distop.protocol.policy_condition import DURATION, SINCE, STATISTICS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.policy import Policy, SeenPolicy

NEW_PARTITIONS, PARTITIONS = "new_partitions", "partitions"
SMALL_RATIO = 0.75
"""Share of the target size below which a file is small, as in ``compact``."""
TARGET_BYTES = 512 * 1024 * 1024
"""The target size of a policy whose argument names none."""
UNREADABLE_VERSION = "cannot read version: "
"""What an evaluation says first if the table's version cannot be read."""
READABLE_AGAIN = "the version can be read again"
FAILURES_EVERY = 600.0
"""Minimum seconds between two records of failures whose texts alone differ: an error may name a time or a request."""
_HOUR = 3_600.0
FIRST_PAUSE = 60.0
"""Seconds without a start after the policy's operation failed. Each further failure doubles them."""
LONGEST_PAUSE = 8 * _HOUR


@frozen
class Wanted:
    """What an evaluation has to look at.

    ``statistics``: names of statistics that the format gives; ``since``: types whose last successful end is asked for;
    ``version``: whether the table's version is; ``small_bytes``: the size below which a file is small.
    """

    statistics: frozenset[str]
    since: frozenset[str]
    version: bool
    small_bytes: int

    @property
    def scans(self) -> bool:
        """Whether the table's statistics have to be computed."""
        return bool(self.statistics)


@frozen
class Facts:
    """What was found. ``problem``: why it could not be found; "": it was.

    ``version``: None if it was not looked at. ``statistics``: None for one that the format does not have.
    ``ended``: seconds since the last successful end of an operation of a type; infinite for none. ``active``: the
    operation that the policy started last, if it has not ended. ``failures``: how many operations of the policy have
    failed since the type's last success on the table, or the last command on the policy; ``failed_at``: the end of the
    last one. ``evaluator``: the incarnation that looked.
    """

    now: float
    version: str | None = None
    statistics: Mapping[str, float | None] = field(default_factory=dict)
    ended: Mapping[str, float] = field(default_factory=dict)
    active: str = ""
    problem: str = ""
    evaluator: str = ""
    failures: int = 0
    failed_at: float = 0.0

    @property
    def paused_until(self) -> float:
        """Until when nothing starts because operations failed; 0: something may start now.

        A failure that a wrong clock wrote far ahead is none.
        """
        if not self.failures or self.failed_at > self.now + LONGEST_PAUSE:
            return 0.0
        until = self.failed_at + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures - 1, 20))
        return until if until > self.now else 0.0


@frozen
class PolicyJudgement:
    """The evaluation, and the state with it. ``starts``: whether to start the operation.

    ``waits``: the state if the start is refused for now; the triggers stay due.
    """

    evaluation: Evaluation
    after: PolicyState
    starts: bool = False


def due(seen: SeenPolicy, now: float, version: str | None = None) -> tuple[str, ...]:
    """The due triggers of a policy, each with what makes it due. () for a policy that is paused or absent.

    ``version``: the table's version, None if it was not looked at.
    """
    policy, state = seen.policy, seen.state
    if policy is None or policy.paused:
        return ()
    found = []
    if policy.every and next_interval(policy, state, now) <= now:
        found.append(f"every@{rfc3339(_counted(policy, state, now))}")
    if VERSION in policy.on and version is not None and version != state.version:
        found.append(f"{VERSION}@{version}")
    found += [f"{EVENT}{one.name}@{one.id}" for one in seen.events.waiting if one.name in policy.events]
    return tuple(found)


def next_interval(policy: Policy, state: PolicyState, now: float) -> float:
    """When the interval is due next; infinite without one. The first evaluation is due at once.

    An interval that was counted far ahead of ``now`` was written by a wrong clock: the next one is due at once.
    """
    if not policy.every:
        return math.inf
    if not state.every_at or state.every_at > now + policy.every:
        return 0.0
    return state.every_at + policy.every


def _counted(policy: Policy, state: PolicyState, now: float) -> float:
    """The begin of the current interval: missed intervals count once, and the grid of their begins stays."""
    if not state.every_at or state.every_at > now + policy.every:
        return now
    return state.every_at + math.floor((now - state.every_at) / policy.every) * policy.every


def commanded_at(policy: Policy) -> float:
    """When a user last made, changed, paused or resumed the policy: earlier failures count no more."""
    last = policy.actions.kept[-1:]
    return parse_time(last[0].time if last else policy.set_at)


def wanted(policy: Policy) -> Wanted:
    """What an evaluation of the policy has to look at."""
    names = policy_condition.parse(policy.when).names() if policy.when else frozenset[str]()
    since = frozenset(name.removeprefix(SINCE) for name in names if name.startswith(SINCE))
    of_table = {PARTITIONS if name == NEW_PARTITIONS else name for name in names if not name.startswith(SINCE)}
    target = policy.arg.get("target_bytes")
    size = target if isinstance(target, int) and not isinstance(target, bool) and target > 0 else TARGET_BYTES
    return Wanted(frozenset(of_table), since, VERSION in policy.on, int(size * SMALL_RATIO))


def evaluate(seen: SeenPolicy, triggers: tuple[str, ...], facts: Facts) -> PolicyJudgement:
    """Evaluate a policy whose triggers are due."""
    policy, state = seen.policy, seen.state
    assert policy is not None
    if facts.problem:
        return _stays(state, facts, PolicyVerdict.FAILED, facts.problem, triggers, {})
    if facts.paused_until:
        last = "the last one" if facts.failures == 1 else f"the last {facts.failures}"
        why = f"{last} of its operations failed: it starts none before {rfc3339(facts.paused_until)}"
        return _stays(state, facts, PolicyVerdict.WAITS, why, triggers, {})
    values, inputs, missing = _inputs(policy, state, facts)
    if missing:
        why = f"the format of the table has no {', '.join(missing)}"
        return _stays(state, facts, PolicyVerdict.FAILED, why, triggers, inputs)
    if policy.when and not policy_condition.parse(policy.when).holds(values):
        found = _evaluation(facts, PolicyVerdict.NO, f"the condition does not hold: {policy.when}", triggers, inputs)
        return PolicyJudgement(found, _consumed(seen, facts).and_then(found))
    if facts.active:
        why = f"{facts.active}, which it started, has not ended"
        return _stays(state, facts, PolicyVerdict.WAITS, why, triggers, inputs)
    started = _evaluation(facts, PolicyVerdict.STARTED, policy.when, triggers, inputs)
    return PolicyJudgement(started, _consumed(seen, facts), starts=True)


def started(judgement: PolicyJudgement, op: str, facts: Facts) -> PolicyState:
    """The state after the start of this operation."""
    partitions = facts.statistics.get(PARTITIONS)
    after = replace(judgement.after, op=op)
    if partitions is not None:
        after = replace(after, partitions=int(partitions))
    return after.and_then(replace(judgement.evaluation, op=op))


def refused(seen: SeenPolicy, judgement: PolicyJudgement, why: str, facts: Facts) -> PolicyJudgement:
    """The judgement of a start that was refused: its triggers stay due."""
    one = judgement.evaluation
    return _stays(seen.state, facts, PolicyVerdict.WAITS, why, one.triggers, one.inputs)


def of_version(seen: SeenPolicy, facts: Facts) -> PolicyJudgement | None:
    """What to record of a policy that is not due: that the version cannot be read, or can be read again; or None.

    ``facts.problem``: why it cannot be read; "": it was, or was not looked at.
    """
    policy, last = seen.policy, seen.state.kept[-1:]
    if policy is None or VERSION not in policy.on:
        return None
    if facts.version is None and facts.problem:
        return _stays(seen.state, facts, PolicyVerdict.FAILED, f"{UNREADABLE_VERSION}{facts.problem}", (), {})
    if facts.version is not None and last and last[0].why.startswith(UNREADABLE_VERSION):
        return _stays(seen.state, facts, PolicyVerdict.NO, READABLE_AGAIN, (), {"version": facts.version})
    return None


def news(seen: SeenPolicy, judgement: PolicyJudgement) -> bool:
    """Whether an evaluation that starts nothing has to be written: it consumes a trigger, or says something new.

    Failures whose texts alone differ, and those soon after a failure that ended, are written every ten minutes at most.
    """
    before, after, one = seen.state, judgement.after, judgement.evaluation
    if replace(after, kept=(), dropped=0) != replace(before, kept=(), dropped=0):
        return True
    if not before.kept:
        return True
    last = before.kept[-1]
    failed_before = (last.verdict, last.triggers) == (one.verdict, one.triggers) or last.why == READABLE_AGAIN
    if one.verdict is PolicyVerdict.FAILED and failed_before:
        return not one.same_as(last) and parse_time(one.time) - parse_time(last.time) >= FAILURES_EVERY
    return not one.same_as(last)


def _stays(
    state: PolicyState,
    facts: Facts,
    verdict: PolicyVerdict,
    why: str,
    triggers: tuple[str, ...],
    inputs: Mapping[str, Any],
) -> PolicyJudgement:
    found = _evaluation(facts, verdict, why, triggers, inputs)
    return PolicyJudgement(found, state.and_then(found))


def _evaluation(
    facts: Facts, verdict: PolicyVerdict, why: str, triggers: tuple[str, ...], inputs: Mapping[str, Any]
) -> Evaluation:
    return Evaluation(rfc3339(facts.now), verdict, why, triggers, inputs, evaluator=facts.evaluator)


def _consumed(seen: SeenPolicy, facts: Facts) -> PolicyState:
    """The state after its due triggers were evaluated: the interval is counted, the version and the events are known.

    Waiting events of other names, which the policy had before it was changed, are dropped.
    """
    policy, state = seen.policy, seen.state
    assert policy is not None
    if policy.every and next_interval(policy, state, facts.now) <= facts.now:
        state = replace(state, every_at=_counted(policy, state, facts.now))
    if VERSION in policy.on and facts.version is not None:
        state = replace(state, version=facts.version)
    ids = tuple(one.id for one in seen.events.waiting)
    return replace(state, consumed=(*state.consumed, *ids)[-MOST_CONSUMED:]) if ids else state


def _inputs(policy: Policy, state: PolicyState, facts: Facts) -> tuple[dict[str, float], dict[str, Any], list[str]]:
    """The values of the condition's names, the same for a record, and the names that the format does not have."""
    values: dict[str, float] = {}
    inputs: dict[str, Any] = {}
    missing = []
    if facts.version is not None:
        inputs["version"] = facts.version
    names = policy_condition.parse(policy.when).names() if policy.when else ()
    for name in sorted(names):
        if name.startswith(SINCE):
            since = facts.ended.get(name.removeprefix(SINCE), math.inf)
            values[name] = since
            inputs[name] = round(since / _HOUR, 2) if math.isfinite(since) else "never"
            continue
        value = facts.statistics.get(PARTITIONS if name == NEW_PARTITIONS else name)
        if value is None:
            missing.append(name)
            continue
        if name == NEW_PARTITIONS:
            value = max(0.0, value - state.partitions)
        values[name] = value
        inputs[name] = f"{value:.0f} s" if STATISTICS[name] == DURATION else _plain(value)
    return values, inputs, missing


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else round(value, 4)

"""Makes, changes, lists, pauses and removes policies, and emits events (``protocol.policy`` has the transactions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.clock import time, uuid
from distop.errors import InvalidArgument, NotAllowed, NotFound, OutcomeUnknown, UnreadableRecord
from distop.protocol import keys as K
from distop.protocol import policy as p
from distop.protocol import policy_condition
from distop.protocol.caller_values import text
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import UNREADABLE, rfc3339, shorten
from distop.protocol.operation_options import DEFAULT
from distop.protocol.record_reading import read_policy
from distop.protocol.texts import did_you_mean, shown
from distop.protocol.txn import Get
from distop.protocol.user_actions import LONGEST_BY, Action
from distop.services.nearest_names import unknown_table
from distop.services.submission.insertion import object_found
from distop.services.submission.policy_start import request_of
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import acting
from distop.setting_values import duration
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.policy import Policy, PolicyState, SeenPolicy
    from distop.protocol.user_actions import Actions
    from distop.store.client import EtcdClient

LIMITS = ("priority", "max_jobs", "max_jobs_per_executor", "max_failed")
"""The options of a start that a policy has."""


@frozen
class PolicyStatus:
    """A policy as it is listed. ``events``: the number of waiting events. ``problem``: why it cannot be read, or ""."""

    table: str
    name: str
    policy: Policy | None
    state: PolicyState
    events: int = 0
    problem: str = ""

    @property
    def stage(self) -> str:
        """``active``, ``paused`` or ``unreadable``."""
        return str(self.policy.stage) if self.policy is not None else "unreadable"

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        data: dict[str, Any] = {"table": self.table, "name": self.name, "state": self.stage}
        if self.policy is None:
            return {**data, "problem": self.problem}
        own = self.policy.to_json()
        data |= {name: own[name] for name in own if name not in ("uid", "paused")}
        return {
            **data,
            "waiting_events": self.events,
            "op": self.state.op or None,
            "evaluations": [one.to_json() for one in self.state.kept],
            "evaluations_dropped": self.state.dropped,
        }


def definition(
    name: str,
    start: str,
    arg: Mapping[str, Any] | None,
    every: float | str | None,
    on: str | Iterable[str] | None,
    when: str | None,
    limits: Mapping[str, Any],
) -> Policy:
    """A policy from a user's values, without its own id. Raises InvalidArgument."""
    K.encode(text(name, "the name of a policy"))
    K.check_type_name(start)
    if arg is not None and not isinstance(arg, Mapping):
        raise InvalidArgument(f"the argument of a policy's operation must be an object, not {shown(arg)}")
    interval = _interval(every) if every is not None else 0.0
    triggers = (on,) if isinstance(on, str) else tuple(dict.fromkeys(on or ()))
    for one in triggers:
        if not isinstance(one, str) or (one != p.VERSION and not (one.startswith(p.EVENT) and len(one) > len(p.EVENT))):
            raise InvalidArgument(f"{shown(one)} is not a trigger: use `version`, or `event:NAME`")
        text(one, "a trigger", len(p.EVENT) + p.LONGEST_EVENT)
    if not interval and not triggers:
        raise InvalidArgument("a policy needs a trigger: an interval (every), or on `version` or `event:NAME`")
    if len(triggers) > p.MOST_TRIGGERS:
        raise InvalidArgument(f"a policy has at most {p.MOST_TRIGGERS} triggers, not {len(triggers)}")
    condition = text(when, "the condition of a policy") if when else ""
    if condition:
        policy_condition.parse(condition)
    given = {one: value for one, value in limits.items() if value is not None}
    if unknown := given.keys() - set(LIMITS):
        raise InvalidArgument(f"{min(unknown)!r} is not an option of a policy{did_you_mean(min(unknown), LIMITS)}")
    checked = StartOptions.of(given, "start").checked()
    options = DEFAULT.altered(checked) if checked else DEFAULT
    return p.Policy(start, "", dict(arg or {}), interval, triggers, condition, options)


def _interval(every: float | str) -> float:
    try:
        seconds = duration(every)
    except ValueError as error:
        raise InvalidArgument(f"the interval of a policy must be {error}, not {shown(every)}") from None
    if seconds < p.SHORTEST:
        raise InvalidArgument(f"the interval of a policy must be at least {p.SHORTEST:g} s, not {shown(every)}")
    return seconds


async def set_policies(etcd: EtcdClient, keys: Keys, table: str, new: Mapping[str, Policy]) -> list[PolicyStatus]:
    """Make these policies of a table, or change them, all or none. A changed policy stays paused if it was.

    Raises NotFound (the table), UnknownBehavior, InvalidArgument.
    """
    if len(new) > p.MOST_POLICIES:
        raise InvalidArgument(f"at most {p.MOST_POLICIES} policies can be set at once, not {len(new)}")
    for name, policy in new.items():
        await _check_start(etcd, keys, table, name, policy)
    by, now, repeated = acting(etcd), rfc3339(time.time()), False
    made = {name: (uuid.uuid4().hex, replace(policy, by=by)) for name, policy in new.items()}
    while True:
        reads = [get for name in new for get in p.policy_reads(keys, table, name)]
        mark, record, *found = await etcd.read(Get(keys.policy_mark()), Get(keys.table(table)), *reads)
        if record.kv is None:
            raise NotFound(await unknown_table(etcd, keys, table))
        kvs = [one.kv for one in found]
        wanted: dict[str, tuple[Policy, SeenPolicy]] = {}
        for n, (name, (uid, policy)) in enumerate(made.items()):
            seen = read_policy(*kvs[3 * n : 3 * n + 3])
            wanted[name] = _changed(policy, uid, seen, by, now), seen
        applied = repeated and any(
            seen.policy is not None and _made_by(seen.policy, made[name][0], now, by)
            for name, (_, seen) in wanted.items()
        )
        if repeated and not applied and any(seen.policy is None for _, seen in wanted.values()):
            raise OutcomeUnknown(
                f"cannot tell whether {', '.join(wanted)} of the table {shown(table)} was set and then removed by "
                "somebody else, because etcd did not answer in time: list the policies, and set them again if needed"
            )
        if applied or all(seen.policy == policy for policy, seen in wanted.values()):
            return [_status_of(table, name, seen.policy or policy, seen) for name, (policy, seen) in wanted.items()]
        mark_mod = mark.kv.mod_revision if mark.kv is not None else 0
        txn = p.set_policies(keys, table, wanted, mark_mod, record.kv.mod_revision)
        result = await etcd.commit(txn, deadline=WRITE_LIMIT)
        if result.succeeded:
            return [_status_of(table, name, policy, seen) for name, (policy, seen) in wanted.items()]
        repeated = repeated or result.repeated


def _status_of(table: str, name: str, policy: Policy, seen: SeenPolicy) -> PolicyStatus:
    return PolicyStatus(table, name, policy, seen.state, len(seen.events.waiting))


def _changed(policy: Policy, uid: str, seen: SeenPolicy, by: str, now: str) -> Policy:
    """The new record of a policy, with the action; the former one if nothing differs."""
    former = seen.policy
    if former is None:
        return replace(policy, uid=uid, set_at=now)
    before, after = former.definition(), policy.definition()
    if before == after:
        return former
    actions = former.actions.and_then(Action.change(now, "set_policy", by, before, after))
    return replace(policy, uid=former.uid, set_at=former.set_at, paused=former.paused, actions=actions)


def _made_by(there: Policy, uid: str, now: str, by: str) -> bool:
    """Whether a command has made or changed a policy: its own uid or its action is there."""
    return there.uid == uid or _acted(there, "set_policy", now, by)


def _acted(there: Policy, action: str, now: str, by: str) -> bool:
    """Whether this action of a command is recorded in a policy."""
    named = (now, action, shorten(by, LONGEST_BY))
    return any((one.time, one.action, shorten(one.by, LONGEST_BY)) == named for one in there.actions.kept)


async def _check_start(etcd: EtcdClient, keys: Keys, table: str, name: str, policy: Policy) -> None:
    """Raises UnknownBehavior and InvalidArgument for a start that would always be refused."""
    from distop.services.submission.insertion import Insertion, StartAttempt

    wanted = request_of(table, name, policy)
    one = StartAttempt(wanted)
    insertion = Insertion(etcd, keys, [one], joins=False)
    await insertion.look_back()
    await insertion.read_type((table, policy.start))
    await object_found(insertion.types[table, policy.start].declaration, wanted)


async def policies(etcd: EtcdClient, keys: Keys, table: str | None = None) -> list[PolicyStatus]:
    """The policies of a table, or of all tables, by table and name.

    Raises NotFound for a table that has no policies and is not registered.
    """
    families = (K.POLICY, K.POLICY_STATE, K.POLICY_EVENT)
    ranges = [keys.family(one) if table is None else p.table_range(keys, one, table) for one in families]
    found: list[dict[tuple[str, str], Any]] = []
    for first, after in ranges:
        listing = await etcd.list(first, after)
        parsed = ((keys.parse(kv.key), kv) for kv in listing.kvs)
        found.append({(key.table, key.id): kv for key, kv in parsed})
    own, states, events = found
    if table is not None and not own and await etcd.get(keys.table(table)) is None:
        raise NotFound(await unknown_table(etcd, keys, table))
    return [_status(place, kv, states.get(place), events.get(place)) for place, kv in sorted(own.items())]


async def policy(etcd: EtcdClient, keys: Keys, table: str, name: str) -> PolicyStatus:
    """One policy. Raises NotFound."""
    own, state, events = (one.kv for one in await etcd.read(*p.policy_reads(keys, table, name)))
    if own is None:
        raise NotFound(await _unknown(etcd, keys, table, name))
    return _status((table, name), own, state, events)


def _status(place: tuple[str, str], own: Any, state: Any, events: Any) -> PolicyStatus:
    try:
        seen = read_policy(own, state, events)
    except UnreadableRecord as error:
        return PolicyStatus(*place, None, p.PolicyState(), 0, str(error))
    return PolicyStatus(*place, seen.policy, seen.state, len(seen.events.waiting))


async def pause(etcd: EtcdClient, keys: Keys, table: str, name: str) -> PolicyStatus:
    """Pause a policy; one that is paused stays so. Raises NotFound."""
    return await _to(etcd, keys, table, name, paused=True)


async def resume(etcd: EtcdClient, keys: Keys, table: str, name: str) -> PolicyStatus:
    """Resume a policy; an active one stays so. Raises NotFound."""
    return await _to(etcd, keys, table, name, paused=False)


async def _to(etcd: EtcdClient, keys: Keys, table: str, name: str, *, paused: bool) -> PolicyStatus:
    event, by, now, repeated = "pause_policy" if paused else "resume_policy", acting(etcd), rfc3339(time.time()), False
    while True:
        seen = await _seen(etcd, keys, table, name)
        assert seen.policy is not None
        if seen.policy.paused == paused or (repeated and _acted(seen.policy, event, now, by)):
            return _status_of(table, name, seen.policy, seen)
        actions: Actions = seen.policy.actions.and_then(Action(now, event, by))
        change = p.pause if paused else p.resume
        result = await etcd.commit(change(keys, table, name, seen, actions), deadline=WRITE_LIMIT)
        if result.succeeded:
            return _status_of(table, name, replace(seen.policy, paused=paused, actions=actions), seen)
        repeated = repeated or result.repeated


async def remove(etcd: EtcdClient, keys: Keys, table: str, name: str) -> None:
    """Remove a policy. Operations that it started continue. Raises NotFound."""
    removed = ""
    while True:
        own, *_ = await etcd.read(*p.policy_reads(keys, table, name))
        if own.kv is None:
            if removed:
                return
            raise NotFound(await _unknown(etcd, keys, table, name))
        uid = _uid(own.kv.value)
        if removed and removed != uid:
            return  # ours is removed, and somebody has made another one
        removed = uid
        if (await etcd.commit(p.remove(keys, table, name, own.kv.mod_revision), deadline=WRITE_LIMIT)).succeeded:
            return


def _uid(value: bytes) -> str:
    """The policy's own id; a policy that cannot be read can be removed."""
    try:
        return p.Policy.decode(value).uid
    except UNREADABLE:
        return "unreadable"


async def emit(etcd: EtcdClient, keys: Keys, table: str, name: str, event_id: str | None = None) -> list[str]:
    """Emit an event on a table. Returns the names of the policies that it triggers; paused ones wait until resumed.

    ``event_id``: repeated calls with the same id are one event, while it waits or was consumed recently. Raises
    NotFound (the table), InvalidArgument.
    """
    made = p.EmittedEvent(
        _word(event_id, "the id of an event") if event_id is not None else uuid.uuid4().hex,
        _word(name, "the name of an event"),
        rfc3339(time.time()),
        acting(etcd),
    )
    while True:
        to, known = await _triggered(etcd, keys, table, made)
        if not to:
            return sorted(known)
        if len(to) > p.MOST_POLICIES:
            raise NotAllowed(f"the event {shown(name)} triggers {len(to)} policies: at most {p.MOST_POLICIES} may be")
        if (await etcd.commit(p.emit(keys, table, made, to), deadline=WRITE_LIMIT)).succeeded:
            return sorted({*to, *known})


def _word(value: str, what: str) -> str:
    """A text of 1 to 200 characters. Raises InvalidArgument."""
    if text(value, what, p.LONGEST_EVENT) == "":
        raise InvalidArgument(f"{what} must not be empty")
    return value


async def _triggered(
    etcd: EtcdClient, keys: Keys, table: str, event: p.EmittedEvent
) -> tuple[dict[str, SeenPolicy], set[str]]:
    """The policies that an event triggers and that do not know it yet, and the names of those that do."""
    families = (K.POLICY, K.POLICY_STATE, K.POLICY_EVENT)
    record, *found = await etcd.read(
        Get(keys.table(table)), *(Get(*p.table_range(keys, one, table)) for one in families)
    )
    if record.kv is None:
        raise NotFound(await unknown_table(etcd, keys, table))
    own, states, events = ({keys.parse(kv.key).id: kv for kv in one.kvs} for one in found)
    to: dict[str, SeenPolicy] = {}
    known: set[str] = set()
    for name, kv in own.items():
        try:
            seen = read_policy(kv, states.get(name), events.get(name))
        except UnreadableRecord:
            continue
        if seen.policy is not None and event.name in seen.policy.events:
            if event.id in seen.state.consumed or any(one.id == event.id for one in seen.events.waiting):
                known.add(name)
            else:
                to[name] = seen
    return to, known


async def _seen(etcd: EtcdClient, keys: Keys, table: str, name: str) -> SeenPolicy:
    own, state, events = (one.kv for one in await etcd.read(*p.policy_reads(keys, table, name)))
    if own is None:
        raise NotFound(await _unknown(etcd, keys, table, name))
    return read_policy(own, state, events)


async def _unknown(etcd: EtcdClient, keys: Keys, table: str, name: str) -> str:
    listing = await etcd.list(*p.table_range(keys, K.POLICY, table), keys_only=True)
    names: Sequence[str] = [keys.parse(kv.key).id for kv in listing.kvs]
    return f"the table {shown(table)} has no policy {shown(name)}{did_you_mean(name, names, 'its policies')}"

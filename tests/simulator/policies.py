"""Policies in a simulation: their keeper, the versions of tables, and what policies must never do."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import field
from typing import TYPE_CHECKING, Any

from distop.client.async_client import Client
from distop.errors import EtcdRejected, EtcdUnavailable, NotFound, OutcomeUnknown, UnknownBehavior
from distop.protocol import keys as K
from distop.protocol.frozen import frozen
from distop.protocol.policy import SUBMITTER, VERSION, Policy, PolicyState, PolicyVerdict
from distop.protocol.records import OperationRef, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.protocol.keys import ParsedKey
    from distop.protocol.revisioned import Change
    from distop.settings import ClientConfig

AGAIN = 0.3
"""Seconds before the keeper retries."""
SMALL_FILES = 10
"""Small files for each version: so an evaluation shows the version of the statistics that it looked at."""


@frozen
class PolicyAction:
    """An action on a policy, ``after`` seconds after the previous one.

    ``what``: ``pause``, ``resume``, ``remove``, ``set`` (again, with another priority), ``emit``.
    """

    after: float
    what: str


@frozen
class SimPolicy:
    """A policy that the keeper makes. It is paused or removed at the end."""

    name: str
    table: str
    type: str
    arg: Mapping[str, Any]
    every: float = 0.0
    on: tuple[str, ...] = ()
    when: str = ""
    after: float = 0.0
    actions: tuple[PolicyAction, ...] = ()
    commits: tuple[float, ...] = field(default=())
    """When its table gets a new version, in seconds from the start."""

    def keywords(self) -> dict[str, Any]:
        """The options of ``set_policy``."""
        return {"every": self.every or None, "on": list(self.on), "when": self.when or None}


class TableVersions:
    """The versions of all tables, which change by commits of other writers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def commit(self, table: str) -> None:
        """Give a table its next version."""
        self._numbers[table] = self._numbers.get(table, 1) + 1

    def number(self, table: str) -> int:
        """The number of a table's version."""
        return self._numbers.get(table, 1)

    def version(self, table: str) -> str:
        """The version of a table, as its statistics name it."""
        return f"v{self.number(table)}"


async def keep_policies(
    config: ClientConfig, policies: Sequence[SimPolicy], versions: TableVersions, end: float, now: Callable[[], float]
) -> None:
    """Make these policies and act on them. Once ``end`` has come, wait for their last versions, and remove them."""
    async with Client(config) as client:
        await _insist(client.connect)
        await asyncio.gather(*(_keep(client, one, versions, end, now) for one in policies))


async def _keep(client: Client, one: SimPolicy, versions: TableVersions, end: float, now: Callable[[], float]) -> None:
    await asyncio.sleep(one.after)
    await _set(client, one)
    for n, action in enumerate(one.actions):
        await asyncio.sleep(action.after)
        with contextlib.suppress(NotFound):  # it is removed
            await _act(client, one, action.what, n)
    await asyncio.sleep(max(0.0, end - now()))
    with contextlib.suppress(NotFound):
        await _insist(client.resume_policy, one.table, one.name)
        while not await _caught_up(client, one, versions):  # noqa: ASYNC110  # etcd is asked, not a process
            await asyncio.sleep(1.0)
        await _insist(client.remove_policy, one.table, one.name)


async def _act(client: Client, one: SimPolicy, what: str, number: int) -> None:
    if what == "pause":
        await _insist(client.pause_policy, one.table, one.name)
    elif what == "resume":
        await _insist(client.resume_policy, one.table, one.name)
    elif what == "remove":
        await _insist(client.remove_policy, one.table, one.name)
    elif what == "set":
        await _set(client, one, priority=1 + number)
    else:
        name = next((trigger.partition(":")[2] for trigger in one.on if trigger != VERSION), "loaded")
        await _insist(client.emit, one.table, name, event_id=f"{one.name}-{number}")


async def _set(client: Client, one: SimPolicy, **options: Any) -> None:
    while True:
        try:
            await _insist(client.set_policy, one.name, one.table, one.type, one.arg, **one.keywords(), **options)
            return
        except (NotFound, UnknownBehavior):  # the table is removed for a while, or no executor is ready yet
            await asyncio.sleep(AGAIN)


async def _caught_up(client: Client, one: SimPolicy, versions: TableVersions) -> bool:
    """Whether a policy has evaluated the newest version of its table and all events."""
    status = await _insist(client.policy, one.table, one.name)
    seen = VERSION not in one.on or status.state.version == versions.version(one.table)
    return bool(seen and not status.events)


async def _insist(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    while True:
        try:
            return await call(*args, **named)
        except (EtcdUnavailable, OutcomeUnknown, EtcdRejected):
            await asyncio.sleep(AGAIN)


class PolicyChecks:
    """Folds each revision. ``found(kind, key, text, op, partition)`` is called for each breach."""

    def __init__(self, versions: TableVersions, found: Callable[..., None]) -> None:
        self._versions = versions
        self._found = found
        self._policies: dict[tuple[str, str], Policy] = {}
        self._states: dict[tuple[str, str], PolicyState] = {}
        self._removed: dict[str, str] = {}
        """The uid of each removed policy, with its name."""
        self._started: dict[str, dict[str, str]] = {}
        """uid → trigger → the operation that it started."""
        self._unrecorded: dict[str, str] = {}
        """uid → an operation that it started without writing its state."""
        self.evaluations = 0
        """Number of recorded evaluations."""
        self.starts = 0
        """Number of operations that policies started."""

    def step(self, parsed: Sequence[tuple[ParsedKey, Change]], sender: str) -> None:
        """Fold one whole revision."""
        before = dict(self._policies) if any(key.family == K.POLICY for key, _ in parsed) else self._policies
        for key, change in parsed:
            if key.family == K.POLICY:
                self._policy((key.table, key.id), change)
        for key, change in parsed:
            if key.family == K.POLICY_STATE:
                self._state((key.table, key.id), change)
        for key, change in parsed:
            if key.ref is not None and key.name == "spec" and key.family == K.OP and not change.deleted:
                spec = Spec.decode(change.kv.value)
                if spec.submitter.startswith(SUBMITTER):
                    self._start(key.ref, spec.submitter.removeprefix(SUBMITTER), before, change)

    def _policy(self, place: tuple[str, str], change: Change) -> None:
        former = self._policies.pop(place, None)
        if change.deleted:
            if former is not None:
                self._removed[former.uid] = place[1]
            return
        policy = self._policies[place] = Policy.decode(change.kv.value)
        if policy.uid in self._removed:
            self._found("removed policy is back", change.kv.key, f"policy {place[1]} was removed, and exists again")
        resumed = policy.actions.kept[-1:] and policy.actions.kept[-1].action == "resume_policy"
        if former is not None and former.paused and not policy.paused and not resumed:
            self._found(
                "policy lost a pause", change.kv.key, f"policy {place[1]} is active again, but nobody resumed it"
            )

    def _state(self, place: tuple[str, str], change: Change) -> None:
        before = self._states.pop(place, None)
        if change.deleted:
            return
        state = self._states[place] = PolicyState.decode(change.kv.value)
        if before is None or not state.kept:
            return
        self.evaluations += 1
        if (policy := self._policies.get(place)) is not None:
            self._unrecorded.pop(policy.uid, None)
        last = state.kept[-1]
        if state.version != before.version and last.verdict not in (PolicyVerdict.STARTED, PolicyVerdict.NO):
            text = f"policy {place[1]} noted the version {state.version} although its evaluation {last.verdict}"
            self._found("policy missed a version", change.kv.key, text)
        files = last.inputs.get("small_files")
        if state.version != before.version and files is not None and files < SMALL_FILES * int(state.version[1:]):
            text = f"policy {place[1]} noted the version {state.version}, but looked at v{int(files / SMALL_FILES)}"
            self._found("policy missed a version", change.kv.key, text)

    def _start(self, ref: OperationRef, name: str, before: Mapping[tuple[str, str], Policy], change: Change) -> None:
        self.starts += 1
        place = (ref.table, name)
        policy, op = before.get(place), str(ref)
        if policy is None:
            self._found("started by a removed policy", change.kv.key, f"{op} was started by {name}, which is gone", op)
            return
        if policy.paused:
            self._found("started by a paused policy", change.kv.key, f"{op} was started by {name}, which is paused", op)
        if op_before := self._unrecorded.get(policy.uid):
            text = f"policy {name} started {op_before} and {op} from the same state"
            self._found("policy started twice", change.kv.key, text, op)
        self._unrecorded[policy.uid] = op
        state = self._states.get(place)
        last = state.kept[-1] if state is not None and state.kept else None
        if last is None or last.op != op:
            self._found("start without an evaluation", change.kv.key, f"{op} was started by {name}, unrecorded", op)
            return
        del self._unrecorded[policy.uid]
        started = self._started.setdefault(policy.uid, {})
        for trigger in last.triggers:
            if trigger in started:
                text = f"{trigger} of policy {name} started {started[trigger]} and {op}"
                self._found("policy started twice", change.kv.key, text, op)
            started[trigger] = op

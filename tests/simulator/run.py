"""One simulation: a scenario is run, each revision is checked, and at the end that all has ended."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import logging
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.clock import source
from distop.decide.orphan_keys import orphans
from distop.errors import ClusterChanged, InvalidArgument
from distop.invariants.checker import Checker
from distop.protocol import keys as K
from distop.protocol.executor_nodes import Serves
from distop.protocol.frozen import frozen
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef, Spec
from distop.settings import ClientConfig
from distop.store.connection_settings import EtcdConfig
from distop.store.transport import channels
from tests.simulator.actors import act
from tests.simulator.caller_transactions import CALLERS, Branches, turn_some
from tests.simulator.client_answers import broken
from tests.simulator.clients import Told, drain_some, let_go, one_client, remove_some, set_up
from tests.simulator.completions import Completions
from tests.simulator.departures import needs_departing
from tests.simulator.etcd_users import tells_of_users
from tests.simulator.fault_kinds import LOSING
from tests.simulator.faults import Injector
from tests.simulator.history_retention import HistoryRetention, age, past, promised
from tests.simulator.job_effects import Effects
from tests.simulator.machine import Machine, Step, unobserved
from tests.simulator.network import Network
from tests.simulator.offered_types import Offers
from tests.simulator.prepared_starts import Prepared
from tests.simulator.process_clock import SimSource
from tests.simulator.protocol_courses import Courses
from tests.simulator.removed_tables import Registry
from tests.simulator.reruns import judge
from tests.simulator.scenario import Scenario, scenario
from tests.simulator.sim_etcd import SimEtcd
from tests.simulator.simulated_behaviors import RARE, TYPES
from tests.simulator.slow_graphs import GraphHolds
from tests.simulator.stop_checks import Stopping
from tests.simulator.unexpected_errors import Listener, listening, told
from tests.simulator.virtual_loop import Process, VirtualLoop
from tests.simulator.write_authors import Authors

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from distop.protocol.keys import ParsedKey
    from distop.protocol.revisioned import Change
    from distop.protocol.txn import Flaw

LIVENESS = 180.0
"""Virtual seconds after the last fault, and after whatever got on since (a job or an operation that ended, a job that
saved its progress), within which all has to end, or something has to get on again. A step of a job takes 44 s at most;
after 300 s feeds are listed anew, which would mend what was lost of them.
"""
LISTED_AGAIN = 330.0
"""Seconds after which each feed was listed again; added where etcd loses events, which nothing else repairs."""
WENT_BACK = "went back from revision"
"""Part of the error about an etcd that answers a read as of the past."""
HELPERS = frozenset({"set-up", "operator", "registrar", "rival", "janitor"})
"""Processes of the test itself, which get no stale reads and are not started again."""
LAST_WORD = 20
"""So many times as long after the last fault a run is over, though something gets on: that may be so for ever."""


@frozen
class Breach:
    """Something that must not be: ``kind`` names the guarantee; ``op`` and ``partition`` (-1) what it is about."""

    kind: str
    at: float
    revision: int
    key: str
    text: str
    op: str = ""
    partition: int = -1

    def __str__(self) -> str:
        return f"{self.kind} at {self.at:.3f} s, revision {self.revision}: {self.key}: {self.text}"


@dataclass(slots=True)
class Report:
    """How a run went."""

    scenario: Scenario
    breaches: list[Breach]
    ended: int
    """Operations that ended."""
    revisions: int
    requests: int
    callbacks: int
    seconds: float
    """Virtual ones."""
    faults: dict[str, int]
    """That struck while an operation was open or pending."""
    offering: int
    """Executors that offer something that was started."""
    claimed: int
    """Executors that held a claim."""
    elected: int
    """Incarnations that held an election."""
    courses: dict[str, int]
    log: list[tuple[float, int, str, str]] = field(default_factory=list)
    """(time, revision or 0, who, what), all of it, in order."""


class _Keys(Keys):
    """Takes each key apart once: three judges look at each change."""

    __slots__ = ("_known",)

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self._known: dict[str, ParsedKey] = {}

    def parse(self, key: str) -> ParsedKey:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = super().parse(key)
        return known


class Simulation:
    """The cluster of one scenario."""

    def __init__(self, wanted: Scenario) -> None:
        self.scenario = wanted
        self.keys = _Keys(wanted.namespace)
        self.loop = VirtualLoop(random.Random(f"loop/{wanted.seed}"))  # type: ignore[abstract]
        addresses = tuple(f"etcd-{n}:2379" for n in range(wanted.members))
        self.etcd = SimEtcd(self.loop, addresses, version=wanted.version, batch=wanted.batch, election=wanted.election)
        self.etcd.watching.fragments = wanted.fragments
        self.etcd.never_stale = HELPERS
        for txn in past(self.keys, wanted, lambda: self.etcd.store.revision):
            self.etcd.preset(txn)
        self.etcd.committed = self._committed
        self.etcd.refused = self._refused
        self.network = Network(self.loop, self.etcd, random.Random(f"network/{wanted.seed}"))
        self.stepping: Step = unobserved
        """As ``network.sending`` and ``network.applied``, for the steps of machines that are no requests."""
        self.breaches: list[Breach] = []
        self.log: list[tuple[float, int, str, str]] = []
        self.told = Told(wanted.limits.denied_kept)
        self.clients: list[Process] = []
        self._numbers: dict[Process, int] = {}
        """Which of the scenario's clients a process is: one may have several lives."""
        self._actors: dict[Process, int] = {}
        self._done: set[Process] = set()
        self._operator: Process | None = None
        """Who drains executors."""
        self.machines: list[Machine] = []
        self._checker = Checker(self.keys)
        self._checker.begin(self.etcd.store.listing())
        self.effects = Effects(self.etcd.store, self.keys, self.loop.time, self._found)
        effects = self.effects
        self._authors = Authors(self.keys, effects.claim_left, effects.succeeded, self._found, self.loop.time)
        self._stopping = Stopping(self.loop, self.keys, self._authors.claims, self.effects.ends, self._found)
        self._offers = Offers(self._found)
        self.registry = Registry(self._found)
        self._retention = HistoryRetention(promised(wanted.limits), age(wanted), lambda: self.loop.now, self._found)
        self._completions = Completions(self.etcd.store, self.keys, self._found)
        self._courses = Courses()
        self._prepared = Prepared()
        self._branches = Branches()
        self._holds = GraphHolds(self.loop.time, self._found)
        self._open: set[str] = set()
        self._accepted: set[str] = set()
        self._requests: dict[str, str] = {}
        """Operation → the request that began it."""
        self._ids: dict[str, str] = {}
        self._forsaken: set[str] = set()
        """Operations for which only executors may work that go for good."""
        self._ended: dict[str, str] = {}
        self._forgotten: set[str] = set()
        """Operations whose history record was deleted."""
        self._busy = 0
        self._got_on = 0.0
        self._injector = Injector(self)
        self._active = tuple(self.keys.family(family)[0] for family in (K.OPEN, K.PENDING))
        self._history = self.keys.family(K.HISTORY)[0]
        self.etcd.users.enabled = wanted.users
        user = "worker" if wanted.users else None
        config = EtcdConfig(addresses, user, user, connect_timeout=5.0, read_timeout=None)
        self._config = ClientConfig(config, wanted.namespace)

    # ------------------------------------------------------------------ checks

    def note(self, text: str) -> None:
        """Something of the world happens: it stands in the story."""
        self.log.append((self.loop.now, 0, "", text))

    def _committed(self, revision: int, changes: tuple[Change, ...], sender: str) -> None:
        self.log.append((self.loop.now, revision, sender, ""))
        for one in self._checker.feed(revision, changes):
            self._found(f"invariant {one.invariant}", one.key, one.text)
        parsed = list(self._parsed(changes))
        self._stopping.step(revision, parsed, sender)
        self._offers.step(revision, parsed, sender)
        self.registry.step(parsed)
        self._retention.step(parsed)
        self._authors.step(parsed, sender)
        self._courses.step(parsed, sender)
        self._prepared.step(parsed)
        self._holds.step(parsed, sender)
        for key, text in self._branches.step(changes):
            self._found("two branches", key, text)
        for change in changes:
            key = change.kv.key
            if self.etcd.users.enabled and tells_of_users(change.kv.value):
                self._found("blamed", key, f"for what etcd did not permit: {change.kv.value.decode()}")
            if key.endswith((".state", ".progress")):
                self._got_on = self.loop.now
            if key.startswith(self._active):
                (self._open.discard if change.deleted else self._open.add)(key)
                if not change.deleted:
                    self._accepted.add(str(self.keys.parse(key).ref))
            elif key.startswith(self._history):
                self._recorded(key, change)
            elif key.endswith(".spec") and not change.deleted:
                ref, spec = str(self.keys.parse(key).ref), Spec.decode(change.kv.value)
                self._requests[ref], self._ids[ref] = spec.request_id, spec.id
                named = OperationRef.parse(ref)
                if needs_departing(named.type, named.table, spec.where):
                    self._forsaken.add(ref)

    def _refused(self, found: Flaw, sender: str) -> None:
        """Report a transaction that etcd rejects as invalid, whoever sent it.

        It would be sent again for ever.
        """
        text = f"{sender or 'somebody'} sent a transaction that etcd rejects as invalid: {found.text}"
        self._found("progress", found.key, text)

    def _parsed(self, changes: tuple[Change, ...]) -> Iterator[tuple[ParsedKey, Change]]:
        for change in changes:
            with contextlib.suppress(InvalidArgument):
                yield self.keys.parse(change.kv.key), change

    def _unexpected(self, text: str, op: str, partition: int) -> None:
        if self.etcd.told_past and WENT_BACK in text:
            return  # as far as anybody can know, it was restored
        self._found("unexpected error", "", text, op, partition)

    def _recorded(self, key: str, change: Change) -> None:
        from distop.protocol.records import History

        parsed = self.keys.parse(key)
        if not parsed.name:
            if change.deleted:
                self._forgotten.add(str(parsed.ref))
            else:
                self._ended[str(parsed.ref)] = History.decode(change.kv.value).state

    def _found(self, kind: str, key: str, text: str, op: str = "", partition: int = -1) -> None:
        self.breaches.append(Breach(kind, self.loop.now, self.etcd.revision, key, text, op, partition))

    # --------------------------------------------------------------------- run

    def _spawn(self, name: str, work: Coroutine[Any, Any, Any], *, waits: bool = True) -> Process:
        """Start a process of the simulation. ``waits``: it has to come to its end.

        A client that takes etcd for restored, since a read was answered as of the past, is run once more.
        """
        process = Process(name)
        context = contextvars.Context()
        context.run(source.set, SimSource(self.loop, random.Random(f"{self.scenario.seed}/{name}")))
        context.run(channels.set, self.network.channel)
        self._busy += waits

        async def live() -> None:
            try:
                await work
            except ClusterChanged as error:
                if self.etcd.told_past:
                    self.run_again(process)
                else:
                    self.loop.troubles.append(f"{name}: {error}")
            except Exception as error:
                self.loop.troubles.append(f"{name}: {told(error)}")
            self._busy -= waits
            self._done.add(process)

        self.loop.spawn(process, live(), context)
        return process

    def run(self) -> Report:
        """Run it to its end."""
        wanted = self.scenario
        for host in wanted.hosts:
            machine = Machine(
                host.name, self.loop, self.network, self.effects, self._config.etcd, str(wanted.seed), types=host.types,
                slots=host.slots, ttl=wanted.ttl, poll=wanted.poll, skew=host.skew, completed=self._completions.runs,
                unable=host.unable, recovers=host.recovers, step=lambda process, what: self.stepping(process, what),
                namespace=wanted.namespace, history_limit=wanted.history_limit, limits=wanted.limits,
                labels=host.labels, serves=Serves(host.only_types, host.only_tables), history_age=wanted.history_age,
            )  # fmt: skip
            self.machines.append(machine)
            machine.start()
            if host.leaves:
                self.loop.world_at(host.leaves, self._leave, machine)
        declared = tuple(TYPES[name] for name in {wish.type: None for wish in wanted.wishes} if not TYPES[name].code)
        self._spawn("set-up", set_up(self._config, wanted.tables, declared))
        for n in range(wanted.clients):
            self._begin_client(n)
        for n in range(wanted.actors):
            self._begin_actor(n)
        if wanted.drains:
            self._operator = self._spawn("operator", drain_some(self._config, wanted.drains))
            self.clients.append(self._operator)
        if wanted.removals:
            self._spawn("registrar", remove_some(self._config, wanted.removals, self._over), waits=False)
        if turning := [(n, wish) for n, wish in enumerate(wanted.wishes) if wish.turns]:
            self._spawn("rival", turn_some(self._config, turning), waits=False)
        self._injector.schedule(wanted.faults)
        try:
            with listening(Listener(self._unexpected)):
                self._go()
        finally:
            self.loop.end()
        callbacks = self.loop.world.ran + sum(machine.process.ran for machine in self.machines if machine.process)
        return Report(
            wanted, self.breaches, len(self._ended), self.etcd.revision, self.network.requests, callbacks,
            self.loop.now, dict(self._injector.struck), self._offering(),
            self._executors(self._courses.claimed), self._executors(self._courses.elected),
            dict(self._courses.count), self.log,
        )  # fmt: skip

    def _leave(self, machine: Machine) -> None:
        self.note(f"{machine.name} is gone for good")
        machine.leave()

    def _begin_client(self, n: int) -> None:
        wishes = [(number, wish) for number, wish in enumerate(self.scenario.wishes) if wish.client == n]
        lives = sum(number == n for number in self._numbers.values())
        name = f"client-{n}#{lives + 1}" if lives else f"client-{n}"
        process = self._spawn(name, one_client(self._config, wishes, self.told))
        self._numbers[process] = n
        self.clients.append(process)

    def run_again(self, client: Process) -> None:
        """A client that is gone is run once more, and wants the same under the same request ids."""
        if client in self._numbers:
            self._begin_client(self._numbers[client])
        elif client in self._actors:
            self._begin_actor(self._actors[client])

    def _begin_actor(self, n: int) -> None:
        lives = sum(number == n for number in self._actors.values())
        name = f"actor-{n}#{lives + 1}"
        types = tuple({wish.type: None for wish in self.scenario.wishes if wish.type != RARE})
        process = self._spawn(
            name,
            act(self._config, name, types, self._over, lambda text: self._found("void and not", "", text)),
            waits=False,
        )
        self._actors[process] = n
        self.clients.append(process)

    def _go(self) -> None:
        self.loop.run(self._all_quiet, self.scenario.calm)
        self._begin_calm()
        calm = self._got_on = self.loop.now
        within = LIVENESS + LISTED_AGAIN * any(fault.kind in LOSING for fault in self.scenario.faults)
        while not self.loop.run(self._over, self._got_on + within):
            if self.loop.now >= calm + LAST_WORD * within:
                self._not_over(
                    "liveness: still at it", f"has not ended {self.loop.now - calm:g} s after the last fault"
                )
                break
            if self.loop.now >= self._got_on + within:
                self._not_over("liveness", f"has not ended, and nothing got on for {within:g} s")
                break
        self._look_back()

    def _offering(self) -> int:
        started = {OperationRef.parse(op).type for op in self._accepted}
        return sum(any(d.type_name in started for d in machine.declarations) for machine in self.machines)

    def _executors(self, incarnations: set[str]) -> int:
        return sum(not incarnations.isdisjoint(machine.incarnations) for machine in self.machines)

    @property
    def at_work(self) -> bool:
        """An operation is open or pending."""
        return bool(self._open)

    def _all_quiet(self) -> bool:
        return False

    @property
    def all_ended(self) -> bool:
        """Operations began, all of them have ended and are cleaned up, and nobody wants anything more."""
        return bool(self._ended) and self._over()

    def _begin_calm(self) -> None:
        """All faults are over: what is down comes back."""
        self.note("all faults are over")
        for link in self.network.links():
            self.network.heal(link)
        for member in self.etcd.members.values():
            member.lag = 0.0
        self.etcd.quorum.heal()
        for process in [*self.clients, *(machine.process for machine in self.machines)]:
            if process is not None:
                process.let_be()
                self.loop.thaw(process)
        for machine in self.machines:
            machine.go_on()
            machine.start()
        for n in range(self.scenario.actors):
            # One has ended if all clients were dead for a moment; a client that came back may still need it.
            if all(process.dead or process in self._done for process, number in self._actors.items() if number == n):
                self._begin_actor(n)
        self._stopping.calm()
        left = let_go(self._config, self._over, self._left_drained, self._left_alone)
        self._spawn("janitor", left, waits=False)

    def _left_alone(self) -> tuple[str, ...]:
        """Operations that go on although only executors that are gone may run them. Not those that wait for others:
        once these have ended, they end as well, or wait no longer.
        """
        going_on = {ref: str(ref) for key in self._open if (ref := self.keys.parse(key).ref) is not None}
        waiting = {
            name for ref, name in going_on.items() if self.etcd.store.range(*self.keys.edges_range(ref, "after"))
        }
        return tuple(sorted((self._forsaken & set(going_on.values())) - waiting))

    def _left_drained(self) -> tuple[str, ...]:
        """Executors that nobody else will let work again."""
        if self._operator is None or not self._operator.dead:
            return ()
        return tuple(sorted({drain.executor for drain in self.scenario.drains}))

    def _waiting(self) -> int:
        """Clients that are not done, aside from those that end when the others are."""
        gone = (client.dead and client not in self._done for client in self.clients if client not in self._actors)
        return self._busy - sum(gone)

    def _over(self) -> bool:
        return not self._open and self._waiting() <= 0

    def _not_over(self, kind: str, why: str) -> None:
        for key in sorted(self._open):
            kv = self.etcd.store.get(key)
            what = kv.value.decode() if kv is not None and kv.value else "open"
            ref = str(self.keys.parse(key).ref)
            self._found(kind, key, f"{ref} {why}: {what}", ref)
        if not self._open:
            self._found(kind, "", f"{self._waiting()} clients still wait, and no operation is left")

    def _look_back(self) -> None:
        """What can be judged only in the end."""
        for kind, op, text in broken(
            self.told, self._accepted, self._requests, self._ids, self._ended, self._forgotten
        ):
            self._found(kind, op, text, op)
        for op, text in self._prepared.broken(self.told.senders, self._ended):
            self._found("two phases", op, text, op)
        for key, text in self._branches.broken(self.told):
            self._found("told wrong", key, text)
        for op in sorted(self._accepted - self._ended.keys()):
            if not any(str(self.keys.parse(key).ref) == op for key in self._open):
                self._found("lost", op, f"{op} was accepted and is gone without a history", op)
        for effect in self.effects.left_behind(self._ended.keys() - self._forsaken):
            text = f"its operation has ended, and what it has left was not cleaned up: {effect}"
            self._found("left behind", effect.op, text, effect.op, effect.partition)
        for key, text, op in judge(self.etcd.store, self.keys, self.told.reruns):
            self._found("rerun of others", key, text, op)
        if not self._open:
            found = [kv.key for kv in self.etcd.store.listing() if not kv.key.startswith(CALLERS)]
            for text in orphans(self.keys, found):
                self._found("invariant 9", "", text)
        for text in dict.fromkeys([*self.loop.troubles, *self.loop.unnoticed()]):
            self._found("trouble", "", text)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without logs; and nothing is finalized at a moment of the collector's choice."""
    logger = logging.getLogger("distop")
    level, collects = logger.level, gc.isenabled()
    logger.setLevel(logging.CRITICAL + 1)
    gc.disable()
    try:
        yield
    finally:
        logger.setLevel(level)
        if collects:
            gc.enable()


def simulate(seed: int, *, faults: bool = True, wanted: Scenario | None = None) -> Report:
    """Run the scenario of a seed, or this one."""
    with quietly():
        return Simulation(wanted if wanted is not None else scenario(seed, faults=faults)).run()

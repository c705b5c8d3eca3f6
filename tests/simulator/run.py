"""Runs one scenario, checks each revision, and checks at the end that all operations have ended."""

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
from tests.simulator.actors import run_actor
from tests.simulator.caller_transactions import CALLERS, Branches, toggle_compares
from tests.simulator.client_answers import wrong_answers
from tests.simulator.clients import (
    ClientAnswers,
    run_client,
    run_drains,
    run_removals,
    set_up,
    unblock_operations,
)
from tests.simulator.completions import Completions
from tests.simulator.departures import needs_departing
from tests.simulator.etcd_users import mentions_permissions
from tests.simulator.fault_kinds import LOSES_EVENTS
from tests.simulator.faults import Injector
from tests.simulator.history_retention import (
    HistoryRetention,
    guaranteed_retention,
    old_records,
    retention_by_age,
)
from tests.simulator.job_effects import Effects
from tests.simulator.machine import Machine, StepObserver, unobserved
from tests.simulator.network import Network
from tests.simulator.offered_types import OfferedTypes
from tests.simulator.policies import PolicyChecks, TableVersions, keep_policies
from tests.simulator.prepared_starts import PreparedStarts
from tests.simulator.process_clock import SimSource
from tests.simulator.protocol_paths import ProtocolPaths
from tests.simulator.removed_tables import TableRemovals
from tests.simulator.reruns import judge
from tests.simulator.scenario import Scenario, draw_scenario
from tests.simulator.sim_etcd import SimEtcd
from tests.simulator.simulated_behaviors import RARE, TYPES
from tests.simulator.slow_graphs import GraphHolds
from tests.simulator.stop_checks import StopChecks
from tests.simulator.unexpected_errors import ErrorListener, listening, with_traceback
from tests.simulator.virtual_loop import Process, VirtualLoop
from tests.simulator.write_authors import WriteAuthors

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from distop.protocol.keys import ParsedKey
    from distop.protocol.revisioned import Change
    from distop.protocol.txn import Flaw

LIVENESS = 180.0
"""Maximum virtual seconds without progress after the last fault.

Progress is the end of a job or operation, or a checkpoint. A step of a job takes up to 44 s. The limit is below 300 s,
after which feeds are listed again: a listing would hide lost events.
"""
LISTED_AGAIN = 330.0
"""Seconds after which each feed was listed again. Added to ``LIVENESS`` where etcd loses events: only a listing helps.
"""
WENT_BACK = "went back from revision"
"""Part of the error text for an etcd that answers a read at an old revision."""
TABLE_GONE = "Ending its series: the next operation was refused: there is no table"
"""Start of the error text for a series that ends because its table was removed."""
HELPERS = frozenset({"set-up", "operator", "registrar", "rival", "janitor"})
"""Processes of the test itself, which get no stale reads and are not started again."""
MAX_LIVENESS = 20
"""Multiple of ``LIVENESS`` after the last fault at which a run is ended even if it makes progress."""


@frozen
class Breach:
    """A broken guarantee, named by ``kind``, with the operation and partition concerned (-1: none)."""

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
    """The result of a run."""

    scenario: Scenario
    breaches: list[Breach]
    ended: int
    """Number of ended operations."""
    revisions: int
    requests: int
    callbacks: int
    seconds: float
    """Virtual seconds."""
    faults: dict[str, int]
    """Faults that struck while an operation was open or pending, by kind."""
    offering: int
    """Executors that offer the type of a started operation."""
    claimed: int
    """Executors that held a claim."""
    elected: int
    """Executors that won an election."""
    paths: dict[str, int]
    log: list[tuple[float, int, str, str]] = field(default_factory=list)
    """All events in order: (time, revision or 0, sender, text)."""


class _Keys(Keys):
    """Caches parsed keys: several checks parse the key of each change."""

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

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.keys = _Keys(scenario.namespace)
        self.loop = VirtualLoop(random.Random(f"loop/{scenario.seed}"))  # type: ignore[abstract]
        addresses = tuple(f"etcd-{n}:2379" for n in range(scenario.members))
        self.etcd = SimEtcd(
            self.loop, addresses, version=scenario.version, batch=scenario.batch, election=scenario.election
        )
        self.etcd.watching.fragments = scenario.fragments
        self.etcd.never_stale = HELPERS
        for txn in old_records(self.keys, scenario, lambda: self.etcd.store.revision):
            self.etcd.preset(txn)
        self.etcd.committed = self._committed
        self.etcd.refused = self._refused
        self.network = Network(self.loop, self.etcd, random.Random(f"network/{scenario.seed}"))
        self.stepping: StepObserver = unobserved
        """Called around each step of a machine that is not a request (for requests: ``network.sending``, ``applied``).
        """
        self.breaches: list[Breach] = []
        self.log: list[tuple[float, int, str, str]] = []
        self.answers = ClientAnswers(scenario.limits.denied_kept)
        self.clients: list[Process] = []
        self._numbers: dict[Process, int] = {}
        """Process → the number of its client; a client that is run again is another process."""
        self._actors: dict[Process, int] = {}
        self._keepers: list[Process] = []
        """The processes that keep policies, one after the other."""
        self._finished: set[Process] = set()
        self._operator: Process | None = None
        """The process that drains executors."""
        self.machines: list[Machine] = []
        self._checker = Checker(self.keys)
        self._checker.begin(self.etcd.store.listing())
        self.effects = Effects(self.etcd.store, self.keys, self.loop.time, self._found)
        effects = self.effects
        self._authors = WriteAuthors(self.keys, effects.claim_ended, effects.succeeded, self._found, self.loop.time)
        self._stops = StopChecks(self.loop, self.keys, self._authors.claims, self.effects.ends, self._found)
        self._offers = OfferedTypes(self._found)
        self.table_removals = TableRemovals(self._found)
        self._retention = HistoryRetention(
            guaranteed_retention(scenario.limits), retention_by_age(scenario), lambda: self.loop.now, self._found
        )
        self._completions = Completions(self.etcd.store, self.keys, self._found)
        self._paths = ProtocolPaths()
        self._prepared = PreparedStarts()
        self._branches = Branches()
        self._holds = GraphHolds(self.loop.time, self._found)
        self.versions = TableVersions()
        self.policies = PolicyChecks(self.versions, self._found)
        self._open: set[str] = set()
        self._accepted: set[str] = set()
        self._requests: dict[str, str] = {}
        """Operation → the request that started it."""
        self._ids: dict[str, str] = {}
        self._stranded: set[str] = set()
        """Operations that only departing executors may run."""
        self._ended: dict[str, str] = {}
        self._forgotten: set[str] = set()
        """Operations whose history record was deleted."""
        self._busy = 0
        """Processes that have to finish."""
        self._progress_at = 0.0
        self._injector = Injector(self)
        self._active = tuple(self.keys.family(family)[0] for family in (K.OPEN, K.PENDING))
        self._history = self.keys.family(K.HISTORY)[0]
        self.etcd.users.enabled = scenario.users
        user = "worker" if scenario.users else None
        config = EtcdConfig(addresses, user, user, connect_timeout=5.0, read_timeout=None)
        self._config = ClientConfig(config, scenario.namespace)

    # ------------------------------------------------------------------ checks

    def note(self, text: str) -> None:
        """Add an event to the timeline."""
        self.log.append((self.loop.now, 0, "", text))

    def _committed(self, revision: int, changes: tuple[Change, ...], sender: str) -> None:
        self.log.append((self.loop.now, revision, sender, ""))
        for one in self._checker.feed(revision, changes):
            self._found(f"invariant {one.invariant}", one.key, one.text)
        parsed = list(self._parsed(changes))
        self._stops.step(revision, parsed, sender)
        self._offers.step(revision, parsed, sender)
        self.table_removals.step(parsed)
        self._retention.step(parsed)
        self._authors.step(parsed, sender)
        self._paths.step(parsed, sender)
        self._prepared.step(parsed)
        self._holds.step(parsed, sender)
        self.policies.step(parsed, sender)
        for key, text in self._branches.step(changes):
            self._found("transaction branches", key, text)
        for change in changes:
            key = change.kv.key
            if self.etcd.users.enabled and mentions_permissions(change.kv.value):
                self._found("wrongly blamed", key, f"a record blames missing rights: {change.kv.value.decode()}")
            if key.endswith((".state", ".progress")):
                self._progress_at = self.loop.now
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
                    self._stranded.add(ref)

    def _refused(self, found: Flaw, sender: str) -> None:
        """Report a transaction that etcd rejects as invalid: it would be retried for ever."""
        text = f"{sender or 'unknown sender'} sent a transaction that etcd rejects as invalid: {found.text}"
        self._found("invalid transaction", found.key, text)

    def _parsed(self, changes: tuple[Change, ...]) -> Iterator[tuple[ParsedKey, Change]]:
        for change in changes:
            with contextlib.suppress(InvalidArgument):
                yield self.keys.parse(change.kv.key), change

    def _unexpected(self, text: str, op: str, partition: int) -> None:
        if self.etcd.stale_answers and WENT_BACK in text:
            return  # for the client it looks like a restored etcd
        if text.startswith(TABLE_GONE) and op in self.table_removals.started_before:
            return
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
        """Start a process of the simulation. ``waits``: the run lasts until it has finished.

        A client that assumes a restored etcd after a stale read is run again.
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
                if self.etcd.stale_answers:
                    self.run_again(process)
                else:
                    self.loop.errors.append(f"{name}: {error}")
            except Exception as error:
                self.loop.errors.append(f"{name}: {with_traceback(error)}")
            self._busy -= waits
            self._finished.add(process)

        self.loop.spawn(process, live(), context)
        return process

    def run(self) -> Report:
        """Run the scenario to its end."""
        scenario = self.scenario
        for host in scenario.hosts:
            machine = Machine(
                host.name, self.loop, self.network, self.effects, self._config.etcd, str(scenario.seed),
                types=host.types, slots=host.slots, ttl=scenario.ttl, poll=scenario.poll, skew=host.skew,
                completed=self._completions.runs, unable=host.unable, recovers=host.recovers,
                step=lambda process, what: self.stepping(process, what),
                namespace=scenario.namespace, history_limit=scenario.history_limit, limits=scenario.limits,
                labels=host.labels, serves=Serves(host.only_types, host.only_tables), history_age=scenario.history_age,
            )  # fmt: skip
            machine.versions = self.versions
            self.machines.append(machine)
            machine.start()
            if host.leaves:
                self.loop.world_at(host.leaves, self._leave, machine)
        declared = tuple(
            TYPES[name]
            for name in {submission.type: None for submission in scenario.submissions}
            if not TYPES[name].code
        )
        self._spawn("set-up", set_up(self._config, scenario.tables, declared))
        for n in range(scenario.clients):
            self._begin_client(n)
        for n in range(scenario.actors):
            self._begin_actor(n)
        if scenario.drains:
            self._operator = self._spawn("operator", run_drains(self._config, scenario.drains))
            self.clients.append(self._operator)
        if scenario.removals:
            self._spawn("registrar", run_removals(self._config, scenario.removals, self._over), waits=False)
        if toggled := [(n, submission) for n, submission in enumerate(scenario.submissions) if submission.toggles]:
            self._spawn("rival", toggle_compares(self._config, toggled), waits=False)
        for policy in scenario.policies:
            for at in policy.commits:
                self.loop.world_at(at, self.versions.commit, policy.table)
        if scenario.policies:
            self._keep_policies()
        self._injector.schedule(scenario.faults)
        try:
            with listening(ErrorListener(self._unexpected)):
                self._run_loop()
        finally:
            self.loop.end()
        callbacks = self.loop.world.ran + sum(machine.process.ran for machine in self.machines if machine.process)
        return Report(
            scenario, self.breaches, len(self._ended), self.etcd.revision, self.network.requests, callbacks,
            self.loop.now, dict(self._injector.struck), self._offering(),
            self._executors(self._paths.claimed), self._executors(self._paths.elected),
            dict(self._paths.count), self.log,
        )  # fmt: skip

    def _keep_policies(self) -> None:
        """Start the keeper of policies, perhaps once more."""
        policies = self.scenario.policies
        end = max(self.scenario.calm, *(at for one in policies for at in (0.0, *one.commits)))
        now = self.loop.time
        lives = len(self._keepers)
        name = f"client-keeper#{lives + 1}" if lives else "client-keeper"
        keeper = self._spawn(name, keep_policies(self._config, policies, self.versions, end, now))
        self._keepers.append(keeper)
        self.clients.append(keeper)

    def _left_policies(self) -> bool:
        """Whether the keeper of policies is gone for good."""
        return bool(self._keepers) and all(one.dead and one not in self._finished for one in self._keepers)

    def _leave(self, machine: Machine) -> None:
        self.note(f"{machine.name} is gone for good")
        machine.leave()

    def _begin_client(self, n: int) -> None:
        submissions = [
            (number, submission)
            for number, submission in enumerate(self.scenario.submissions)
            if submission.client == n
        ]
        lives = sum(number == n for number in self._numbers.values())
        name = f"client-{n}#{lives + 1}" if lives else f"client-{n}"
        process = self._spawn(name, run_client(self._config, submissions, self.answers))
        self._numbers[process] = n
        self.clients.append(process)

    def run_again(self, client: Process) -> None:
        """Run a dead client or actor once more, a client with the same request ids."""
        if client in self._numbers:
            self._begin_client(self._numbers[client])
        elif client in self._keepers:
            self._keep_policies()
        elif client in self._actors:
            self._begin_actor(self._actors[client])

    def _begin_actor(self, n: int) -> None:
        lives = sum(number == n for number in self._actors.values())
        name = f"actor-{n}#{lives + 1}"
        types = tuple({submission.type: None for submission in self.scenario.submissions if submission.type != RARE})
        process = self._spawn(
            name,
            run_actor(
                self._config, name, types, self._over, lambda text: self._found("invalid token accepted", "", text)
            ),
            waits=False,
        )
        self._actors[process] = n
        self.clients.append(process)

    def _run_loop(self) -> None:
        self.loop.run(lambda: False, self.scenario.calm)
        self._end_faults()
        calm = self.loop.now
        self.fault_lasts_until(calm)
        within = LIVENESS + LISTED_AGAIN * any(fault.kind in LOSES_EVENTS for fault in self.scenario.faults)
        while not self.loop.run(self._over, self._progress_at + within):
            if self.loop.now >= calm + MAX_LIVENESS * within:
                self._not_over("liveness: endless", f"has not ended {self.loop.now - calm:g} s after the last fault")
                break
            if self.loop.now >= self._progress_at + within:
                self._not_over("liveness", f"has not ended, without progress for {within:g} s")
                break
        self._check_at_end()

    def fault_lasts_until(self, at: float) -> None:
        """Count the time without progress from ``at`` at the earliest: then a fault ends, and its repair begins.

        The scenario's faults end before the calm. A fault that is added to a run may come later.
        """
        self._progress_at = max(self._progress_at, at)

    def _offering(self) -> int:
        started = {OperationRef.parse(op).type for op in self._accepted}
        return sum(any(d.type_name in started for d in machine.declarations) for machine in self.machines)

    def _executors(self, incarnations: set[str]) -> int:
        return sum(not incarnations.isdisjoint(machine.incarnations) for machine in self.machines)

    @property
    def at_work(self) -> bool:
        """Whether an operation is open or pending."""
        return bool(self._open)

    @property
    def all_ended(self) -> bool:
        """Whether all operations have ended and are cleaned up, and all clients have finished."""
        return bool(self._ended) and self._over()

    def _end_faults(self) -> None:
        """End all faults, and restart all stopped processes."""
        self.note("end of all faults")
        for link in self.network.links():
            self.network.heal(link)
        for member in self.etcd.members.values():
            member.lag = 0.0
        self.etcd.quorum.heal()
        for process in [*self.clients, *(machine.process for machine in self.machines)]:
            if process is not None:
                process.cancel_strike()
                self.loop.thaw(process)
        for machine in self.machines:
            machine.resume()
            machine.start()
        for n in range(self.scenario.actors):
            # One has ended if all clients were dead for a moment; a client that came back may still need it.
            runs = (process for process, number in self._actors.items() if number == n)
            if all(process.dead or process in self._finished for process in runs):
                self._begin_actor(n)
        self._stops.calm()
        work = unblock_operations(
            self._config, self._over, self._left_drained, self._stranded_operations, self._left_policies
        )
        self._spawn("janitor", work, waits=False)

    def _stranded_operations(self) -> tuple[str, ...]:
        """Open operations that only departed executors may run, without those that wait for predecessors.

        The latter end with their predecessors, or stop waiting.
        """
        running = {ref: str(ref) for key in self._open if (ref := self.keys.parse(key).ref) is not None}
        waiting = {name for ref, name in running.items() if self.etcd.store.range(*self.keys.edges_range(ref, "after"))}
        return tuple(sorted((self._stranded & set(running.values())) - waiting))

    def _left_drained(self) -> tuple[str, ...]:
        """Executors that no other process will undrain."""
        if self._operator is None or not self._operator.dead:
            return ()
        return tuple(sorted({drain.executor for drain in self.scenario.drains}))

    def _waiting(self) -> int:
        """Number of clients that have not finished, without actors, which end with the others."""
        gone = (client.dead and client not in self._finished for client in self.clients if client not in self._actors)
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
            self._found(kind, "", f"{self._waiting()} clients still wait, but no operation is left")

    def _check_at_end(self) -> None:
        """Check what is known only at the end."""
        for kind, op, text in wrong_answers(
            self.answers, self._accepted, self._requests, self._ids, self._ended, self._forgotten
        ):
            self._found(kind, op, text, op)
        for op, text in self._prepared.breaches(self.answers.senders, self._ended):
            self._found("two phases", op, text, op)
        for key, text in self._branches.wrong_answers(self.answers):
            self._found("wrong answer", key, text)
        for op in sorted(self._accepted - self._ended.keys()):
            if not any(str(self.keys.parse(key).ref) == op for key in self._open):
                self._found("operation lost", op, f"{op} was accepted, but has neither keys nor a history record", op)
        for effect in self.effects.not_cleaned_up(self._ended.keys() - self._stranded):
            text = f"the operation has ended without a cleanup of this attempt: {effect}"
            self._found("output not cleaned up", effect.op, text, effect.op, effect.partition)
        for key, text, op in judge(self.etcd.store, self.keys, self.answers.reruns):
            self._found("wrong rerun partitions", key, text, op)
        if not self._open:
            found = [kv.key for kv in self.etcd.store.listing() if not kv.key.startswith(CALLERS)]
            for text in orphans(self.keys, found):
                self._found("invariant 9", "", text)
        for text in dict.fromkeys([*self.loop.errors, *self.loop.lost_task_errors()]):
            self._found("uncaught error", "", text)


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Disable distop's logs, and garbage collection, which would run finalizers at random moments."""
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


def simulate(seed: int, *, faults: bool = True, scenario: Scenario | None = None) -> Report:
    """Run the scenario of a seed, or the given one."""
    with without_logs():
        return Simulation(scenario if scenario is not None else draw_scenario(seed, faults=faults)).run()

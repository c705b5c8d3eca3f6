"""One incarnation of a daemon: a session, its watches, its worker, and its two roles (executor and coordinator).

An incarnation ends when the daemon stops or its session is lost. If the session is lost, all its work is dropped at
once (the guardian kills the child before the lease can expire), and a new incarnation starts with a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distop.clock import time, uuid
from distop.daemon import action_log
from distop.daemon.capability import Capability
from distop.daemon.clock_check import ClockCheck
from distop.daemon.elections import Elections
from distop.daemon.evaluator.evaluator_role import Evaluator
from distop.daemon.executor.executor_role import Executor
from distop.daemon.executor.reconciliation import Reconciler
from distop.daemon.incarnation_context import Context
from distop.daemon.job_progress import JobStatuses
from distop.daemon.job_reports import Reporter
from distop.daemon.local_jobs import LocalJobs, RunFiles
from distop.daemon.meter import NO_METER, Gauges, Meter
from distop.daemon.node_record import NodeRecord
from distop.daemon.record_lookup import find_history, find_removed_table, find_tables
from distop.daemon.rejected_writes import RejectedWrites
from distop.daemon.upkeep.abandoned_holds import HoldKeeper
from distop.daemon.upkeep.history_pruning import HistoryPruner
from distop.daemon.upkeep.result_sweeping import ResultSweeper
from distop.decide.view import ClusterView
from distop.errors import EtcdRejected, SessionLost, describe
from distop.protocol import keys as K
from distop.protocol.executor_nodes import refusal
from distop.protocol.jobs import Claim
from distop.protocol.keys import Keys
from distop.protocol.record_reading import read
from distop.protocol.texts import did_you_mean
from distop.protocol.txn import Put, Txn, unchanged
from distop.protocol.user_actions import NO_ACTIONS, entries
from distop.setting_values import ALL_TYPES
from distop.store.session import Session
from distop.store.watch import Feed
from distop.worker.daemon_side.host import WorkerHost
from distop.worker.daemon_side.requests import WorkerConfig
from distop.worker.guardian import boottime

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from pathlib import Path

    from distop.daemon.operation_traces import OperationTraces
    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.keys import ParsedKey
    from distop.protocol.records import Node
    from distop.runtime.logs import ContextLogger
    from distop.settings import ExecutorConfig
    from distop.store.client import EtcdClient
    from distop.store.watch import Batch

    MakeWorker = Callable[..., WorkerHost]
    MakeFiles = Callable[[Path], RunFiles]

STOP_GRACE = 15.0
"""Maximum seconds for running jobs to stop in a graceful stop, before the session ends."""

SUBJECT_FAMILIES = (K.OPEN, K.PENDING, K.COORDINATOR)
"""Families of keys that concern one type on one table each."""

TABLES_LISTED = 3_600.0
"""Seconds between the listings of the watch of table actions, which serves the log only."""


def _placement_fields(node: Node | None) -> Node | None:
    """A node's record without the frequently changing fields that do not affect elections and claims."""
    if node is None:
        return None
    stable = replace(node, released=0, doing={}, work={}, refused={}, refused_more=0)
    return replace(stable, skipped={}, skipped_more=0, clock=0, clock_unknown="", spark="")


def _watch_name(families: Sequence[str]) -> str:
    """The name of a watch: its first family."""
    return families[0]


async def run_all(*roles: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines. If one fails, cancel the others, wait until they have ended, and raise its error.

    So no task of this incarnation runs beside the next one.
    """
    tasks = [asyncio.ensure_future(role) for role in roles]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class DaemonSetup:
    """What all incarnations of a daemon share."""

    config: ExecutorConfig
    executor_id: str
    log: ContextLogger
    make_worker: MakeWorker = WorkerHost
    make_files: MakeFiles = RunFiles
    meter: Meter = NO_METER
    traces: OperationTraces | None = None


class Incarnation(Context):
    """Runs both roles until it is stopped or its session is lost. ``space``: the namespace's id, for shared files."""

    def __init__(self, daemon: DaemonSetup, client: EtcdClient, space: str = "") -> None:
        self._daemon = daemon
        self.config = config = daemon.config
        self.meter = daemon.meter
        self.traces = daemon.traces
        self._space = space
        self.client = client
        self.keys = Keys(config.namespace)
        self.limits = config.limits
        self.incarnation = uuid.uuid4().hex[:12]
        self.executor_id = daemon.executor_id
        self.log = daemon.log.bind(executor=daemon.executor_id, incarnation=self.incarnation)
        self.cluster = ClusterView(self.keys)
        self.types = frozenset()
        self.reports_only = frozenset()
        self.capability = Capability(self.cluster, self.incarnation, self.log, self._capability_changed)
        self.doing = JobStatuses(lambda: len(self.cluster.nodes), self.activity_changed)
        self.rejected_writes = RejectedWrites(self.log, self.activity_changed)
        self.arguments = {}
        self.caught_up_at = 0
        self.clock = ClockCheck(client, self.log, self.activity_changed)
        self.node_record = NodeRecord(self, lambda: self.executor.busy or self.elections.busy or self.evaluator.busy)
        self._sweeper = ResultSweeper(self)
        self._pruner = HistoryPruner(self, self._sweeper.add)
        self.holds = HoldKeeper(self)
        self._feeds: list[Feed] = []
        self._actions_of_tables: list[Feed] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set (then end gracefully) or the session is lost (SessionLost).

        Raises EtcdUnavailable and other errors of the first requests; the caller retries.
        """
        self.lost = asyncio.get_running_loop().create_future()
        self.lost.add_done_callback(lambda future: future.exception())
        self.worker = self._daemon.make_worker(self._worker_config(), log=self.log)
        self.worker.on_trouble(self.activity_changed)
        self.worker.show_calls(self.doing)
        self.worker.on_history(partial(find_history, self))
        self.meter.begin(self.gauges)
        living = asyncio.ensure_future(self._live())
        stopping = asyncio.ensure_future(stop.wait())
        graceful = False
        try:
            await asyncio.wait({living, stopping, self.lost}, return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
            if self.lost.done():
                self.lost.result()
            if self.caught_up_at:
                await self._stop_gracefully()
                graceful = True
        finally:
            stopping.cancel()
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            await self._tear_down(graceful)

    async def _live(self) -> None:
        """Start and run everything; ends only with an error."""
        await self._start_session(await self._start_worker())
        await self._start_roles()
        await self._start_watches()
        self.caught_up_at = max(feed.revision for feed in self._feeds)
        offers, only = ", ".join(sorted(self.types)) or "nothing", str(self.config.serves)
        slots = "1 slot" if self.config.slots == 1 else f"{self.config.slots} slots"
        self.log.info("ready: %s, offers %s%s", slots, offers, f"; serves only {only}" if only else "")
        self.executor.cluster_changed(hint=True)
        self.elections.cluster_changed()
        self.holds.changed()
        if self.cluster.has_policies:
            self.evaluator.marked()
        age = self.config.history_age
        await run_all(
            self.reconciler.begin(),
            self.executor.run(),
            self._poll(),
            self.clock.run(),
            *([self._sweeper.run()] if self._sweeper.types else []),
            *([self._pruner.keep_young(age)] if age is not None else []),
            *(feed.wait() for feed in (*self._feeds, *self._actions_of_tables)),
        )

    async def _start_worker(self) -> list[Declaration]:
        """Start the worker; returns the declarations of the behaviors that this node serves."""
        installed = await self.worker.start()
        served = [d for d in installed if not refusal(self.config.serves, d.type_name, ())]
        if unknown := self.config.job_time_limits.keys() - {ALL_TYPES, *(d.type_name for d in installed)}:
            known = sorted(d.type_name for d in installed)
            named = ", ".join(f"{name}{did_you_mean(name, known)}" for name in sorted(unknown))
            self.log.warning("Ignoring job-time-limit for types that are not installed on this node: %s", named)
        self.types = frozenset(d.type_name for d in served)
        self.reports_only = frozenset(d.type_name for d in served if d.reports_only)
        self._sweeper.staging = frozenset(d.type_name for d in served if d.rules().stages)
        self._sweeper.types = self._sweeper.staging | {d.type_name for d in served if d.to_file}
        return served

    async def _start_session(self, declarations: Sequence[Declaration]) -> None:
        await self._publish_declarations(declarations)
        self.session = Session(
            self.client,
            self.keys.node(self.incarnation),
            self.node_record.begin(self.types),
            ttl=math.ceil(self.config.ttl),
            on_deadline_moved=self.worker.set_deadline,
        )
        self.session.lost.add_done_callback(self._session_lost)
        await self.session.start()

    async def _start_roles(self) -> None:
        self.reporter = Reporter(self, meter=self.meter)
        self.local = LocalJobs(self._daemon.make_files(self.config.work_dir), self.incarnation)
        self.reconciler = Reconciler(self, self.local)
        await self.reconciler.read()
        self.executor = Executor(self)
        self.elections = Elections(self)
        self.evaluator = Evaluator(self)

    async def _start_watches(self) -> None:
        for first, after, families in self._watched():
            fold, name = self._folder(families), _watch_name(families)
            every, gather = self.config.poll, self.cluster.listing
            feed = Feed(self.client, first, after, fold, relist_every=every, name=name, gather=gather)
            self._feeds.append(feed)
            await feed.start()
        if action_log.wanted():
            tables, table_actions = self.keys.family(K.TABLE_ACTIONS), action_log.TableActions(self.keys, self.log)
            watch = Feed(self.client, *tables, table_actions.apply, relist_every=TABLES_LISTED, name=K.TABLE_ACTIONS)
            try:
                await watch.start()  # so the log has all actions from "ready" on
            except EtcdRejected:
                watch.begin()  # retries in the background
            self._actions_of_tables.append(watch)

    def _worker_config(self) -> WorkerConfig:
        same = (
            *("work_dir", "slots", "shared_dir", "spark_master", "spark_conf", "ttl", "log_level", "call_limit"),
            *("verifier_urls", "trusted_spark_catalogs", "export_to", "serves", "behaviors", "storage"),
        )
        return WorkerConfig(
            executor=self.executor_id,
            incarnation=self.incarnation,
            space=self._space,
            find_tables=partial(find_tables, self),
            find_removed_table=partial(find_removed_table, self),
            **{name: getattr(self.config, name) for name in same},
        )

    def _watched(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """The watched ranges with their families. Hold to Pending are adjacent in key order, so one watch has all."""
        first, _ = self.keys.family(K.HOLD)
        _, after = self.keys.family(K.PENDING)
        return [
            (first, after, (K.HOLD, K.NODE, K.NODE_DRAIN, K.NOTICE, K.OPEN, K.PENDING)),
            (*self.keys.family(K.COORDINATOR), (K.COORDINATOR,)),
        ]

    def _folder(self, families: Sequence[str]) -> Any:
        def fold(batch: Batch) -> None:
            if batch.events and not batch.listing:
                newest = max(event.kv.mod_revision for event in batch.events)
                self.meter.events_received(_watch_name(families), self.client.transport.identity.revision - newest)
            before, changed = dict(self.cluster.nodes), []
            drained = self.cluster.drained_by.get(self.executor_id, NO_ACTIONS).count
            if batch.listing:
                self.cluster.take(families, batch.gathered)
            else:
                changed = self.cluster.apply(batch.events)
            if self.caught_up_at:
                now = self.cluster.drained_by.get(self.executor_id, NO_ACTIONS)
                action_log.write(self.log, entries("executor", self.executor_id, replace(now, kept=now.since(drained))))
            if self.caught_up_at and (changed or batch.listing):
                self._changed(changed, before, batch.listing)

        return fold

    def _changed(self, changed: Sequence[ParsedKey], before: dict[str, Node], listing: bool) -> None:
        nodes = self.cluster.nodes
        if self.cluster.has_policies:
            self.evaluator.marked()
        if self.incarnation not in nodes and self.incarnation in before:
            self.session.node_key_gone()
            return
        gone = any(inc not in nodes for inc in before)
        self.capability.nodes_changed(before)
        holds = [key.id for key in changed if key.family == K.HOLD]
        if holds or listing:
            self.holds.changed(None if listing else holds)
        released = any(
            key.family == K.NODE
            and key.id != self.incarnation
            and key.id in before
            and key.id in nodes
            and nodes[key.id].released != before[key.id].released
            for key in changed
        )
        drains = any(key.family == K.NODE_DRAIN for key in changed)
        refs = None if listing else {key.ref: None for key in changed if key.ref is not None}
        named = {key.id for key in changed if key.family == K.NODE}
        placing = any(_placement_fields(nodes.get(inc)) != _placement_fields(before.get(inc)) for inc in named)
        nodes_changed = listing or drains or placing
        if nodes_changed:
            self.executor.nodes_changed()
        self.executor.cluster_changed(hint=gone or released or listing or drains, refs=refs)
        if nodes_changed:
            self.elections.cluster_changed()
            self.evaluator.nodes_changed()
            return
        if holds:
            self.elections.holds_changed(holds)
        if subjects := {(key.table, key.type) for key in changed if key.family in SUBJECT_FAMILIES}:
            self.elections.subjects_changed(subjects)

    def _session_lost(self, reason: asyncio.Future[str]) -> None:
        if not self.lost.done():
            self.lost.set_exception(SessionLost(reason.result()))

    async def _publish_declarations(self, declarations: Sequence[Declaration]) -> None:
        """Write the declarations of installed behaviors to etcd, if they are missing or differ."""
        for declaration in declarations:
            key, value = self.keys.behavior(declaration.type_name), declaration.encode()
            found = await self.client.get(key)
            if found is None or found.value != value:
                seen = found.mod_revision if found is not None else 0
                await self.client.commit(Txn((unchanged(key, seen),), (Put(key, value),), (), "publish"))

    async def announce_released(self) -> None:
        await self.node_record.count_release()

    def activity_changed(self) -> None:
        if self.caught_up_at:
            self.node_record.publish_changes()

    def _capability_changed(self) -> None:
        self.activity_changed()
        self.elections.cluster_changed()

    def gauges(self) -> Gauges:
        """The current values of the metrics."""
        ready = self.caught_up_at > 0
        return Gauges(
            self.incarnation,
            max(0.0, self.session.deadline - boottime()) if ready and not self.lost.done() else 0.0,
            self.config.slots,
            self.executor.slots_busy if ready else 0,
            self._coordinated(),
            {feed.name: feed.silent for feed in self._feeds},
            self.worker.deaths,
            self.worker.session,
        )

    def _coordinated(self) -> dict[tuple[str, str], int]:
        """The number of operations that this incarnation coordinates, by type and stage."""
        cluster = self.cluster
        mine = {subject for subject, held in cluster.elections.items() if held.value == self.incarnation}
        found = Counter((ref.type, "open") for ref in cluster.gates if (ref.table, ref.type) in mine)
        for subject, phase, count in cluster.pending.counts():
            if subject in mine:
                found[subject[1], str(phase)] += count
        return dict(found)

    async def prune_history(self, table: str) -> None:
        await self._pruner.prune(table)

    async def _poll(self) -> None:
        """Poll regularly, besides the watches: resolve claims and elections that this incarnation does not know of."""
        while True:
            await asyncio.sleep(self.config.poll)
            self.elections.poll()
            self.evaluator.nodes_changed()
            self.reconciler.look_soon()
            self.activity_changed()
            if not self.cluster.gates and not self.cluster.pending and not self.cluster.holds:
                continue
            with self._rejection_logged():
                await self.holds.look()
            with self._rejection_logged():
                await self._release_unknown_claims()
            self.executor.cluster_changed(hint=True)

    @contextlib.contextmanager
    def _rejection_logged(self) -> Iterator[None]:
        """Log a rejected request of one step of a poll; other steps continue.

        A role of our user may have been revoked: running jobs continue as long as the session lives.
        """
        try:
            yield
        except EtcdRejected as error:
            self.log.warning("Polling failed; retrying at the next poll: %s", describe(error))

    async def _release_unknown_claims(self) -> None:
        listing = await self.client.list(*self.keys.family(K.CLAIM))
        for kv in listing.kvs:
            if self.incarnation.encode() not in kv.value:
                continue
            key, claim = self.keys.parse(kv.key), read(Claim.decode, kv)
            if key.ref is not None and claim.incarnation == self.incarnation:
                self.executor.give_back(key.ref, key.partition, claim, kv.mod_revision)

    async def _stop_gracefully(self) -> None:
        self.log.info("stopping: cancelling and releasing running jobs")
        started = time.monotonic()
        self.evaluator.close()
        await self.executor.stop(STOP_GRACE)
        await self.elections.stop()
        await self.worker.stop(STOP_GRACE)
        await self.session.close()
        self.log.info("stopped in %.1f s", time.monotonic() - started)

    async def _tear_down(self, graceful: bool) -> None:
        self.doing.close()
        self.holds.close()
        if not self.lost.done():
            self.lost.set_exception(SessionLost("the daemon stopped" if graceful else "the daemon failed"))
        if hasattr(self, "executor"):
            self.reconciler.close()
            self.executor.close()
            self.reporter.close()
            self.elections.close()
            self.evaluator.close()
            await self.evaluator.closed()
        feeds = (*self._feeds, *self._actions_of_tables)
        await asyncio.gather(*(feed.close() for feed in feeds), return_exceptions=True)
        # The child must be dead before the lease ends: other nodes may then start its jobs.
        await self.worker.stop(STOP_GRACE if graceful else 0.0)
        if hasattr(self, "session") and not graceful:
            await self.session.close()

"""One life of a daemon: a session, what it watches, its worker, and its two roles.

An incarnation ends when the daemon stops or when its session is lost; in the second case everything of it is dropped
at once (its child is killed by the guardian before the lease can expire) and a new incarnation begins with a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop import __version__
from distop.clock import time, uuid
from distop.daemon import action_log
from distop.daemon.capability import Capability
from distop.daemon.clock_check import ClockCheck
from distop.daemon.elections import Elections
from distop.daemon.executor.executor_role import Executor
from distop.daemon.executor.reconciliation import Reconciler
from distop.daemon.incarnation_context import Context
from distop.daemon.job_progress import Doing
from distop.daemon.job_reports import Reporter
from distop.daemon.local_jobs import LocalJobs, RunFiles
from distop.daemon.meter import NO_METER, Gauges, Meter
from distop.daemon.rejected_writes import RejectedWrites
from distop.daemon.upkeep.abandoned_holds import HoldKeeper
from distop.daemon.upkeep.history_pruning import HistoryPruner
from distop.daemon.upkeep.result_sweeping import ResultSweeper
from distop.decide.view import ClusterView
from distop.errors import DistopError, EtcdRejected, InvalidArgument, SessionLost, UnreadableRecord, describe
from distop.protocol import keys as K
from distop.protocol.executor_nodes import node_state, refusal
from distop.protocol.jobs import Claim
from distop.protocol.keys import Keys
from distop.protocol.record_reading import read
from distop.protocol.record_signature import why_refused
from distop.protocol.records import History, Node, OperationRef, TableRecord
from distop.protocol.txn import Get, Put, Txn, unchanged
from distop.protocol.user_actions import NO_ACTIONS, entries
from distop.settings import ALL_TYPES, ExecutorConfig
from distop.store.session import Session
from distop.store.watch import Feed
from distop.worker.daemon_side.host import Worker
from distop.worker.daemon_side.requests import WorkerConfig
from distop.worker.guardian import boottime

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path

    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.keys import ParsedKey
    from distop.protocol.txn import TxnResult
    from distop.runtime.logs import ContextLogger
    from distop.services.open_operation import OpenOperation
    from distop.store.client import EtcdClient
    from distop.store.watch import Batch

    MakeWorker = Callable[..., Worker]
    MakeFiles = Callable[[Path], RunFiles]

STOP_GRACE = 15.0
"""Seconds that a graceful stop waits for running jobs to stop before it ends the session."""

SUBJECT_FAMILIES = (K.OPEN, K.PENDING, K.COORDINATOR)
"""Keys of which each concerns one type on one table."""

TABLES_LISTED = 3_600.0
"""Seconds between the listings behind the watch of what is done to tables: nothing depends on it."""


def _of_placing(node: Node | None) -> Node | None:
    """A node's record without the fields that change often and do not concern who coordinates or claims."""
    if node is None:
        return None
    told = replace(node, released=0, doing={}, refused={}, refused_more=0)
    return replace(told, clock=0, clock_unknown="", spark="")


def _watch_name(families: Sequence[str]) -> str:
    """What a watch is called."""
    return families[0]


async def together(*roles: Coroutine[Any, Any, None]) -> None:
    """Run them all. The first to fail ends the others, and what it raised is raised when none of them goes on: it would
    be nobody's, beside the incarnation that follows.
    """
    at_work = [asyncio.ensure_future(role) for role in roles]
    try:
        await asyncio.gather(*at_work)
    finally:
        for work in at_work:
            work.cancel()
        await asyncio.gather(*at_work, return_exceptions=True)


class Incarnation(Context):
    """Runs both roles until it is stopped or its session is lost."""

    def __init__(
        self,
        config: ExecutorConfig,
        client: EtcdClient,
        executor_id: str,
        log: ContextLogger,
        make_worker: MakeWorker = Worker,
        make_files: MakeFiles = RunFiles,
        meter: Meter = NO_METER,
        space: str = "",
    ) -> None:
        self.config = config
        self.meter = meter
        self._space = space
        self.client = client
        self.keys = Keys(config.namespace)
        self.limits = config.limits
        self.incarnation = uuid.uuid4().hex[:12]
        self.executor_id = executor_id
        self.log = log.bind(executor=executor_id, incarnation=self.incarnation)
        self.cluster = ClusterView(self.keys)
        self.types = frozenset()
        self.reports_only = frozenset()
        self.capability = Capability(self.cluster, self.incarnation, self.log, self._can_less)
        self.doing = Doing(lambda: len(self.cluster.nodes), self.activity_changed)
        self.rejected_writes = RejectedWrites(self.log, self.activity_changed)
        self.arguments = {}
        self.caught_up_at = 0
        self.gates_at = 0
        self._make_worker = make_worker
        self._make_files = make_files
        self._node = Node(
            executor_id, socket.gethostname(), config.slots, (), config.labels, __version__, serves=config.serves
        )
        """What is always so, and the count of releases; the rest of the record is made when it is said."""
        self._said = self._node
        """The record that etcd has taken."""
        self._announcing = asyncio.Lock()
        self._saying: asyncio.Task[None] | None = None
        self.clock = ClockCheck(client, self.log, self.activity_changed)
        self._sweeper = ResultSweeper(self)
        self._pruner = HistoryPruner(self, self._sweeper.tell)
        self._holds = HoldKeeper(self)
        self._feeds: list[Feed] = []
        self._actions_of_tables: list[Feed] = []
        self._caught_up = False

    async def run(self, stop: asyncio.Event) -> None:
        """Live until ``stop`` is set (then end gracefully) or the session is lost (SessionLost).

        Raises EtcdUnavailable and its like from the first requests; the caller tries again.
        """
        self.lost = asyncio.get_running_loop().create_future()
        self.lost.add_done_callback(lambda future: future.exception())
        self.worker = self._make_worker(self._worker_config(), log=self.log)
        self.worker.on_trouble(self.activity_changed)
        self.worker.on_history(self._find_history)
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
            if self._caught_up:
                await self._stop_gracefully()
                graceful = True
        finally:
            stopping.cancel()
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            await self._tear_down(graceful)

    async def _live(self) -> None:
        """Set everything up and keep it going; returns only by an error."""
        installed = await self.worker.start()
        declarations = [d for d in installed if not refusal(self.config.serves, d.type_name, ())]
        if unknown := self.config.job_time_limits.keys() - {ALL_TYPES, *(d.type_name for d in installed)}:
            self.log.warning("job-time-limit names types that are not installed here: %s", ", ".join(sorted(unknown)))
        self.types = frozenset(d.type_name for d in declarations)
        self.reports_only = frozenset(d.type_name for d in declarations if d.reports_only)
        self._sweeper.types = frozenset(d.type_name for d in declarations if d.to_file)
        await self._publish(declarations)
        self._node = replace(self._node, behaviors=tuple(sorted(self.types)))
        self.session = Session(
            self.client,
            self.keys.node(self.incarnation),
            self._node.encode(),
            ttl=math.ceil(self.config.ttl),
            on_deadline_moved=self.worker.set_deadline,
        )
        self.session.lost.add_done_callback(self._session_lost)
        await self.session.start()
        self._said = self._node
        self.reporter = Reporter(
            self.client, self.keys, self.lost, self.log, self.rejected_writes, self.limits, self.meter
        )
        self.local = LocalJobs(self._make_files(self.config.work_dir), self.incarnation)
        self._reconciler = Reconciler(self, self.local)
        await self._reconciler.read()
        self.executor = Executor(self)
        self.elections = Elections(self)
        for first, after, families in self._watched():
            fold, name = self._folder(families), _watch_name(families)
            every, gather = self.config.poll, self.cluster.listing
            feed = Feed(self.client, first, after, fold, relist_every=every, name=name, gather=gather)
            self._feeds.append(feed)
            await feed.start()
        if action_log.wanted():
            tables, told = self.keys.family(K.TABLE_ACTIONS), action_log.TableActions(self.keys, self.log)
            watch = Feed(self.client, *tables, told.apply, relist_every=TABLES_LISTED, name=K.TABLE_ACTIONS)
            try:
                await watch.start()  # what is done from "ready" on is written
            except EtcdRejected:
                watch.begin()  # it tries again, and nothing else waits for it
            self._actions_of_tables.append(watch)
        self.caught_up_at = max(feed.revision for feed in self._feeds)
        self._caught_up = True
        offers, only = ", ".join(sorted(self.types)) or "nothing", str(self.config.serves)
        self.log.info(
            "ready: %d slots, offers %s%s", self.config.slots, offers, f"; serves only {only}" if only else ""
        )
        self.executor.cluster_changed(hint=True)
        self.elections.cluster_changed()
        self._holds.changed()
        age = self.config.history_age
        await together(
            self._reconciler.begin(),
            self.executor.run(),
            self._poll(),
            self.clock.run(),
            *([self._sweeper.run()] if self._sweeper.types else []),
            *([self._pruner.keep_young(age)] if age is not None else []),
            *(feed.wait() for feed in (*self._feeds, *self._actions_of_tables)),
        )

    def _worker_config(self) -> WorkerConfig:
        c = self.config
        return WorkerConfig(
            work_dir=c.work_dir,
            executor=self.executor_id,
            incarnation=self.incarnation,
            slots=c.slots,
            shared_dir=c.shared_dir,
            space=self._space,
            spark_master=c.spark_master,
            spark_conf=c.spark_conf,
            ttl=c.ttl,
            log_level=c.log_level,
            call_limit=c.call_limit,
            verifier_urls=c.verifier_urls,
            trusted_spark_catalogs=c.trusted_spark_catalogs,
            serves=c.serves,
            behaviors=c.behaviors,
            find_tables=self._find_tables,
        )

    def _watched(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Hold, Node, NodeDrain, Open and Pending are neighbours in the key order: one stream shows them as one."""
        first, _ = self.keys.family(K.HOLD)
        _, after = self.keys.family(K.PENDING)
        return [
            (first, after, (K.HOLD, K.NODE, K.NODE_DRAIN, K.OPEN, K.PENDING)),
            (*self.keys.family(K.COORDINATOR), (K.COORDINATOR,)),
        ]

    def _folder(self, families: Sequence[str]) -> Any:
        def fold(batch: Batch) -> None:
            if batch.events and not batch.listing:
                newest = max(event.kv.mod_revision for event in batch.events)
                self.meter.heard(_watch_name(families), self.client.transport.identity.revision - newest)
            if K.OPEN in families:
                self.gates_at = batch.revision
            before, changed = dict(self.cluster.nodes), []
            drained = self.cluster.drained_by.get(self.executor_id, NO_ACTIONS).count
            if batch.listing:
                self.cluster.take(families, batch.gathered)
            else:
                changed = self.cluster.apply(batch.events)
            if self._caught_up:
                now = self.cluster.drained_by.get(self.executor_id, NO_ACTIONS)
                action_log.write(self.log, entries("executor", self.executor_id, replace(now, kept=now.since(drained))))
            if self._caught_up and (changed or batch.listing):
                self._changed(changed, before, batch.listing)

        return fold

    def _changed(self, changed: Sequence[ParsedKey], before: dict[str, Node], listing: bool) -> None:
        nodes = self.cluster.nodes
        if self.incarnation not in nodes and self.incarnation in before:
            self.session.node_key_gone()
            return
        gone = any(inc not in nodes for inc in before)
        self.capability.nodes_changed(before)
        holds = [key.id for key in changed if key.family == K.HOLD]
        if holds or listing:
            self._holds.changed(None if listing else holds)
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
        placing = any(_of_placing(nodes.get(inc)) != _of_placing(before.get(inc)) for inc in named)
        nodes_changed = listing or drains or placing
        if nodes_changed:
            self.executor.nodes_changed()
        self.executor.cluster_changed(hint=gone or released or listing or drains, refs=refs)
        if nodes_changed:
            self.elections.cluster_changed()
            return
        if holds:
            self.elections.holds_changed(holds)
        if subjects := {(key.table, key.type) for key in changed if key.family in SUBJECT_FAMILIES}:
            self.elections.subjects_changed(subjects)

    def _session_lost(self, reason: asyncio.Future[str]) -> None:
        if not self.lost.done():
            self.lost.set_exception(SessionLost(reason.result()))

    async def _publish(self, declarations: Sequence[Declaration]) -> None:
        """Publish what this node offers, where it is not published yet, or differs."""
        for declaration in declarations:
            key, value = self.keys.behavior(declaration.type_name), declaration.encode()
            found = await self.client.get(key)
            if found is None or found.value != value:
                seen = found.mod_revision if found is not None else 0
                await self.client.commit(Txn((unchanged(key, seen),), (Put(key, value),), (), "publish"))

    async def _find_history(self, op: str) -> Mapping[str, Any]:
        """A history record for a behavior, which may act on it: it is of that operation, and signed with this
        executor's key where there is one. Raises what etcd answers.
        """
        try:
            ref = OperationRef.parse(op)
            kv = await self.client.get(self.keys.history(ref))
            if kv is None:
                return {"refused": f"there is no history record of {op}: it has not ended, or was forgotten"}
            record = read(History.decode, kv)
        except (InvalidArgument, UnreadableRecord) as error:
            return {"refused": str(error)}
        if why := why_refused(str(ref), self.config.certificate_key, self.keys.namespace, record):
            return {"refused": f"the history record of {op} is not accepted: {why}"}
        return {"record": record.to_json()}

    async def _find_tables(self, names: Collection[str]) -> Mapping[str, TableRecord | None]:
        """The records that are registered; none for a name that can be no table's, and where what stands there cannot
        be read. Raises what etcd answers.
        """
        asked: dict[str, Get] = {}
        for name in names:
            with contextlib.suppress(InvalidArgument, ValueError):
                asked[name] = Get(self.keys.table(name))
        found: dict[str, TableRecord | None] = dict.fromkeys(names)
        wanted, size = list(asked), self.limits.reads
        for page in (wanted[n : n + size] for n in range(0, len(wanted), size)):
            for name, answer in zip(page, await self.client.read(*(asked[name] for name in page)), strict=True):
                with contextlib.suppress(UnreadableRecord):
                    found[name] = read(TableRecord.decode, answer.kv) if answer.kv is not None else None
        return found

    async def open(self, ref: OperationRef, make: Callable[[], OpenOperation], plan: Txn, state_mod: int) -> TxnResult:
        return await self.executor.open(ref, make, plan, state_mod)

    async def announce_released(self) -> None:
        async with self._announcing:
            # Counted even where it is refused: a copy of that may stand in etcd, and the next count has to differ.
            self._node = replace(self._node, released=self._node.released + 1)
            await self._update(self._to_say())

    def activity_changed(self) -> None:
        if self._caught_up and self._saying is None and self._to_say() != self._said:
            self._saying = asyncio.ensure_future(self._say())

    def _can_less(self) -> None:
        self.activity_changed()
        self.elections.cluster_changed()

    def _to_say(self) -> Node:
        """Asked after each turn of a role: nearly always nothing has changed."""
        node, unable, failing = self._node, self.capability.unable, self.capability.failing
        doing, refused, more = self.doing.told, self.rejected_writes.told, self.rejected_writes.more
        draining = self.draining
        state = node_state(draining, draining and (self.executor.busy or self.elections.busy))
        clock, unknown, spark = self.clock.ahead, self.clock.unknown, self.worker.trouble
        said = (node.state, node.unable, node.doing, node.refused, node.refused_more, node.spark, node.failing)
        if (*said, node.clock, node.clock_unknown) == (
            *(state, unable, doing, refused, more, spark, failing),
            *(clock, unknown),
        ):
            return node
        able = tuple(sorted(self.types - unable.keys()))
        told = replace(node, state=state, behaviors=able, unable={**unable}, doing=doing)
        told = replace(told, refused=refused, refused_more=more, clock=clock, clock_unknown=unknown)
        return replace(told, spark=spark, failing={**failing})

    async def _say(self) -> None:
        """Have the node record tell whether this node drains, whether it is empty, what it cannot do, and what has been
        done here for a while. What is refused is said again by the next poll at the latest: somebody may be waiting for
        it (`drain --wait`).
        """
        try:
            while self._to_say() != self._said:
                async with self._announcing:
                    await self._update(self._to_say())
        except DistopError as error:
            self.log.debug("could not tell what this node is: %s", describe(error))
        finally:
            self._saying = None

    async def _update(self, node: Node) -> None:
        await self.session.update(node.encode())
        before, self._said = self._said, node
        if node.state is not before.state:
            self.log.info("this node is %s", node.state)

    def gauges(self) -> Gauges:
        """How it stands now."""
        ready = self._caught_up
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
        """How many operations this incarnation coordinates, by type and stage."""
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
        """A poll backs every watch: claims and elections that name me and that I know nothing of are settled."""
        while True:
            await asyncio.sleep(self.config.poll)
            self.elections.poll()
            self._reconciler.look_soon()
            self.activity_changed()
            if not self.cluster.gates and not self.cluster.pending and not self.cluster.holds:
                continue
            with self._refusal_told():
                await self._holds.look()
            with self._refusal_told():
                await self._settle_claims()
            self.executor.cluster_changed(hint=True)

    @contextlib.contextmanager
    def _refusal_told(self) -> Iterator[None]:
        """Of one step of a poll; the others go on. A role may have been revoked: what runs here goes on, for as long as
        the session lives.
        """
        try:
            yield
        except EtcdRejected as error:
            self.log.warning("the poll was refused, and is tried again: %s", describe(error))

    async def _settle_claims(self) -> None:
        listing = await self.client.list(*self.keys.family(K.CLAIM))
        for kv in listing.kvs:
            if self.incarnation.encode() not in kv.value:
                continue
            key, claim = self.keys.parse(kv.key), read(Claim.decode, kv)
            if key.ref is not None and claim.incarnation == self.incarnation:
                self.executor.give_back(key.ref, key.partition, claim, kv.mod_revision)

    async def _stop_gracefully(self) -> None:
        self.log.info("stopping: running jobs are stopped and released")
        started = time.monotonic()
        await self.executor.stop(STOP_GRACE)
        await self.elections.stop()
        await self.worker.stop(STOP_GRACE)
        await self.session.close()
        self.log.info("stopped in %.1f s", time.monotonic() - started)

    async def _tear_down(self, graceful: bool) -> None:
        self.doing.close()
        self._holds.close()
        if not self.lost.done():
            self.lost.set_exception(SessionLost("the daemon stopped" if graceful else "the daemon failed"))
        if hasattr(self, "executor"):
            self._reconciler.close()
            self.executor.close()
            self.reporter.close()
            self.elections.close()
        feeds = (*self._feeds, *self._actions_of_tables)
        await asyncio.gather(*(feed.close() for feed in feeds), return_exceptions=True)
        # The child is dead before the lease is given up: nobody may start its jobs while it still runs.
        await self.worker.stop(STOP_GRACE if graceful else 0.0)
        if hasattr(self, "session") and not graceful:
            await self.session.close()

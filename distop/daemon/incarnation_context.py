"""The shared state of one incarnation's roles: its connection, session, worker and view of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.daemon.meter import NO_METER, Meter
from distop.errors import EtcdUnavailable, InvalidArgument, OutcomeUnknown
from distop.protocol.executor_nodes import refusal
from distop.protocol.jobs import MARGIN, MAX_BYTES
from distop.protocol.json_codec import dumps, loads
from distop.protocol.operation_options import fits
from distop.protocol.size_limits import DEFAULT, Limits

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Mapping

    from distop.daemon.capability import Capability
    from distop.daemon.clock_check import ClockCheck
    from distop.daemon.job_progress import JobStatuses
    from distop.daemon.job_reports import Reporter
    from distop.daemon.local_jobs import LocalJobs
    from distop.daemon.operation_traces import OperationTraces
    from distop.daemon.rejected_writes import RejectedWrites
    from distop.decide.view import ClusterView
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Txn, TxnResult
    from distop.runtime.logs import ContextLogger
    from distop.settings import ExecutorConfig
    from distop.store.client import EtcdClient
    from distop.store.session import Session
    from distop.worker.daemon_side.host import WorkerHost


ARGUMENTS_KEPT = 32
ARGUMENT_BYTES_KEPT = 16 * 1024


class Context:
    """The shared state of one incarnation's roles. :class:`Incarnation` implements it."""

    config: ExecutorConfig
    client: EtcdClient
    keys: Keys
    log: ContextLogger
    limits: Limits = DEFAULT
    meter: Meter = NO_METER
    """Counts this daemon's work."""
    traces: OperationTraces | None = None
    """Sends spans of this daemon's work; None: telemetry is not exported."""
    incarnation: str
    executor_id: str
    cluster: ClusterView
    session: Session
    worker: WorkerHost
    reporter: Reporter
    rejected_writes: RejectedWrites
    """Writes that etcd rejects as invalid."""
    skipped: tuple[Mapping[str, str], int] = ({}, 0)
    """Operations that the executor does not claim for a while, with the reason; how many more there are."""
    local: LocalJobs
    types: frozenset[str]
    """The operation types that are installed on this node."""
    reports_only: frozenset[str]
    """Installed types whose completion code only makes a report."""
    doing: JobStatuses
    """The status of the jobs, plannings and completions that run on this node."""
    capability: Capability
    """Which of the installed types this node can run."""
    arguments: dict[OperationRef, Any]
    """Cached arguments of the operations that were read last; see :meth:`argument`."""
    caught_up_at: int
    """The revision of the first listing. All events of later writes were seen."""
    clock: ClockCheck
    """Whether this machine's clock agrees with etcd's."""
    lost: asyncio.Future[Any]
    """Fails with SessionLost when the session ends."""

    async def commit(self, txn: Txn, deadline: float | None = None) -> TxnResult:
        """Commit, and repeat until the outcome is known.

        At most for ``deadline`` seconds, if given. Raises SessionLost when the session ends first.
        """
        if self.lost.done():
            self.lost.result()
        try:
            return await self.client.commit(txn, deadline=deadline, until=self.lost)
        except (OutcomeUnknown, EtcdUnavailable):
            if self.lost.done():
                self.lost.result()
            raise

    async def argument(self, ref: OperationRef) -> Any:
        """An operation's argument. It never changes and each call into the child needs it, so small ones are cached."""
        if ref in self.arguments:
            return self.arguments[ref]
        kv = await self.client.get(self.keys.of(ref, "arg"))
        if kv is None:
            return None
        self.keep_argument(ref, kv.value)
        return self.arguments[ref] if ref in self.arguments else loads(kv.value)

    def keep_argument(self, ref: OperationRef, value: bytes) -> None:
        """Cache an argument that was read, or that a watch has delivered."""
        if len(value) <= ARGUMENT_BYTES_KEPT:
            self.arguments[ref] = loads(value)
            while len(self.arguments) > ARGUMENTS_KEPT:
                del self.arguments[next(iter(self.arguments))]

    async def announce_released(self) -> None:
        """Tell other nodes that claims wait. Raises SessionLost."""
        raise NotImplementedError

    def others(self, type_name: str, tables: Collection[str], where: Mapping[str, str] | None = None) -> list[str]:
        """The other executors that serve the type on these tables, and have these labels."""
        capable = self.cluster.capable(type_name, where, tables)
        return [self.cluster.nodes[inc].executor for inc in capable if inc != self.incarnation]

    def admits(self, type_name: str, tables: Collection[str]) -> bool:
        """Whether the settings of this node allow it to serve the type on these tables, installed or not."""
        return not refusal(self.config.serves, type_name, tables)

    def serves(self, type_name: str, tables: Collection[str]) -> bool:
        """Whether this node serves operations of the type on these tables."""
        known = type_name in self.types and self.admits(type_name, tables)
        return known and self.capability.serves(type_name, tables)

    def fits(self, where: Mapping[str, str]) -> bool:
        """Whether this node has these labels."""
        return not where or fits(where, self.config.labels)

    @property
    def draining(self) -> bool:
        """Whether this executor is drained, so that it must run nothing."""
        return self.executor_id in self.cluster.drains

    def activity_changed(self) -> None:
        """Update this node's record after a role started or ended work."""

    async def prune_history(self, table: str) -> None:
        """Prune a table's history to its limits."""
        raise NotImplementedError

    @staticmethod
    def encode(value: Any) -> bytes:
        """Encode a checkpoint for etcd. Raises InvalidArgument if it is too large."""
        data = dumps(value)
        if len(data) > MAX_BYTES + MARGIN:
            raise InvalidArgument(f"a checkpoint has {len(data)} bytes: at most {MAX_BYTES} are allowed")
        return data

    @staticmethod
    def decode(value: bytes) -> Any:
        """Decode a checkpoint from etcd."""
        return loads(value)

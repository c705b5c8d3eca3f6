"""What the roles of one incarnation share: its connection, its session, its worker, and what it sees of the cluster."""

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
    from distop.daemon.job_progress import Doing
    from distop.daemon.job_reports import Reporter
    from distop.daemon.local_jobs import LocalJobs
    from distop.daemon.rejected_writes import RejectedWrites
    from distop.decide.view import ClusterView
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Txn, TxnResult
    from distop.runtime.logs import ContextLogger
    from distop.settings import ExecutorConfig
    from distop.store.client import EtcdClient
    from distop.store.session import Session
    from distop.worker.daemon_side.host import Worker


ARGUMENTS_KEPT = 32
ARGUMENT_BYTES_KEPT = 16 * 1024


class Context:
    """What the roles of one incarnation share. Built by :class:`Incarnation`."""

    config: ExecutorConfig
    client: EtcdClient
    keys: Keys
    log: ContextLogger
    limits: Limits = DEFAULT
    meter: Meter = NO_METER
    """What is counted of the work done here."""
    incarnation: str
    executor_id: str
    cluster: ClusterView
    session: Session
    worker: Worker
    reporter: Reporter
    rejected_writes: RejectedWrites
    """Writes that etcd rejects as invalid."""
    local: LocalJobs
    types: frozenset[str]
    """The operation types that are installed on this node."""
    reports_only: frozenset[str]
    """Those whose completion code, as it is installed here, only makes a report."""
    doing: Doing
    """What the jobs here say that they are doing."""
    capability: Capability
    """Which of them it can run."""
    arguments: dict[OperationRef, Any]
    """Of the operations that were asked for last; see :meth:`argument`."""
    caught_up_at: int
    """The revision of the first listing: what was written later was seen from its first event on."""
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
        """An operation's argument. It never changes and each call into the child needs it, so small ones are kept."""
        if ref in self.arguments:
            return self.arguments[ref]
        kv = await self.client.get(self.keys.of(ref, "arg"))
        if kv is None:
            return None
        self.keep_argument(ref, kv.value)
        return self.arguments[ref] if ref in self.arguments else loads(kv.value)

    def keep_argument(self, ref: OperationRef, value: bytes) -> None:
        """It was read, or seen to be written."""
        if len(value) <= ARGUMENT_BYTES_KEPT:
            self.arguments[ref] = loads(value)
            while len(self.arguments) > ARGUMENTS_KEPT:
                del self.arguments[next(iter(self.arguments))]

    async def announce_released(self) -> None:
        """Tell other nodes that claims wait. Raises SessionLost."""
        raise NotImplementedError

    def others(self, type_name: str, tables: Collection[str], where: Mapping[str, str] | None = None) -> list[str]:
        """The other executors that work for operations of the type on these tables, and have these labels."""
        capable = self.cluster.capable(type_name, where, tables)
        return [self.cluster.nodes[inc].executor for inc in capable if inc != self.incarnation]

    def admits(self, type_name: str, tables: Collection[str]) -> bool:
        """The settings of this node let it serve the type on these tables, whether or not it has the type."""
        return not refusal(self.config.serves, type_name, tables)

    def serves(self, type_name: str, tables: Collection[str]) -> bool:
        """This node works for operations of the type on these tables."""
        known = type_name in self.types and self.admits(type_name, tables)
        return known and self.capability.serves(type_name, tables)

    def fits(self, where: Mapping[str, str]) -> bool:
        """This node has these labels."""
        return not where or fits(where, self.config.labels)

    @property
    def draining(self) -> bool:
        """This executor shall run nothing."""
        return self.executor_id in self.cluster.drains

    def activity_changed(self) -> None:
        """A role took up or let go of something: tell what this node says of itself, where that changes."""

    async def prune_history(self, table: str) -> None:
        """Bound a table's history."""
        raise NotImplementedError

    @staticmethod
    def encode(value: Any) -> bytes:
        """A checkpoint as stored. Raises InvalidArgument where it is too large."""
        data = dumps(value)
        if len(data) > MAX_BYTES + MARGIN:
            raise InvalidArgument(f"a checkpoint has {len(data)} bytes: at most {MAX_BYTES} are allowed")
        return data

    @staticmethod
    def decode(value: bytes) -> Any:
        """A checkpoint as it was saved."""
        return loads(value)

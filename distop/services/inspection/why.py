"""Why an operation waits: reads what the status does not need, and lists all reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.errors import PermissionDenied
from distop.protocol import keys as K
from distop.protocol import table_registry
from distop.protocol.executor_nodes import refusal
from distop.protocol.frozen import frozen
from distop.protocol.state_tables import Stage
from distop.protocol.txn import Get
from distop.services.inspection.reasons import Reason, reasons
from distop.services.inspection.status import judge, take_with_cluster, unreadable_records, view_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import Node, OperationRef
    from distop.services.operation_results import OperationStatus
    from distop.store.client import EtcdClient

MOST_GATES = 1_000
"""How many open operations are searched for jobs that hold slots."""
_PAGE = 100


@frozen
class Why:
    """Why an operation waits.

    ``reasons``: the most important one first; none while jobs run, and none once it has ended (see ``status``).
    """

    op: str
    status: OperationStatus
    reasons: tuple[Reason, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether a reason stops the operation."""
        return any(reason.stops for reason in self.reasons)

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        return {
            "op": self.op,
            "state": self.status.state,
            "stage": self.status.stage,
            "waiting": self.waiting,
            "running": self.status.jobs.get("running") or 0,
            "reasons": [reason.to_json() for reason in self.reasons],
        }


async def why(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> Why:
    """Read an operation and the executors that could work on it. Raises NotFound, UnreadableRecord."""
    snapshot, nodes, raised = await take_with_cluster(etcd, keys, ref)
    now = time.time()
    seen = judge(snapshot, nodes, now, raised)
    if seen.ended:
        return Why(str(ref), seen)
    unreadable = await unreadable_records(etcd, keys, seen, ref)
    view = view_of(snapshot, nodes, now, raised, unreadable)
    held = (await etcd.read(Get(keys.coordinator(ref.table, ref.type))))[0].kv
    view = replace(view, coordinated=held is not None and held.value.decode(errors="replace") in nodes)
    if view.stage is Stage.OPEN and not view.running:
        view = replace(view, elsewhere=await _elsewhere(etcd, keys, ref, nodes))
    return Why(str(ref), judge(snapshot, nodes, now, raised, unreadable), reasons(view))


async def _elsewhere(etcd: EtcdClient, keys: Keys, ref: OperationRef, nodes: Mapping[str, Node]) -> dict[str, int]:
    """Other open operations → how many of their jobs are claimed.

    Only types that an executor offers together with this operation's type.
    """
    offering = (node for node in nodes.values() if ref.type in node.behaviors)
    capable = [node for node in offering if not refusal(node.serves, ref.type, (ref.table,))]
    beside = {name for node in capable for name in node.behaviors}
    try:
        found = (await etcd.read(Get(*keys.family(K.OPEN), limit=MOST_GATES, keys_only=True)))[0]
    except PermissionDenied:  # a submitter may only read its own table
        gates = table_registry.table_family(keys, K.OPEN, ref.table)
        found = (await etcd.read(Get(*gates, limit=MOST_GATES, keys_only=True)))[0]
    others = [one for one in table_registry.refs(keys, found.kvs) if one != ref and one.type in beside]
    held: dict[str, int] = {}
    for n in range(0, len(others), _PAGE):
        page = others[n : n + _PAGE]
        answers = await etcd.read(*(Get(*keys.claims_range(one), count_only=True) for one in page))
        held |= {str(one): answer.count for one, answer in zip(page, answers, strict=True) if answer.count}
    return held

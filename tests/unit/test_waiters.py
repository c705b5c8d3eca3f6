"""Those that wait to begin, on the model of etcd: what the coordinator sees of them, and of their holds, comes in any
order.
"""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from distop.coordinator import waiters
from distop.coordinator.waiters import Waiters
from distop.core import prepared as p
from distop.core.limits import DEFAULT
from distop.core.links import Hold, HoldState
from distop.core.model import OperationRef
from distop.core.txn import Txn, TxnResult, value_is
from distop.core.view import Change, ClusterView, TypeView
from tests.support.starting import KEYS, TABLE, Etcd

REF = OperationRef(TABLE, "noop", "", 1)
HOLD = KEYS.hold(p.hold_id("tx-17"))


class Coordinator:
    """What waiters need of one: elected, and with views that are as far as ``sees`` says."""

    def __init__(self, etcd: Etcd) -> None:
        election = KEYS.coordinator(TABLE, "noop")
        etcd.put(election, b"e1")
        self.etcd = etcd
        self.done = asyncio.Event()
        """It has changed something."""
        self.view = TypeView(KEYS, TABLE, "noop", DEFAULT.outcomes_ahead)
        self.cluster = ClusterView(KEYS)
        ctx: Any = SimpleNamespace(
            client=etcd, keys=KEYS, cluster=self.cluster, log=logging.getLogger("distop.test"), limits=DEFAULT,
            config=SimpleNamespace(poll=30.0), commit=self._send,
        )  # fmt: skip
        self.waiters = Waiters(ctx, value_is(election, b"e1"), self.view, self._commit, self._reached)

    async def _send(self, txn: Txn) -> TxnResult:
        result = await self.etcd.commit(txn)
        if result.succeeded:
            self.done.set()
        return result

    async def _commit(self, txn: Txn) -> bool:
        return (await self._send(txn)).succeeded

    async def _reached(self, revision: int) -> None:
        self.sees_operations()

    def sees_operations(self) -> None:
        listing = self.etcd.store.range(*KEYS.type_range(TABLE, "noop"))
        self.view.replace([Change(kv) for kv in listing], claims=False)
        self.waiters.look([REF])

    def sees_holds(self) -> None:
        self.cluster.replace(["distOpHold"], [Change(kv) for kv in self.etcd.store.range(*KEYS.family("distOpHold"))])
        self.waiters.holds_changed()


@pytest.mark.parametrize("confirmed", [True, False])
def test_one_that_is_seen_before_its_hold_ends_as_that_says(confirmed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are watched apart. It was tried to begin it for ever, where the hold was denied."""
    monkeypatch.setattr(waiters, "EXCLUDED_PAUSE", (0.001, 0.001))

    async def main() -> str:
        etcd = Etcd()
        await etcd.client.prepare_operation("noop", TABLE, {}, external_id="tx-17")
        coordinator = Coordinator(etcd)
        coordinator.sees_operations()
        await etcd.until(lambda: etcd.requests.count("begin") == 2)
        assert etcd.value(KEYS.of(REF, "state")) == b"pending", "etcd knows of the hold"
        coordinator.sees_holds()
        if confirmed:
            await etcd.client.confirm("tx-17")
        else:
            terms = p.Terms.of(Hold.decode(etcd.value(HOLD) or b""))
            assert terms is not None
            etcd.put(HOLD, terms.hold(HoldState.DENIED, "no").encode())
        coordinator.sees_holds()
        async with asyncio.timeout(20):
            await coordinator.done.wait()
        coordinator.waiters.close()
        return (etcd.value(KEYS.of(REF, "state")) or b"").decode()

    assert asyncio.run(main()) == ("running" if confirmed else "cancelled")

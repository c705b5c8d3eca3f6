"""Writes about prepared holds that etcd rejects as invalid: told, sent again, and in the way of no other."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon import rejected_writes
from distop.daemon.rejected_writes import RejectedWrites
from distop.daemon.upkeep.abandoned_holds import HoldKeeper
from distop.daemon.upkeep.prepared_verification import AT_ONCE
from distop.errors import MalformedRequest
from distop.protocol import prepared_operations as p
from distop.protocol.dependencies import Hold, HoldState
from distop.protocol.executor_nodes import ALL, NodeState
from distop.protocol.records import OperationRef
from distop.protocol.revisioned import Seen
from distop.runtime import logs
from distop.worker.daemon_side.requests import Verified
from tests.unit.support.model_submission import KEYS, TABLE, Etcd

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.txn import Txn, TxnResult

pytestmark = pytest.mark.malformed

REJECTION = "verification: etcdserver: request is too large"


class Daemon:
    """The only one, with its holds. ``refused``: whether etcd takes a transaction of its verifications."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: bool | None = True) -> None:
        monkeypatch.setattr(rejected_writes, "PAUSE", (0.002, 0.01))
        self.etcd, self.keys, self.incarnation, self.log = Etcd(), KEYS, "e1", logs.get("distop.test")
        self.client = self.etcd
        self.cluster = SimpleNamespace(holds={}, nodes={"e1": SimpleNamespace(state=NodeState.ACTIVE, serves=ALL)})
        self.rejected_writes = RejectedWrites(self.log, lambda: None)
        self.worker = self
        self.answer = answer
        self.asked: list[str] = []
        self.sent = 0
        self.refused: Callable[[Txn], bool] = lambda txn: False
        self.keeper = HoldKeeper(self)  # type: ignore[arg-type]

    def admits(self, type_name: str, tables: Any) -> bool:
        return True

    async def verify(self, op: str, external_id: str, verify: str, limit: float) -> Verified:
        self.asked.append(external_id)
        return Verified(self.answer, "" if self.answer is not None else "timeout")

    async def commit(self, txn: Txn) -> TxnResult:
        n, self.sent = self.sent, self.sent + 1
        await asyncio.sleep(0)
        if self.refused(txn):
            raise MalformedRequest("etcdserver: request is too large")
        assert n < 1_000
        result = self.etcd.store.apply(txn)
        self.sees()
        return result

    async def prepare(self, external_id: str = "x", **options: Any) -> None:
        await self.etcd.client.prepare_operation("noop", TABLE, {}, external_id=external_id, **options)
        self.sees()

    def sees(self) -> None:
        """All holds, as they stand in etcd."""
        found = self.etcd.store.range(*KEYS.family("distOpHold"))
        self.cluster.holds.clear()
        self.cluster.holds.update({KEYS.parse(kv.key).id: Seen(Hold.decode(kv.value), kv.mod_revision) for kv in found})
        self.keeper.changed()

    def begin(self, external_id: str = "x") -> bool:
        id_ = p.hold_id(external_id)
        terms = p.PreparedTerms.of(self.cluster.holds[id_].value)
        assert terms is not None
        return self.keeper._verifying.begin(id_, terms, self.cluster.holds[id_].mod)

    def state(self, external_id: str = "x") -> HoldState | None:
        """Of the hold; None: it is gone, as once it is confirmed."""
        found = self.cluster.holds.get(p.hold_id(external_id))
        return found.value.state if found is not None else None

    @property
    def rejections(self) -> dict[str, str]:
        return dict(self.rejected_writes.published)

    async def until(self, reached: Callable[[], bool]) -> None:
        for _ in range(5_000):
            if reached():
                return
            await asyncio.sleep(0.001)
        pytest.fail("it is not reached")


@pytest.mark.parametrize(
    ("verify", "answer", "which", "becomes"),
    [
        ("orders", True, 0, None),  # the count of the attempt
        ("orders", True, 1, None),  # the confirmation
        ("orders", False, 1, HoldState.DENIED),
        ("orders", None, 1, HoldState.HELD),  # that there was no answer
        (None, None, 0, HoldState.DENIED),  # nobody could be asked
    ],
)
async def test_each_rejected_write_of_a_verification_is_reported_and_retried(
    verify: str | None, answer: bool | None, which: int, becomes: HoldState | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(monkeypatch, answer)
    await daemon.prepare(verify=verify)
    daemon.refused = lambda txn: daemon.sent > which
    daemon.begin()
    await daemon.until(lambda: daemon.rejections == {"hold prepared:x": REJECTION})
    await daemon.until(lambda: daemon.sent > which + 2)
    assert daemon.state() is HoldState.HELD
    daemon.refused = lambda txn: False  # as somebody raises its limit
    await daemon.until(lambda: not daemon.keeper._verifying._at_work)
    assert daemon.rejections == {}
    assert daemon.state() is becomes
    assert daemon.asked == (["x"] if verify else []), "what a verifier said is not forgotten"
    daemon.keeper.close()


async def test_an_ended_operation_that_cannot_be_denied_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(monkeypatch)
    await daemon.prepare(verify="orders")
    daemon.etcd.put(KEYS.of(OperationRef(TABLE, "noop", "", 1), "state"), b"success")
    daemon.refused = lambda txn: True
    daemon.begin()
    await daemon.until(lambda: daemon.rejections == {"hold prepared:x": REJECTION})
    daemon.refused = lambda txn: False
    await daemon.until(lambda: daemon.state() is HoldState.DENIED)
    await daemon.until(lambda: daemon.rejections == {})
    daemon.keeper.close()


async def test_rejected_holds_delay_no_other_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(monkeypatch)
    bad = [f"bad-{n}" for n in range(AT_ONCE + 1)]
    for name in (*bad, "x"):
        await daemon.prepare(name, verify="orders")
    daemon.refused = lambda txn: any("bad-" in compare.key for compare in txn.compares)
    for name in bad:
        assert daemon.begin(name)
        await daemon.until(partial(daemon.keeper._verifying._rejected.__contains__, p.hold_id(name)))
    assert len(daemon.rejections) + daemon.rejected_writes.more == len(bad)
    assert daemon.begin("x")
    await daemon.until(lambda: daemon.state("x") is None)
    assert daemon.asked == ["x"]
    daemon.keeper.close()


@pytest.mark.parametrize("how", ["confirmed", "written"])
async def test_a_hold_that_other_executors_handle_is_not_reported(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that compares what the hold was is dead: it is sent no more."""
    daemon = Daemon(monkeypatch)
    await daemon.prepare(verify="orders")
    daemon.refused = lambda txn: True
    daemon.begin()
    await daemon.until(lambda: bool(daemon.rejections))
    if how == "confirmed":
        await daemon.etcd.client.confirm("x")
    else:
        daemon.etcd.put(KEYS.hold(p.hold_id("x")), daemon.cluster.holds[p.hold_id("x")].value.encode())
    daemon.sees()
    await daemon.until(lambda: not daemon.keeper._verifying._at_work)
    assert daemon.rejections == {}
    daemon.keeper.close()


async def test_a_hold_that_was_deleted_meanwhile_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(monkeypatch)
    await daemon.prepare(verify="orders")

    def goes(txn: Txn) -> bool:
        daemon.cluster.holds.clear()
        daemon.keeper.changed()
        return True

    daemon.refused = goes
    daemon.begin()
    await daemon.until(lambda: not daemon.keeper._verifying._at_work)
    assert (daemon.rejections, daemon.sent) == ({}, 1)
    daemon.keeper.close()


async def test_a_stopping_daemon_reports_no_rejected_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(monkeypatch)
    await daemon.prepare(verify="orders")
    daemon.refused = lambda txn: True
    daemon.begin()
    await daemon.until(lambda: bool(daemon.rejections))
    daemon.keeper.close()
    await daemon.until(lambda: not daemon.keeper._verifying._at_work)
    assert daemon.rejections == {}

"""Forged keys of one table that name operations of another table have no effect on those."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import NotAllowed, UnreadableRecord
from distop.protocol.keys import Keys
from distop.protocol.prepared_operations import hold_id
from distop.protocol.records import OperationRef, TableRecord
from tests.unit.support.model_submission import TABLE, Etcd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KEYS = Keys()
OTHER = "other"


def run(work: Callable[[Etcd], Awaitable[Any]]) -> None:
    """Run without the audit, which reports the forged keys."""

    async def main() -> None:
        etcd = Etcd()
        etcd.renew_client()
        etcd.put(KEYS.table(OTHER), TableRecord(OTHER, "parquet", "/theirs").encode())
        await work(etcd)

    asyncio.run(main())


def forge(etcd: Etcd, ref: str, **fields: Any) -> None:
    key = KEYS.of(OperationRef.parse(ref), "spec")
    spec = json.loads(etcd.value(key) or b"")
    etcd.put(key, json.dumps({**spec, **fields}).encode())


def state(etcd: Etcd, ref: str) -> bytes | None:
    return etcd.value(KEYS.of(OperationRef.parse(ref), "state"))


def test_a_request_key_does_not_answer_with_an_operation_of_another_table() -> None:
    async def work(etcd: Etcd) -> None:
        theirs = await etcd.client.start_operation("noop", OTHER, {}, request_id="nightly", delay=60.0)
        await etcd.client.start_operation("noop", TABLE, {}, delay=60.0)  # the very first start reads no request key
        etcd.put(KEYS.request(TABLE, "noop", "nightly"), theirs.ref.encode())
        with pytest.raises(UnreadableRecord, match="names other/noop/1, which is not of type noop on table t"):
            await etcd.client.start_operation("noop", TABLE, {}, request_id="nightly", delay=60.0)
        assert state(etcd, theirs.ref) == b"pending"

    run(work)


def test_a_forged_series_does_not_end_a_series_of_another_table() -> None:
    async def work(etcd: Etcd) -> None:
        theirs = await etcd.client.start_operation("noop", OTHER, {}, delay=60.0, every=60.0)
        mine = await etcd.client.start_operation("noop", TABLE, {}, delay=60.0, every=60.0)
        series = json.loads(etcd.value(KEYS.of(mine.parts, "spec")) or b"")["series"]
        forge(etcd, mine.ref, series={**series, "first": theirs.ref})
        with pytest.raises(UnreadableRecord, match="names other/noop/1, which is not of type noop on table t"):
            await mine.end_series()
        assert state(etcd, theirs.ref) == b"pending"

    run(work)


@pytest.mark.parametrize("does", ["cancel", "confirm", "abandon"])
def test_a_forged_hold_does_not_decide_a_prepared_operation_of_another_table(does: str) -> None:
    async def work(etcd: Etcd) -> None:
        theirs = await etcd.client.prepare_operation("noop", OTHER, {}, external_id="order-1")
        mine = await etcd.client.start_operation("noop", TABLE, {}, delay=60.0)
        forge(etcd, mine.ref, hold=hold_id("order-1"))
        held = etcd.value(KEYS.hold(hold_id("order-1")))
        assert held is not None
        if does == "cancel":
            await mine.cancel()
            assert state(etcd, mine.ref) != b"pending"
        else:
            with pytest.raises(NotAllowed, match="was not prepared"):
                await getattr(mine, does)()
        assert etcd.value(KEYS.hold(hold_id("order-1"))) == held
        assert state(etcd, theirs.ref) == b"pending"

    run(work)

"""ModelStore answers every transaction as a real etcd does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distop.errors import EtcdRejected, MalformedRequest
from distop.protocol.revisioned import Change
from distop.protocol.txn import (
    ENVELOPE_BYTES,
    MAX_REQUEST_BYTES,
    Compare,
    Delete,
    Get,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
    absent,
    flaw,
    request_bytes,
)
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.embedded import EmbeddedEtcd
from distop.store.watch import WatchStream, decode_response
from distop.testing import ModelStore

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.etcd, pytest.mark.malformed]

LEASE = 0x7E57
keys = st.sampled_from(["k.a", "k.b", "k.b.c", "k.c"])
ranges = st.sampled_from([("k.", "k/"), ("k.b", "k.c"), ("k.b.", "k.b/"), ("k.c", "k.a"), ("k.x", "k.y")])
values = st.sampled_from([b"", b"1", b"2"])
numbers = st.integers(0, 12)


def bounded(make: type) -> st.SearchStrategy:
    return keys.map(make) | ranges.map(lambda r: make(*r))


@st.composite
def compares(draw: st.DrawFn) -> Compare:
    start, end = draw(ranges | keys.map(lambda k: (k, "")))
    target = draw(st.sampled_from(list(Target)))
    value = draw(values) if target is Target.VALUE else draw(numbers)
    return Compare(start, target, draw(st.sampled_from(list(Relation))), value, end)


gets = st.builds(
    lambda r, limit, only, count: Get(r[0], r[1], limit, only, count),
    ranges | keys.map(lambda k: (k, "")), st.integers(0, 3), st.booleans(), st.booleans(),
)  # fmt: skip
plain = st.builds(Put, keys, values, st.sampled_from([0, 0, 0, LEASE, 0xBAD])) | bounded(Delete) | gets
lists_of = st.lists(compares(), max_size=2).map(tuple)
inner = st.builds(Txn, lists_of, st.lists(plain, max_size=2).map(tuple), st.lists(plain, max_size=2).map(tuple))
parts = st.lists(plain | inner, max_size=3).map(tuple)
branches = st.lists(plain | inner | st.builds(Txn, lists_of, parts, parts), max_size=4).map(tuple)
transactions = st.builds(Txn, lists_of, branches, branches)


@pytest.fixture(scope="module")
def quiet_etcd() -> Iterator[EmbeddedEtcd]:
    """An etcd without other writers, so that its revisions are predictable."""
    with EmbeddedEtcd(compaction=None) as server:
        yield server


def many(count: int, inside: int) -> Txn:
    """``count`` nested transactions, each with ``inside`` reads in its else branch, which is not taken."""
    nested = (
        Txn((absent(f"m.{n}"),), (Put(f"m.{n}", b""),), tuple(Get(f"m.{n}") for _ in range(inside)))
        for n in range(count)
    )
    return Txn((), tuple(nested))


async def assert_same_answers(client: EtcdClient, txns: list[Txn]) -> None:
    """Apply the transactions to etcd and the model, both starting with an empty range at the same revision."""
    await client.commit(Txn((), (Delete("k.", "k/"), Delete("m.", "m/"))))
    model = ModelStore()
    start = (await client.commit(Txn((), (Put("other", b""),)))).revision
    model.revision = start
    model.grant(LEASE)
    await client.grant(600, LEASE)
    try:
        for txn in txns:
            assert await _real(client, txn) == _model(model, txn), txn
        listing = await client.list("k.", "k/")
        assert listing.kvs == tuple(model.range("k.", "k/"))
        assert await _history(client, start + 1, model.revision) == model.history
    finally:
        await client.revoke(LEASE)
    if model.leases[LEASE]:
        model.expire(LEASE)
        assert (await client.list("k.", "k/")).kvs == tuple(model.range("k.", "k/"))
        assert await _history(client, start + 1, model.revision) == model.history


async def _real(client: EtcdClient, txn: Txn) -> object:
    try:
        return await client.commit(txn)
    except EtcdRejected as error:
        return type(error), error.detail


def _model(model: ModelStore, txn: Txn) -> object:
    try:
        return model.apply(txn)
    except EtcdRejected as error:
        return type(error), error.detail


async def _history(client: EtcdClient, first: int, last: int) -> list[tuple[int, tuple[Change, ...]]]:
    found: dict[int, list[Change]] = {}
    if last < first:
        return []
    stream = WatchStream(client, "k.", "n", first)
    await stream.open(5.0)
    while last not in found:
        message = await asyncio.wait_for(stream.read(), 20)
        assert message is not None
        for event in decode_response(message).events:
            found.setdefault(event.kv.mod_revision, []).append(Change(event.kv, event.deleted))
    stream.cut()
    return [(revision, tuple(changes)) for revision, changes in sorted(found.items())]


@settings(max_examples=60)
@given(txns=st.lists(transactions, min_size=1, max_size=8))
def test_the_model_answers_as_etcd_does(quiet_etcd: EmbeddedEtcd, txns: list[Txn]) -> None:
    async def run() -> None:
        async with EtcdClient(EtcdConfig((quiet_etcd.endpoint,))) as client:
            await assert_same_answers(client, txns)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("count", "inside"), [(126, 2), (127, 1), (127, 2), (128, 0), (128, 1), (129, 0), (1, 127), (1, 128)]
)
async def test_the_model_has_the_limit_on_operations_of_etcd(quiet_etcd: EmbeddedEtcd, count: int, inside: int) -> None:
    async with EtcdClient(EtcdConfig((quiet_etcd.endpoint,))) as client:
        await assert_same_answers(client, [many(count, inside)])


@pytest.mark.parametrize(("beyond", "accepted"), [(0, True), (ENVELOPE_BYTES, False)])
async def test_etcd_accepts_a_transaction_within_the_size_limit(
    quiet_etcd: EmbeddedEtcd, beyond: int, accepted: bool
) -> None:
    """distop's limit is smaller, because etcd adds an envelope to a request before it checks the size."""
    values = [Put(f"m.{n}", b"x" * 500_000) for n in range(3)]
    room = MAX_REQUEST_BYTES - ENVELOPE_BYTES - request_bytes(Txn((), (*values, Put("m.last", b""))))
    txn = Txn((), (*values, Put("m.last", b"x" * (room - 8 + beyond))))
    assert (flaw(txn) is None) is accepted
    async with EtcdClient(EtcdConfig((quiet_etcd.endpoint,))) as client:
        real = await _real(client, txn)
    assert isinstance(real, TxnResult) if accepted else real == (MalformedRequest, "etcdserver: request is too large")

"""Reads and paged listings at one revision."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import Compacted
from distop.protocol.txn import Get, Put, Txn
from distop.store import transport as wire
from tests.support.etcd import compacted, connected, fill_database

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd

pytestmark = pytest.mark.etcd


async def test_pages_are_pinned_to_one_revision(client: EtcdClient, prefix: str) -> None:
    keys = [f"{prefix}{number:03}" for number in range(100)]
    stop = asyncio.Event()

    async def write() -> None:
        number = 0
        while not stop.is_set():
            await client.commit(Txn((), tuple(Put(key, b"%d" % number) for key in keys)))
            number += 1

    await client.commit(Txn((), tuple(Put(key, b"first") for key in keys)))
    writer = asyncio.ensure_future(write())
    seen = set()
    try:
        for _ in range(20):
            listing = await client.list(prefix, f"{prefix}9", page=7)
            assert [pair.key for pair in listing.kvs] == keys
            assert len({pair.value for pair in listing.kvs}) == 1
            assert {pair.mod_revision for pair in listing.kvs} <= set(range(listing.revision + 1))
            seen.add(listing.kvs[0].value)
    finally:
        stop.set()
        await writer
    assert len(seen) > 1


async def test_an_empty_range_lists_no_keys(client: EtcdClient, prefix: str) -> None:
    listing = await client.list(prefix, f"{prefix}9")
    assert listing.kvs == ()
    assert listing.revision > 0
    assert await client.count(prefix, f"{prefix}9") == 0
    assert await client.get(f"{prefix}none") is None


async def test_several_reads_share_one_revision(client: EtcdClient, prefix: str) -> None:
    written = await client.commit(Txn((), (Put(f"{prefix}a", b"1"), Put(f"{prefix}b", b"2"))))
    revision, (one, both) = await client.read_at(Get(f"{prefix}a"), Get(prefix, f"{prefix}z", keys_only=True))
    assert revision >= written.revision
    assert one.kv is not None
    assert one.kv.value == b"1"
    assert [pair.key for pair in both.kvs] == [f"{prefix}a", f"{prefix}b"]
    assert await client.read(Get(f"{prefix}none")) == (one.__class__((), False, 0),)


async def test_a_compaction_during_paging_restarts_the_list(
    own_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(own_etcd.endpoint) as client, connected(own_etcd.endpoint) as other:
        await client.commit(Txn((), tuple(Put(f"k{number}", b"old") for number in range(10))))
        plain, pages = client.transport.unary, 0

        async def between_pages(method: Any, request: Any, timeout: float) -> Any:
            nonlocal pages
            answer = await plain(method, request, timeout)
            pages += method is wire.RANGE
            if pages == 2:
                newest = await other.commit(Txn((), tuple(Put(f"k{number}", b"new") for number in range(10))))
                await compacted(other, newest.revision)
            return answer

        monkeypatch.setattr(client.transport, "unary", between_pages)
        listing = await client.list("k", "l", page=3)
        assert {pair.value for pair in listing.kvs} == {b"new"}
        assert len(listing.kvs) == 10
        with pytest.raises(Compacted):
            await client.list("k", "l", revision=2)


async def test_the_status_of_a_single_server(client: EtcdClient) -> None:
    status = await client.status()
    assert not status.denied
    assert status.leader == status.member_id != 0
    assert status.db_size > 0
    assert await client.version() >= (3, 4)
    assert [member.id for member in await client.members()] == [status.member_id]


async def test_reads_succeed_on_a_full_etcd(small_etcd: EmbeddedEtcd) -> None:
    """Old servers with a full database refuse even read-only transactions."""
    async with connected(small_etcd.endpoint) as client:
        await client.commit(Txn((), (Put("full.a", b"1"), Put("full.b", b"2"))))
        await fill_database(client)
        assert "NOSPACE" in await client.alarms()
        revision, (a, b, none) = await client.read_at(Get("full.a"), Get("full.b"), Get("full.c"))
        assert (a.kv.value, b.kv.value, none.kv) == (b"1", b"2", None)
        assert revision >= b.kv.mod_revision


@pytest.mark.parametrize("page", [1, 2, 3, 10, 1_000])
async def test_pages_list_every_key_once_and_in_order_at_one_revision(client: EtcdClient, page: int) -> None:
    """This holds for keys of every form, and during writes."""
    names = [f"pages{page}/{n:b}" for n in range(1, 40)] + [f"pages{page}/{n}.x" for n in range(90)]
    names += [f"pages{page}/~", f"pages{page}/a", f"pages{page}/a.b", f"pages{page}/a.b.{'c' * 80}", f"pages{page}/ab"]
    for n in range(0, len(names), 100):
        await client.commit(Txn((), tuple(Put(name, b"v") for name in names[n : n + 100])))
    found: list[str] = []
    async for kvs in client.pages(f"pages{page}/", f"pages{page}0", keys_only=True, page=page):
        assert 0 < len(kvs) <= page
        found += [kv.key for kv in kvs]
        await client.commit(Txn((), (Put(f"pages{page}/z{len(found)}", b"v"),)))
    assert found == sorted(names)
    assert [kvs async for kvs in client.pages("nothing/", "nothing0")] == []
    whole = await client.list(f"pages{page}/", f"pages{page}0")
    again = [kv async for kvs in client.pages(f"pages{page}/", f"pages{page}0", page=page) for kv in kvs]
    assert again == list(whole.kvs)

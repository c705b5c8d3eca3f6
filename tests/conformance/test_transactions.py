"""Transactions on a real etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.errors import EtcdRejected, LeaseNotFound
from distop.protocol.txn import (
    Compare,
    Delete,
    DeleteResult,
    Get,
    GetResult,
    Put,
    PutResult,
    Relation,
    Target,
    Txn,
    TxnResult,
    absent,
    exists,
    none_within,
    unchanged,
    value_is,
)
from tests.support.etcd import connected, fill_database

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from distop.store.embedded import EmbeddedEtcd

pytestmark = pytest.mark.etcd


async def holds(client: EtcdClient, *compares: Compare) -> bool:
    return (await client.commit(Txn(compares))).succeeded


async def test_compares(client: EtcdClient, prefix: str) -> None:
    key = f"{prefix}key"
    first = await client.commit(Txn((absent(key),), (Put(key, b"1"),)))
    assert first.succeeded
    assert not first.repeated
    second = await client.commit(Txn((unchanged(key, first.revision),), (Put(key, b"2"),)))
    assert second.succeeded
    assert second.revision > first.revision
    assert await holds(client, exists(key), unchanged(key, second.revision), value_is(key, b"2"))
    assert await holds(client, Compare(key, Target.CREATE, Relation.EQUAL, first.revision))
    assert await holds(client, Compare(key, Target.VERSION, Relation.GREATER, 1))
    assert await holds(client, Compare(key, Target.MOD, Relation.NOT_EQUAL, first.revision))
    assert not await holds(client, absent(key))
    assert not await holds(client, unchanged(key, first.revision))
    assert await holds(client, unchanged(f"{prefix}other", 0))
    assert not await holds(client, value_is(f"{prefix}other", b""))


async def test_range_compares(client: EtcdClient, prefix: str) -> None:
    start, end = f"{prefix}claim.", f"{prefix}claim/"
    assert await holds(client, none_within(start, end))
    await client.commit(Txn((), (Put(f"{start}1", b""),)))
    assert not await holds(client, none_within(start, end))


async def test_the_else_branch_reads_the_winning_value(client: EtcdClient, prefix: str) -> None:
    key = f"{prefix}key"
    won = await client.commit(Txn((), (Put(key, b"winner"),)))
    lost = await client.commit(Txn((absent(key),), (Put(key, b"loser"),), (Get(key),)))
    assert not lost.succeeded
    (found,) = lost.responses
    assert isinstance(found, GetResult)
    assert found.kv is not None
    assert (found.kv.value, found.kv.mod_revision, found.kv.create_revision) == (b"winner", won.revision, won.revision)


async def test_results_are_in_the_order_of_the_operations(client: EtcdClient, prefix: str) -> None:
    keys = [f"{prefix}{number}" for number in range(5)]
    await client.commit(Txn((), tuple(Put(key, key.encode()) for key in keys)))
    result = await client.commit(
        Txn(
            (),
            (
                Put(f"{prefix}a", b""),
                Get(prefix, f"{prefix}9", limit=2),
                Get(prefix, f"{prefix}9", keys_only=True),
                Get(prefix, f"{prefix}9", count_only=True),
                Delete(keys[0], keys[3]),
            ),
        )
    )
    put, page, names, count, deleted = result.responses
    assert isinstance(put, PutResult)
    assert isinstance(page, GetResult)
    assert [pair.key for pair in page.kvs] == keys[:2]
    assert page.more
    assert page.count == 5
    assert isinstance(names, GetResult)
    assert [pair.value for pair in names.kvs] == [b""] * 5
    assert isinstance(count, GetResult)
    assert (count.kvs, count.count) == ((), 5)
    assert deleted == DeleteResult(3)


async def test_nested_transactions_compare_the_state_before_the_whole_transaction(
    client: EtcdClient, prefix: str
) -> None:
    outer, inner = f"{prefix}outer", f"{prefix}inner"
    nested = Txn((absent(outer),), (Put(inner, b"then"),), (Put(inner, b"else"),))
    result = await client.commit(Txn((), (Put(outer, b""), nested)))
    then = result.responses[1]
    assert isinstance(then, TxnResult)
    assert then.succeeded
    written = await client.get(inner)
    assert written is not None
    assert (written.value, written.mod_revision) == (b"then", result.revision)


async def test_126_claims_in_nested_transactions_succeed_independently(client: EtcdClient, prefix: str) -> None:
    claims = tuple(
        Txn((absent(f"{prefix}{number}"),), (Put(f"{prefix}{number}", b"me"),), (Get(f"{prefix}{number}"),))
        for number in range(126)
    )
    await client.commit(Txn((), (Put(f"{prefix}7", b"other"),)))
    result = await client.commit(Txn((absent(f"{prefix}gate"),), claims))
    taken = [part.succeeded for part in result.responses if isinstance(part, TxnResult)]
    assert len(taken) == 126
    assert taken.count(False) == 1


@pytest.mark.malformed
@pytest.mark.parametrize(
    ("operations", "words"),
    [
        (tuple(Put(f"many.{number}", b"") for number in range(129)), "too many operations"),  # T1
        ((Put("twice", b"1"), Put("twice", b"2")), "duplicate key"),  # T3
        ((Put("large", b"x" * 1_700_000),), "too large"),  # T2
        ((Put("larger", b"x" * 3_000_000),), "larger than max"),
        ((Put("", b""),), "key is not provided"),
    ],
)
async def test_etcd_rejects_a_malformed_transaction(
    client: EtcdClient, operations: tuple[Put, ...], words: str
) -> None:
    with pytest.raises(EtcdRejected, match=words):
        await client.commit(Txn((), operations), deadline=5)


async def test_a_response_larger_than_the_default_limit_of_grpc_is_read(client: EtcdClient, prefix: str) -> None:  # T2
    for number in range(5):
        await client.commit(Txn((), (Put(f"{prefix}{number}", bytes(1_200_000)),)))
    listing = await client.list(prefix, f"{prefix}9")
    assert sum(len(pair.value) for pair in listing.kvs) == 6_000_000


async def test_a_put_on_a_missing_lease_fails(client: EtcdClient, prefix: str) -> None:
    with pytest.raises(LeaseNotFound):
        await client.commit(Txn((), (Put(f"{prefix}key", b"", lease=12345),)))


async def test_keys_with_special_characters_are_listed_unchanged(client: EtcdClient, prefix: str) -> None:
    keys = [f"{prefix}{name}" for name in ("a", "a.b", "ab", "%2E", "ü", "\udcff")]
    await client.commit(Txn((), tuple(Put(key, b"") for key in keys)))
    listing = await client.list(prefix, f"{prefix[:-1]}/")
    assert {pair.key for pair in listing.kvs} == set(keys)


async def test_a_full_database_rejects_a_put_and_raises_the_alarm(small_etcd: EmbeddedEtcd) -> None:  # T8
    async with connected(small_etcd.endpoint) as client:
        assert "database space exceeded" in str(await fill_database(client))
        assert await client.alarms() == ("NOSPACE",)
        assert (await client.status()).alarms == ("NOSPACE",)
        assert await client.get("fill0") is not None  # reads still succeed

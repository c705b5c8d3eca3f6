"""Transactions that etcd rejects as invalid, and which ones may be grouped."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.protocol.transaction_groups import GROUP_BYTES, fitting_count, independent_count, merged
from distop.protocol.txn import (
    ENVELOPE_BYTES,
    MAX_OPERATIONS,
    MAX_REQUEST_BYTES,
    Compare,
    Delete,
    Get,
    Put,
    Relation,
    Target,
    Txn,
    TxnOperation,
    absent,
    exists,
    flaw,
    largest_value,
    none_within,
    operations,
    request_bytes,
    value_is,
)
from distop.store.etcd_messages import encode_txn
from distop.testing import ModelStore

names = st.sampled_from(["a", "a.b", "a.c", "b", "b.c", "ü"])
spans = st.sampled_from([("a", "b"), ("a.b", "a.c"), ("a.", "c"), ("b", "b.c"), ("c", "a")])
places = names.map(lambda name: (name, "")) | spans
values = st.sampled_from([b"", b"1", b"x" * 300])


@st.composite
def compares(draw: st.DrawFn) -> Compare:
    key, end = draw(places)
    target = draw(st.sampled_from(list(Target)))
    value = draw(values) if target is Target.VALUE else draw(st.sampled_from([0, 1, 127, 128, 1 << 40]))
    return Compare(key, target, draw(st.sampled_from(list(Relation))), value, end)


puts = st.builds(Put, names, values, st.sampled_from([0, 1, 1 << 62]))
deletes = places.map(lambda place: Delete(*place))
gets = st.builds(
    lambda place, limit, only, count: Get(*place, limit, only, count),
    *(places, st.sampled_from([0, 1, 1000]), st.booleans(), st.booleans()),
)
plain: st.SearchStrategy[TxnOperation] = puts | deletes | gets
conditions = st.lists(compares(), max_size=2).map(tuple)


def nested(within: st.SearchStrategy[TxnOperation]) -> st.SearchStrategy[Txn]:
    some = st.lists(within, max_size=3).map(tuple)
    return st.builds(Txn, conditions, some, some)


transactions = nested(plain | nested(plain | nested(plain)))


@given(transactions)
def test_the_computed_bytes_of_a_request_are_exact(txn: Txn) -> None:
    assert request_bytes(txn) == encode_txn(txn).ByteSize()


@pytest.mark.parametrize(
    ("ops", "key"),
    [
        ((Put("k", b""), Put("k", b"")), "k"),
        ((Put("k", b""), Delete("k")), "k"),
        ((Put("k.x", b""), Delete("k", "l")), "k.x"),
        ((Delete("k", "l"), Txn((), (Put("k.x", b""),))), "k.x"),
        ((Put("k", b""), Txn((), (), (Put("k", b""),))), "k"),
        ((Txn((), (Put("k", b""),)), Txn((), (), (Put("k", b""),))), "k"),
        ((Txn((), (Txn((), (Put("k", b""), Put("k", b""))),)),), "k"),
        ((Txn((), (Delete("k", "l"),)), Txn((), (Put("k", b""),))), "k"),
    ],
)
def test_a_key_written_twice_is_a_flaw(ops: tuple[TxnOperation, ...], key: str) -> None:
    for txn in (Txn((), ops, (), "end"), Txn((), (), ops, "end")):
        found = flaw(txn)
        assert found is not None
        assert (found.key, found.detail) == (key, "etcdserver: duplicate key given in txn request")
        assert found.text == f"the transaction 'end' puts {key!r} twice, or puts and deletes it"


@pytest.mark.parametrize(
    "ops",
    [
        (Delete("k"), Delete("k", "l"), Get("k")),
        (Txn((), (Put("k", b""),), (Put("k", b""),)),),
        (Put("l", b""), Delete("k", "l")),
        # A later one may delete what an earlier one puts: so etcd says.
        (Txn((), (Put("k", b""),)), Txn((), (Delete("k"),))),
    ],
)
def test_a_valid_transaction_has_no_flaw(ops: tuple[TxnOperation, ...]) -> None:
    assert flaw(Txn((), ops)) is None


def test_the_operations_of_nested_transactions_count_with_those_around_them() -> None:
    def deep(outer: int, inner: int) -> Txn:
        reads = tuple(Get(f"k{n}") for n in range(inner))
        return Txn((), (*(Get("k") for _ in range(outer - 1)), Txn((), (), reads)), (), "claim")

    assert flaw(deep(100, 28)) is None
    found = flaw(deep(100, 29))
    assert found is not None
    assert found.text == "a list of the transaction 'claim' has 29 entries; etcd accepts 28"
    assert operations(deep(100, 28)) == MAX_OPERATIONS


def test_empty_keys_and_bytes() -> None:
    for empty in (Txn((absent(""),)), Txn((), (Put("", b""),)), Txn((), (), (Txn((), (Get(""),)),))):
        found = flaw(empty)
        assert found is not None
        assert found.detail == "etcdserver: key is not provided"
    large = Txn((), (Put("small", b""), Txn((), (Put("large", b"x" * 1_000_000),))))
    assert largest_value(large) == ("large", 1_000_000)
    room = MAX_REQUEST_BYTES - ENVELOPE_BYTES - request_bytes(large)
    one = Txn((), (*large.success, Put("more", b"x" * (room - 20))))
    assert MAX_REQUEST_BYTES - ENVELOPE_BYTES - 8 <= request_bytes(one) <= MAX_REQUEST_BYTES - ENVELOPE_BYTES
    assert flaw(one) is None
    found = flaw(replace(one, success=(*one.success, Put("last", b""))))
    assert found is not None
    assert (found.key, found.detail) == ("large", "etcdserver: request is too large")


# ------------------------------------------------------------------- grouping


@given(st.lists(transactions, min_size=2, max_size=5), st.data())
def test_grouped_writes_equal_sequential_writes_in_any_order(parts: list[Txn], data: st.DataObject) -> None:
    """And etcd accepts the group in each order."""
    parts = [part for part in parts if flaw(part) is None]
    parts = parts[: fitting_count(parts)]
    whole = merged(parts)
    assert flaw(whole) is None
    assert flaw(Txn((), tuple(parts))) is None
    before = data.draw(st.lists(names, unique=True))
    stores = [ModelStore() for _ in range(3)]
    for store in stores:
        store.grant(1)
        store.grant(1 << 62)
        for name in before:
            store.apply(Txn((), (Put(name, b"1"),)))
    stores[0].apply(Txn((), tuple(parts)))
    for store, order in zip(stores[1:], (parts, parts[::-1]), strict=True):
        # Revisions of one transaction are one: what is compared with a revision is not what is grouped here.
        store.apply(Txn((), ()))
        for part in order:
            store.apply(part)
    states = [[(kv.key, kv.value, kv.lease) for kv in store.listing()] for store in stores]
    assert states[0] == states[1] == states[2]


def test_parts_with_conflicting_keys_are_not_grouped() -> None:
    first = Txn((absent("a"),), (Put("b", b""), Delete("c", "d")))
    for part in (
        Txn((), (Put("b", b""),)),
        Txn((), (Delete("b"),)),
        Txn((), (Delete("a.", "bb"),)),
        Txn((), (Put("c.x", b""),)),
        Txn((), (Put("a", b""),)),
        Txn((exists("b"),), ()),
        Txn((none_within("b", "c"),), ()),
        Txn((value_is("c.x", b""),), ()),
        Txn((), (Txn((), (), (Txn((), (Put("c.y", b""),)),)),)),
        Txn((), (Txn((absent("c"),)),)),
    ):
        for one, other in itertools.permutations((first, part)):
            assert fitting_count([one, other]) == 1, part
    beside = Txn((absent("a"),), (Delete("c.x"), Delete("cc", "dd"), Put("d", b"")))
    for part in (beside, Txn((exists("a"),), (Get("b"),))):
        assert fitting_count([first, part]) == 2
    assert independent_count([first, beside, Txn((), (Put("e", b""),)), Txn((exists("e"),)), beside]) == 3


def test_a_shared_guard_counts_once_and_the_largest_nested_list_counts_for_all() -> None:
    guard = absent("election")
    parts = [Txn((guard, absent(f"k{n}")), (Put(f"k{n}", b""),)) for n in range(200)]
    assert fitting_count(parts) == MAX_OPERATIONS - 1
    assert len(merged(parts[: MAX_OPERATIONS - 1]).compares) == MAX_OPERATIONS
    deep = Txn((), (Txn((), tuple(Get(f"n{n}") for n in range(10))),))
    assert fitting_count([deep, *parts]) == MAX_OPERATIONS - 10
    common = Txn((guard,), tuple(Put(f"c{n}", b"") for n in range(100)), (Get("c"),), "finish")
    assert fitting_count(parts, common) == 28
    assert merged(parts[:1], common).label == "finish"
    assert merged(parts[:1], common).failure == (Get("c"),)


def test_bytes_limit_a_group_but_one_part_always_fits() -> None:
    parts = [Txn((), (Put(f"k{n}", b"x" * (GROUP_BYTES // 3)),)) for n in range(5)]
    assert fitting_count(parts) == 3
    assert fitting_count([Txn((), (Put("k", b"x" * 2 * GROUP_BYTES),)), *parts]) == 1
    assert fitting_count([Txn((), tuple(Put(f"k{n}", b"") for n in range(300)))]) == 1
    assert fitting_count([]) == 0

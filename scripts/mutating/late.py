"""Late copies: a request whose answer was lost is on its way still, and is applied long after its repetition (T9).

A schedule draws a few such copies. Here each transaction of a schedule is held against the store again at each later
revision, without being applied: where one guard alone refuses it, a copy that arrives at that moment shows what the
guard is for. The mutant is then run with that one copy.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from distop.core.txn import Txn
from distop.errors import EtcdRejected
from distop.testing.simulation.etcd import SimEtcd
from mutating.hooks import Observed, client
from mutating.transactions import AND, GUARD, Holds, Left, kind_of_compare, place_within, without

MOST, MOST_OF_PAIRS = 6, 2
"""Copies that are noted for each guard, and for each pair of guards, in one schedule."""

Copy = tuple[int, int]
"""The number of a transaction among those that were sent, and the revision after which its copy arrives."""


class Late:
    """Which copies of which transactions one guard alone refuses: (number, revision) for each guard."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._sent: dict[Txn, int] = {}
        self._known: set[tuple[Left, int]] = set()
        self.copies: defaultdict[Left, list[Copy]] = defaultdict(list)

    def reset(self) -> None:
        """Another schedule begins."""
        self.__init__(self._observed)  # type: ignore[misc]

    def applied(self, txn: Txn) -> None:
        """It was applied, or refused."""
        labelled = self._observed.labelled(txn)
        if labelled is not None:
            self._sent.setdefault(labelled, len(self._sent))

    def moved(self, etcd: SimEtcd) -> None:
        """The store has a new revision: hold all that was sent against it."""
        holds, revision = etcd.store._holds, etcd.store.revision
        for txn, number in self._sent.items():
            for left in _refused_alone(txn, holds, txn.label):
                most = MOST if AND not in left.what else MOST_OF_PAIRS
                if (left, number) not in self._known and len(self.copies[left]) < most:
                    self._known.add((left, number))
                    self.copies[left].append((number, revision))


def _refused_alone(txn: Txn, holds: Holds, place: str) -> Iterator[Left]:
    """The guards that alone, or as a pair, refuse a transaction, or a nested one that is reached."""
    kinds: set[str] = set()
    for compare in txn.compares:
        if not holds(compare):
            kinds.add(kind_of_compare(compare))
            if len(kinds) > 2:
                break
    if 1 <= len(kinds) <= 2:
        yield Left(place, GUARD, AND.join(sorted(kinds)))
    for op in txn.failure if kinds else txn.success:
        if isinstance(op, Txn):
            yield from _refused_alone(op, holds, place_within(place, op))


@contextlib.contextmanager
def watching(late: Late) -> Iterator[None]:
    """Tell it of what each simulated etcd does."""
    answer, commit = SimEtcd._txn, SimEtcd._commit

    def answered(self: SimEtcd, member: Any, txn: Any, sender: str) -> Any:
        if isinstance(txn, Txn):
            late.applied(txn)
        return answer(self, member, txn, sender)

    def committed(self: SimEtcd, before: int, sender: str) -> None:
        commit(self, before, sender)
        if self.store.revision != before:
            late.moved(self)

    with _replaced(answered, committed):
        yield


@contextlib.contextmanager
def _replaced(answered: Any, committed: Any) -> Iterator[None]:
    former = SimEtcd._txn, SimEtcd._commit
    answers = _answers()
    SimEtcd._txn, SimEtcd._commit = answered, committed  # type: ignore[method-assign]
    answers[_PATH] = answered
    try:
        yield
    finally:
        SimEtcd._txn, SimEtcd._commit = former  # type: ignore[method-assign]
        answers[_PATH] = former[0]


_PATH = "/etcdserverpb.KV/Txn"


def _answers() -> Any:
    from distop.testing.simulation import etcd

    return etcd._ANSWERS


@contextlib.contextmanager
def labelling(left: Left | None) -> Iterator[Observed]:
    """What is sent is known by its label, also the transactions of a mutant: as the code built them."""
    observed, encode = Observed(), client.encode_txn

    def encoded(txn: Txn) -> Any:
        observed.sent(without(txn, left) if left is not None else txn, txn)
        return encode(txn)

    client.encode_txn = encoded
    try:
        yield observed
    finally:
        client.encode_txn = encode


@contextlib.contextmanager
def arriving(copy: Copy, left: Left | None) -> Iterator[None]:
    """Have a copy of one transaction arrive; of the mutant's, where one is given."""
    number, revision = copy
    sent: dict[Txn, int] = {}
    found: list[tuple[Txn, str]] = []
    answer, commit = SimEtcd._txn, SimEtcd._commit

    def answered(self: SimEtcd, member: Any, txn: Any, sender: str) -> Any:
        labelled = observed.labelled(txn) if isinstance(txn, Txn) else None
        if labelled is not None and labelled not in sent:
            sent[labelled] = len(sent)
            if sent[labelled] == number:
                found.append((txn, sender))
        return answer(self, member, txn, sender)

    def committed(self: SimEtcd, before: int, sender: str) -> None:
        commit(self, before, sender)
        if before < revision <= self.store.revision and found:
            self.loop.world_at(self.loop.now, arrive, self)

    def arrive(self: SimEtcd) -> None:
        (txn, sender), before = found[0], self.store.revision
        with contextlib.suppress(EtcdRejected):
            self.store.apply(txn)
            self._commit(before, sender)

    with labelling(left) as observed, _replaced(answered, committed):
        yield

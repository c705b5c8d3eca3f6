"""Late copies: a request that is applied long after its repetition (T9).

Schedules draw a few such copies. Here each transaction of a schedule is tested against the store again, without being
applied, at each later revision that changes a key it compares. Where one guard alone refuses it, a copy that arrives at
that moment shows what the guard is for. The mutant is then run with that one copy.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from distop.errors import EtcdRejected
from distop.protocol.txn import Compare, Txn
from distop.testing.model_store import ModelStore
from mutating.hooks import Observed, client
from mutating.transaction_mutants import AND, Holds, Mutant, failed, place_within, refusing, without
from tests.simulator.sim_etcd import SimEtcd

MOST, MOST_OF_PAIRS = 6, 2
"""Maximum copies in one schedule for each guard, and for each pair of guards."""

Copy = tuple[int, int]
"""The number of a transaction among those that were sent, and the revision after which its copy arrives."""


class Late:
    """Which late copies one guard alone refuses: guard → (number, revision)."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._sent: dict[Txn, int] = {}
        self._numbered: list[Txn] = []
        self._of_key: defaultdict[str, set[int]] = defaultdict(set)
        """Key → the transactions that compare it."""
        self._of_range: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        self._new: set[int] = set()
        """Transactions that were not tested yet."""
        self._revision = 0
        """The last revision against which transactions were tested."""
        self._known: set[tuple[Mutant, int]] = set()
        self.copies: defaultdict[Mutant, list[Copy]] = defaultdict(list)

    def reset(self) -> None:
        """Start again for another schedule."""
        self.__init__(self._observed)  # type: ignore[misc]

    def applied(self, txn: Txn) -> None:
        """Remember a transaction that was sent."""
        labelled = self._observed.labelled(txn)
        if labelled is None or labelled in self._sent:
            return
        number = self._sent[labelled] = len(self._sent)
        self._numbered.append(labelled)
        self._new.add(number)
        for compare in _compares(labelled):
            if compare.range_end:
                self._of_range[compare.key, compare.range_end].add(number)
            else:
                self._of_key[compare.key].add(number)

    def moved(self, etcd: SimEtcd) -> None:
        """Test the transactions that were sent against the store's new revision."""
        holds, revision = etcd.store._holds, etcd.store.revision
        for number in sorted(self._affected(etcd.store)):
            txn = self._numbered[number]
            for mutant in _refused_alone(txn, holds, txn.label):
                most = MOST if AND not in mutant.what else MOST_OF_PAIRS
                if (mutant, number) not in self._known and len(self.copies[mutant]) < most:
                    self._known.add((mutant, number))
                    self.copies[mutant].append((number, revision))

    def _affected(self, store: ModelStore) -> set[int]:
        """New transactions, and those that compare a key that has changed: the others are refused as before."""
        written = store.between(self._revision + 1, store.revision)
        changed = {change.kv.key for _, changes in written for change in changes}
        found, self._new, self._revision = self._new, set(), store.revision
        for key in self._of_key.keys() & changed:
            found |= self._of_key[key]
        for (start, end), numbers in self._of_range.items():
            if any(start <= key < end for key in changed):
                found |= numbers
        return found


def _compares(txn: Txn) -> Iterator[Compare]:
    """The compares of a transaction and of its nested ones."""
    yield from txn.compares
    for op in (*txn.success, *txn.failure):
        if isinstance(op, Txn):
            yield from _compares(op)


def _refused_alone(txn: Txn, holds: Holds, place: str) -> Iterator[Mutant]:
    """Guards that, alone or as a pair, refuse a transaction or a nested one."""
    failing = failed(txn, holds)
    yield from refusing(txn, failing, place)
    for op in txn.failure if failing else txn.success:
        if isinstance(op, Txn):
            yield from _refused_alone(op, holds, place_within(place, op))


@contextlib.contextmanager
def watching(late: Late) -> Iterator[None]:
    """Have ``late`` observe each simulated etcd."""
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
    from tests.simulator import sim_etcd as etcd

    return etcd._ANSWERS


@contextlib.contextmanager
def labelling(mutant: Mutant | None) -> Iterator[Observed]:
    """Recognize the transactions that are sent by their labels, also a mutant's."""
    observed, encode = Observed(), client.encode_txn

    def encoded(txn: Txn) -> Any:
        observed.sent(without(txn, mutant) if mutant is not None else txn, txn)
        return encode(txn)

    client.encode_txn = encoded
    try:
        yield observed
    finally:
        client.encode_txn = encode


@contextlib.contextmanager
def arriving(copy: Copy, mutant: Mutant | None) -> Iterator[None]:
    """Have a late copy of one transaction arrive; the mutant's, if one is given."""
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

    with labelling(mutant) as observed, _replaced(answered, committed):
        yield

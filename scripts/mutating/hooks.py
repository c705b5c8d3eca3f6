"""Where transactions leave for the store: there they are observed, and there one mutant changes them.

Production code has no hook. The two functions through which every transaction passes are wrapped: the client's encoder,
and the model of etcd that the unit tests apply labelled transactions to. A label is not sent, so what the model of the
simulator is given is recognized by its value.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from distop.core.txn import Txn, TxnResult
from distop.store import client as _client
from distop.testing.model_store import ModelStore
from mutating import sources
from mutating.transactions import Left, all_left, decisive, without

client: Any = _client
"""The module whose encoder is wrapped."""


class Observed:
    """What transactions did: ``seen`` has all mutants of those that were built, ``decisive`` counts how often each
    would have changed one that was applied.
    """

    def __init__(self) -> None:
        self.seen: set[Left] = set()
        self.decisive: Counter[Left] = Counter()
        self._sent: dict[Txn, Txn] = {}

    def sent(self, txn: Txn, labelled: Txn | None = None) -> None:
        """The client sends it: the label is known by its value from now on. ``labelled``: as the code built it."""
        self._sent[txn] = labelled if labelled is not None else txn

    def labelled(self, txn: Txn) -> Txn | None:
        """The transaction with its label; None where it has none. What came from the wire is known by its value."""
        labelled = txn if txn.label else self._sent.get(txn)
        return labelled if labelled is not None and labelled.label else None

    def applied(self, store: ModelStore, txn: Txn) -> None:
        """The model applies it, with its label or as it came from the wire."""
        labelled = self.labelled(txn)
        if labelled is None:
            return
        self.seen.update(all_left(labelled))
        self.decisive.update(set(decisive(labelled, store._holds)))

    def reached(self, left: Left) -> None:
        """The statement that a mutant of source changes is about to run."""
        self.decisive[left] += 1

    def reset(self) -> None:
        """Begin to count anew."""
        self.decisive = Counter()
        self._sent.clear()


@contextlib.contextmanager
def observing(observed: Observed) -> Iterator[None]:
    """Tell it of each transaction that is sent or applied, and of each statement that a mutant of source changes, which
    stay marked in this process.
    """
    sources.mark(observed.reached)
    encode, apply = client.encode_txn, ModelStore.apply

    def encoded(txn: Txn) -> Any:
        observed.sent(txn)
        return encode(txn)

    def applied(self: ModelStore, txn: Txn) -> TxnResult:
        observed.applied(self, txn)
        return apply(self, txn)

    client.encode_txn = encoded
    ModelStore.apply = applied  # type: ignore[method-assign]
    try:
        yield
    finally:
        client.encode_txn = encode
        ModelStore.apply = apply  # type: ignore[method-assign]


def plant(left: Left) -> None:
    """From now on, in this process, the code is the mutant."""
    if left.mode in sources.MODES:
        sources.change(left)
        return
    encode, apply = client.encode_txn, ModelStore.apply
    client.encode_txn = lambda txn: encode(without(txn, left))
    ModelStore.apply = lambda self, txn: apply(self, without(txn, left) if txn.label else txn)  # type: ignore[method-assign]

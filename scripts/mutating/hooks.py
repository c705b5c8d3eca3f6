"""Wraps the functions that send transactions, to observe or to mutate them.

Production code has no hook. Every transaction passes through the client's encoder, or, in unit tests, through the
model of etcd. A label is not sent, so a transaction that comes from the wire is recognized by its value.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from distop.protocol.txn import Txn, TxnResult
from distop.store import client as _client
from distop.testing.model_store import ModelStore
from mutating import source_mutants
from mutating.transaction_mutants import Mutant, all_mutants, decisive, without

client: Any = _client
"""The module whose encoder is wrapped."""


class Observed:
    """What transactions did.

    ``seen``: all mutants of the transactions that were built. ``decisive``: how often each would have changed one that
    was applied.
    """

    def __init__(self) -> None:
        self.seen: set[Mutant] = set()
        self.decisive: Counter[Mutant] = Counter()
        self.read_children: Callable[[], None] = lambda: None
        """Counts the statements that were reached in the worker's children."""
        self._sent: dict[Txn, Txn] = {}

    def sent(self, txn: Txn, labelled: Txn | None = None) -> None:
        """Remember the label of a transaction that the client sends.

        ``labelled``: the transaction as the code built it.
        """
        self._sent[txn] = labelled if labelled is not None else txn

    def labelled(self, txn: Txn) -> Txn | None:
        """The transaction with its label; None where it has none.

        One from the wire is recognized by its value.
        """
        labelled = txn if txn.label else self._sent.get(txn)
        return labelled if labelled is not None and labelled.label else None

    def applied(self, store: ModelStore, txn: Txn) -> None:
        """Count a transaction that the model applies, with its label or from the wire."""
        labelled = self.labelled(txn)
        if labelled is None:
            return
        self.seen.update(all_mutants(labelled))
        self.decisive.update(set(decisive(labelled, store._holds)))

    def reached(self, mutant: Mutant) -> None:
        """The statement that a source mutant changes is about to run."""
        self.decisive[mutant] += 1

    def keep(self, prefix: str) -> None:
        """Forget the mutants outside of the modules with this prefix."""
        self.decisive = Counter({one: n for one, n in self.decisive.items() if one.place.startswith(prefix)})

    def reset(self) -> None:
        """Begin to count anew."""
        self.decisive = Counter()
        self._sent.clear()


@contextlib.contextmanager
def observing(observed: Observed, *, statements: bool = True) -> Iterator[None]:
    """Observe each transaction, and with ``statements`` each statement that a source mutant changes.

    The statements stay marked in this process.
    """
    if statements:
        observed.read_children = source_mutants.mark(observed.reached)
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


def plant(mutant: Mutant) -> None:
    """Change the code of this process into the mutant."""
    if mutant.mode in source_mutants.MODES:
        source_mutants.change(mutant)
        return
    encode, apply = client.encode_txn, ModelStore.apply
    client.encode_txn = lambda txn: encode(without(txn, mutant))
    ModelStore.apply = lambda self, txn: apply(self, without(txn, mutant) if txn.label else txn)  # type: ignore[method-assign]

"""Transaction mutants: pure functions that leave something out of a transaction.

A transaction is a value, so its mutants are generated. A mutant names a *place* (the transaction's label, and for a
nested one the labels on the way to it) and a *kind* of compare or write (what it asks of which kind of key). All
compares of that kind at that place are left out together. Some mutants leave out only the first or the last of several
compares or writes of a kind, like code that drops an element of a batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from distop.protocol.txn import Compare, Delete, Get, Put, Relation, Target, Txn, TxnOperation, exists, none_within

GUARD, GUARD_FIRST, GUARD_LAST = GUARDS = ("guard", "guard-first", "guard-last")
"""What a mutant leaves out: the compares of a kind; the first, or the last, of several compares of a kind."""
WRITE, FIRST, LAST = WRITES = ("write", "first", "last")
"""The writes of a kind; the first, or the last, of several writes of a kind or of several nested transactions."""
MODES = (*GUARDS, *WRITES)

AND = " + "
"""Between two kinds of compares that are left out together."""
NOWHERE = "~"
"""A key that no transaction writes, and that sorts behind all of distop's."""
NOTHING = Delete(NOWHERE)
"""A write without effect. It stands in the place of the one that is left out, so that results keep their positions."""
CALLERS = "a caller's key"
"""The kind of keys outside of distop. What a user's transaction compares and writes there is not distop's to guard."""
EACH = "each"
"""The name of a nested transaction without a label."""

_EDGE = re.compile(r"[0-9a-f]{20}")
_ORDINAL = re.compile(r"[0-9]{6}")
_WORDS = {
    (Target.CREATE, Relation.EQUAL): "is absent",
    (Target.CREATE, Relation.GREATER): "exists",
    (Target.MOD, Relation.EQUAL): "is unchanged",
    (Target.MOD, Relation.LESS): "is older",
    (Target.MOD, Relation.GREATER): "is newer",
    (Target.VALUE, Relation.EQUAL): "has this value",
    (Target.VALUE, Relation.NOT_EQUAL): "has another value",
}


@dataclass(frozen=True, order=True)
class Mutant:
    """What one mutant changes.

    ``mode``: one of ``MODES`` for a transaction, else one of ``source_mutants.MODES``.
    """

    place: str
    mode: str
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.mode} {self.what}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of compares: one, or two that back each other."""
        return tuple(self.what.split(AND))


@lru_cache(maxsize=100_000)
def kind_of_key(key: str, range_end: str = "") -> str:
    """The kind of a key: ``claim``, ``state``, ``job state``, ``chunk`` …

    It is the key's family, or the name of an operation's own key.
    """
    family, *rest = key.rpartition("/")[2].split(".")
    if not family.startswith("distOp"):
        return CALLERS
    numbers = [n for n, part in enumerate(rest) if n >= 2 and part.isdigit()]
    tail = rest[numbers[0] + 1 :] if numbers else []
    if family == "distOp" and not numbers:
        words = rest[-1:] if rest else []
    else:
        family = family.removeprefix("distOp") or "job"
        named = [part for part in tail if part and not part.isdigit() and not _EDGE.fullmatch(part)]
        ordinal = any(_ORDINAL.fullmatch(part) for part in tail)
        if family == "job" and not ordinal:
            words = named or ["own keys"]
        elif family == "job":
            words = ["chunk"] if named == ["plan"] else ["job", *named]
        else:
            words = [_spaced(family), *named]
    return " ".join([*words, *(["range"] if range_end else [])])


def _spaced(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def kind_of_compare(compare: Compare) -> str:
    """The key and what is asked of it."""
    words = _WORDS.get((compare.target, compare.relation), f"{compare.target.name} {compare.relation.name}")
    return f"{kind_of_key(compare.key, compare.range_end)} {words.lower()}"


def kind_of_write(op: Put | Delete) -> str:
    """The verb and the key."""
    if isinstance(op, Put):
        return f"put {kind_of_key(op.key)}"
    return f"delete {kind_of_key(op.key, op.range_end)}"


def place_within(place: str, nested: Txn) -> str:
    """The place of a nested transaction.

    One without compares and label only groups writes: they belong to the place around it.
    """
    if not nested.label and not nested.compares and not nested.failure:
        return place
    return f"{place} > {nested.label or EACH}"


def all_mutants(txn: Txn) -> Iterator[Mutant]:
    """All mutants of a transaction and of its nested ones; some may come twice."""
    yield from _mutants(txn, txn.label)


def _mutants(txn: Txn, place: str) -> Iterator[Mutant]:
    for kind, count in Counter(map(kind_of_compare, txn.compares)).items():
        for mode in GUARDS if count > 1 else (GUARD,):
            yield Mutant(place, mode, kind)
    for branch in (txn.success, txn.failure):
        yield from _written(branch, place)
        for op in branch:
            if isinstance(op, Txn):
                yield from _mutants(op, place_within(place, op))


def _written(branch: Sequence[TxnOperation], place: str) -> Iterator[Mutant]:
    """The writes of one branch that can be left out."""
    kinds = sorted(kind_of_write(op) for op in branch if isinstance(op, Put | Delete))
    for kind, alike in groupby(kinds):
        for mode in WRITES if len(list(alike)) > 1 else (WRITE,):
            yield Mutant(place, mode, kind)
    inner = sorted(place_within(place, op) for op in branch if isinstance(op, Txn))
    for nested, several in groupby(inner):
        if nested != place and len(list(several)) > 1:
            for mode in (FIRST, LAST):
                yield Mutant(nested, mode, "of several")


def without(txn: Txn, mutant: Mutant) -> Txn:
    """The transaction, nested ones included, without what the mutant leaves out."""
    return _without(txn, mutant, txn.label) if mutant.place.startswith(txn.label) else txn


def _without(txn: Txn, mutant: Mutant, place: str) -> Txn:
    return replace(
        txn,
        compares=_compares(txn.compares, mutant) if place == mutant.place else txn.compares,
        success=_branch(txn.success, mutant, place),
        failure=_branch(txn.failure, mutant, place),
    )


def _compares(compares: tuple[Compare, ...], mutant: Mutant) -> tuple[Compare, ...]:
    if mutant.mode not in GUARDS:
        return compares
    positions = [_positions(compares, kind) for kind in mutant.kinds]
    gone = {n for found in positions for n in found}
    if mutant.mode != GUARD:
        several = any(len(found) > 1 for found in positions)
        gone = {_end(mutant.mode, found) for found in positions if found and several}
    return tuple(one for n, one in enumerate(compares) if n not in gone)


def _positions(compares: Sequence[Compare], kind: str) -> list[int]:
    return [n for n, one in enumerate(compares) if kind_of_compare(one) == kind]


def _end(mode: str, alike: Sequence[int]) -> int:
    """The position of the first or the last, as the mode says."""
    return alike[0] if mode in (GUARD_FIRST, FIRST) else alike[-1]


def _branch(ops: tuple[TxnOperation, ...], mutant: Mutant, place: str) -> tuple[TxnOperation, ...]:
    kept: list[TxnOperation] = []
    for op in ops:
        if isinstance(op, Txn):
            kept.append(_without(op, mutant, place_within(place, op)))
        elif isinstance(op, Put | Delete) and mutant.mode == WRITE and place == mutant.place:
            kept.append(NOTHING if kind_of_write(op) == mutant.what else op)
        else:
            kept.append(op)
    if mutant.mode in (FIRST, LAST):
        matching = [n for n, op in enumerate(ops) if _is_one_of(op, mutant, place)]
        if len(matching) > 1:
            n = _end(mutant.mode, matching)
            one = ops[n]
            kept[n] = _silenced(one) if isinstance(one, Txn) else NOTHING
    return tuple(kept)


def _is_one_of(op: TxnOperation, mutant: Mutant, place: str) -> bool:
    """Whether this is one of the writes of which the mutant leaves out the first or the last."""
    if isinstance(op, Txn):
        return mutant.what == "of several" and place_within(place, op) == mutant.place and mutant.place != place
    return isinstance(op, Put | Delete) and place == mutant.place and kind_of_write(op) == mutant.what


def _silenced(txn: Txn) -> Txn:
    """A transaction that answers as if it had been applied, and writes nothing."""
    return Txn((), tuple(op if isinstance(op, Get) else NOTHING for op in txn.success), (), txn.label)


Holds = Callable[[Compare], bool]


def decisive(txn: Txn, holds: Holds) -> Iterator[Mutant]:
    """The mutants that would have changed what this transaction did.

    Guards that alone refused it (all failed compares are of one kind, or of two: a pair; the first or the last of
    several where only that one failed), and writes that it did. Deleting an absent key is no write. Nested transactions
    count where they are reached.
    """
    yield from _decisive(txn, holds, txn.label)


def _decisive(txn: Txn, holds: Holds, place: str) -> Iterator[Mutant]:
    failing = failed(txn, holds)
    yield from refusing(txn, failing, place)
    branch = txn.failure if failing else txn.success
    idle = {id(op) for op in branch if isinstance(op, Delete) and not _deletes(op, holds)}
    written = {kind_of_write(op) for op in branch if isinstance(op, Put | Delete) and id(op) not in idle}
    last = {kind_of_write(op): id(op) not in idle for op in branch if isinstance(op, Put | Delete)}
    first = {kind_of_write(op): id(op) not in idle for op in reversed(branch) if isinstance(op, Put | Delete)}
    effective = {WRITE: written, FIRST: {one for one in first if first[one]}, LAST: {one for one in last if last[one]}}
    for mutant in _written(branch, place):
        if mutant.place != place or mutant.what in effective[mutant.mode]:
            yield mutant
    for op in branch:
        if isinstance(op, Txn):
            yield from _decisive(op, holds, place_within(place, op))


def failed(txn: Txn, holds: Holds) -> dict[str, list[int]]:
    """The compares that fail: kind → positions. Those of more than two kinds need not be told apart: it ends there."""
    found: dict[str, list[int]] = {}
    for n, one in enumerate(txn.compares):
        if not holds(one):
            found.setdefault(kind_of_compare(one), []).append(n)
            if len(found) > 2:
                break
    return found


def refusing(txn: Txn, failing: dict[str, list[int]], place: str) -> Iterator[Mutant]:
    """The guards that, alone or as a pair, refuse a transaction of which these compares fail."""
    if not 1 <= len(failing) <= 2:
        return
    what = AND.join(sorted(failing))
    yield Mutant(place, GUARD, what)
    alike = {kind: _positions(txn.compares, kind) for kind in failing}
    if any(len(positions) > 1 for positions in alike.values()):
        for mode in (GUARD_FIRST, GUARD_LAST):
            if all(failing[kind] == [_end(mode, positions)] for kind, positions in alike.items()):
                yield Mutant(place, mode, what)


def _deletes(op: Delete, holds: Holds) -> bool:
    """Whether the deletion finds anything to delete."""
    return not holds(none_within(op.key, op.range_end)) if op.range_end else holds(exists(op.key))

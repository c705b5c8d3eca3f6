"""Mutants of transactions: pure functions from a transaction to the one that leaves something out.

A transaction is a value, so its mutants are generated. A mutant names a *place* (the transaction's label, and for a
nested one the labels on the way to it) and a *kind* of compare or write (what it asks of which kind of key). All
compares of that kind at that place are left out together; of writes there are also mutants that leave out only the last
of several, as code would that drops the last element of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from distop.core.txn import Compare, Delete, Get, Operation, Put, Relation, Target, Txn, exists, none_within

GUARD, WRITE, LAST = "guard", "write", "last"
"""What a mutant leaves out: the compares of a kind, the writes of a kind, the last of several writes of a kind."""

AND = " + "
"""Between two kinds of compares that are left out together."""
NOWHERE = "~"
"""A key that no transaction writes, and that sorts behind all of distop's."""
NOTHING = Delete(NOWHERE)
"""A write without effect. It stands in the place of the one that is left out, so that results keep their positions."""
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
class Left:
    """What one mutant leaves out of transactions: ``mode`` is GUARD, WRITE or LAST."""

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
    """The family of a key, or the name of an operation's own key: ``claim``, ``state``, ``job state``, ``chunk``."""
    family, *rest = key.rpartition("/")[2].split(".")
    if not family.startswith("distOp"):
        return "a caller's key"
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
    """The place of a nested transaction. One without compares and label is a parcel: its writes are those of what
    encloses it.
    """
    if not nested.label and not nested.compares and not nested.failure:
        return place
    return f"{place} > {nested.label or EACH}"


def all_left(txn: Txn) -> Iterator[Left]:
    """All mutants of a transaction and of those nested in it; some may come twice."""
    yield from _left(txn, txn.label)


def _left(txn: Txn, place: str) -> Iterator[Left]:
    for compare in txn.compares:
        yield Left(place, GUARD, kind_of_compare(compare))
    for branch in (txn.success, txn.failure):
        yield from _written(branch, place)
        for op in branch:
            if isinstance(op, Txn):
                yield from _left(op, place_within(place, op))


def _written(branch: Sequence[Operation], place: str) -> Iterator[Left]:
    """The writes of one branch that can be left out."""
    kinds = sorted(kind_of_write(op) for op in branch if isinstance(op, Put | Delete))
    for kind, alike in groupby(kinds):
        yield Left(place, WRITE, kind)
        if len(list(alike)) > 1:
            yield Left(place, LAST, kind)
    inner = sorted(place_within(place, op) for op in branch if isinstance(op, Txn))
    for nested, several in groupby(inner):
        if nested != place and len(list(several)) > 1:
            yield Left(nested, LAST, "of several")


def without(txn: Txn, left: Left) -> Txn:
    """The transaction, also in what is nested, without what the mutant leaves out."""
    return _without(txn, left, txn.label) if left.place.startswith(txn.label) else txn


def _without(txn: Txn, left: Left, place: str) -> Txn:
    compares = txn.compares
    if place == left.place and left.mode == GUARD:
        compares = tuple(one for one in compares if kind_of_compare(one) not in left.kinds)
    return replace(
        txn,
        compares=compares,
        success=_branch(txn.success, left, place),
        failure=_branch(txn.failure, left, place),
    )


def _branch(ops: tuple[Operation, ...], left: Left, place: str) -> tuple[Operation, ...]:
    kept: list[Operation] = []
    for op in ops:
        if isinstance(op, Txn):
            kept.append(_without(op, left, place_within(place, op)))
        elif isinstance(op, Put | Delete) and left.mode == WRITE and place == left.place:
            kept.append(NOTHING if kind_of_write(op) == left.what else op)
        else:
            kept.append(op)
    if left.mode == LAST:
        matching = [n for n, op in enumerate(ops) if _is_one_of(op, left, place)]
        if len(matching) > 1:
            last = ops[matching[-1]]
            kept[matching[-1]] = _silenced(last) if isinstance(last, Txn) else NOTHING
    return tuple(kept)


def _is_one_of(op: Operation, left: Left, place: str) -> bool:
    """It is one of those of which the mutant leaves out the last."""
    if isinstance(op, Txn):
        return left.what == "of several" and place_within(place, op) == left.place and left.place != place
    return isinstance(op, Put | Delete) and place == left.place and kind_of_write(op) == left.what


def _silenced(txn: Txn) -> Txn:
    """It answers as if it had been applied, and writes nothing."""
    return Txn((), tuple(op if isinstance(op, Get) else NOTHING for op in txn.success), (), txn.label)


Holds = Callable[[Compare], bool]


def decisive(txn: Txn, holds: Holds) -> Iterator[Left]:
    """The mutants that would have changed what this transaction did: guards that alone refused it (all that fail are of
    one kind, or of two: a pair), and writes that it did, of which a deletion of what is not there is none. Nested
    transactions are looked at where they are reached.
    """
    yield from _decisive(txn, holds, txn.label)


def _decisive(txn: Txn, holds: Holds, place: str) -> Iterator[Left]:
    failing = {kind_of_compare(one) for one in txn.compares if not holds(one)}
    if 1 <= len(failing) <= 2:
        yield Left(place, GUARD, AND.join(sorted(failing)))
    branch = txn.failure if failing else txn.success
    idle = {id(op) for op in branch if isinstance(op, Delete) and not _deletes(op, holds)}
    written = {kind_of_write(op) for op in branch if isinstance(op, Put | Delete) and id(op) not in idle}
    last = {kind_of_write(op): id(op) not in idle for op in branch if isinstance(op, Put | Delete)}
    for left in _written(branch, place):
        inner = left.place != place
        if inner or (left.what in written if left.mode == WRITE else last[left.what]):
            yield left
    for op in branch:
        if isinstance(op, Txn):
            yield from _decisive(op, holds, place_within(place, op))


def _deletes(op: Delete, holds: Holds) -> bool:
    """Something is there that it deletes."""
    return not holds(none_within(op.key, op.range_end)) if op.range_end else holds(exists(op.key))

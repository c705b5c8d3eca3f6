"""Identifies operations: ids and their holders, request ids, and digests.

Digests identify a plan, which ties its chunks to it; what a start asks for; and an edge between two operations.

The id of an operation shows that two starts ask for the same. This module compares and combines their arguments by what
the behavior publishes. Arguments are compared as JSON, with the published schema's defaults for missing fields, and
with 1.0 equal to 1. So no code of the behavior is needed. Pure.

``distOpUnique.<table>.<type>.<id>`` names the holder of an id: its operation that has not ended (invariant 18). The
start's transaction writes it. The transaction that ends the operation deletes it, if it still names that operation. An
operation that waits for another of the same id *follows* it. The key then names the follower. If the follower is
cancelled while the other still runs, the key names the other again. An exhaustive exploration of a model checked the
compares.

An operation of a series keeps its id after its end, until the next operation takes it or its last keys are deleted. So
no other start takes the id in between.

``distOpRequest.<table>.<type>.<request id>`` names the operation that a request id has started, if the caller chose the
id (invariant 14). The start's transaction writes it. It is deleted with the operation's history record, if it still
names that operation. The start needs no compare for it: the id is looked up after the counters were read, and every
start of the type on the table changes the instance counter. An operation of a graph that was given up never started;
then the next start of the request writes the key again.

A request id that distop generates has no key: only a caller who was told that the outcome is unknown repeats it. It is
looked up in the specs of active operations and in the history.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import dumps, loads, word
from distop.protocol.records import OperationRef, State
from distop.protocol.txn import (
    Compare,
    Delete,
    Put,
    Txn,
    TxnOperation,
    absent,
    is_not,
    none_within,
    unchanged,
    value_is,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.keys import Keys
    from distop.protocol.records import Cancel, History, Spec


def plan_digest(chunks: Iterable[bytes]) -> str:
    """SHA-256 in hex over the chunks' bytes in order (invariant 13)."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def request_digest(arg: bytes, partitions: Iterable[str] | None) -> str:
    """SHA-256 in hex over the argument and the partitions asked for, whatever the order of fields and names."""
    names = sorted(partitions) if partitions is not None else None
    asked = json.dumps([loads(arg), names], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(asked.encode()).hexdigest()


def edge_id(before: OperationRef, after: OperationRef) -> str:
    """The name of the edge between two operations: 80 bits of SHA-256 in hex."""
    return hashlib.sha256(f"{before}\n{after}".encode()).hexdigest()[:20]


COMPUTED = "@"
"""Prefix of computed ids, which no caller's id has."""
_ABSENT: Any = object()


def computed_id(declaration: Declaration, table: str, arg: bytes) -> str | None:
    """The id that is computed from the argument; None if the behavior wants none.

    The order of the fields does not matter.
    """
    if declaration.id_fields is None:
        return None
    fields = _fields(declaration, arg)
    named = [[name, fields.get(name)] for name in sorted(declaration.id_fields)]
    text = canonical([declaration.type_name, table, named])
    return COMPUTED + hashlib.sha256(text.encode()).hexdigest()[:32]


def differing(declaration: Declaration, stored: bytes, new: bytes) -> list[str]:
    """The fields that show that two arguments belong to different operations.

    Compared are the fields of the id, or all fields if the behavior names none. [""]: they differ and are not both
    objects.
    """
    before, after = loads(stored), loads(new)
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if canonical(before) == canonical(after) else [""]
    a, b = _fields(declaration, stored), _fields(declaration, new)
    names = declaration.id_fields if declaration.id_fields is not None else a.keys() | b.keys()
    return sorted(name for name in names if not _equal(a.get(name, _ABSENT), b.get(name, _ABSENT)))


def combined(declaration: Declaration, stored: bytes, new: bytes) -> bytes:
    """One argument for both, by the behavior's rules.

    ``stored`` itself, if the new one adds nothing to it. Raises InvalidArgument if a field without a rule differs, or a
    rule does not fit the values.
    """
    if not (isinstance(loads(stored), dict) and isinstance(loads(new), dict)):
        raise InvalidArgument(f"cannot combine arguments of {declaration.type_name}: both must be objects with fields")
    before, after = _fields(declaration, stored), _fields(declaration, new)
    found: dict[str, Any] = {}
    for name in dict.fromkeys((*before, *after)):
        a, b = before.get(name, _ABSENT), after.get(name, _ABSENT)
        rule = declaration.combine.get(name)
        if rule is not None:
            found[name] = _combine(rule, name, a, b)
        elif _equal(a, b):
            found[name] = a
        else:
            raise InvalidArgument(
                f"{name!r} differs, and {declaration.type_name} has no rule to combine it "
                f"(it has rules for {', '.join(sorted(declaration.combine))})"
            )
    return stored if canonical(found) == canonical(before) else dumps(found)


def canonical(value: Any) -> str:
    """The canonical text of a JSON value: sorted keys, 1.0 as 1."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _equal(a: Any, b: Any) -> bool:
    if a is _ABSENT or b is _ABSENT:
        return a is b
    return canonical(a) == canonical(b)


def _fields(declaration: Declaration, arg: bytes) -> dict[str, Any]:
    """The argument's fields, with the published defaults for missing ones."""
    value = loads(arg)
    properties = declaration.arg_schema.get("properties")
    known = properties.items() if isinstance(properties, dict) else ()
    defaults = {name: one["default"] for name, one in known if isinstance(one, dict) and "default" in one}
    return {**defaults, **value} if isinstance(value, dict) else defaults


# --------------------------------------------------------------------- combine


def _combine(rule: str, name: str, a: Any, b: Any) -> Any:
    """Two values of a field, combined by its rule.

    A missing value or null adds nothing; but null may be the value of the rule "last".
    """
    if rule in ("first", "last"):
        first, last = (a, b) if rule == "first" else (b, a)
        return last if first is _ABSENT else first
    if b is _ABSENT or b is None:
        return None if a is _ABSENT else a
    if a is _ABSENT or a is None:
        return b
    fits, combine = _RULES[rule]
    if not (fits(a, b)):
        raise InvalidArgument(
            f"{name!r} cannot be combined by the rule {rule!r}: the values are {_shortened(a)} and {_shortened(b)}"
        )
    return combine(a, b)


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(a: Any, b: Any) -> bool:
    return _number(a) and _number(b)


def _texts(a: Any, b: Any) -> bool:
    return isinstance(a, str) and isinstance(b, str)


def _lists(a: Any, b: Any) -> bool:
    return isinstance(a, list) and isinstance(b, list)


def _union(a: list[Any], b: list[Any]) -> list[Any]:
    """The items of both, each once, in order."""
    found: dict[str, Any] = {}
    for one in (*a, *b):
        found.setdefault(canonical(one), one)
    return list(found.values())


_RULES: Mapping[str, tuple[Callable[[Any, Any], bool], Callable[[Any, Any], Any]]] = {
    "union": (_lists, _union),
    "concat": (lambda a, b: _lists(a, b) or _texts(a, b), lambda a, b: a + b),
    "max": (lambda a, b: _numbers(a, b) or _texts(a, b), max),
    "min": (lambda a, b: _numbers(a, b) or _texts(a, b), min),
    "sum": (_numbers, lambda a, b: a + b),
}
RULES: Sequence[str] = (*_RULES, "last", "first")
"""How two values of a field are combined (``Behavior.combine``).

All rules are associative; ``sum`` as far as numbers are.
"""


@frozen
class Takes:
    """How a start takes its id.

    ``holder``: the operation that the key names, if any, with ``mod``, the mod revision of its state as read (0: it is
    gone). The holder has ended without releasing the id (an old release), or it is followed. Or it is ``replaced``: it
    is pending, and ends in the same transaction with these records. ``alone``: no successor may then wait for it;
    without it, successors are signalled.
    """

    id: str
    holder: OperationRef | None = None
    mod: int = 0
    replaced: tuple[History, Cancel] | None = None
    alone: bool = False


def holder_of(value: bytes) -> OperationRef:
    """The operation that an id's key names. Raises ValueError for any other value."""
    try:
        return OperationRef.parse(value.decode())
    except InvalidArgument as error:
        raise ValueError(str(error)) from None


def id_guards(keys: Keys, ref: OperationRef, takes: Takes) -> tuple[Compare, ...]:
    """Guards of a start that takes an id.

    Without a holder: the key is absent. With one: the key still names it and its state is unchanged; with ``alone`` it
    has no successor.
    """
    key, holder = keys.unique(ref.table, ref.type, takes.id), takes.holder
    if holder is None:
        return (absent(key),)
    seen = (value_is(key, word(str(holder))), unchanged(keys.of(holder, "state"), takes.mod))
    return (*seen, none_within(*keys.edges_range(holder, "next"))) if takes.alone else seen


def id_put(keys: Keys, ref: OperationRef, takes: Takes) -> Put:
    """The write of the id's key, which names the operation from its start on."""
    return Put(keys.unique(ref.table, ref.type, takes.id), word(str(ref)))


def id_releases(keys: Keys, ref: OperationRef, history: History) -> tuple[TxnOperation, ...]:
    """The writes that release the id of an operation that ends with this record.

    Nothing if it has no id, or if the next operation of a series may take it. Guard: the key still names the operation.
    If it followed another operation that has not ended, the key names that one again.
    """
    if not history.id or may_come_again(bool(history.series), history.state):
        return ()
    key = keys.unique(ref.table, ref.type, history.id)
    back: TxnOperation = Delete(key)
    followed = _followed(ref, history)
    if followed is not None:
        state = keys.of(followed, "state")
        going_on = tuple(is_not(state, word(end)) for end in State if end.terminal)
        back = Txn(going_on, (Put(key, word(str(followed))),), (Delete(key),), "give_back")
    return (Txn((value_is(key, word(str(ref))),), (back,), (), "release_id"),)


def _followed(ref: OperationRef, history: History) -> OperationRef | None:
    """The operation that it followed; None if there is none.

    None also if the record names an operation of another table or type. Otherwise a user who may only write one table's
    keys could learn whether that operation has ended.
    """
    try:
        found = OperationRef.parse(history.follows)
    except InvalidArgument:
        return None
    return found if (found.table, found.type) == (ref.table, ref.type) else None


def may_come_again(series: bool, ended: State) -> bool:
    """Whether an operation that ended in this state may have a next one; it is started during cleanup."""
    return series and ended is not State.CANCELLED


def series_id_releases(keys: Keys, ref: OperationRef, id_: str) -> tuple[TxnOperation, ...]:
    """The writes that release the id of an operation of a series with its last keys.

    Guard: the key still names the operation, so no next one has taken the id.
    """
    if not id_:
        return ()
    key = keys.unique(ref.table, ref.type, id_)
    return (Txn((value_is(key, word(str(ref))),), (Delete(key),), (), "release_id"),)


MADE = "auto-"
"""Prefix of generated request ids."""


def request_key_put(keys: Keys, ref: OperationRef, spec: Spec) -> Put:
    """The write of the request's key, which names the operation from its start on."""
    return Put(keys.request(ref.table, ref.type, spec.request_id), word(str(ref)))


def request_key_deletes(keys: Keys, ref: OperationRef, request_id: str) -> tuple[Txn, ...]:
    """The writes that delete the request's key when the history is deleted.

    Nothing if it cannot have one. Guard: the key still names the operation.
    """
    if not request_id or request_id.startswith(MADE):
        return ()
    key = keys.request(ref.table, ref.type, request_id)
    return (Txn((value_is(key, word(str(ref))),), (Delete(key),), (), "forget_request"),)

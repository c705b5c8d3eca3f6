"""Identifies operations: ids, who holds one, request ids, and digests of plans and starts.

Digests: of a plan, which ties its chunks to it, of what a start asks for, and of two operations, for their edge.

The id of an operation: what makes two starts the same, by what the behavior publishes; and how the arguments of two
such starts become one. Pure.

Arguments are judged as JSON, with the defaults that the published schema has for fields that are left out, and with
1.0 as 1: so it takes no code of the behavior to tell that two of them ask for the same.

Who holds an id: ``distOpUnique.<table>.<type>.<id>`` names the operation of it that has not ended (invariant 18).

It is put by the start's transaction, and deleted by the one that ends the operation, if it still names that. One that
shall run after another of the same id *follows* it: it waits for its end, and the key names the one that waits; if that
is cancelled while the other still runs, it names the other again. The clauses were checked by exhaustive exploration of
a model.

An operation of a series keeps its id beyond its end, until the next one has taken it or its last keys are deleted: so
nobody takes the id in between, who would find the series itself there a moment later.

Which operation a request id has started: ``distOpRequest.<table>.<type>.<request id>`` names it, where the caller
chose the id (invariant 14).

It is put by the start's transaction and deleted with the operation's history record, if it still names that: as long
as anything is known of the operation. The start compares nothing for it: the id is looked for after the counters were
read, and every start of the type on the table changes the counter of instances. What was part of a graph that was given
up was never started: then the next start of the request writes the key again.

An id that distop makes has no key, since nobody repeats it but who was told that the outcome is unknown: it is looked
for among the specs of what is active, and in the history.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import dumps, loads, word
from distop.protocol.records import OperationRef, State
from distop.protocol.txn import Compare, Delete, Operation, Put, Txn, absent, is_not, none_within, unchanged, value_is

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
"""How a computed id begins, and no id that a caller brings."""
_ABSENT: Any = object()


def computed_id(declaration: Declaration, table: str, arg: bytes) -> str | None:
    """The id that the behavior computes from the argument; None where it wants none. The order of the fields does not
    matter.
    """
    if declaration.id_fields is None:
        return None
    fields = _fields(declaration, arg)
    named = [[name, fields.get(name)] for name in sorted(declaration.id_fields)]
    text = canonical([declaration.type_name, table, named])
    return COMPUTED + hashlib.sha256(text.encode()).hexdigest()[:32]


def differing(declaration: Declaration, stored: bytes, new: bytes) -> list[str]:
    """The fields by which these arguments are those of two operations: among the id's, or among all where the behavior
    names none. [""]: they are no objects with fields, and not the same.
    """
    before, after = loads(stored), loads(new)
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if canonical(before) == canonical(after) else [""]
    a, b = _fields(declaration, stored), _fields(declaration, new)
    names = declaration.id_fields if declaration.id_fields is not None else a.keys() | b.keys()
    return sorted(name for name in names if not _equal(a.get(name, _ABSENT), b.get(name, _ABSENT)))


def combined(declaration: Declaration, stored: bytes, new: bytes) -> bytes:
    """One argument for both, by the behavior's rules: ``stored`` itself where the new one adds nothing to it.

    Raises InvalidArgument where a field without a rule differs, or a rule does not fit the values.
    """
    if not (isinstance(loads(stored), dict) and isinstance(loads(new), dict)):
        raise InvalidArgument(f"arguments of {declaration.type_name} are combined field by field, and these have none")
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
                f"(it has some for {', '.join(sorted(declaration.combine))})"
            )
    return stored if canonical(found) == canonical(before) else dumps(found)


def canonical(value: Any) -> str:
    """One text for all spellings of a JSON value: keys in order, 1.0 as 1."""
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
    """The argument's fields, with the published defaults of those that are left out."""
    value = loads(arg)
    properties = declaration.arg_schema.get("properties")
    known = properties.items() if isinstance(properties, dict) else ()
    defaults = {name: one["default"] for name, one in known if isinstance(one, dict) and "default" in one}
    return {**defaults, **value} if isinstance(value, dict) else defaults


# --------------------------------------------------------------------- combine


def _combine(rule: str, name: str, a: Any, b: Any) -> Any:
    """Two values of a field by its rule. One that is left out, or null, adds nothing; but null may be the last one."""
    if rule in ("first", "last"):
        first, last = (a, b) if rule == "first" else (b, a)
        return last if first is _ABSENT else first
    if b is _ABSENT or b is None:
        return None if a is _ABSENT else a
    if a is _ABSENT or a is None:
        return b
    fits, combine = _RULES[rule]
    if not (fits(a, b)):
        raise InvalidArgument(f"{name!r} cannot be combined by the rule {rule!r}: {_told(a)} and {_told(b)}")
    return combine(a, b)


def _told(value: Any) -> str:
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
    """Each once, in the order in which they came."""
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
"""How two values of a field become one (``Behavior.combine``). All of them are associative, ``sum`` as far as numbers
are.
"""


@frozen
class Takes:
    """How a start takes its id. ``holder``: whom the key names, if anybody, with ``mod``, the revision of its state as
    it was read (0: it is gone). It has ended, by a release that knows no ids, or is followed; or it is ``replaced``: it
    waits, and ends in the same transaction, in this way; then nobody may wait for it (``alone``), or who does is told
    that it ended.
    """

    id: str
    holder: OperationRef | None = None
    mod: int = 0
    replaced: tuple[History, Cancel] | None = None
    alone: bool = False


def holder_of(value: bytes) -> OperationRef:
    """Whom a key of an id names. Raises ValueError for what names nobody."""
    try:
        return OperationRef.parse(value.decode())
    except InvalidArgument as error:
        raise ValueError(str(error)) from None


def free_for(keys: Keys, ref: OperationRef, takes: Takes) -> tuple[Compare, ...]:
    """What the start of an operation that takes an id compares besides."""
    key, holder = keys.unique(ref.table, ref.type, takes.id), takes.holder
    if holder is None:
        return (absent(key),)
    seen = (value_is(key, word(str(holder))), unchanged(keys.of(holder, "state"), takes.mod))
    return (*seen, none_within(*keys.edges_range(holder, "next"))) if takes.alone else seen


def taken(keys: Keys, ref: OperationRef, takes: Takes) -> Put:
    """The key, which names the operation from its start on."""
    return Put(keys.unique(ref.table, ref.type, takes.id), word(str(ref)))


def freed(keys: Keys, ref: OperationRef, history: History) -> tuple[Operation, ...]:
    """What gives back the id of an operation that ends with this record; nothing without one, or if more may come."""
    if not history.id or may_come_again(bool(history.series), history.state):
        return ()
    key = keys.unique(ref.table, ref.type, history.id)
    back: Operation = Delete(key)
    followed = _followed(ref, history)
    if followed is not None:
        state = keys.of(followed, "state")
        going_on = tuple(is_not(state, word(end)) for end in State if end.terminal)
        back = Txn(going_on, (Put(key, word(str(followed))),), (Delete(key),), "give_back")
    return (Txn((value_is(key, word(str(ref))),), (back,), (), "release_id"),)


def _followed(ref: OperationRef, history: History) -> OperationRef | None:
    """What it followed; None also where the record names an operation of another table or type, or none: who may write
    one table's keys would learn whether that goes on.
    """
    try:
        found = OperationRef.parse(history.follows)
    except InvalidArgument:
        return None
    return found if (found.table, found.type) == (ref.table, ref.type) else None


def may_come_again(series: bool, ended: State) -> bool:
    """An operation (of a ``series``) that has ended so may have a next one: which is started when it is cleaned up."""
    return series and ended is not State.CANCELLED


def released(keys: Keys, ref: OperationRef, id_: str) -> tuple[Operation, ...]:
    """What gives back the id of an operation of a series with its last keys, where it has no next one."""
    if not id_:
        return ()
    key = keys.unique(ref.table, ref.type, id_)
    return (Txn((value_is(key, word(str(ref))),), (Delete(key),), (), "release_id"),)


MADE = "auto-"
"""How the request ids begin that are made here."""


def noted(keys: Keys, ref: OperationRef, spec: Spec) -> Put:
    """The key, from the start of the operation on."""
    return Put(keys.request(ref.table, ref.type, spec.request_id), word(str(ref)))


def forgotten(keys: Keys, ref: OperationRef, request_id: str) -> tuple[Txn, ...]:
    """What deletes the key of an operation of which nothing is kept any more; nothing where it cannot have one."""
    if not request_id or request_id.startswith(MADE):
        return ()
    key = keys.request(ref.table, ref.type, request_id)
    return (Txn((value_is(key, word(str(ref))),), (Delete(key),), (), "forget_request"),)

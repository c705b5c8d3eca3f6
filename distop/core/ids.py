"""The id of an operation: what makes two starts the same, by what the behavior publishes; and how the arguments of two
such starts become one. Pure.

Arguments are judged as JSON, with the defaults that the published schema has for fields that are left out, and with
1.0 as 1: so it takes no code of the behavior to tell that two of them ask for the same.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from distop.core.codec import dumps, loads
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.core.declaration import Declaration

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

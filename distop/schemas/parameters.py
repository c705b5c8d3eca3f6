"""The fields of a type's argument, for readers without JSON Schema (PolyCat C33)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.schemas.schema_bounds import BadSchema, check_form

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DEEPEST = 8
"""Maximum depth of followed references."""
_MOST_RULES = 300
"""Maximum rules that are read to name the types of one field: references to each other multiply them."""


@frozen
class Parameter:
    """One field of an argument.

    ``type``: for example ``integer``, ``array of Check``, ``string or integer``, ``any``; without ``null``, which
    ``nullable`` shows. ``required``: it has no default. ``default``: a JSON value; None also if there is no default.
    """

    name: str
    type: str
    nullable: bool
    required: bool
    default: Any = None
    description: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        return {
            "name": self.name,
            "type": self.type,
            "nullable": self.nullable,
            "required": self.required,
            "default": self.default,
            "description": self.description,
        }


def parameters(schema: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """The fields of an argument, in the order of its schema.

    Empty if the schema does not describe an object with named fields, or is not evaluated (``schema_bounds``).
    """
    try:
        check_form(schema)
    except BadSchema:
        return ()
    root = _followed(schema, schema)
    required = root.get("required") or ()
    found = []
    for name, rule in (root.get("properties") or {}).items():
        field = rule if isinstance(rule, dict) else {}
        kinds = list(dict.fromkeys(_kinds(field, schema, [_MOST_RULES])))
        named = [kind for kind in kinds if kind != "null"]
        found.append(
            Parameter(
                name,
                " or ".join(named) or ("null" if kinds else "any"),
                "null" in kinds or not kinds,
                name in required,
                field.get("default"),
                str(field.get("description") or _followed(field, schema).get("description") or "").partition("\n")[0],
            )
        )
    return tuple(found)


def _followed(rule: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a reference to a definition."""
    for _ in range(_DEEPEST):
        ref = str(rule.get("$ref", ""))
        if not ref.startswith("#/$defs/"):
            break
        rule = (root.get("$defs") or {}).get(ref.removeprefix("#/$defs/")) or {}
    return rule


def _kinds(rule: Any, root: Mapping[str, Any], left: list[int]) -> Iterator[str]:
    """The possible types of a field, by name. ``left``: the number of rules that may still be read."""
    left[0] -= 1
    if not isinstance(rule, dict) or left[0] < 0:
        return
    if "$ref" in rule:
        followed = _followed(rule, root)
        plain = followed.get("type") not in ("object", None) or "enum" in followed or "const" in followed
        yield from _kinds(followed, root, left) if plain else [str(rule["$ref"]).rpartition("/")[2]]
        return
    for branch in ("anyOf", "oneOf"):
        if branch in rule:
            for one in rule[branch]:
                yield from _kinds(one, root, left)
            return
    if "allOf" in rule and len(rule["allOf"]) == 1:
        yield from _kinds(rule["allOf"][0], root, left)
        return
    if "enum" in rule or "const" in rule:
        from json import dumps

        values = rule.get("enum", [rule.get("const")])
        yield from ("null" if value is None else dumps(value, ensure_ascii=False) for value in values)
        return
    named = rule.get("type")
    for kind in [named] if isinstance(named, str) else named or ():
        items = list(dict.fromkeys(_kinds(rule.get("items"), root, left))) if kind == "array" else []
        yield f"array of {' or '.join(items)}" if items else str(kind)

"""Bounds of the JSON Schemas of operation types: local references, linear-time patterns, limited size and depth.

A schema is untrusted data: a behavior publishes it, or a caller of ``register_type`` writes it, and every client that
starts an operation evaluates it. So it must fetch nothing, and its evaluation must take bounded time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from distop.protocol.json_codec import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BYTES = 128 * 1024
MAX_DEPTH = 64
"""Maximum levels of nested objects and arrays."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
UNIQUE_BY, ORDERED, SAME_LENGTH = "x-unique-by", "x-ordered", "x-same-length"
ROW_EXPRESSION = "x-row-expression"
"""distop's own keywords; ``distop.schemas.argument_schema`` implements them."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_PATTERN_MEMORY = 512 * 1024
"""Maximum bytes of a compiled pattern: RE2 refuses larger ones. The time of a match grows with that size."""


class BadSchema(ValueError):
    """A schema that is not evaluated; the message has the reason."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises BadSchema for a schema that is too large, refers to another document, or has a pattern that RE2 refuses.

    :func:`check_form` also checks that it is a JSON Schema, which loads a library.
    """
    try:
        size = len(dumps(dict(schema)))
    except RecursionError:
        raise BadSchema(f"it is nested more than {MAX_DEPTH} levels deep") from None
    if size > MAX_BYTES:
        raise BadSchema(f"it has {size} bytes, and at most {MAX_BYTES} are allowed")
    # Every object is checked, also outside of schema positions: a reference can use any object as a schema.
    level: list[Any] = [dict(schema)]
    root, depth = True, 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise BadSchema(f"it is nested more than {MAX_DEPTH} levels deep")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                _check_object(node, root=root)
                below += node.values()
            elif isinstance(node, list):
                below += node
        level, root = below, False


def check_form(schema: Mapping[str, Any]) -> None:
    """Raises BadSchema as :func:`check_schema` does, and for a value that is not a JSON Schema of draft 2020-12."""
    from jsonschema import Draft202012Validator, FormatChecker
    from jsonschema.exceptions import SchemaError

    check_schema(schema)
    try:
        # No formats: "regex" would compile each pattern with Python's own engine.
        Draft202012Validator.check_schema(dict(schema), format_checker=FormatChecker(()))
    except SchemaError as error:
        raise BadSchema(error.message) from None


def _check_object(node: Mapping[str, Any], *, root: bool) -> None:
    for name in _REFERENCES:
        target = node.get(name)
        if isinstance(target, str) and not target.startswith("#"):
            raise BadSchema(f"its reference {target[:100]!r} leads out of the schema: only {name} to '#…' is allowed")
    dialect = node.get("$schema")
    if isinstance(dialect, str) and not (root and dialect.rstrip("#") == DIALECT):
        raise BadSchema(f"its $schema {dialect[:100]!r} is not {DIALECT}, or is not at the top level")
    _check_rules(node)
    patterns = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
    if isinstance(node.get("patternProperties"), dict):
        patterns += node["patternProperties"]
        if "unevaluatedProperties" in node:
            raise BadSchema("it combines patternProperties with unevaluatedProperties: use additionalProperties")
    for pattern in patterns:
        compiled(pattern)


def _check_rules(node: Mapping[str, Any]) -> None:
    """A property of such a name has a schema, which is an object or a truth value."""
    for name in (UNIQUE_BY, ORDERED, SAME_LENGTH, ROW_EXPRESSION):
        value = node.get(name)
        if value is None or isinstance(value, dict | bool):
            continue
        names = [value] if name == UNIQUE_BY else value
        wrong = not isinstance(names, list) or not all(isinstance(one, str) for one in names)
        if wrong or (name == ORDERED and len(names) != 2):
            raise BadSchema(f"its {name} names no {'functions' if name == ROW_EXPRESSION else 'fields'}")


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> Any:
    """The pattern for RE2, which matches in time linear in the text. Raises BadSchema where RE2 does not support it."""
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _PATTERN_MEMORY
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0] if error.args else ""
        why = reason.decode(errors="replace") if isinstance(reason, bytes) else "it is not Unicode text"
        raise BadSchema(f"its pattern {pattern[:100]!r} is not supported by RE2 ({why[:100]})") from None


def matches(pattern: str, text: str) -> bool:
    """The pattern is found in the text. Raises BadSchema."""
    try:
        return compiled(pattern).search(text) is not None
    except UnicodeEncodeError:  # a lone surrogate, of which a record may have one
        return compiled(pattern).search(text.encode(errors="replace").decode()) is not None


def cost(pattern: str, text: str) -> int:
    """How much work a match is, in the unit of :data:`distop.schemas.argument_schema.MAX_STEPS`."""
    return 1 + len(text) * int(compiled(pattern).programsize) // 1000

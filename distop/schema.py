"""Arguments against the JSON Schema that a behavior has published: one clear sentence where one does not fit."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from distop.core.codec import dumps, loads
from distop.core.model import MAX_ARGUMENT_BYTES
from distop.core.texts import check_encoded
from distop.errors import InvalidArgument
from distop.row_expressions import refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

_SHOWN = 80
NOT_YET = "not available yet"
"""A property whose schema allows this one value alone is known, and refused until it is there."""

UNIQUE_BY = "x-unique-by"
"""A rule that JSON Schema has no word for, on an array: no two of its objects have the same value in the field that it
names. Who does not know it leaves it to the behavior.
"""
ORDERED = "x-ordered"
"""Another one, on an object: of the two fields that it names, the first is not greater than the second. It speaks of
two numbers, and of two dates as ``2013-01-31``; how other texts compare depends on what they are compared with.
"""
SAME_LENGTH = "x-same-length"
"""And another, on an object: of the two fields that it names, both of which are arrays, each has as many items."""
ROW_EXPRESSION = "x-row-expression"
"""And one on a text: it is a condition in Spark SQL on one row, and calls functions of this list only. What only
Spark's parser can tell is left to the behavior.
"""
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def encode_argument(arg: Any) -> bytes:
    """The argument as JSON (None: ``{}``; a pydantic model is dumped). Raises InvalidArgument for what is no JSON,
    and for over 512 KiB.
    """
    if arg is None:
        arg = {}
    dump = getattr(arg, "model_dump", None)
    if callable(dump):
        arg = dump(mode="json", exclude_unset=True)
    value = encode_json(arg, "the argument")
    if len(value) > MAX_ARGUMENT_BYTES:
        raise InvalidArgument(
            f"the argument has {len(value)} bytes; at most {MAX_ARGUMENT_BYTES} (512 KiB) are allowed: "
            "put large data into a file or a table that the jobs read, and name that"
        )
    return value


def encode_json(given: Any, what: str) -> bytes:
    """A caller's value as JSON for a record.

    Raises InvalidArgument for what is not JSON (NaN and infinities included), and for lone surrogates.
    """
    try:
        value = dumps(given)
        loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what} is not JSON: {error}") from None
    if b"NaN" in value or b"Infinity" in value:
        try:
            json.dumps(given, allow_nan=False)
        except ValueError:
            raise InvalidArgument(f"{what} holds NaN or an infinity, which JSON has no number for") from None
    check_encoded(value, what)
    return value


@lru_cache(maxsize=64)
def _validator(schema: bytes) -> Validator:
    from jsonschema import Draft202012Validator, validators

    extend: Any = validators.extend  # it has no types
    rules = {UNIQUE_BY: _unique_by, ORDERED: _ordered, SAME_LENGTH: _paired, ROW_EXPRESSION: _row_expression}
    made: Validator = extend(Draft202012Validator, rules)(loads(schema))
    return made


def _unique_by(validator: Validator, name: str, items: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    seen = []
    for item in items if isinstance(items, list) else ():
        value = item.get(name) if isinstance(item, dict) else None
        if value is not None and value in seen:
            shown = json.dumps(value, ensure_ascii=False)
            yield ValidationError(f"two of them have the {name} {shown}")
            return
        seen.append(value)


def _ordered(validator: Validator, names: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, dict):
        low, high = (instance.get(name) for name in names)
        if out_of_order(low, high):
            shown = [f"{name} ({json.dumps(value)})" for name, value in zip(names, (low, high), strict=True)]
            yield ValidationError(f"{shown[0]} is greater than {shown[1]}")


def _paired(validator: Validator, names: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    given: list[Any] = [instance.get(name) for name in names] if isinstance(instance, dict) else []
    lengths = [len(array) for array in given if isinstance(array, list)]
    if len(lengths) == len(names) and len(set(lengths)) > 1:
        shown = [f"{name} has {length} items" for name, length in zip(names, lengths, strict=True)]
        yield ValidationError(f"{' and '.join(shown)}: they belong together")


def _row_expression(
    validator: Validator, functions: Any, text: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    why = refusal(text, functions) if isinstance(text, str) else None
    if why is not None:
        yield ValidationError(why)


def out_of_order(low: Any, high: Any) -> bool:
    """What ``x-ordered`` refuses, for a model that has the rule too: the first of two numbers or dates is greater."""
    if isinstance(low, str) and isinstance(high, str):
        return bool(_DATE.fullmatch(low) and _DATE.fullmatch(high)) and low > high
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (low, high))
    return numbers and low > high


def check_argument(type_name: str, schema: Mapping[str, Any], value: bytes) -> Any:
    """The decoded argument. Raises InvalidArgument, which names the place and what is wrong there."""
    arg = loads(value)
    if not schema:
        return arg
    from jsonschema.exceptions import best_match

    if len(value) <= _KEPT and value in (fitting := _fitting(_spelled(schema))):
        return arg
    errors = list(_validator(_spelled(schema)).iter_errors(arg))
    if not errors and len(value) <= _KEPT:
        if len(fitting) >= _KEPT:
            fitting.clear()
        fitting.add(value)
    if errors:
        worst = _deepest(best_match(errors))
        raise InvalidArgument(f"the argument of {type_name} does not fit: {_sentence(worst, schema)}")
    return arg


_KEPT = 256
"""Bytes of an argument that is kept as one that fits, and how many are: the same one comes again and again."""


@lru_cache(maxsize=64)
def _fitting(schema: bytes) -> set[bytes]:
    return set()


_last: list[tuple[Mapping[str, Any], bytes]] = []


def _spelled(schema: Mapping[str, Any]) -> bytes:
    """The schema's text. It is asked for again and again for the same one, which nobody changes."""
    for one, text in _last:
        if one is schema:
            return text
    text = dumps(dict(schema))
    _last[:] = [(schema, text)]
    return text


def _deepest(error: ValidationError) -> ValidationError:
    """Of a value that fits none of several alternatives, what is wrong with the one that it comes nearest to."""
    while error.context:
        branches: dict[Any, list[ValidationError]] = {}
        for child in error.context:
            branches.setdefault(child.schema_path[0] if child.schema_path else 0, []).append(child)
        named = [group for group in branches.values() if not any(_foreign(child, error) for child in group)]
        if not named:
            return error
        nearest = min(named, key=lambda group: (len(group), -max(len(e.absolute_path) for e in group)))
        error = max(nearest, key=lambda e: len(e.absolute_path))
    return error


def _foreign(child: ValidationError, parent: ValidationError) -> bool:
    """The alternative is another kind of value altogether: another type, or other keys at the same place."""
    same_place = len(child.absolute_path) == len(parent.absolute_path)
    return same_place and child.validator in ("type", "required", "additionalProperties", "const", "enum")


def _at(parts: Iterable[str | int]) -> str:
    where = path(parts)
    return f"at {where}: " if where else ""


def _sentence(error: ValidationError, root: Mapping[str, Any]) -> str:
    at = _at(error.absolute_path)
    instance: Any = error.instance
    value = json.dumps(instance, ensure_ascii=False)
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
    limit: Any = error.validator_value
    schema: Any = error.schema
    kind = error.validator
    missing = [n for n in schema.get("required", ()) if n not in instance] if isinstance(instance, dict) else []
    if kind == "required" or (kind == "minProperties" and missing):
        return f"{at}{' and '.join(repr(m) for m in missing)} is missing"
    if kind == "additionalProperties" and isinstance(instance, dict):
        known = _available(schema)
        extra = [name for name in instance if name not in known]
        return f"{at}unknown field {', '.join(map(repr, extra))} (known: {', '.join(known) or 'none'})"
    if kind == "type":
        wanted = limit if isinstance(limit, str) else " or ".join(limit)
        return f"{at}{shown} is not of type {wanted}"
    if kind == "enum" and limit == [NOT_YET] and error.absolute_path:
        *parents, name = error.absolute_path
        return f"{_at(parents)}{name!r} is {NOT_YET}"
    if kind in ("minProperties", "maxProperties"):
        return at + _how_many(error, _owner(root, error.absolute_schema_path), limit)
    if kind == "enum":
        return f"{at}{shown} is none of {', '.join(json.dumps(v, ensure_ascii=False) for v in limit)}"
    if kind in ("anyOf", "oneOf"):
        names = alternatives(limit, schema)
        return f"{at}{shown} fits none of what is allowed there" + (f" ({', '.join(names)})" if names else "")
    if kind == "minItems":
        return f"{at}at least {limit} item{'s' if limit != 1 else ''} must be given"
    if kind == "maxItems":
        return f"{at}at most {limit} item{'s' if limit != 1 else ''} may be given, not {len(instance)}"
    if kind == "pattern" and schema.get("description"):
        return f"{at}{shown} is not {schema['description']}"
    return f"{at}{error.message.replace(repr(instance), shown)}"


def _available(schema: Mapping[str, Any]) -> list[str]:
    """The properties that may be given now."""
    return [
        name
        for name, rule in schema.get("properties", {}).items()
        if not (isinstance(rule, dict) and rule.get("enum") == [NOT_YET])
    ]


def _owner(root: Mapping[str, Any], parts: Iterable[str | int]) -> Mapping[str, Any]:
    """The innermost schema with properties on the way to a rule."""
    found: Mapping[str, Any] = {}
    node: Any = root
    for part in parts:
        if isinstance(node, dict) and "properties" in node:
            found = node
        node = node[int(part)] if isinstance(node, list) else node.get(part, {})
        while isinstance(node, dict) and str(node.get("$ref", "")).startswith("#/$defs/"):
            node = root.get("$defs", {}).get(node["$ref"].removeprefix("#/$defs/"), {})
    return found


def _how_many(error: ValidationError, owner: Mapping[str, Any], limit: int) -> str:
    """What a limit on the number of properties means: how many of those that are optional may stand there.

    Those that must be there, and those that a condition has found there, are counted in the limit and taken off.
    """
    instance: Any = error.instance
    rule: Any = error.schema
    always = {*owner.get("required", ()), *owner.get("if", {}).get("required", ())}
    choices = [name for name in _available(owner) if name not in always]
    number = limit - sum(name in instance for name in always)
    given = " and ".join(repr(name) for name in instance if name not in always) or "none"
    if not choices:
        return f"{'at least' if error.validator == 'minProperties' else 'at most'} {limit} fields must be given"
    if rule.get("minProperties") == rule.get("maxProperties"):
        bound = "exactly"
    else:
        bound = "at least" if error.validator == "minProperties" else "at most"
    return f"{bound} {'one' if number == 1 else number} of {', '.join(choices)} must be given (here: {given})"


def alternatives(branches: Iterable[Any], schema: Mapping[str, Any]) -> list[str]:
    """The names of the alternatives, as far as they have any: a reference's last part, or a type."""
    named = []
    for branch in branches:
        ref = branch.get("$ref", "") if isinstance(branch, dict) else ""
        name = ref.rpartition("/")[2] or (branch.get("title") or branch.get("type") if isinstance(branch, dict) else "")
        if isinstance(name, str) and name:
            named.append(name)
    return named


def path(parts: Iterable[str | int]) -> str:
    """``checks[0].range.min``."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text

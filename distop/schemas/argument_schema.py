"""Checks arguments against the JSON Schema of their behavior, with one clear sentence."""

from __future__ import annotations

import json
import re
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, UnreadableRecord
from distop.protocol.json_codec import dumps, loads
from distop.protocol.records import MAX_ARGUMENT_BYTES
from distop.protocol.texts import check_encoded, did_you_mean
from distop.schemas.row_expressions import refusal
from distop.schemas.schema_bounds import (
    ORDERED,
    ROW_EXPRESSION,
    SAME_LENGTH,
    UNIQUE_BY,
    BadSchema,
    check_form,
    cost,
    matches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

_SHOWN = 80
NOT_YET = "not available yet"
"""A property whose schema allows only this value is known, but refused until it is implemented."""

MAX_STEPS = 1_000_000
"""Maximum keywords evaluated for one argument: nested references multiply them without bound."""
QUICK_STEPS = 2_000
"""Steps that take less than 50 ms: more would block an event loop."""
_QUICK_SCHEMA = 2048
"""Maximum bytes of a new schema that an event loop may prepare."""
_MAX_ERRORS = 1_000
"""Maximum errors among which the reported one is chosen."""
# distop's keywords, for rules that JSON Schema cannot express. Other validators ignore them; the behavior checks them.
# UNIQUE_BY, on an array: no two of its objects have the same value in the named field.
# ORDERED, on an object: of the two named fields, the first is not greater than the second. It compares two numbers, or
# two dates such as 2013-01-31; the order of other texts depends on their type in the table.
# SAME_LENGTH, on an object: the two named fields are arrays with the same number of items.
# ROW_EXPRESSION, on a text: it is a Spark SQL condition on one row, and calls only functions of this list. The behavior
# checks what only Spark's parser can decide.
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def encode_argument(arg: Any) -> bytes:
    """The argument as JSON (None: ``{}``; a pydantic model is dumped).

    Raises InvalidArgument for a value that is not JSON, and for over 512 KiB.
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
            raise InvalidArgument(f"{what} has NaN or an infinity, which JSON cannot represent") from None
    check_encoded(value, what)
    return value


_steps: ContextVar[list[int]] = ContextVar("steps")
"""Number of steps left in the current evaluation."""


class _TooManySteps(Exception):
    """The evaluation exceeds its steps."""


class TakesLong(Exception):
    """The argument was not checked: that takes more than the given steps."""


def _count(steps: int) -> None:
    left = _steps.get()
    left[0] -= steps
    if left[0] < 0:
        raise _TooManySteps


def _counted(keyword: Callable[..., Any]) -> Callable[..., Any]:
    """The keyword's function with a count of its steps, by the size of its value in the schema."""

    def run(validator: Validator, value: Any, instance: Any, schema: Any) -> Any:
        _count(1 + (len(value) >> 4 if isinstance(value, list | dict) else 0))
        return _counted_errors(keyword(validator, value, instance, schema) or ())

    return run


def _counted_errors(errors: Iterable[ValidationError]) -> Iterator[ValidationError]:
    """Count the errors by the length of their texts, which contain the values.

    Alternatives keep the errors of all their branches.
    """
    for error in errors:
        _count(len(error.message) >> 6)
        yield error


_SCHEMAS = 64
_prepared: set[bytes] = set()
"""Schemas with a cached validator, now or a short time ago."""


@lru_cache(maxsize=_SCHEMAS)
def _validator(schema: bytes) -> Validator:
    """Raises BadSchema. Nothing is fetched, no format is checked, and patterns are RE2's."""
    from jsonschema import Draft202012Validator, validators
    from referencing import Registry

    plain: Any = loads(schema)
    check_form(plain)
    rules = dict(Draft202012Validator.VALIDATORS) | {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
        UNIQUE_BY: _unique_by,
        ORDERED: _ordered,
        SAME_LENGTH: _paired,
        ROW_EXPRESSION: _row_expression,
    }
    # By its dialect the library would choose its own class for what refers to the whole schema.
    plain.pop("$schema", None)
    extend: Any = validators.extend  # it has no types
    made: Any = extend(Draft202012Validator, {name: _counted(rule) for name, rule in rules.items()})
    found: Validator = made(plain, registry=Registry())
    if len(_prepared) >= _SCHEMAS:
        _prepared.clear()
    _prepared.add(schema)
    return found


def _found(pattern: str, text: str) -> bool:
    _count(cost(pattern, text))
    return matches(pattern, text)


def _pattern(validator: Validator, pattern: str, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not _found(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, rule in patterns.items():
            for name, value in instance.items():
                if _found(pattern, name):
                    yield from validator.descend(value, rule, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, rule: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    if not isinstance(instance, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extra = [name for name in instance if name not in known and not any(_found(one, name) for one in patterns)]
    if isinstance(rule, dict):
        for name in extra:
            yield from validator.descend(instance[name], rule, path=name)
    elif not rule and extra:
        yield ValidationError(f"unknown fields {', '.join(map(repr, extra))}")


def _same(value: Any) -> Any:
    """The value with one spelling of each number.

    For JSON Schema, 1 and 1.0 are equal, and 1 and true are not.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_same(one) for one in value]
    return {name: _same(one) for name, one in value.items()} if isinstance(value, dict) else value


def _spelling(value: Any) -> str:
    return json.dumps(_same(value), sort_keys=True)


def _unique_items(
    validator: Validator, wanted: Any, items: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    if wanted and isinstance(items, list) and len({_spelling(item) for item in items}) < len(items):
        yield ValidationError("it has two equal items")


def _unique_by(validator: Validator, name: str, items: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    seen = set()
    for item in items if isinstance(items, list) else ():
        value = item.get(name) if isinstance(item, dict) else None
        if value is None:
            continue
        spelling = _spelling(value)
        if spelling in seen:
            shown = json.dumps(value, ensure_ascii=False)
            yield ValidationError(f"two items have the {name} {shown}")
            return
        seen.add(spelling)


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
        yield ValidationError(f"{' and '.join(shown)}: both need the same number")


def _row_expression(
    validator: Validator, functions: Any, text: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    from jsonschema.exceptions import ValidationError

    if not isinstance(text, str):
        return
    _count(1 + len(text) * len(functions) // 10_000)
    why = refusal(text, functions)
    if why is not None:
        yield ValidationError(why)


def out_of_order(low: Any, high: Any) -> bool:
    """Whether ``x-ordered`` refuses two numbers or dates: the first is greater.

    Models with the same rule use it too.
    """
    if isinstance(low, str) and isinstance(high, str):
        return bool(_DATE.fullmatch(low) and _DATE.fullmatch(high)) and low > high
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (low, high))
    return numbers and low > high


def check_argument(type_name: str, schema: Mapping[str, Any], value: bytes, *, steps: int = MAX_STEPS) -> Any:
    """The decoded and checked argument.

    Raises InvalidArgument, with the place and the problem; UnreadableRecord if the type's published schema is not
    allowed (``schema_bounds``); TakesLong if ``steps`` is below the maximum and not enough.
    """
    arg = loads(value)
    if not schema:
        return arg
    from jsonschema.exceptions import best_match

    if len(value) <= _KEPT and value in (fitting := _fitting(_spelled(schema))):
        return arg
    if steps < MAX_STEPS and len(_spelled(schema)) > _QUICK_SCHEMA and _spelled(schema) not in _prepared:
        raise TakesLong
    errors = _errors(type_name, schema, arg, steps)
    if not errors and len(value) <= _KEPT:
        if len(fitting) >= _KEPT:
            fitting.clear()
        fitting.add(value)
    if errors:
        worst = _deepest(best_match(errors))
        raise InvalidArgument(f"the argument of {type_name} is invalid: {_sentence(worst, schema)}")
    return arg


def _errors(type_name: str, schema: Mapping[str, Any], arg: Any, steps: int) -> list[ValidationError]:
    from referencing.exceptions import Unresolvable

    _steps.set([steps])
    try:
        return list(islice(_validator(_spelled(schema)).iter_errors(arg), _MAX_ERRORS))
    except (BadSchema, Unresolvable) as error:
        # The type's publisher may use another release of distop, or other code.
        why = str(error) if isinstance(error, BadSchema) else "it has a reference to a missing definition"
        raise UnreadableRecord(
            f"the published schema of {type_name} cannot be used: {why:.300}; correct it and publish the type again"
        ) from None
    except (_TooManySteps, RecursionError) as error:
        if steps < MAX_STEPS and isinstance(error, _TooManySteps):
            raise TakesLong from None
        raise InvalidArgument(
            f"the argument of {type_name} takes too long to check against the type's schema: make the argument "
            "smaller, or the schema simpler"
        ) from None


_KEPT = 256
"""Maximum bytes of a cached valid argument, and maximum number of these: arguments repeat."""


@lru_cache(maxsize=64)
def _fitting(schema: bytes) -> set[bytes]:
    return set()


_last: list[tuple[Mapping[str, Any], bytes]] = []


def _spelled(schema: Mapping[str, Any]) -> bytes:
    """The schema's text, cached for the same object, which nobody changes."""
    for one, text in _last:
        if one is schema:
            return text
    text = dumps(dict(schema))
    _last[:] = [(schema, text)]
    return text


def _deepest(error: ValidationError) -> ValidationError:
    """The error of the alternative that the value matches best."""
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
    """Whether the alternative is for another kind of value: another type, or other keys."""
    same_place = len(child.absolute_path) == len(parent.absolute_path)
    return same_place and child.validator in ("type", "required", "additionalProperties", "const", "enum")


def _unknown(extra: Sequence[str], known: Sequence[str]) -> str:
    """``unknown field 'colum' (did you mean 'column'? known: column, type)``."""
    if len(extra) == 1:
        return f"unknown field {extra[0]!r}{did_you_mean(extra[0], known, 'known')}"
    named = ", ".join(f"{name!r}{did_you_mean(name, known)}" for name in extra)
    return f"unknown fields {named}; known: {', '.join(known) or 'none'}"


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
        return f"{at}{_unknown(extra, known)}"
    if kind == "type":
        wanted = limit if isinstance(limit, str) else " or ".join(limit)
        return f"{at}{shown} is not of type {wanted}"
    if kind == "enum" and limit == [NOT_YET] and error.absolute_path:
        *parents, name = error.absolute_path
        return f"{_at(parents)}{name!r} is {NOT_YET}"
    if kind in ("minProperties", "maxProperties"):
        return at + _how_many(error, _owner(root, error.absolute_schema_path), limit)
    if kind == "enum":
        hint = did_you_mean(instance, [v for v in limit if isinstance(v, str)])
        return f"{at}{shown} is none of {', '.join(json.dumps(v, ensure_ascii=False) for v in limit)}{hint}"
    if kind in ("anyOf", "oneOf"):
        names = alternatives(limit, schema)
        return f"{at}{shown} matches none of the allowed forms" + (f" ({', '.join(names)})" if names else "")
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
        if isinstance(node, list):
            node = node[int(part)]
        else:
            node = node.get(part, {}) if isinstance(node, dict) else {}
        while isinstance(node, dict) and str(node.get("$ref", "")).startswith("#/$defs/"):
            node = root.get("$defs", {}).get(node["$ref"].removeprefix("#/$defs/"), {})
    return found


def _how_many(error: ValidationError, owner: Mapping[str, Any], limit: int) -> str:
    """The sentence about a limit on the number of properties, in terms of the optional ones.

    Required properties, and those that a condition has matched, are subtracted from the limit.
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
    """The names of the alternatives: a reference's last part, or a type."""
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

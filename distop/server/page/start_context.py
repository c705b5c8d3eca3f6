"""The content of the view that starts an operation: fields from the JSON Schema of its argument."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, InvalidArgument
from distop.protocol.records import CLUSTER_TABLE
from distop.protocol.texts import shown
from distop.schemas.argument_schema import check_argument, encode_argument
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.behavior_declaration import Declaration
    from distop.server.page.local_channel import LocalChannel

PLAIN = {"string": "text", "number": "number", "integer": "number", "boolean": "boolean"}


async def start_context(channel: LocalChannel, type_name: str, table: str, text: str) -> dict[str, Any]:
    """The types and tables to choose from, and the fields of the chosen type's argument."""
    backend = channel.backend()
    declared = sorted(await backend.behaviors(), key=lambda one: one.type_name)
    tables = sorted(one.name for one in await backend.tables())
    chosen = next((one for one in declared if one.type_name == type_name), None)
    request = operations_pb2.StartRequest(type=type_name, table=table or CLUSTER_TABLE)
    request.arg.text = "{}"
    return {
        "types": [(one.type_name, one.description.strip().partition("\n")[0]) for one in declared if one.code],
        "tables": [*tables, CLUSTER_TABLE],
        "type": type_name,
        "table": table,
        "chosen": chosen,
        "fields": fields_of(chosen.arg_schema) if chosen is not None else [],
        "schema": json.dumps(dict(chosen.arg_schema), indent=2) if chosen is not None else "",
        "text": text or "{}",
        "may": bool(type_name and table) and channel.may("Operations/Start", request),
    }


def fields_of(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The properties of an object's schema, each with the kind of its field: text, number, boolean, choice or json."""
    defined, properties = schema.get("$defs"), schema.get("properties")
    if not isinstance(properties, dict):
        return []
    required = schema.get("required")
    found = []
    for name, rule in properties.items():
        one = _resolved(rule, defined)
        found.append({
            "name": str(name),
            "kind": _kind(one),
            "whole": one.get("type") == "integer",
            "choices": [value for value in one.get("enum", ()) if isinstance(value, str)],
            "required": isinstance(required, list) and name in required,
            "text": str(one.get("description") or ""),
            "default": json.dumps(one["default"]) if "default" in one else "",
        })  # fmt: skip
    return sorted(found, key=lambda field: not field["required"])


def _resolved(rule: Any, defined: Any) -> dict[str, Any]:
    """A property's schema: a reference is followed, and null is left out of alternatives."""
    one = rule if isinstance(rule, dict) else {}
    ref = one.get("$ref")
    if isinstance(ref, str) and isinstance(defined, dict):
        target = defined.get(ref.rpartition("/")[2])
        return {**target, **{k: v for k, v in one.items() if k != "$ref"}} if isinstance(target, dict) else {}
    if isinstance(options := one.get("anyOf"), list):
        others = [each for each in options if isinstance(each, dict) and each.get("type") != "null"]
        if len(others) == 1:
            return {**_resolved(others[0], defined), **{k: v for k, v in one.items() if k != "anyOf"}}
    return one


def _kind(rule: Mapping[str, Any]) -> str:
    choices = rule.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return "choice"
    kind = rule.get("type")
    return PLAIN.get(kind, "json") if isinstance(kind, str) else "json"


def parsed_argument(text: str) -> Any:
    """The JSON value in a form. Raises InvalidArgument, which names the place."""
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"the argument is not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError):
        raise InvalidArgument("the argument is not valid JSON") from None


def problem_of(declaration: Declaration | None, type_name: str, text: str) -> str:
    """What is wrong with an argument; "": nothing."""
    try:
        argument = parsed_argument(text)
        if declaration is None:
            return f"there is no operation type {shown(type_name)}"
        check_argument(type_name, declaration.arg_schema, encode_argument(argument))
    except DistopError as error:
        return str(error)
    return ""

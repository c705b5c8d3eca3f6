"""The OpenAPI document of the REST routes."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor

from distop import __version__
from distop.server.json_messages import ANY, DURATION, JSON, TIME, is_map
from distop.server.long_running import SERVICE as LONG_RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.descriptor import Descriptor

    from distop.server.http_routes import HttpRoute

_ERROR = {"$ref": "#/components/schemas/Error"}
_NESTED = re.compile(r"\{[a-z_]+\.")
"""The begin of a field of a field in a path, which has the name of the inner one in the document."""
_WHOLE = (
    FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)  # fmt: skip


def document(routes: Iterable[HttpRoute]) -> dict[str, Any]:
    """The document (OpenAPI 3.1) of these routes."""
    schemas: dict[str, Any] = {"Error": _error_schema()}
    paths: dict[str, Any] = {}
    routes_of: Counter[str] = Counter()
    for route in routes:
        path = _NESTED.sub("{", route.template.replace("=**", ""))
        made = _operation(route, schemas)
        routes_of[route.call] += 1
        if (number := routes_of[route.call]) > 1:
            made["operationId"] += f"_{number}"  # ids are unique, but a call may have several routes
        paths.setdefault(path, {})[route.verb.lower()] = made
    return {
        "openapi": "3.1.0",
        "info": {"title": "distop", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _operation(route: HttpRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    request = route.request.DESCRIPTOR
    parameters = [
        {"name": name.rpartition(".")[2], "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.fields
    ]
    tag = "LongRunning" if route.service == LONG_RUNNING else route.call.partition("/")[0]
    found: dict[str, Any] = {"operationId": route.call.replace("/", "_"), "tags": [tag]}
    if route.has_body:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(request, schemas)}}}
    else:
        parameters += [
            {"name": one.name, "in": "query", "required": False, "schema": _of(one, schemas)}
            for one in request.fields
            if one.name not in route.fields and one.message_type is None
        ]
    kind = "text/event-stream" if route.streams else "application/json"
    answer = {"description": "The answer.", "content": {kind: {"schema": _ref(route.response.DESCRIPTOR, schemas)}}}
    refused = {"description": "An error.", "content": {"application/json": {"schema": _ERROR}}}
    return {**found, "parameters": parameters, "responses": {"200": answer, "default": refused}}


def _ref(message: Descriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    name = message.full_name.removeprefix("distop.v1.")
    if name not in schemas:
        schemas[name] = {}  # a message may contain itself
        properties = {one.name: _of(one, schemas) for one in message.fields}
        schemas[name] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"$ref": f"#/components/schemas/{name}"}


def _of(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field."""
    if is_map(field):
        return {"type": "object", "additionalProperties": {"type": "string"}}
    one = _one(field, schemas)
    return {"type": "array", "items": one} if field.is_repeated else one


def _one(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    if field.message_type is not None:
        if field.message_type.full_name == JSON:
            return {"description": "Any JSON value."}
        if field.message_type.full_name == TIME:
            return {"type": "string", "format": "date-time"}
        if field.message_type.full_name == DURATION:
            return {"type": "string", "pattern": r"^-?[0-9]{1,12}(\.[0-9]{1,9})?s$"}
        if field.message_type.full_name == ANY:
            return {"type": "object", "properties": {"@type": {"type": "string"}}, "required": ["@type"]}
        return _ref(field.message_type, schemas)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return {"type": "boolean"}
    if field.cpp_type in _WHOLE:
        return {"type": "integer"}
    return {"type": "string"} if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else {"type": "number"}


def _error_schema() -> dict[str, Any]:
    texts = {name: {"type": "string"} for name in ("code", "message", "reason", "domain")}
    error = {
        "type": "object",
        "properties": {**texts, "retryable": {"type": "boolean"}},
        "required": ["code", "message"],
    }
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}

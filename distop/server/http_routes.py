"""The REST routes of the services, from the ``google.api.http`` annotations of their methods."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from google.api import annotations_pb2
from google.protobuf import descriptor_pool, message_factory

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

LONG_RUNNING = "/v1/longrunning"
_VERBS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "google.longrunning.Operations.GetOperation": ("GET", f"{LONG_RUNNING}/{{name=**}}"),
        "google.longrunning.Operations.ListOperations": ("GET", f"{LONG_RUNNING}/operations"),
        "google.longrunning.Operations.CancelOperation": ("POST", f"{LONG_RUNNING}/{{name=**}}:cancel"),
        "google.longrunning.Operations.WaitOperation": ("POST", f"{LONG_RUNNING}/{{name=**}}:wait"),
    }
)
"""Routes of Google's interface: its annotations have the paths of distop's own operations."""
_FIELD = re.compile(r"\{([a-z_.]+)(=\*\*)?\}")


@frozen
class HttpRoute:
    """One route of one method. ``fields``: of the request, which the path holds. ``service``: its full name."""

    service: str
    call: str
    verb: str
    template: str
    pattern: re.Pattern[str]
    fields: tuple[str, ...]
    has_body: bool
    streams: bool
    request: Any
    response: Any

    def match(self, verb: str, path: str) -> dict[str, str] | None:
        """The fields in a raw path; None: it is of another route."""
        found = self.pattern.fullmatch(path) if verb == self.verb else None
        return None if found is None else dict(zip(self.fields, map(unquote, found.groups()), strict=True))

    @property
    def specific(self) -> tuple[int, int]:
        """The sort key of a route: colons and characters outside fields. The route with the larger key is tried first.

        So `…/{op=**}:why` is tried before `…/{op=**}`, whose field would also match `:why`.
        """
        literal = _FIELD.sub("", self.template)
        return literal.count(":"), len(literal)


def routes(services: Iterable[str]) -> tuple[HttpRoute, ...]:
    """All routes of these services (full names), in the order in which they are tried."""
    return tuple(sorted(_routes(services), key=lambda one: one.specific, reverse=True))


def _routes(services: Iterable[str]) -> Iterator[HttpRoute]:
    for name in services:
        for method in descriptor_pool.Default().FindServiceByName(name).methods:
            for verb, template, has_body in _bindings(method):
                fields = tuple(found[1] for found in _FIELD.finditer(template))
                yield HttpRoute(
                    name,
                    f"{method.containing_service.name}/{method.name}",
                    verb,
                    template,
                    _compiled(template),
                    fields,
                    has_body,
                    method.server_streaming,
                    message_factory.GetMessageClass(method.input_type),
                    message_factory.GetMessageClass(method.output_type),
                )


def _bindings(method: Any) -> list[tuple[str, str, bool]]:
    """Verb, template, and whether there is a body, of each route of a method."""
    if method.full_name in _VERBS:
        verb, template = _VERBS[method.full_name]
        return [(verb, template, verb == "POST")]
    if method.full_name.startswith("google."):
        return []
    rule = method.GetOptions().Extensions[annotations_pb2.http]
    found = []
    for one in (rule, *rule.additional_bindings):
        verb = one.WhichOneof("pattern")
        found.append((verb.upper(), getattr(one, verb), bool(one.body)))
    return found


def _compiled(template: str) -> re.Pattern[str]:
    parts, at = [], 0
    for found in _FIELD.finditer(template):
        parts.append(re.escape(template[at : found.start()]))
        parts.append("([^:]+?)" if found[2] else "([^/:]+)")  # a colon before a verb; in a name it is %3A
        at = found.end()
    return re.compile("".join([*parts, re.escape(template[at:])]))


def set_path_fields(message: Any, values: Mapping[str, str]) -> None:
    """Set the fields of a request that its path holds; ``table.name`` is a field of a field."""
    for name, value in values.items():
        *outer, last = name.split(".")
        target = message
        for part in outer:
            target = getattr(target, part)
        setattr(target, last, value)

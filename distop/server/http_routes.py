"""The REST routes of the services, from the ``google.api.http`` annotations of their methods."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from google.api import annotations_pb2
from google.protobuf import descriptor_pool, message_factory

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_FIELD = re.compile(r"\{([a-z_.]+)(=\*\*)?\}")


@frozen
class HttpRoute:
    """One route of one method. ``fields``: of the request, which the path holds."""

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
        """The more literal a template is, the earlier it is tried."""
        literal = _FIELD.sub("", self.template)
        return literal.count(":"), len(literal)


def routes(services: Iterable[str]) -> tuple[HttpRoute, ...]:
    """All routes of these services (full names), in the order in which they are tried."""
    return tuple(sorted(_routes(services), key=lambda one: one.specific, reverse=True))


def _routes(services: Iterable[str]) -> Iterator[HttpRoute]:
    for name in services:
        for method in descriptor_pool.Default().FindServiceByName(name).methods:
            rule = method.GetOptions().Extensions[annotations_pb2.http]
            for one in (rule, *rule.additional_bindings):
                verb = one.WhichOneof("pattern")
                template = getattr(one, verb)
                fields = tuple(found[1] for found in _FIELD.finditer(template))
                yield HttpRoute(
                    f"{method.containing_service.name}/{method.name}",
                    verb.upper(),
                    template,
                    _compiled(template),
                    fields,
                    bool(one.body),
                    method.server_streaming,
                    message_factory.GetMessageClass(method.input_type),
                    message_factory.GetMessageClass(method.output_type),
                )


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

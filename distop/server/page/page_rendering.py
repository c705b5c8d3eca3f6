"""Renders the templates of the page. The template engine escapes all data; none of it is escaped by hand."""

from __future__ import annotations

import json
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from distop import __version__
from distop.cli.output import amount, duration
from distop.cli.page.content import moment
from distop.cli.page.page_file import visible
from distop.clock import time
from distop.protocol.json_codec import parse_time, rfc3339
from distop.services.operation_results import first_line
from distop.services.suggested_commands import command

if TYPE_CHECKING:
    from collections.abc import Mapping

TONES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("success", "valid", "started", "active"), "success"),
        **dict.fromkeys(("failed", "violated", "error", "unreadable", "lost"), "danger"),
        **dict.fromkeys(("cancelled", "paused", "pausing", "cancelling", "draining", "drained"), "attention"),
        **dict.fromkeys(("running", "open", "completing", "planning", "cleaning"), "active"),
        **dict.fromkeys(("waiting", "pending"), "idle"),
    }
)
"""State → its tone: the colour, together with the mark."""
MARKS = {"success": "✓", "danger": "✕", "attention": "❙❙", "active": "▶", "idle": "…"}


@cache
def environment() -> Environment:
    """The templates, with their filters."""
    found = Environment(
        loader=PackageLoader("distop.server.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "ago": lambda text: duration(max(0.0, time.time() - parse_time(text))) if text else "",
        "amount": amount,
        "command": lambda words: command(*words).strip("`"),
        "duration": lambda seconds: duration(seconds) if seconds is not None and seconds >= 0 else "",
        "first_line": first_line,
        "kind": lambda node: type(node).__name__,
        "moment": lambda given: moment(given if isinstance(given, str) else rfc3339(given)) if given else "",
        "number": lambda value: f"{value:,}" if isinstance(value, int) else str(value),
        "pretty": lambda value: json.dumps(value, ensure_ascii=False, indent=2, default=str),
        "mark": lambda state: MARKS[TONES.get(str(state), "idle")],
        "tone": lambda state: TONES.get(str(state), "idle"),
    }
    found.globals |= {"link": link, "version": __version__}
    return found


def link(path: str, **query: Any) -> str:
    """A path of the page with a query; values of None or "" are left out, and lists are repeated."""
    given = [(name, value) for name, value in query.items() if value not in (None, "", [], ())]
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def render(template: str, content: Mapping[str, Any]) -> str:
    """The HTML of a template."""
    return environment().get_template(template).render(**content)

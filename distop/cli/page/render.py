"""The page as HTML: one text that needs nothing else, neither files nor scripts nor the network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distop.cli.page.model import Page

_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""What no page may hold, or what turns the text around it: control characters, bidirectional overrides, surrogates."""


def render(page: Page) -> str:
    """The page. What comes from data is escaped by the templates' own rule, none of it by hand."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("distop.cli.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda node: type(node).__name__
    return environment.get_template("operation.html").render(page=page)


def _visible(value: Any) -> Any:
    """Characters that cannot be shown, as escapes. What a template has made is left as it is: it was made of such."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return _UNSEEN.sub(lambda found: found.group().encode("unicode-escape").decode(), value)
    return value

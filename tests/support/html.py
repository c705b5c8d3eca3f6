"""A strict parser of HTML pages: all elements must be closed, in the right order."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Parsed(HTMLParser):
    """``tags``: (name, attributes) in order; ``text``: the visible text, with white space as single blanks.

    Raises AssertionError if elements are not closed in the right order, or an element has an attribute twice.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self._open: list[str] = []
        self._texts: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], f"not closed: {self._open}"

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._texts).split())

    def all(self, tag: str, **attributes: str) -> list[dict[str, str]]:
        """The attributes of all elements with this name and these attributes."""
        return [found for name, found in self.tags if name == tag and attributes.items() <= found.items()]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> without an open element"
        assert self._open[-1] == tag, f"</{tag}> while <{self._open[-1]}> is open"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self._texts.append(data)

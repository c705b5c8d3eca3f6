"""All error messages have one style, so that one can be quoted inside another."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from distop import errors

ROOT = Path(__file__).resolve().parents[3]
OURS = {
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.DistopError) and name != "UsageError"
}
NAMES = ("Java ", "JAVA_HOME", "PySpark ", "Spark ", "Spark's ", "TLS ")
"""Names that always have a capital letter."""


def texts(path: Path) -> list[tuple[int, str, str]]:
    """Line, start and end of each message of a distop exception ("": a value)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OURS and node.args):
            continue
        message = node.args[0]
        parts = message.values if isinstance(message, ast.JoinedStr) else [message]
        first, last = ("" if not isinstance(p, ast.Constant) else str(p.value) for p in (parts[0], parts[-1]))
        found.append((node.lineno, first, last))
    return found


SOURCES = [
    path
    for folder in ("distop", "behaviors")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {"_proto", "v1"} & set(path.parts)
]


def test_messages_are_found() -> None:
    assert sum(len(texts(path)) for path in SOURCES) > 100


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_message_starts_with_a_small_letter_and_has_no_full_stop_at_its_end(path: Path) -> None:
    wrong = [
        f"{line}: {first[:40]!r} … {last[-20:]!r}"
        for line, first, last in texts(path)
        if (first[:1].isupper() and not first.startswith(NAMES)) or last.endswith(".")
    ]
    assert wrong == []

"""The bar that a person sees while waiting, on a terminal."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from distop.cli import command_context, output, wait_for_end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REF = "sales[eu]/[red]x/1"
TROUBLE = "planning, attempt 2 (the last one failed: RuntimeError: cannot list [/data/flights])"


class Watched:
    """An operation that waits for something, and ends once it was drawn."""

    ref = REF

    def __init__(self) -> None:
        self.drawn = asyncio.Event()

    async def wait(self, timeout: float | None) -> str:
        async with asyncio.timeout(10):
            await self.drawn.wait()
        return "its result"

    async def watch(self, interval: float) -> AsyncIterator[Any]:
        doing = ({"executor": "ann", "text": "scanning [a] files"},)
        counts = {"total": 4, "success": 1, "failed": 1}
        yield SimpleNamespace(jobs=counts, waiting_for=TROUBLE, eta_seconds=None, doing=doing)
        self.drawn.set()


async def test_names_and_errors_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=200, highlight=False)
    monkeypatch.setattr(output, "console", lambda **_: terminal)
    monkeypatch.setattr(command_context.current, "json", False)  # another test may have run a command with --json
    operation: Any = Watched()
    result: Any = await wait_for_end.follow(operation)
    assert result == "its result"
    assert REF in screen.getvalue()
    assert "cannot list [/data/flights]" in screen.getvalue()
    assert "1 failed, ann: scanning [a] files, waits for" in screen.getvalue()
    assert "2/4" in screen.getvalue()

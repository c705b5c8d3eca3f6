"""Progress while a command waits: a bar on a terminal, a line for each change elsewhere."""

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
WAITING_FOR = "planning, attempt 2 (the last one failed: RuntimeError: cannot list [/data/flights])"


class Watched:
    """An operation that waits for planning and ends once its progress is drawn."""

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
        yield SimpleNamespace(jobs=counts, waiting_for=WAITING_FOR, eta_seconds=None, doing=doing, work=None)
        self.drawn.set()


async def test_names_and_errors_are_not_rendered_as_markup(monkeypatch: pytest.MonkeyPatch) -> None:
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


class Changing:
    """An operation with these statuses; it ends after the last one."""

    ref = "t/validate/1"

    def __init__(self, *statuses: Any) -> None:
        self.statuses = statuses
        self.ended = asyncio.Event()

    async def wait(self, timeout: float | None) -> str:
        async with asyncio.timeout(10):
            await self.ended.wait()
        return "its result"

    async def watch(self, interval: float) -> AsyncIterator[Any]:
        for status in self.statuses:
            yield status
        self.ended.set()


def status(success: int, text: str = "", waiting_for: str | None = None, eta: float | None = None, **other: Any) -> Any:
    doing = ({"executor": "ann", "text": text},) if text else ()
    counts = {"total": 9, "success": success, "failed": 0, **other.pop("jobs", {})}
    fields = {"jobs": counts, "doing": doing, "waiting_for": waiting_for, "eta_seconds": eta, "ended": False}
    fields |= {"work": None, **other}
    return SimpleNamespace(**fields)


async def test_piped_output_has_a_line_for_each_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Piped output had no lines, so a log showed no progress."""
    monkeypatch.setattr(output, "console", lambda **_: Console(file=io.StringIO(), force_terminal=False))
    monkeypatch.setattr(command_context.current, "json", False)
    operation: Any = Changing(
        status(0, waiting_for="planning", jobs={"total": None}),
        status(0, "starting Spark"),
        status(0, "starting Spark", eta=9.0),
        status(4, "scanning 9 files", eta=8.0),
        status(4, "scanning 9 files", eta=3.0),
        status(8, work={"files": 3, "of_files": 9, "commits": 1, "committed_files": 2, "files_per_second": 1.0}),
        status(8, work={"files": 3, "of_files": 9, "commits": 1, "committed_files": 2, "files_per_second": 0.5}),
        status(8, jobs={"failed": 1}),
        status(9, ended=True),
    )
    await wait_for_end.follow(operation, line_seconds=0.0)
    assert capsys.readouterr().err.splitlines() == [
        "t/validate/1: waits for planning",
        "t/validate/1: 0/9 jobs; ann: starting Spark",
        "t/validate/1: 4/9 jobs; ann: scanning 9 files",
        "t/validate/1: 8/9 jobs; 3/9 files (1.0 files/s), committed: 1 commit, 2 files",
        "t/validate/1: 9/9 jobs, 1 failed",
    ]


async def test_an_operation_that_ends_at_once_prints_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "console", lambda **_: Console(file=io.StringIO(), force_terminal=False))
    monkeypatch.setattr(command_context.current, "json", False)
    operation: Any = Changing(status(0, "starting Spark"))
    operation.ended.set()
    await wait_for_end.follow(operation)
    assert capsys.readouterr().err == ""

"""Waits for the end of an operation with a progress bar or progress lines, and prints how it ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer

from distop.cli import output
from distop.cli.command_context import current
from distop.protocol.texts import one_line
from distop.services.suggested_commands import continues_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.client.async_operation import Operation
    from distop.services.operation_results import OperationResult, OperationStatus

_BAR_SECONDS = 0.25
"""How often the progress bar is drawn again."""
LINE_SECONDS = 3.0
"""Seconds before the first progress line, and between two of them."""


def ended(result: OperationResult) -> None:
    """Print how an operation ended. Raises ``typer.Exit`` with code 1 unless it succeeded."""
    from distop.cli.operation_text import show_result

    if current.json:
        output.write_json(dict(result.record))
    else:
        show_result(result)
    if not result.success:
        raise typer.Exit(1)


async def follow(op: Operation, timeout: float | None = None, *, line_seconds: float = LINE_SECONDS) -> OperationResult:
    """Wait for the end, with a progress bar on a terminal and progress lines elsewhere; with ``--json`` neither.

    Raises WaitTimeout, which names the commands that follow and stop the operation.
    """
    from distop.errors import WaitTimeout

    try:
        if current.json:
            return await op.wait(timeout)
        if output.console(stderr=True).is_terminal:
            return await _with_bar(op, timeout)
        return await _while(op.wait(timeout), lambda: _print_lines(op, line_seconds))
    except WaitTimeout:
        raise WaitTimeout(f"time-out after {timeout:g} s; {continues_text(op.ref)}") from None


async def _while(waiting: Awaitable[OperationResult], report: Callable[[], Awaitable[None]]) -> OperationResult:
    """Report progress until the operation has ended. An error of the report does not end the wait."""
    wait, reporting = asyncio.ensure_future(waiting), asyncio.ensure_future(report())
    try:
        return await wait
    finally:
        wait.cancel()
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)


async def _print_lines(op: Operation, pause: float) -> None:
    """Print a line on stderr whenever the progress has changed, and none for an operation that ends at once.

    A rate that changes alone is no progress.
    """
    printed: tuple[str, ...] = ()
    await asyncio.sleep(pause)
    async for status in op.watch(pause):
        line = "; ".join(filter(None, (_ended_jobs(status), _work(status), _activity(status))))
        seen = _ended_jobs(status), _work(status, rate=False), _activity(status)
        if line and seen != printed and not status.ended:
            output.note(f"{op.ref}: {line}")
            printed = seen


def _ended_jobs(status: OperationStatus) -> str:
    """``12/365 jobs, 2 failed``; "" before the plan."""
    counts = status.jobs
    if counts.get("total") is None:
        return ""
    done, failed = (counts.get("success") or 0) + (counts.get("failed") or 0), counts.get("failed")
    return f"{done}/{counts['total']} jobs" + (f", {failed} failed" if failed else "")


def _work(status: OperationStatus, *, rate: bool = True) -> str:
    """``12/365 files, 1.2 GB of 30.0 GB (80.1 MB/s), committed: 2 commits, 40 files``; "" if it is unknown."""
    from distop.cli.operation_text import committed_text, work_text

    work = status.work
    committed = committed_text(work)
    return ", ".join(filter(None, (work_text(work, rate=rate), f"committed: {committed}" if committed else None)))


def _activity(status: OperationStatus) -> str:
    """The job status that executors report, and what the operation waits for."""
    from distop.cli.operation_text import doing

    waits = f"waits for {status.waiting_for}" if status.waiting_for else None
    return ", ".join(filter(None, (doing(status), waits)))


async def _with_bar(op: Operation, timeout: float | None) -> OperationResult:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[op]}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    with Progress(*columns, console=output.console(stderr=True), transient=True) as bar:
        line = bar.add_task("", total=None, op=one_line(op.ref), note="")

        async def draw() -> None:
            async for status in op.watch(_BAR_SECONDS):
                counts = status.jobs
                done = (counts.get("success") or 0) + (counts.get("failed") or 0)
                failed = f"{counts['failed']} failed" if counts.get("failed") else None
                left = None
                if status.eta_seconds is not None:
                    left = f"about {output.duration(status.eta_seconds)} left"
                note = one_line(", ".join(filter(None, (failed, _work(status), _activity(status), left))))
                bar.update(line, completed=done, total=counts.get("total"), note=note)

        return await _while(op.wait(timeout), draw)

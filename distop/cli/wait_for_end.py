"""Waiting for the end of an operation, and telling how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from distop.cli import output
from distop.cli.command_context import current
from distop.protocol.texts import one_line
from distop.services.suggested_commands import goes_on

if TYPE_CHECKING:
    from distop.client.async_operation import Operation
    from distop.services.operation_results import OperationResult


def ended(result: OperationResult) -> None:
    """Tell how it ended, and leave with 1 unless it succeeded."""
    from distop.cli.operation_text import show_result

    if current.json:
        output.write_json(dict(result.record))
    else:
        show_result(result)
    if not result.success:
        raise typer.Exit(1)


async def follow(op: Operation, timeout: float | None = None) -> OperationResult:
    """Wait for the end, with a progress bar on a terminal. Raises WaitTimeout, which says how to go on."""
    from distop.errors import WaitTimeout

    try:
        if current.json or not output.console(stderr=True).is_terminal:
            return await op.wait(timeout)
        return await _with_bar(op, timeout)
    except WaitTimeout:
        raise WaitTimeout(f"not ended within {timeout:g} s; {goes_on(op.ref)}") from None


async def _with_bar(op: Operation, timeout: float | None) -> OperationResult:
    import asyncio

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from distop.cli.operation_text import doing

    columns = (
        TextColumn("{task.fields[op]}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    waiting = asyncio.ensure_future(op.wait(timeout))
    with Progress(*columns, console=output.console(stderr=True), transient=True) as bar:
        line = bar.add_task("", total=None, op=one_line(op.ref), note="")

        async def draw() -> None:
            async for seen in op.watch(0.25):
                counts = seen.jobs
                done = (counts.get("success") or 0) + (counts.get("failed") or 0)
                note = seen.waiting_for and f"waits for {seen.waiting_for}"
                if not note and seen.eta_seconds is not None:
                    note = f"about {output.duration(seen.eta_seconds)} left"
                note = one_line(", ".join(filter(None, (doing(seen), note))))
                if counts.get("failed"):
                    note = f"{counts['failed']} failed" + (f", {note}" if note else "")
                bar.update(line, completed=done, total=counts.get("total"), note=note)

        drawing = asyncio.ensure_future(draw())
        try:
            return await waiting
        finally:
            waiting.cancel()
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)

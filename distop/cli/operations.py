"""Commands on started operations: ls, show, why, watch, cancel, pause, resume, alter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distop.cli import output
from distop.cli.command_context import Interrupted, current
from distop.cli.command_options import (
    NO_OPTIONS,
    OF_TYPE,
    OP,
    TIMEOUT,
    WITH_LABEL,
    check_waiting,
    count,
    labels,
    parse,
    start_options,
)
from distop.cli.wait_for_end import ended, follow
from distop.errors import InvalidArgument, UsageError
from distop.protocol.texts import shown
from distop.services.submission.start_options import StartOptions
from distop.services.suggested_commands import continues_text

if TYPE_CHECKING:
    from distop.client.async_client import Client
    from distop.client.async_operation import Operation
    from distop.errors import WaitTimeout
    from distop.protocol.records import OperationRef
    from distop.services.operation_results import OperationResult, OperationStatus


_FAILED_LISTED = 100
"""Failed partitions in one page of ``show --failed``, unless ``--limit`` gives another number."""


async def check_known(client: Client, table: str | None) -> None:
    """Called when no operation of a table was found. Raises NotFound if there is no such table, and never was."""
    from distop.services.registered import check_table_known

    await check_table_known(client.etcd, client.keys, table)


def _table(positional: str | None, option: str | None) -> str | None:
    """The table, given as an argument or with ``--table``. Raises UsageError, InvalidArgument."""
    from distop.services.inspection.filters import table_of

    if positional is not None and option is not None and positional != option:
        raise UsageError(f"the tables {positional} and {option} are both given: give one of them")
    return table_of(positional if positional is not None else option)


def ls(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Only this table's.")] = None,
    of_table: Annotated[str | None, typer.Option("--table", metavar="TABLE", help="The same as TABLE.")] = None,
    of_type: OF_TYPE = None,
    state: Annotated[
        list[str] | None, typer.Option(metavar="S", help="pending, running, paused, cancelling (repeatable).")
    ] = None,
    label: WITH_LABEL = None,
    count: Annotated[bool, typer.Option("--count", help="Count them, by type and state.")] = False,
) -> None:
    """List the open operations, or count them."""
    from distop.services.inspection.filters import type_of
    from distop.services.inspection.survey import open_states

    table = _table(table, of_table)
    type_of(of_type)
    open_states(state or None)
    wanted: dict[str, Any] = {"type": of_type, "states": state or None, "labels": labels(label)}
    if count:
        _count(table, wanted)
    else:
        _list(table, wanted)


def _list(table: str | None, wanted: dict[str, Any]) -> None:
    async def work(client: Client) -> list[Any]:
        if not (active := await client.operations(table, **wanted)):
            await check_known(client, table)
        return active

    found = current.with_client(work)
    if current.json:
        output.write_json([seen.to_json() for seen in found])
        return
    which = " of that kind" if any(wanted.values()) else ""
    output.table(
        ("op", "state", "jobs", "left", "waits for", "started"),
        [
            (
                seen.op,
                "pausing" if seen.stage == "pausing" else seen.state,
                output.jobs(seen.jobs),
                output.duration(seen.eta_seconds),
                seen.waiting_for,
                seen.started,
            )
            for seen in found
        ],
        f"no operation{which} is open" + (f" on {table}" if table else ""),
    )


def _count(table: str | None, wanted: dict[str, Any]) -> None:
    async def work(client: Client) -> list[Any]:
        if not (counted := await client.counts(table, **wanted)):
            await check_known(client, table)
        return list(counted)

    found = current.with_client(work)
    if current.json:
        output.write_json([one.to_json() for one in found])
        return
    output.table(
        ("type", "state", "operations", "waiting", "oldest waiting"),
        [(c.type, c.state, c.operations, c.waiting, output.duration(c.oldest_waiting)) for c in found],
        "no operation is open" + (f" on {table}" if table else ""),
        ("operations", "waiting", "oldest waiting"),
    )


def why(op: OP) -> None:
    """Show what an operation waits for, and what to do about it."""
    ref = parse(op)

    found = current.with_client(lambda client: client.why(ref))
    if current.json:
        output.write_json(found.to_json())
        return
    from distop.cli.operation_text import state_of

    seen = found.status
    if seen.result is not None:
        output.say(seen.result.sentence())
        return
    running = seen.jobs.get("running") or 0
    if not found.reasons:
        jobs = f"{running} job{'s' if running != 1 else ''}"
        doing = f"{jobs} run{'s' if running == 1 else ''}" if running else state_of(seen)
        output.say(f"{seen.op} does not wait: {doing}")
        return
    output.fields({"operation": seen.op, "state": state_of(seen), "started": seen.started})
    for reason in found.reasons:
        output.say("")
        name = "waits for" if reason.stops else "slowed by"
        output.fields({name: reason.text, "to do": reason.advice, "code": str(reason.code)})


def _ordinal(value: Any) -> int:
    text = str(value).strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidArgument(f"--after must be a whole number, 0 or more, not {shown(value)}")
    return int(text)


def show(
    op: OP,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write an HTML page of it, with all partitions (-: to stdout)."),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="List its failed partitions, with their errors.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", parser=count("--limit"), help="With --failed: list at most N partitions (100)."),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(metavar="N", parser=_ordinal, help="With --failed: list those after this number of the plan."),
    ] = None,
) -> None:
    """Show an operation's status, or its report."""
    ref = parse(op)
    if not failed and (limit is not None or after is not None):
        raise UsageError("--limit and --after need --failed: add --failed, or leave them out")
    if failed and html is not None:
        raise UsageError("--failed and --html exclude each other: the page lists all partitions")
    if html is not None:
        _show_page(ref, html)
    elif failed:
        _show_failed(ref, limit if limit is not None else _FAILED_LISTED, after if after is not None else -1)
    else:
        _show_operation(ref)


def _show_operation(ref: OperationRef) -> None:
    from distop.cli.operation_text import show_result, show_status

    seen = current.with_client(lambda client: client.operation(ref).status())
    if current.json:
        output.write_json(seen.to_json())
    elif seen.result is not None:
        show_result(seen.result)
    else:
        show_status(seen)


def _show_failed(ref: OperationRef, limit: int, after: int) -> None:
    from distop.cli.operation_text import show_failed
    from distop.services.inspection.failed_partitions import FailedPage, failed_partitions

    async def work(client: Client) -> FailedPage:
        status = await client.operation(ref).status()
        return await failed_partitions(client.etcd, client.keys, ref, status, limit, after)

    page = current.with_client(work)
    if current.json:
        output.write_json(page.to_json())
    else:
        show_failed(page)


def _show_page(ref: OperationRef, file: str) -> None:
    from distop.cli.page import page_file
    from distop.services.page import gather

    page_file.check(file, json=current.json)

    found = current.with_client(lambda client: gather(client.etcd, client.keys, ref))
    page_file.write(found, file)
    if current.json:
        output.write_json(found.status.to_json())
    elif file != page_file.STDOUT:
        output.say(f"{ref}: page written to {file}")


def watch(op: OP) -> None:
    """Follow an operation until it ends. Exits with 1 unless it succeeds."""
    ref = parse(op)

    async def work(client: Client) -> OperationResult:
        followed = client.operation(ref)
        if not current.json:
            return await follow(followed)
        async for seen in followed.watch():
            if seen.result is not None:
                return seen.result
            output.write_json(seen.to_json())
        return await followed.wait()

    try:
        ended(current.with_client(work))
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {continues_text(str(ref))}") from None


def _command(op: str, name: str, done: str, *arguments: str) -> None:
    ref = parse(op)

    current.with_client(lambda client: getattr(client.operation(ref), name)(*arguments))
    current.answer({"op": str(ref), "state": done}, f"{ref} is {done}")


def _cancel(ref: OperationRef, text: str) -> None:
    """Cancel an operation, and say what it has committed so far, which stays."""
    from distop.cli.operation_text import committed_text
    from distop.errors import DistopError

    async def work(client: Client) -> OperationStatus | None:
        operation = client.operation(ref)
        await operation.cancel(text)
        try:
            return await operation.status()
        except DistopError:  # it is cancelled, whatever can be read of it now
            return None

    seen = current.with_client(work)
    done = seen.work if seen is not None else None
    if seen is not None and seen.result is not None and seen.result.work is not None:
        done = seen.result.work.to_json()
    committed = committed_text(done)
    stays = f"; committed so far, and stays: {committed}" if committed else ""
    answer = {"op": str(ref), "state": "cancelling"}
    current.answer({**answer, "work": dict(done)} if done else answer, f"{ref} is cancelling{stays}")


def cancel(
    op: OP,
    text: Annotated[str, typer.Option("--text", metavar="TEXT", help="The reason, for the record.")] = "",
    series: Annotated[
        bool, typer.Option("--series", help="End its series, too: cancel the open operation of the series.")
    ] = False,
) -> None:
    """Cancel an operation. Its jobs stop and clean up. A series ends with its cancelled operation."""
    ref = parse(op)
    if not series:
        _cancel(ref, text)
        return

    ended = current.with_client(lambda client: client.operation(ref).end_series(text))
    current.answer({"op": ended, "state": "cancelling"}, f"{ended} is cancelling, and its series has ended")


def pause(
    op: OP,
    now: Annotated[bool, typer.Option("--now", help="Stop running jobs; they keep their checkpoints.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no job runs.")] = False,
    timeout: TIMEOUT = None,
) -> None:
    """Pause an operation. Running jobs finish, or are stopped with --now.

    Types that run batches (validate, export, noop) finish whole batches, maybe all of a small operation: use --now.
    """
    check_waiting(wait, timeout)
    ref = parse(op)

    async def work(client: Client) -> tuple[OperationStatus, WaitTimeout | None]:
        paused = client.operation(ref)
        await paused.pause(now=now)
        late = await _settled(paused, timeout) if wait else None
        return await paused.status(), late

    seen, late = current.with_client(work)
    if current.json:
        output.write_json(
            {"op": seen.op, "state": seen.state, "stage": seen.stage, "running": seen.jobs.get("running") or 0}
        )
    elif late is None:
        from distop.cli.operation_text import state_of

        output.say(f"{seen.op} is {state_of(seen)}")
    if late is not None:
        raise late


async def _settled(op: Operation, timeout: float | None) -> WaitTimeout | None:
    """Wait until the operation has stopped pausing. Returns the error to raise after a time-out."""
    import asyncio

    from distop.errors import WaitTimeout

    watching = op.watch(0.1)
    try:
        async with asyncio.timeout(timeout):
            async for seen in watching:
                if seen.stage != "pausing":
                    break
    except TimeoutError:
        return WaitTimeout(f"time-out after {timeout:g} s: jobs of {op.ref} still run; it is paused when they end")
    finally:
        await watching.aclose()
    return None


def resume(op: OP) -> None:
    """Resume a paused operation."""
    _command(op, "resume", "running")


@start_options("alter")
def alter(op: OP, options: StartOptions = NO_OPTIONS) -> None:
    """Change the priority and the limits of an open operation."""
    ref = parse(op)
    wanted = options.checked()
    if not wanted:
        raise UsageError("nothing to alter: give --priority, --max-jobs, --max-jobs-per-executor or --max-failed")

    current.with_client(lambda client: client.operation(ref).alter(**wanted))
    changes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in wanted.items())
    current.answer({"op": str(ref), **wanted}, f"{ref} is altered: {changes}")

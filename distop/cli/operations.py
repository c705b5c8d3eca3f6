"""Commands on operations: start, rerun, ls, show, watch, cancel, pause, resume, history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distop.cli import output
from distop.cli.context import Interrupted, current, parse_argument
from distop.cli.options import ATTEMPTS, OP, TIMEOUT, check_waiting, count
from distop.suggest import goes_on, may_have_begun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.client import Client
    from distop.core.model import OperationRef
    from distop.operation import Operation
    from distop.results import OperationResult, OperationStatus


def _ended(result: OperationResult) -> None:
    """Tell how it ended, and leave with 1 unless it succeeded."""
    from distop.cli.report import show_result

    if current.json:
        output.write_json(dict(result.record))
    else:
        show_result(result)
    if not result.success:
        raise typer.Exit(1)


def _check_start(
    type_name: str,
    table: str,
    argument: Any,
    partitions: list[str] | None,
    request_id: str | None,
    failure_policy: str | None,
    retry_attempts: int | None,
) -> None:
    """What is wrong whatever etcd holds is said before it is asked. Raises InvalidArgument."""
    from distop.request import request
    from distop.schema import encode_argument

    arg = encode_argument(argument)
    request(type_name, table, arg, partitions or None, request_id, failure_policy, retry_attempts, "")


def start(
    type_name: Annotated[str, typer.Argument(metavar="TYPE", help="The operation type; see `distop behaviors`.")],
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A registered table, or @cluster.")],
    arg: Annotated[str | None, typer.Option(metavar="JSON|@FILE", help="JSON, or a file with it (@-: stdin).")] = None,
    partition: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this one (repeatable).")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and show the report.")] = False,
    timeout: TIMEOUT = None,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Repeating a start with the same id starts it once.")
    ] = None,
    failure_policy: Annotated[
        str | None, typer.Option(metavar="POLICY", help="fail_fast or collect_all, instead of the type's.")
    ] = None,
    retry_attempts: ATTEMPTS = None,
) -> None:
    """Start an operation."""
    check_waiting(wait, timeout)
    argument = parse_argument(arg)
    _check_start(type_name, table, argument, partition, request_id, failure_policy, retry_attempts)

    async def work(client: Client) -> Operation:
        return await client.start_operation(
            type_name,
            table,
            argument,
            partitions=partition or None,
            request_id=request_id,
            failure_policy=failure_policy,
            retry_attempts=retry_attempts,
        )

    _start(work, table, wait, timeout)


def _start(
    begin: Callable[[Client], Awaitable[Operation]], table: str, wait: bool, timeout: float | None, **told: Any
) -> None:
    """Start an operation, and with ``wait`` see it to its end. ``told``: further fields of the JSON."""
    import asyncio

    from distop.submit import cut_off

    started: list[Operation] = []
    unknown: list[str] = []

    async def work(client: Client) -> OperationResult | None:
        try:
            op = await begin(client)
        except asyncio.CancelledError as error:
            if (request_id := cut_off(error)) is not None:
                unknown.append(request_id)
            raise
        started.append(op)
        if not wait:
            return None
        if not current.json:
            output.note(f"started {op.ref}")
        return await follow(op, timeout)

    try:
        result = current.with_client(work)
    except KeyboardInterrupt:
        if unknown:
            raise Interrupted(may_have_begun(table, unknown[0])) from None
        if not started:
            raise
        raise Interrupted(f"interrupted; {goes_on(started[0].ref)}") from None
    if result is not None:
        _ended(result)
        return
    op = started[0]
    if current.json:
        output.write_json({"op": op.ref, "instance": op.instance_id, "state": "running", **told})
    else:
        output.say(f"started {op.ref}")


def rerun(
    op: OP,
    unfinished: Annotated[
        bool | None,
        typer.Option("--unfinished/--failed", help="Also partitions that had no end (default: if it was cancelled)."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and show the report.")] = False,
    timeout: TIMEOUT = None,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Repeating a rerun with the same id starts it once.")
    ] = None,
    failure_policy: Annotated[
        str | None, typer.Option(metavar="POLICY", help="fail_fast or collect_all, instead of the former.")
    ] = None,
    retry_attempts: ATTEMPTS = None,
) -> None:
    """Run the failed partitions again. It is a new operation, with the argument of one that has ended."""
    check_waiting(wait, timeout)
    ref = _parse(op)
    _check_start(ref.type, ref.table, None, None, request_id, failure_policy, retry_attempts)

    async def work(client: Client) -> Operation:
        again = await client.rerun(
            ref,
            unfinished=unfinished,
            request_id=request_id,
            failure_policy=failure_policy,
            retry_attempts=retry_attempts,
        )
        ended = (await client.operation(ref).status()).result
        left = ended.jobs["total"] - ended.jobs["success"] - ended.jobs["failed"] if ended is not None else 0
        if left and not unfinished and ended is not None and (unfinished is False or ended.state == "failed"):
            output.note(f"{left} partitions of {ref} that had no end are left out: --unfinished takes them as well")
        return again

    _start(work, ref.table, wait, timeout, rerun_of=op)


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

    columns = (
        TextColumn("{task.fields[op]}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    waiting = asyncio.ensure_future(op.wait(timeout))
    with Progress(*columns, console=output.console(stderr=True), transient=True) as bar:
        line = bar.add_task("", total=None, op=op.ref, note="")

        async def draw() -> None:
            async for seen in op.watch(0.25):
                counts = seen.jobs
                done = (counts.get("success") or 0) + (counts.get("failed") or 0)
                note = seen.waiting_for and f"waits for {seen.waiting_for}"
                if not note and seen.eta_seconds is not None:
                    note = f"about {output.duration(seen.eta_seconds)} left"
                if counts.get("failed"):
                    note = f"{counts['failed']} failed" + (f", {note}" if note else "")
                bar.update(line, completed=done, total=counts.get("total"), note=note or "")

        drawing = asyncio.ensure_future(draw())
        try:
            return await waiting
        finally:
            waiting.cancel()
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)


def _check_table(table: str | None) -> None:
    from distop.core.keys import encode

    if table is not None:
        encode(table)


async def _nothing(client: Client, table: str | None) -> list[Any]:
    """No operation of a table was found. Raises NotFound where there is no such table and there never was one."""
    from distop.core.model import CLUSTER_TABLE
    from distop.core.txn import Get
    from distop.errors import NotFound

    if table is not None and table != CLUSTER_TABLE:
        found, ever = await client.etcd.read(Get(client.keys.table(table)), Get(client.keys.run_ops(table)))
        if found.kv is None and ever.kv is None:
            raise NotFound(f"there is no table {table!r}, and no operation on it is known: see `distop table ls`")
    return []


def ls(table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Only this table's.")] = None) -> None:
    """List the operations that have not ended."""
    _check_table(table)

    async def work(client: Client) -> list[Any]:
        active = await client.operations(table)
        return active or await _nothing(client, table)

    found = current.with_client(work)
    if current.json:
        output.write_json([seen.to_json() for seen in found])
        return
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
        "no operation is running" + (f" on {table}" if table else ""),
    )


def _parse(op: str) -> OperationRef:
    """The operation that is named, read before etcd is asked. Raises InvalidArgument."""
    from distop.operation import parse_ref

    return parse_ref(op)


def show(op: OP) -> None:
    """Show how one operation is doing, or ended."""
    ref = _parse(op)

    async def work(client: Client) -> Any:
        return await client.operation(ref).status()

    seen = current.with_client(work)
    if current.json:
        output.write_json(seen.to_json())
        return
    from distop.cli.report import show_result, show_status

    if seen.result is not None:
        show_result(seen.result)
    else:
        show_status(seen)


def watch(op: OP) -> None:
    """Follow an operation until it ends. Exits with 1 when it failed."""
    ref = _parse(op)

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
        _ended(current.with_client(work))
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {goes_on(op)}") from None


def _command(op: str, name: str, done: str, *arguments: str) -> None:
    ref = _parse(op)

    async def work(client: Client) -> None:
        await getattr(client.operation(ref), name)(*arguments)

    current.with_client(work)
    if current.json:
        output.write_json({"op": op, "state": done})
    else:
        output.say(f"{op} is {done}")


def cancel(
    op: OP, text: Annotated[str, typer.Option("--text", metavar="TEXT", help="Why, for the record.")] = ""
) -> None:
    """Cancel an operation. Its jobs stop and clean up."""
    _command(op, "cancel", "cancelling", text)


def pause(
    op: OP,
    now: Annotated[bool, typer.Option("--now", help="Stop running jobs, too; they keep their checkpoints.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no job runs any more.")] = False,
    timeout: TIMEOUT = None,
) -> None:
    """Pause an operation. Running jobs finish, or are stopped with --now.

    Types that run in batches (validate, noop) finish whole batches, which may be all of a small operation: use --now.
    """
    check_waiting(wait, timeout)
    ref = _parse(op)

    async def work(client: Client) -> OperationStatus:
        paused = client.operation(ref)
        await paused.pause(now=now)
        return await _settled(paused, timeout) if wait else await paused.status()

    seen = current.with_client(work)
    if current.json:
        output.write_json(
            {"op": op, "state": seen.state, "stage": seen.stage, "running": seen.jobs.get("running") or 0}
        )
        return
    from distop.cli.report import state_of

    output.say(f"{op} is {state_of(seen)}")


async def _settled(op: Operation, timeout: float | None) -> OperationStatus:
    """Its status once it is no longer pausing. Raises WaitTimeout."""
    import asyncio

    from distop.errors import WaitTimeout

    watching = op.watch(0.1)
    try:
        async with asyncio.timeout(timeout):
            async for seen in watching:
                if seen.stage != "pausing":
                    return seen
    except TimeoutError:
        raise WaitTimeout(f"jobs of {op.ref} still run after {timeout:g} s; it is paused when they end") from None
    finally:
        await watching.aclose()
    return await op.status()


def resume(op: OP) -> None:
    """Let a paused operation go on."""
    _command(op, "resume", "running")


def history(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Only this table's.")] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", parser=count("--limit"), help="At most so many, the newest first.")
    ] = 50,
) -> None:
    """List the operations that have ended."""
    _check_table(table)

    async def work(client: Client) -> list[OperationResult]:
        return await client.history(table, limit) or await _nothing(client, table)

    found = current.with_client(work)
    if current.json:
        output.write_json([dict(result.record) for result in found])
        return
    output.table(
        ("op", "state", "jobs", "took", "finished"),
        [(r.op, r.state, output.jobs(r.jobs), output.duration(r.seconds), r.record.get("finished")) for r in found],
        "no operation has ended yet" + (f" on {table}" if table else ""),
    )

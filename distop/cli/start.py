"""Commands that start operations: start, apply, rerun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distop.cli import output
from distop.cli.command_context import Interrupted, current, parse_argument
from distop.cli.command_options import (
    NO_OPTIONS,
    OP,
    TIMEOUT,
    check_start,
    check_waiting,
    parse,
    seconds,
    start_options,
)
from distop.cli.graph_commands import start_graph
from distop.cli.wait_for_end import ended, follow
from distop.errors import DistopError, UsageError
from distop.protocol.texts import plural
from distop.services.submission.start_options import StartOptions
from distop.services.suggested_commands import continues_text, may_have_begun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from distop.client.async_client import Client
    from distop.client.async_operation import Operation
    from distop.services.operation_results import OperationResult

_LAST_LOOK = 1.0
"""Seconds for the state of an operation that is no longer waited for."""


@start_options("start")
def start(
    context: typer.Context,
    type_name: Annotated[
        str | None, typer.Argument(metavar="TYPE", help="The operation type; see `distop behaviors`.")
    ] = None,
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="A registered table, or @cluster.")] = None,
    arg: Annotated[str | None, typer.Option(metavar="JSON|@FILE", help="JSON, or a file with it (@-: stdin).")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="OP", help="Check only files newer than that validation's certificate.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and show the report.")] = False,
    timeout: TIMEOUT = None,
    options: StartOptions = NO_OPTIONS,
    graph: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="Instead: all operations of this graph (JSON), or none.")
    ] = None,
) -> None:
    """Start an operation, or a graph of them."""
    check_waiting(wait, timeout)
    if graph is not None:
        _only(context, ("graph", "request_id", "wait", "timeout"))
        start_graph(graph, options.request_id, wait, timeout)
        return
    if type_name is None or table is None:
        missing = "TYPE" if type_name is None else "TABLE"
        raise UsageError(f"Missing argument '{missing}' (see `distop start --help`)")
    argument = parse_argument(arg)
    check_start(type_name, table, argument, options)
    former = parse(since) if since is not None else None
    from distop.services.certificates import argument_since

    async def work(client: Client) -> Operation:
        asked = argument
        if former is not None:
            asked = await argument_since(client.etcd, client.keys, argument, former)
        return await client.start_operation(type_name, table, asked, **options.given())

    _start(work, wait, timeout)


def _only(context: typer.Context, allowed: Collection[str]) -> None:
    """Raises UsageError if other options were given: the graph file has them for each of its operations."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in allowed and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                "--graph can only be combined with --request-id, --wait and --timeout: the file has all other options "
                "of each operation"
            )


@start_options("apply")
def apply(
    op: OP,
    settle: Annotated[
        float | None,
        typer.Option(metavar="S", parser=seconds("--settle"), help="Seconds to check for late commits (10; 0: once)."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and show the report.")] = False,
    timeout: TIMEOUT = None,
    options: StartOptions = NO_OPTIONS,
) -> None:
    """Add the checks that a validation has proved to its table's schema."""
    check_waiting(wait, timeout)
    ref = parse(op)
    check_start("apply", ref.table, None, options)
    from distop.services.certificates import argument_of_apply

    async def work(client: Client) -> Operation:
        argument = await argument_of_apply(client.etcd, client.keys, ref, settle)
        return await client.start_operation("apply", ref.table, argument, **options.given())

    _start(work, wait, timeout, applies=str(ref))


class _StartResult:
    """The known state of a start. ``further``: additional fields of its JSON output."""

    def __init__(self, further: Mapping[str, str]) -> None:
        self.op: Operation | None = None
        self.unknown: str | None = None
        """Its request id, if the command was interrupted while the start was sent."""
        self._state: str | None = "running"
        """Its last known state; None: unknown."""
        self._further = further

    async def begin(self, starting: Awaitable[Operation]) -> Operation:
        """Start the operation. If an earlier call has started it, read its current state."""
        import asyncio

        from distop.services.submission.submit import cut_off

        try:
            self.op = await starting
        except asyncio.CancelledError as error:
            self.unknown = cut_off(error)
            raise
        if self.op.already_started:
            self._state = None
            self._state = (await self.op.status()).state
        return self.op

    async def follow(self, op: Operation, timeout: float | None) -> OperationResult:
        """Wait for the end. After a time-out, read the state once more, if etcd answers at once."""
        import asyncio
        from contextlib import suppress

        from distop.errors import WaitTimeout

        try:
            return await follow(op, timeout)
        except WaitTimeout:
            with suppress(DistopError, TimeoutError):
                async with asyncio.timeout(_LAST_LOOK):
                    seen = await op.status()
                    self._state = seen.state
                    if seen.result is not None:
                        return seen.result
            raise

    def sentence(self) -> str:
        assert self.op is not None
        if self.op.already_started:
            return f"already started: {self.op.ref} ({self._state})"
        return f"started {self.op.ref}"

    def write_json(self) -> None:
        """Print the JSON of a start whose end was not awaited; nothing if the operation was not started."""
        if self.op is not None and current.json:
            output.write_json(
                {"op": self.op.ref, "instance": self.op.instance_id, "state": self._state, **self._further}
            )


def _start(begin: Callable[[Client], Awaitable[Operation]], wait: bool, timeout: float | None, **further: str) -> None:
    """Start an operation, and with ``wait`` see it to its end. ``further``: more fields of the JSON."""
    started = _StartResult(further)

    async def work(client: Client) -> OperationResult | None:
        op = await started.begin(begin(client))
        if not wait:
            return None
        if not current.json:
            output.note(started.sentence())
        return await started.follow(op, timeout)

    try:
        result = current.with_client(work)
    except KeyboardInterrupt:
        started.write_json()
        if started.unknown is not None:
            raise Interrupted(may_have_begun(started.unknown)) from None
        if started.op is None:
            raise
        raise Interrupted(f"interrupted; {continues_text(started.op.ref)}") from None
    except DistopError:  # whatever error ends the wait, the operation continues
        started.write_json()
        raise
    if result is not None:
        ended(result)
    elif current.json:
        started.write_json()
    else:
        output.say(started.sentence())


@start_options("rerun")
def rerun(
    op: OP,
    unfinished: Annotated[
        bool | None,
        typer.Option("--unfinished/--failed", help="Also unfinished partitions (default: if it was cancelled)."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and show the report.")] = False,
    timeout: TIMEOUT = None,
    options: StartOptions = NO_OPTIONS,
) -> None:
    """Run the failed partitions again. It is a new operation, with the argument of one that has ended.

    Failure policy, attempts, time limit and labels stay as they were, unless given.
    """
    check_waiting(wait, timeout)
    ref = parse(op)
    check_start(ref.type, ref.table, None, options)
    from distop.services.submission.rerun import left_out

    async def work(client: Client) -> Operation:
        # Read before the start: after the start no error may keep this command from printing its name.
        ended = (await client.operation(ref).status()).result
        again = await client.rerun(ref, unfinished=unfinished, **options.given())
        if ended is not None and (left := left_out(ended, unfinished)):
            skipped = plural(left, "unfinished partition")
            output.note(f"skipping {skipped} of {ref}: --unfinished includes them")
        return again

    _start(work, wait, timeout, rerun_of=str(ref))

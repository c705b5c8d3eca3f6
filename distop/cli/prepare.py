"""Commands of a submission in two phases: prepare, confirm, abandon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distop.cli.command_context import current, parse_argument
from distop.cli.command_options import NO_OPTIONS, check_start, count, parse, seconds, start_options
from distop.errors import UsageError
from distop.services.submission.start_options import StartOptions

if TYPE_CHECKING:
    from distop.client.async_client import Client
    from distop.client.async_operation import Operation

ID = Annotated[str, typer.Option("--external-id", metavar="ID", help="The sender's own id of its transaction.")]
_OP = Annotated[str | None, typer.Argument(metavar="OP", help="table/type[/object]/instance; or --external-id.")]
_EXTERNAL = Annotated[
    str | None, typer.Option("--external-id", metavar="ID", help="The operation prepared under this id, instead of OP.")
]


@start_options("prepare")
def prepare(
    type_name: Annotated[str, typer.Argument(metavar="TYPE", help="The operation type; see `distop behaviors`.")],
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A registered table, or @cluster.")],
    external_id: ID,
    arg: Annotated[str | None, typer.Option(metavar="JSON|@FILE", help="JSON, or a file with it (@-: stdin).")] = None,
    verify: Annotated[
        str | None, typer.Option(metavar="NAME|URL", help="Verifier to ask if nobody confirms in time.")
    ] = None,
    verify_after: Annotated[
        float, typer.Option(metavar="S", parser=seconds("--verify-after"), help="Seconds until it is asked (60).")
    ] = 60.0,
    verify_attempts: Annotated[
        int, typer.Option(metavar="N", parser=count("--verify-attempts"), help="Attempts to get an answer (5).")
    ] = 5,
    options: StartOptions = NO_OPTIONS,
) -> None:
    """Insert an operation that begins once it is confirmed."""
    from distop.services.submission.two_phase import check_verifier, external

    argument = parse_argument(arg)
    external(external_id)
    if verify is not None:
        check_verifier(verify)
    check_start(type_name, table, argument, options)

    async def work(client: Client) -> Operation:
        return await client.prepare_operation(
            type_name,
            table,
            argument,
            external_id=external_id,
            verify=verify,
            verify_after=verify_after,
            verify_attempts=verify_attempts,
            **options.given(),
        )

    op = current.with_client(work)
    _tell(op, "already prepared" if op.already_started else "prepared", external_id)


def confirm(op: _OP = None, external_id: _EXTERNAL = None) -> None:
    """Let a prepared operation begin."""
    _check(op, external_id)

    async def work(client: Client) -> Operation:
        if external_id is not None:
            return await client.confirm(external_id)
        found = client.operation(parse(op or ""))
        await found.confirm()
        return found

    _tell(current.with_client(work), "confirmed", external_id)


def abandon(
    op: _OP = None,
    external_id: _EXTERNAL = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="The reason, for the record.")] = "",
) -> None:
    """End a prepared operation that was not confirmed."""
    _check(op, external_id)

    async def work(client: Client) -> Operation:
        found = await client.prepared_operation(external_id) if external_id is not None else client.operation(op or "")
        await found.abandon(reason)
        return found

    _tell(current.with_client(work), "abandoned", external_id)


def _check(op: str | None, external_id: str | None) -> None:
    """Raises UsageError, InvalidArgument."""
    from distop.services.submission.two_phase import external

    if (op is None) is (external_id is None):
        raise UsageError("name the operation, or give its --external-id: one of the two")
    if op is not None:
        parse(op)
    if external_id is not None:
        external(external_id)


def _tell(op: Operation, done: str, external_id: str | None) -> None:
    answer: dict[str, Any] = {"op": op.ref, "instance": op.instance_id, "done": done}
    if external_id is not None:
        answer["external_id"] = external_id
    current.answer(answer, f"{done} {op.ref}")

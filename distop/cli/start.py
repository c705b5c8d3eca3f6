"""Commands that start operations: start, apply, rerun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distop.cli import output
from distop.cli.command_context import Interrupted, current, parse_argument
from distop.cli.command_options import (
    AFTER,
    AFTER_END,
    AT,
    ATTEMPTS,
    DELAY,
    LABEL,
    MAX_FAILED,
    MAX_JOBS,
    MAX_JOBS_PER_EXECUTOR,
    OP,
    PRIORITY,
    TIME_LIMIT,
    TIMEOUT,
    WHERE,
    check_waiting,
    labels,
    parse,
    predecessors,
    seconds,
    selected,
)
from distop.cli.graph_commands import start_graph
from distop.cli.wait_for_end import ended, follow
from distop.errors import DistopError, InvalidArgument, NotAllowed, UsageError
from distop.services.suggested_commands import goes_on, may_have_begun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from distop.client.async_client import Client
    from distop.client.async_operation import Operation
    from distop.protocol.records import OperationRef
    from distop.services.operation_results import OperationResult

_LAST_LOOK = 1.0
"""Seconds for the state of an operation that is no longer waited for."""


def _check_start(
    type_name: str,
    table: str,
    argument: Any,
    partitions: list[str] | None,
    request_id: str | None,
    failure_policy: str | None,
    retry_attempts: int | None,
    **waiting: Any,
) -> None:
    """What is wrong whatever etcd holds is said before it is asked. Raises InvalidArgument."""
    from distop.schemas.argument_schema import encode_argument
    from distop.services.submission.start_request import request

    arg = encode_argument(argument)
    request(type_name, table, arg, partitions or None, request_id, failure_policy, retry_attempts, "", **waiting)


def start(
    context: typer.Context,
    type_name: Annotated[
        str | None, typer.Argument(metavar="TYPE", help="The operation type; see `distop behaviors`.")
    ] = None,
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="A registered table, or @cluster.")] = None,
    arg: Annotated[str | None, typer.Option(metavar="JSON|@FILE", help="JSON, or a file with it (@-: stdin).")] = None,
    partition: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this one (repeatable).")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="OP", help="Only what came since that validation, by its certificate.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and show the report.")] = False,
    timeout: TIMEOUT = None,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Repeating a start with the same id starts it once.")
    ] = None,
    failure_policy: Annotated[
        str | None, typer.Option(metavar="POLICY", help="fail_fast or collect_all, instead of the type's.")
    ] = None,
    retry_attempts: ATTEMPTS = None,
    time_limit: TIME_LIMIT = None,
    label: LABEL = None,
    at: AT = None,
    delay: DELAY = None,
    after: AFTER = None,
    after_end: AFTER_END = None,
    priority: PRIORITY = None,
    max_jobs: MAX_JOBS = None,
    max_jobs_per_executor: MAX_JOBS_PER_EXECUTOR = None,
    max_failed: MAX_FAILED = None,
    where: WHERE = None,
    every: Annotated[float | None, typer.Option(metavar="S", help="Come again so many seconds after its end.")] = None,
    grid: Annotated[bool, typer.Option("--grid", help="With --every: from one begin to the next.")] = False,
    jitter: Annotated[float, typer.Option(metavar="S", help="With --every: up to so many seconds later.")] = 0.0,
    times: Annotated[int | None, typer.Option(metavar="N", help="With --every: so often in all.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="With --every: not after this time.")] = None,
    again_on: Annotated[
        str, typer.Option("--on", metavar="END", help="With --every: after success, failure or any end.")
    ] = "any",
    id_: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Of one id, at most one goes on (default: the type's).")
    ] = None,
    on_duplicate: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="join (default), refuse, replace or combine, where one goes on."),
    ] = None,
    one_off: Annotated[bool, typer.Option("--one-off", help="Without an id.")] = False,
    graph: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="Instead: all operations of this graph (JSON), or none.")
    ] = None,
) -> None:
    """Start an operation, or a graph of them."""
    check_waiting(wait, timeout)
    if graph is not None:
        _only(context, ("graph", "request_id", "wait", "timeout"))
        start_graph(graph, request_id, wait, timeout)
        return
    if type_name is None or table is None:
        missing = "TYPE" if type_name is None else "TABLE"
        raise UsageError(f"Missing argument '{missing}' (see `distop start --help`)")
    given = labels(label)
    argument = parse_argument(arg)
    from distop.services.submission.start_request import Every

    series = Every(every, jitter, "start" if grid else "end", again_on, until, times) if every is not None else None
    if series is None and (grid or jitter or times is not None or until is not None or again_on != "any"):
        raise InvalidArgument(
            "--grid, --jitter, --times, --until and --on say how an operation comes again: add --every"
        )
    waiting: dict[str, Any] = {
        "every": series,
        "not_before": at,
        "delay": delay,
        "id": id_,
        "one_off": one_off,
        "on_duplicate": on_duplicate,
        "after": predecessors(after, after_end),
        "priority": priority,
        "max_jobs": max_jobs,
        "max_jobs_per_executor": max_jobs_per_executor,
        "max_failed": max_failed,
        "time_limit": time_limit,
        "where": selected(where),
    }
    _check_start(type_name, table, argument, partition, request_id, failure_policy, retry_attempts, **waiting)
    former = parse(since) if since is not None else None

    async def work(client: Client) -> Operation:
        return await client.start_operation(
            type_name,
            table,
            argument if former is None else _going_on(argument, former, await _certificate(client, former)),
            partitions=partition or None,
            request_id=request_id,
            failure_policy=failure_policy,
            retry_attempts=retry_attempts,
            labels=given,
            **waiting,
        )

    _start(work, wait, timeout)


def _only(context: typer.Context, allowed: Collection[str]) -> None:
    """Raises UsageError where something else stands in the line, too: the graph says it for each of its operations."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in allowed and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                "beside --graph stand --request-id, --wait and --timeout alone: all else is said in the file, of each "
                "operation"
            )


async def _certificate(client: Client, ref: OperationRef) -> Mapping[str, Any]:
    """The certificate of an operation that has ended, to look at: the executor reads its own. Raises NotFound,
    NotAllowed.
    """
    seen = await client.operation(ref).status()
    if seen.result is None:
        raise NotAllowed(f"{ref} has no certificate yet: wait until it has ended")
    return seen.result.certificate()


def _going_on(argument: Any, former: OperationRef, certificate: Mapping[str, Any]) -> Any:
    """The argument with ``since``; what it does not say of the checks is as the certificate has it."""
    if not isinstance(argument, dict | None):
        return argument  # the start is refused, with the reason
    checks = [{**certified["check"], "name": certified["name"]} for certified in certificate["checks"]]
    certified = {"checks": checks, "where": certificate["where"], "null_is": certificate["null_is"]}
    return {**certified, **(argument or {}), "since": str(former)}


def apply(
    op: OP,
    settle: Annotated[
        float | None,
        typer.Option(metavar="S", parser=seconds("--settle"), help="Look so long at what is still committed (10)."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and show the report.")] = False,
    timeout: TIMEOUT = None,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Repeating this with the same id does it once.")
    ] = None,
    label: LABEL = None,
) -> None:
    """Make what a validation has proved part of its table's schema."""
    check_waiting(wait, timeout)
    ref = parse(op)
    _check_start("apply", ref.table, None, None, request_id, None, None)
    given = labels(label)

    async def work(client: Client) -> Operation:
        await _certificate(client, ref)  # else the operation would start, and fail with the same sentence
        argument: dict[str, Any] = {"certificate": str(ref)}
        settled = {} if settle is None else {"settle_seconds": settle}
        argument |= settled
        return await client.start_operation("apply", ref.table, argument, request_id=request_id, labels=given)

    _start(work, wait, timeout, applies=str(ref))


class _Start:
    """What is known of a start. ``further``: fields that stand beside the others in its JSON."""

    def __init__(self, further: Mapping[str, str]) -> None:
        self.op: Operation | None = None
        self.unknown: str | None = None
        """Its request id, where etcd was being asked for it when the command was interrupted."""
        self._state: str | None = "running"
        """When it was last seen; None: it was not."""
        self._further = further

    async def begin(self, starting: Awaitable[Operation]) -> Operation:
        """Start it. One that an earlier call has started may be in any state by now: it is asked for."""
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
        """Wait for the end. Where the time is over, its state is that of this moment, if etcd tells it at once."""
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
        """The document of a start that was not waited for, or not to the end; nothing where it did not begin."""
        if self.op is not None and current.json:
            output.write_json(
                {"op": self.op.ref, "instance": self.op.instance_id, "state": self._state, **self._further}
            )


def _start(begin: Callable[[Client], Awaitable[Operation]], wait: bool, timeout: float | None, **further: str) -> None:
    """Start an operation, and with ``wait`` see it to its end. ``further``: more fields of the JSON."""
    started = _Start(further)

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
        raise Interrupted(f"interrupted; {goes_on(started.op.ref)}") from None
    except DistopError:  # whatever ends the waiting, the operation goes on
        started.write_json()
        raise
    if result is not None:
        ended(result)
    elif current.json:
        started.write_json()
    else:
        output.say(started.sentence())


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
    time_limit: TIME_LIMIT = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="A label, instead of the former (repeatable).")
    ] = None,
) -> None:
    """Run the failed partitions again. It is a new operation, with the argument of one that has ended."""
    check_waiting(wait, timeout)
    ref = parse(op)
    _check_start(ref.type, ref.table, None, None, request_id, failure_policy, retry_attempts, time_limit=time_limit)
    given = labels(label)

    async def work(client: Client) -> Operation:
        # Asked for before the start: from then on nothing may keep its name from being told.
        ended = (await client.operation(ref).status()).result
        again = await client.rerun(
            ref,
            unfinished=unfinished,
            request_id=request_id,
            failure_policy=failure_policy,
            retry_attempts=retry_attempts,
            time_limit=time_limit,
            labels=given,
        )
        left = ended.jobs["total"] - ended.jobs["success"] - ended.jobs["failed"] if ended is not None else 0
        if left and not unfinished and ended is not None and (unfinished is False or ended.state == "failed"):
            output.note(f"{left} partitions of {ref} that had no end are left out: --unfinished takes them as well")
        return again

    _start(work, wait, timeout, rerun_of=str(ref))

"""``distop start --graph``: starts operations that wait for each other, as a file describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from distop.cli import output
from distop.cli.command_context import Interrupted, current, parse_file

if TYPE_CHECKING:
    from distop.client.async_client import Client
    from distop.client.async_operation import Operation
    from distop.services.operation_results import OperationResult


def start_graph(file: str, request_id: str | None, wait: bool, timeout: float | None) -> None:
    """Start all operations of the graph in this file, or none. The file is checked before etcd is asked.

    Raises InvalidArgument, and what ``Client.start_operations`` raises.
    """
    from distop.client.graph_file import read_graph
    from distop.client.graphs import requests
    from distop.services.submission.graph_start import check

    graph, names = read_graph(parse_file(file, "the graph"))
    check(*requests(graph, request_id))
    called = [names.get(start, "") for start in graph]
    started: list[Operation] = []

    async def work(client: Client) -> list[OperationResult]:
        started.extend(await client.start_operations(graph, request_id=request_id))
        if not wait:
            return []
        if not current.json:
            _print_started(started, called, stream=output.note)
        return await _ended(started, timeout)

    try:
        results = current.with_client(work)
    except KeyboardInterrupt:
        if not started:
            raise
        raise Interrupted(f"interrupted; {_operations(len(started))}: `distop ls` lists them") from None
    if current.json:
        records = [dict(one.record) for one in results] if wait else [_of(op) for op in started]
        rows = [{"name": name, **row} for name, row in zip(called, records, strict=True)]
        output.write_json({"operations": rows, "already_started": all(op.already_started for op in started)})
    elif wait:
        rows = [{"op": op.ref, "state": one.state} for op, one in zip(started, results, strict=True)]
        output.table(("op", "state", "name"), [(*row.values(), n) for row, n in zip(rows, called, strict=True)], "")
    else:
        _print_started(started, called, stream=output.say)
    if not all(one.success for one in results):
        raise typer.Exit(1)


def _of(op: Operation) -> dict[str, Any]:
    return {"op": op.ref, "instance": op.instance_id}


def _operations(number: int) -> str:
    return "the operation goes on" if number == 1 else f"the {number} operations go on"


def _print_started(started: list[Operation], called: list[str], stream: Any) -> None:
    for op, name in zip(started, called, strict=True):
        done = "already started" if op.already_started else "started"
        stream(f"{done}: {op.ref}" + (f" ({name})" if name else ""))


async def _ended(started: list[Operation], timeout: float | None) -> list[OperationResult]:
    """Wait for the operations one after the other, with one watch at a time. Raises WaitTimeout."""
    import asyncio

    from distop.errors import WaitTimeout

    results: list[OperationResult] = []
    left = ""
    try:
        async with asyncio.timeout(timeout):
            for op in started:
                left = op.ref
                results.append(await op.wait())
    except TimeoutError:
        raise WaitTimeout(
            f"time-out after {timeout:g} s: {left} and the operations after it go on; `distop ls` lists them"
        ) from None
    return results

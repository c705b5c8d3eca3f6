"""Commands on what is registered: tables, executors, operation types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distop.cli import output
from distop.cli.command_context import current, parse_options
from distop.cli.command_options import TIMEOUT, check_waiting
from distop.errors import UsageError

if TYPE_CHECKING:
    from distop.client.async_client import Client
    from distop.protocol.behavior_declaration import Declaration

NAME = Annotated[str, typer.Argument(metavar="NAME", help="The table's name, such as sales.orders.")]


def add(
    name: NAME,
    format_name: Annotated[
        str, typer.Option("--format", metavar="F", help="parquet, iceberg, spark, or one that is installed")
    ],
    location: Annotated[
        str,
        typer.Option(
            metavar="L",
            help="The table's folder (a path, or what pyarrow's file systems open), or what it is called in a catalog.",
        ),
    ],
    option: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A format option; V is JSON or text.")] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Change a table that is registered already: operations on it that go on fail."),
    ] = False,
) -> None:
    """Register a table."""
    from distop.cli.interrupts import run
    from distop.protocol.keys import encode
    from distop.protocol.records import TableRecord
    from distop.services.table_registry import check_record
    from distop.tables import check_within_limit

    encode(name)
    given = TableRecord(name, format_name, location, dict(parse_options(option)))
    check_record(given)
    record = run(check_within_limit(given))

    async def work(client: Client) -> TableRecord:
        return await client.add_table(record, replace=replace, check=False)

    stored = current.with_client(work)
    if current.json:
        output.write_json(stored.to_json())
    else:
        output.say(f"table {name}: {stored.format} at {stored.location}")


def ls() -> None:
    """List the registered tables."""

    async def work(client: Client) -> list[Any]:
        return await client.tables()

    found = current.with_client(work)
    if current.json:
        output.write_json([record.to_json() for record in found])
        return
    output.table(
        ("table", "format", "location", "options"),
        [(r.name, r.format, r.location, " ".join(f"{k}={v}" for k, v in r.options.items())) for r in found],
        "no table is registered: `distop table add NAME --format parquet --location DIR`",
    )


def rm(name: NAME) -> None:
    """Remove a table from the registry; its data stays."""

    async def work(client: Client) -> None:
        await client.remove_table(name)

    current.with_client(work)
    if current.json:
        output.write_json({"table": name, "removed": True})
    else:
        output.say(f"table {name} is no longer registered; its data is where it was")


def nodes() -> None:
    """List the live executors."""

    async def work(client: Client) -> dict[str, Any]:
        return await client.nodes()

    found = current.with_client(work)
    if current.json:
        import json

        output.write_json([{**json.loads(node.encode()), "incarnation": i} for i, node in sorted(found.items())])
        return
    output.table(
        ("executor", "state", "host", "slots", "behaviors", "serves", "labels", "version", "incarnation"),
        [
            (
                node.executor,
                node.state,
                node.host,
                node.slots,
                ", ".join(node.behaviors),
                str(node.serves) or "all",
                ", ".join(f"{k}={v}" for k, v in node.labels.items()),
                node.version,
                incarnation,
            )
            for incarnation, node in sorted(found.items(), key=lambda pair: pair[1].executor)
        ],
        "no executor is alive: start one with `distop executor`",
        ("slots",),
    )


def drain(
    executor: Annotated[str, typer.Argument(metavar="EXECUTOR", help="Its id; see `distop nodes`.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it work again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is empty.")] = False,
    timeout: TIMEOUT = None,
) -> None:
    """Empty an executor. Its jobs go on elsewhere, and it takes no new ones until --undo."""
    from distop.protocol.keys import encode
    from distop.services.draining import undo as undo_drain

    check_waiting(wait, timeout)
    if undo and wait:
        raise UsageError("--wait is for draining: leave it out with --undo")
    encode(executor)
    undone: list[bool] = []

    async def work(client: Client) -> str:
        if undo:
            undone.append(await undo_drain(client.etcd, client.keys, executor))
            return "active"
        return await client.drain(executor, wait=wait, timeout=timeout)

    state = current.with_client(work)
    if current.json:
        output.write_json({"executor": executor, "state": state})
    elif undo:
        output.say(f"{executor} works {'again' if undone[0] else 'already'}")
    else:
        output.say(f"{executor} is {state}")


def behaviors(
    of_type: Annotated[str | None, typer.Argument(metavar="TYPE", help="Only this one, with its parameters.")] = None,
) -> None:
    """List the published operation types, or the parameters of one. An executor publishes those installed with it."""
    from distop.services.inspection.filters import type_of

    type_of(of_type)

    async def work(client: Client) -> tuple[list[Any], dict[str, Any]]:
        return await client.behaviors(), await client.nodes()

    found, live = current.with_client(work)
    offered = {d.type_name: sum(d.type_name in node.behaviors for node in live.values()) for d in found}
    if of_type is not None:
        _behavior(of_type, found, offered)
        return
    if current.json:
        output.write_json([_document(d, offered[d.type_name]) for d in found])
        return
    output.table(
        ("type", "executors", "instances", "conflicts with", "policy", "description"),
        [
            (
                d.type_name,
                offered[d.type_name],
                d.instances,
                ", ".join(d.conflicts_with),
                d.failure_policy,
                d.description,
            )
            for d in found
        ],
        "no operation type is published yet: an executor publishes those installed with it when it starts",
        ("executors",),
    )


def _document(declaration: Declaration, executors: int) -> dict[str, Any]:
    """What is published of a type (its JSON Schemas are ``arg_schema``, ``result_schema``, ``report_schema``), how many
    executors offer it, and its parameters as a list.
    """
    import json

    from distop.schemas.parameters import parameters

    told = [one.to_json() for one in parameters(declaration.arg_schema)]
    return {**json.loads(declaration.encode()), "executors": executors, "parameters": told}


def _behavior(type_name: str, found: list[Declaration], offered: dict[str, int]) -> None:
    import json

    from distop.errors import UnknownBehavior
    from distop.schemas.parameters import parameters

    one = next((d for d in found if d.type_name == type_name), None)
    if one is None:
        known = ", ".join(d.type_name for d in found)
        published = f"published: {known}" if known else "none is published yet"
        raise UnknownBehavior(f"there is no behavior {type_name!r} ({published})")
    if current.json:
        output.write_json(_document(one, offered[type_name]))
        return
    output.fields(
        {
            "type": one.type_name,
            "description": one.description,
            "executors": offered[type_name],
            "instances": one.instances,
            "object": one.object_field,
            "conflicts with": ", ".join(one.conflicts_with),
            "failure policy": one.failure_policy,
            "attempts": one.retry.attempts,
        }
    )
    output.say("")
    output.table(
        ("parameter", "type", "nullable", "default", "description"),
        [
            (
                p.name,
                p.type,
                "yes" if p.nullable else "no",
                "(required)" if p.required else json.dumps(p.default, ensure_ascii=False),
                p.description,
            )
            for p in parameters(one.arg_schema)
        ],
        "it has no parameters that its schema names",
    )

"""Commands on tables, executors and operation types."""

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
    from distop.services.registered import Offer

NAME = Annotated[str, typer.Argument(metavar="NAME", help="The table's name, such as sales.orders.")]


def add(
    name: NAME,
    format_name: Annotated[
        str, typer.Option("--format", metavar="F", help="parquet, iceberg, delta, spark, or an installed format.")
    ],
    location: Annotated[
        str,
        typer.Option(
            metavar="L",
            help="The table's folder (a path, or a URL that pyarrow's file systems open), or its name in a catalog.",
        ),
    ],
    option: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A format option; V is JSON or text.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Change a registered table; its open operations fail.")
    ] = False,
) -> None:
    """Register a table."""
    from distop.cli.interrupts import run
    from distop.protocol.keys import encode
    from distop.protocol.records import TableRecord
    from distop.services.table_registry import check_record
    from distop.storage import storage_options
    from distop.tables import check_within_limit

    storage_options.configure(current.settings().get("storage"))
    encode(name)
    given = TableRecord(name, format_name, location, dict(parse_options(option)))
    check_record(given)
    record = run(check_within_limit(given))

    stored = current.with_client(lambda client: client.add_table(record, replace=replace, check=False))
    current.answer(stored.to_json(), f"table {name}: {stored.format} at {stored.location}")


def ls() -> None:
    """List the registered tables."""

    found = current.with_client(lambda client: client.tables())
    if current.json:
        output.write_json([record.to_json() for record in found])
        return
    output.table(
        ("table", "format", "location", "options"),
        [(r.name, r.format, r.location, " ".join(f"{k}={v}" for k, v in r.options.items())) for r in found],
        "no table is registered: `distop table add NAME --format parquet --location DIR`",
    )


def rm(name: NAME) -> None:
    """Remove a table from the registry. Its data stays, and its series end."""

    current.with_client(lambda client: client.remove_table(name))
    gone = f"table {name} is removed from the registry; its data is unchanged"
    current.answer({"table": name, "removed": True}, gone)


def nodes() -> None:
    """List the live executors."""

    found = current.with_client(lambda client: client.nodes())
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
    undo: Annotated[bool, typer.Option("--undo", help="Let it run jobs again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it runs no jobs.")] = False,
    timeout: TIMEOUT = None,
) -> None:
    """Drain an executor. Other executors take its jobs, and it claims none until --undo."""
    from distop.protocol.keys import encode
    from distop.services.draining import undo as undo_drain

    check_waiting(wait, timeout)
    if undo and wait:
        raise UsageError("--wait and --undo exclude each other: leave --wait out")
    encode(executor)
    undone: list[bool] = []

    async def work(client: Client) -> str:
        if undo:
            undone.append(await undo_drain(client.etcd, client.keys, executor))
            return "active"
        return await client.drain(executor, wait=wait, timeout=timeout)

    state = current.with_client(work)
    if undo:
        sentence = f"{executor} runs jobs again" if undone[0] else f"{executor} is not drained: nothing to undo"
    else:
        sentence = f"{executor} is {state}"
    current.answer({"executor": executor, "state": state}, sentence)


def behaviors(
    of_type: Annotated[str | None, typer.Argument(metavar="TYPE", help="Show this type, with its parameters.")] = None,
) -> None:
    """List the published operation types, or the parameters of one. Executors publish the types installed with them."""
    from distop.services.inspection.filters import type_of

    type_of(of_type)

    from distop.services.registered import offer_of, offers

    found = current.with_client(lambda client: offers(client.etcd, client.keys))
    if of_type is not None:
        _behavior(offer_of(of_type, found))
        return
    if current.json:
        output.write_json([_document(one.declaration, one.executors) for one in found])
        return
    output.table(
        ("type", "executors", "instances", "conflicts with", "policy", "description"),
        [
            (d.type_name, one.executors, d.instances, ", ".join(d.conflicts_with), d.failure_policy, d.description)
            for one in found
            for d in (one.declaration,)
        ],
        "no operation type is published: an executor publishes the types installed with it when it starts",
        ("executors",),
    )


def _document(declaration: Declaration, executors: int) -> dict[str, Any]:
    """The JSON of a type: its declaration, the number of executors that offer it, and its parameters.

    The declaration has the schemas ``arg_schema``, ``result_schema`` and ``report_schema``.
    """
    import json

    from distop.schemas.parameters import parameters

    arguments = [one.to_json() for one in parameters(declaration.arg_schema)]
    return {**json.loads(declaration.encode()), "executors": executors, "parameters": arguments}


def _behavior(offer: Offer) -> None:
    import json

    from distop.schemas.parameters import parameters

    one = offer.declaration
    if current.json:
        output.write_json(_document(one, offer.executors))
        return
    output.fields(
        {
            "type": one.type_name,
            "description": one.description,
            "executors": offer.executors,
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
        "its schema names no parameters",
    )

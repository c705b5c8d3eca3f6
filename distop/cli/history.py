"""The command on ended operations: history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distop.cli import output
from distop.cli.command_context import current
from distop.cli.command_options import NO_FILTERS, count, history_filters
from distop.cli.operations import check_known
from distop.protocol.keys import Keys
from distop.services.inspection.history_filters import HistoryFilters

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.client.async_client import Client
    from distop.services.inspection.history_filters import Query
    from distop.services.inspection.history_pages import HistoryPage


@history_filters
def history(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Only this table's.")] = None,
    filters: HistoryFilters = NO_FILTERS,
    limit: Annotated[int, typer.Option(metavar="N", parser=count("--limit"), help="At most N, the newest first.")] = 50,
    actions: Annotated[
        bool, typer.Option("--actions", help="List who did what to operations, tables and executors.")
    ] = False,
) -> None:
    """List the operations that have ended, the newest first."""
    wanted = filters.query(Keys(), table, limit)  # reports wrong arguments before etcd is asked

    async def work(client: Client) -> HistoryPage:
        page = await client.history(table, limit, **filters.given)
        if not page:
            await check_known(client, table)
        return page

    if actions:
        narrowed = any(value for name, value in filters.given.items() if name not in ("since", "until"))
        _list_actions(work, wanted, others=not narrowed)
    else:
        _show_history(current.with_client(work), table, filters)


def _show_history(found: HistoryPage, table: str | None, filters: HistoryFilters) -> None:
    if current.json:
        records = [dict(result.record) for result in found]
        if found.after is not None:
            records[-1]["after"] = found.after
        output.write_json(records)
        return
    which = " of that kind" if filters.given.keys() - {"alarms"} else ""
    which += " with an alarm" if filters.alarms else ""
    rows = [(r.op, r.state, output.jobs(r.jobs), output.duration(r.seconds), r.record.get("finished")) for r in found]
    output.table(
        ("op", "state", "jobs", "took", "finished", *(("alarm",) if filters.alarms else ())),
        [(*row, r.alarm) for row, r in zip(rows, found, strict=True)] if filters.alarms else rows,
        f"no operation{which} has ended yet" + (f" on {table}" if table else ""),
    )
    if found.after is not None:
        output.note(f"list older operations with --after {found.after}")


def _list_actions(ask: Callable[[Client], Awaitable[HistoryPage]], wanted: Query, *, others: bool) -> None:
    """Print the actions on the operations that ``ask`` finds, or on the wanted one, which may be open, newest first.

    ``others``: also the actions on tables and executors.
    """
    from distop.cli.operation_text import action_rows
    from distop.errors import NotFound
    from distop.services import actions

    async def work(client: Client) -> list[dict[str, Any]]:
        found = actions.within(await client.actions(wanted.table), wanted.since, wanted.until) if others else []
        try:
            records = [result.record for result in await ask(client)]
        except NotFound:
            if not found:
                raise
            records = []
        return await actions.listed(client.etcd, client.keys, records, found, wanted.ref)

    listed = current.with_client(work)
    if current.json:
        output.write_json(listed)
        return
    rows = [(one["time"], one["name"], *rest) for one, (_, *rest) in zip(listed, action_rows(listed), strict=True)]
    output.table(("time", "of", "action", "by", "what"), rows, "no action is recorded")

"""``distop audit``: checks etcd's history against the invariants, from its oldest revision on, or live."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from distop.cli import output
from distop.cli.command_context import Interrupted, current
from distop.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from distop.client.async_client import Client
    from distop.services.audit import Audit
    from distop.store.history import HistoryStep


def audit(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="Check only this one and its dependencies.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Check all operations (the default without OP).")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Check each new revision, too, until Ctrl-C.")] = False,
) -> None:
    """Check etcd's history against the invariants. At the first violation, prints its events and exits with 1."""
    from distop.client.async_operation import parse_ref
    from distop.protocol.keys import Keys
    from distop.services.audit import Audit, history

    if op is not None and everything:
        raise UsageError("OP and --all exclude each other: leave one of them out")
    ref = parse_ref(op) if op is not None else None
    checked = Audit(Keys(current.settings().get("namespace")), ref)

    async def work(client: Client) -> None:
        name = None if ref is None else str(ref)
        await run(checked, history(client.etcd, client.keys, follow=follow), name, follow=follow)

    try:
        current.with_client(work)
    except KeyboardInterrupt:
        if not follow:
            raise
        raise Interrupted(f"interrupted: {checked.summary()}; no violation") from None


async def run(
    checked: Audit, steps: AsyncGenerator[HistoryStep, None], op: str | None, *, follow: bool = False
) -> None:
    """Check a history and print the result.

    Raises ``typer.Exit`` with code 1 at a violation; NotFound if the operation is not in the history, or none of its
    revisions could be checked and no more follow; and the errors of reading the history.
    """
    async with aclosing(checked.run(steps)) as moments:
        async for moment in moments:
            if moment == "lost":
                output.note(lost(*checked.totals.lost[-1]))
                continue
            if moment == "caught up" and not checked.known:
                raise NotFound(
                    f"there is no operation {op!r} in etcd's history from revision {checked.totals.first} on"
                )
            if moment == "caught up" and checked.unseen and not follow:
                raise NotFound(compacted_away(op, checked.totals.lost))
            _show(checked)
            if moment == "violation":
                raise typer.Exit(1)


def lost(first: int, last: int) -> str:
    """A sentence about revisions that etcd has compacted."""
    if first <= 1:
        return f"etcd's history up to revision {last} is compacted: only later revisions are checked"
    return f"revisions {first} to {last} were compacted before they could be read: they are not checked"


def compacted_away(op: str | None, lost: list[tuple[int, int]]) -> str:
    """A sentence that no revision of an operation was checked. Without it the result would look good."""
    where = f"etcd's history is compacted up to revision {lost[-1][1]}, and " if lost else ""
    return f"{op!r} was not checked: {where}no later revision has a key of it"


def _show(checked: Audit) -> None:
    if current.json:
        output.write_json(checked.to_json())
        return
    violation = checked.violation
    if violation is None:
        output.say(f"{checked.summary()}; no violation")
        return
    output.say(str(violation))
    if violation.story:
        output.say("what happened, by revision:")
        for line in violation.story:
            output.say(f"  {line}")

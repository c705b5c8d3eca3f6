"""``distop audit``: etcd's own history against the invariants, from the oldest revision kept, or live."""

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
    from distop.store.history import Step


def audit(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="Only this operation, and what it needs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All operations (so it is without OP).")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with each new revision.")] = False,
) -> None:
    """Hold etcd's history against the invariants. Exits with 1 at the first violation, and tells its story."""
    from distop.client.async_operation import parse_ref
    from distop.protocol.keys import Keys
    from distop.services.audit import Audit, history

    if op is not None and everything:
        raise UsageError("name an operation, or give --all: not both")
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


async def run(checked: Audit, steps: AsyncGenerator[Step, None], op: str | None, *, follow: bool = False) -> None:
    """Take in a history, and tell what came of it. Leaves with 1 at a violation. Raises NotFound where the operation
    does not occur, or nothing of it could be checked and nothing more is to come; and what the history raises.
    """
    from distop.store.history import Beginning, CaughtUp

    async with aclosing(steps) as stream:
        async for step in stream:
            checked.take(step)
            if checked.violation is not None:
                _show(checked)
                raise typer.Exit(1)
            if isinstance(step, Beginning):
                output.note(lost(*checked.totals.lost[-1]))
            if isinstance(step, CaughtUp):
                if not checked.known:
                    raise NotFound(
                        f"there is no operation {op!r} in etcd's history from revision {checked.totals.first} on"
                    )
                if checked.unseen and not follow:
                    raise NotFound(compacted_away(op, checked.totals.lost))
                _show(checked)


def lost(first: int, last: int) -> str:
    """That history was compacted, in one sentence."""
    if first <= 1:
        return f"the history up to revision {last} is compacted: only what came after it is checked"
    return f"revisions {first} to {last} were compacted before they could be read: they are not checked"


def compacted_away(op: str | None, lost: list[tuple[int, int]]) -> str:
    """That nothing of an operation was checked, in one sentence: a result without it would be taken for a good one."""
    where = f"etcd's history is compacted up to revision {lost[-1][1]}, and " if lost else ""
    return f"nothing of {op!r} was checked: {where}nothing of its life came after that"


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

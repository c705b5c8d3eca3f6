"""``distop access``: prints or creates the etcd roles of viewers, executors, submitters and maintainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distop.cli import output
from distop.cli.command_context import current

if TYPE_CHECKING:
    from distop.client.async_client import Client
    from distop.protocol.etcd_roles import Role
    from distop.store.role_grants import RoleChange


def access(
    tables: Annotated[list[str] | None, typer.Argument(metavar="[TABLE]...", help="Tables to make roles for.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Create or correct the roles, as etcd's root.")] = False,
) -> None:
    """Print the etcd roles of viewers, executors, submitters and maintainers, or create them."""
    from distop.protocol.etcd_roles import roles
    from distop.protocol.keys import Keys

    found = roles(Keys(current.settings().get("namespace")), tables or ())
    if not apply:
        _show(found)
        return

    async def work(client: Client) -> tuple[list[RoleChange], bool]:
        from distop.services.roles import apply_roles

        return await apply_roles(client.etcd, found)

    _changed(found, *current.with_client(work))


def _show(found: tuple[Role, ...]) -> None:
    if current.json:
        output.write_json([role.to_json() for role in found])
        return
    rows = [(role.name, one.access, one.first, one.after) for role in found for one in role.permissions]
    output.table(("role", "access", "key", "range end"), rows, "")


def _changed(found: tuple[Role, ...], changes: list[RoleChange], enabled: bool) -> None:
    if current.json:
        document: dict[str, Any] = {"roles": [role.to_json() for role in found]}
        document |= {"changes": [change.to_json() for change in changes], "enabled": enabled}
        output.write_json(document)
    for change in changes if not current.json else ():
        where = f" {change.access} on {change.key} … {change.range_end}".rstrip(" …") if change.access else ""
        output.say(f"{change.role}: {change.change}{where}")
    if not changes and not current.json:
        output.say(f"nothing to change: all {len(found)} roles are correct")
    if not enabled:
        output.note("warning: authentication is off in etcd, so roles have no effect: run `etcdctl auth enable`")

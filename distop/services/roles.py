"""Writes etcd's roles for viewers, executors, submitters and maintainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.store import role_grants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.etcd_roles import Role
    from distop.store.client import EtcdClient
    from distop.store.role_grants import RoleChange


async def apply_roles(etcd: EtcdClient, roles: Sequence[Role]) -> tuple[list[RoleChange], bool]:
    """Apply the roles; returns the changes, and whether etcd checks users.

    Raises PermissionDenied unless the client's user is root.
    """
    return await role_grants.apply(etcd, roles), await role_grants.enabled(etcd)

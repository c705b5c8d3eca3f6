"""The roles of etcd that viewers, executors and submitters need, as they shall be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.store import role_grants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.etcd_roles import Role
    from distop.store.client import EtcdClient
    from distop.store.role_grants import Change


async def apply_roles(etcd: EtcdClient, roles: Sequence[Role]) -> tuple[list[Change], bool]:
    """What was changed; and whether etcd asks for users at all. Raises PermissionDenied unless our user is root."""
    return await role_grants.apply(etcd, roles), await role_grants.enabled(etcd)

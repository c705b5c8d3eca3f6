"""Users and roles of a real etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.store._proto import auth_pb2
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from distop.store.transport import Method
from tests.support.etcd import connected

if TYPE_CHECKING:
    pass

ROOT = {"username": "root", "password": "of all evil"}
WORKER = {"username": "worker", "password": "bee"}


async def admin(client: EtcdClient, name: str, request: object) -> None:
    """Send a request to etcd's Auth service."""
    response = getattr(rpc, f"Auth{name.removeprefix('Auth')}Response")
    await client.transport.unary(Method.of(f"Auth/{name}", type(request), response), request, 5.0)


async def grant(client: EtcdClient, first: str, after: str) -> None:
    """Allow the user ``worker`` to read and write the keys from ``first`` to before ``after``."""
    permission = auth_pb2.Permission(
        permType=auth_pb2.Permission.READWRITE, key=first.encode(), range_end=after.encode()
    )
    await admin(client, "RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name="ours", perm=permission))


async def revoke(client: EtcdClient, first: str, after: str) -> None:
    """Remove a permission of :func:`grant`."""
    request = rpc.AuthRoleRevokePermissionRequest(role="ours", key=first.encode(), range_end=after.encode())
    await admin(client, "RoleRevokePermission", request)


async def enable_users(endpoint: str, first: str = "ours.", after: str = "ours/") -> None:
    """Enable authentication with the users root and worker; worker may only read and write these keys."""
    async with connected(endpoint) as client:
        for user in (ROOT, WORKER):
            await admin(client, "UserAdd", rpc.AuthUserAddRequest(name=user["username"], password=user["password"]))
        await admin(client, "RoleAdd", rpc.AuthRoleAddRequest(name="root"))
        await admin(client, "RoleAdd", rpc.AuthRoleAddRequest(name="ours"))
        await grant(client, first, after)
        await admin(client, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        await admin(client, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user="worker", role="ours"))
        await admin(client, "AuthEnable", rpc.AuthEnableRequest())

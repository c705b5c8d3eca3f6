"""Creates roles in etcd and sets their permissions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import EtcdRejected, PermissionDenied
from distop.protocol.frozen import frozen
from distop.store._proto import auth_pb2 as auth
from distop.store._proto import rpc_pb2 as rpc
from distop.store.transport import Method

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.etcd_roles import Role
    from distop.store.client import EtcdClient

_STATUS = Method.of("Auth/AuthStatus", rpc.AuthStatusRequest, rpc.AuthStatusResponse)
_ADD = Method.of("Auth/RoleAdd", rpc.AuthRoleAddRequest, rpc.AuthRoleAddResponse)
_GET = Method.of("Auth/RoleGet", rpc.AuthRoleGetRequest, rpc.AuthRoleGetResponse)
_GRANT = Method.of("Auth/RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest, rpc.AuthRoleGrantPermissionResponse)
_REVOKE = Method.of(
    "Auth/RoleRevokePermission", rpc.AuthRoleRevokePermissionRequest, rpc.AuthRoleRevokePermissionResponse
)
# etcd's errors for a repeated request whose first copy was applied.
_NO_ROLE, _ROLE_EXISTS, _NOT_GRANTED = "role name not found", "role name already exists", "permission is not granted"

_Range = tuple[bytes, bytes]
_TYPES = {False: auth.Permission.READ, True: auth.Permission.READWRITE}


@frozen
class RoleChange:
    """One change of a role.

    ``change``: ``created``, ``granted`` or ``revoked``; only the last two have a key and a range_end.
    """

    role: str
    change: str
    access: str = ""
    key: str = ""
    range_end: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        fields = {"role": self.role, "change": self.change}
        if self.change == "created":
            return fields
        return fields | {"access": self.access, "key": self.key, "range_end": self.range_end}


async def enabled(client: EtcdClient) -> bool:
    """Whether etcd's authentication is enabled. Raises PermissionDenied unless our user is root."""
    return bool((await _request(client, _STATUS, rpc.AuthStatusRequest())).enabled)


async def apply(client: EtcdClient, roles: Sequence[Role]) -> list[RoleChange]:
    """Create missing roles, and make each role grant exactly its permissions.

    Missing permissions are granted, others are revoked. Idempotent. No user is given a role.

    Raises PermissionDenied unless our user is root.
    """
    return [change for role in roles for change in await _apply_one(client, role)]


async def _apply_one(client: EtcdClient, role: Role) -> list[RoleChange]:
    wanted = {(one.first.encode(), one.after.encode()): one for one in role.permissions}
    changes: list[RoleChange] = []
    found = await _permissions(client, role.name)
    if found is None:
        await _request(client, _ADD, rpc.AuthRoleAddRequest(name=role.name), already_done=_ROLE_EXISTS)
        changes.append(RoleChange(role.name, "created"))
        found = {}
    for where, one in wanted.items():
        if found.get(where) != _TYPES[one.write]:
            perm = auth.Permission(permType=_TYPES[one.write], key=where[0], range_end=where[1])
            await _request(client, _GRANT, rpc.AuthRoleGrantPermissionRequest(name=role.name, perm=perm))
            changes.append(_change(role.name, "granted", one.access, where))
    for where, kind in found.items():
        if where not in wanted:
            revoke = rpc.AuthRoleRevokePermissionRequest(role=role.name, key=where[0], range_end=where[1])
            await _request(client, _REVOKE, revoke, already_done=_NOT_GRANTED)
            changes.append(_change(role.name, "revoked", auth.Permission.Type.Name(kind).lower(), where))
    return changes


def _change(role: str, change: str, access: str, where: _Range) -> RoleChange:
    first, after = (end.decode(errors="backslashreplace") for end in where)
    return RoleChange(role, change, access, first, after)


async def _permissions(client: EtcdClient, role: str) -> dict[_Range, Any] | None:
    """The permissions of a role by range; None if the role does not exist."""
    try:
        found = await _request(client, _GET, rpc.AuthRoleGetRequest(role=role))
    except EtcdRejected as error:
        if _NO_ROLE in error.detail:
            return None
        raise
    return {(one.key, one.range_end): one.permType for one in found.perm}


async def _request(client: EtcdClient, method: Method[Any, Any], request: Any, already_done: str = "") -> Any:
    """Send a request. An error of etcd that contains ``already_done`` counts as success."""
    try:
        return await client.administer(method, request)
    except PermissionDenied as error:
        raise PermissionDenied(
            f"only etcd's root may read and change roles ({error.detail or error}): give a user with the role root "
            "(--user root and DISTOP_PASSWORD)",
            code=error.code,
            detail=error.detail,
        ) from None
    except EtcdRejected as error:
        if not already_done or already_done not in error.detail:
            raise
        return None

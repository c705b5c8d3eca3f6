"""Going on from the certificate of an operation that has ended: what came since, and what is applied to a schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import NotAllowed
from distop.services.inspection.status import status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.store.client import EtcdClient


async def certificate_of(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> Mapping[str, Any]:
    """The certificate of an operation that has ended, to look at: the executor reads its own. Raises NotFound,
    NotAllowed.
    """
    seen = await status(etcd, keys, ref)
    if seen.result is None:
        raise NotAllowed(f"{ref} has no certificate yet: wait until it has ended")
    return seen.result.certificate()


async def argument_since(etcd: EtcdClient, keys: Keys, argument: Any, former: OperationRef) -> Any:
    """The argument of a validation of what came since a former one; what it does not say of the checks is as the
    certificate has it. Raises NotFound, NotAllowed.
    """
    certificate = await certificate_of(etcd, keys, former)
    if not isinstance(argument, dict | None):
        return argument  # the start is refused, with the reason
    checks = [{**certified["check"], "name": certified["name"]} for certified in certificate["checks"]]
    certified = {"checks": checks, "where": certificate["where"], "null_is": certificate["null_is"]}
    return {**certified, **(argument or {}), "since": str(former)}


async def argument_of_apply(etcd: EtcdClient, keys: Keys, former: OperationRef, settle: float | None) -> dict[str, Any]:
    """The argument by which what a validation has proved becomes part of its table's schema. ``settle``: for so many
    seconds it looks at what is still committed. Raises NotFound, NotAllowed: else the operation would start, and fail
    with the same sentence.
    """
    await certificate_of(etcd, keys, former)
    settled = {} if settle is None else {"settle_seconds": settle}
    return {"certificate": str(former), **settled}

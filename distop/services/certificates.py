"""Arguments that continue from the certificate of an ended operation.

They validate new files since it, or apply it to the table's schema.
"""

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
    """The certificate of an ended operation, for display: executors read it themselves.

    Raises NotFound, NotAllowed.
    """
    seen = await status(etcd, keys, ref)
    if seen.result is None:
        raise NotAllowed(f"{ref} has no certificate yet: wait until it has ended")
    return seen.result.certificate()


async def argument_since(etcd: EtcdClient, keys: Keys, argument: Any, former: OperationRef) -> Any:
    """The argument to validate the new files since a certificate.

    Checks that it leaves out are those of the certificate. Raises NotFound, NotAllowed.
    """
    certificate = await certificate_of(etcd, keys, former)
    if not isinstance(argument, dict | None):
        return argument  # the start is refused, with the reason
    checks = [{**certified["check"], "name": certified["name"]} for certified in certificate["checks"]]
    certified = {"checks": checks, "where": certificate["where"], "null_is": certificate["null_is"]}
    return {**certified, **(argument or {}), "since": str(former)}


async def argument_of_apply(etcd: EtcdClient, keys: Keys, former: OperationRef, settle: float | None) -> dict[str, Any]:
    """The argument to apply a validation's result to its table's schema.

    ``settle``: seconds for which it checks files that are still committed. Raises NotFound, NotAllowed: otherwise the
    operation would start, and fail with the same sentence.
    """
    await certificate_of(etcd, keys, former)
    settled = {} if settle is None else {"settle_seconds": settle}
    return {"certificate": str(former), **settled}

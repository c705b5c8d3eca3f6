"""Limits of an identity: calls a second, open calls, open operations and their jobs, and bytes of an argument.

Calls are counted by each service for itself. Open operations are counted in etcd before each start: a service makes the
starts of one identity one after the other, so another service can only start what it is starting at this moment.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from distop.client.async_worker import Bucket
from distop.errors import InvalidArgument, LimitExceeded
from distop.protocol.frozen import frozen
from distop.protocol.texts import plural

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from distop.server.access import CallerIdentity
    from distop.services.inspection.open_work import OpenWorkReader

MOST_OPEN = 2_000
"""Maximum open calls of an identity, so that one cannot use all of the service's."""
MOST_BUCKETS = 10_000
"""Maximum callers whose calls are counted."""


@frozen
class NewWork:
    """What a call asks for: an argument, and an operation with it, or none (a policy starts it later).

    ``jobs``: its partitions, if they are named; else 1. ``request_id``: under which the call can be repeated.
    """

    argument_bytes: int
    operations: int = 1
    jobs: int = 1
    request_id: str = ""


class IdentityLimits:
    """Counts what each identity uses. ``work``: reads open operations; None: these are not limited."""

    def __init__(self, work: OpenWorkReader | None = None) -> None:
        self._work = work
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._open: Counter[str] = Counter()
        self._starting: dict[str, asyncio.Lock] = {}

    def check_call(self, identity: CallerIdentity | None) -> None:
        """Count a call. Raises LimitExceeded."""
        if identity is None:
            return
        if self._open[identity.name] >= MOST_OPEN:
            raise LimitExceeded(f"{identity.name} has {MOST_OPEN} open calls: end some of them")
        if not identity.calls_per_second:
            return
        bucket = self._buckets.get(identity.name)
        if bucket is None or bucket.rate != identity.calls_per_second:
            bucket = self._buckets[identity.name] = Bucket(identity.calls_per_second)
            while len(self._buckets) > MOST_BUCKETS:
                self._buckets.popitem(last=False)
        if not bucket.available():
            raise LimitExceeded(f"{identity.name} makes more than {identity.calls_per_second:g} calls a second")
        bucket.spend()

    @contextmanager
    def open_call(self, identity: CallerIdentity | None) -> Iterator[None]:
        """Count the call as open."""
        name = "" if identity is None else identity.name
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

    @asynccontextmanager
    async def starting(self, identity: CallerIdentity | None, new: Sequence[NewWork]) -> AsyncIterator[None]:
        """Let a call start operations. Raises LimitExceeded, and InvalidArgument for an argument that is too large."""
        if identity is None or not new:
            yield
            return
        largest = max(one.argument_bytes for one in new)
        if identity.argument_bytes and largest > identity.argument_bytes:
            raise InvalidArgument(
                f"the argument has {largest} bytes: those of {identity.name} have at most {identity.argument_bytes}"
            )
        is_counted = (identity.open_operations or identity.open_jobs) and any(one.operations for one in new)
        if not is_counted or self._work is None:
            yield
            return
        async with self._starting.setdefault(identity.name, asyncio.Lock()):
            await self._check_open(self._work, identity, new)
            yield

    async def _check_open(self, reader: OpenWorkReader, identity: CallerIdentity, new: Sequence[NewWork]) -> None:
        work = await reader.read(identity.name)
        ids = {one.request_id for one in new} - {""}
        if any(one in ids or one.rpartition("#")[0] in ids for one in work.request_ids):
            return  # a repeated call starts nothing
        operations = work.operations + sum(one.operations for one in new)
        if identity.open_operations and operations > identity.open_operations:
            raise LimitExceeded(
                f"{identity.name} has {plural(work.operations, 'open operation')}, and may have "
                f"{identity.open_operations}: wait until some have ended"
            )
        jobs = work.jobs + sum(one.jobs for one in new)
        if identity.open_jobs and jobs > identity.open_jobs:
            raise LimitExceeded(
                f"the open operations of {identity.name} have {plural(work.jobs, 'job')}, and may have "
                f"{identity.open_jobs}: wait until some have ended"
            )

"""Keeps this node's record in etcd current: drain state, unavailable types, long-running activities, problems."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from distop import __version__
from distop.errors import DistopError, describe
from distop.protocol.executor_nodes import node_state
from distop.protocol.records import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distop.daemon.incarnation_context import Context


class NodeRecord:
    """The node record of one incarnation. ``busy``: whether a role of this node has work that a drain waits for."""

    def __init__(self, ctx: Context, busy: Callable[[], bool]) -> None:
        config = ctx.config
        self._ctx = ctx
        self._busy = busy
        self._node = Node(
            ctx.executor_id, socket.gethostname(), config.slots, (), config.labels, __version__, serves=config.serves
        )
        """The constant fields, and the count of releases."""
        self._published = self._node
        """The record in etcd."""
        self._writing = asyncio.Lock()
        self._publishing: asyncio.Task[None] | None = None

    def begin(self, types: Iterable[str]) -> bytes:
        """The record with which the session starts. ``types``: the operation types that this node offers."""
        self._node = self._published = replace(self._node, behaviors=tuple(sorted(types)))
        return self._node.encode()

    def publish_changes(self) -> None:
        """Write the record in the background, if it has changed."""
        if self._publishing is None and self.current() != self._published:
            self._publishing = asyncio.ensure_future(self._publish())

    async def count_release(self) -> None:
        """Count a release of claims, which tells other nodes that claims wait. Raises SessionLost."""
        async with self._writing:
            # Count also a rejected update: etcd may have a copy of it, and the next count must differ.
            self._node = replace(self._node, released=self._node.released + 1)
            await self._update(self.current())

    def current(self) -> Node:
        """The current record. Called after each step of a role, so it is fast if nothing has changed."""
        ctx, node = self._ctx, self._node
        unable, failing = ctx.capability.unable, ctx.capability.failing
        doing, work = ctx.doing.published, ctx.doing.published_work
        refused, more = ctx.rejected_writes.published, ctx.rejected_writes.more
        draining = ctx.draining
        state = node_state(draining, draining and self._busy())
        skipped, skipped_more = ctx.skipped
        clock, unknown, spark = ctx.clock.ahead, ctx.clock.unknown, ctx.worker.trouble
        fields = (node.state, node.unable, node.doing, node.refused, node.refused_more, node.spark, node.failing)
        if (*fields, node.clock, node.clock_unknown, node.skipped, node.skipped_more, node.work) == (
            *(state, unable, doing, refused, more, spark, failing),
            *(clock, unknown, skipped, skipped_more, work),
        ):
            return node
        able = tuple(sorted(ctx.types - unable.keys()))
        current = replace(node, state=state, behaviors=able, unable={**unable}, doing=doing, work=work)
        current = replace(current, refused=refused, refused_more=more, clock=clock, clock_unknown=unknown)
        current = replace(current, skipped=skipped, skipped_more=skipped_more)
        return replace(current, spark=spark, failing={**failing})

    async def _publish(self) -> None:
        """Write the current record.

        The next poll retries a rejected write, since somebody may wait for the record (`drain --wait`).
        """
        try:
            while self.current() != self._published:
                async with self._writing:
                    await self._update(self.current())
        except DistopError as error:
            message = "Could not update this node's record in etcd; retrying at the next poll: %s"
            self._ctx.log.debug(message, describe(error))
        finally:
            self._publishing = None

    async def _update(self, node: Node) -> None:
        await self._ctx.session.update(node.encode())
        before, self._published = self._published, node
        if node.state is not before.state:
            self._ctx.log.info("Node state changed to %s", node.state)

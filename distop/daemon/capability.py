"""Tracks which installed operation types this node can run: a type may need something missing here, such as Spark.

A missing requirement shows only when the type's code uses it. The node then stops offering the type and releases its
jobs to other nodes, without counting a failure. If no other node can run them, the operation ends with the reason as
its error.

A type that fails only for the moment (a Spark session did not start, for example) is not offered for a pause, which
doubles each time. The node record lists it in ``failing`` until a job of the type succeeds. A node releases work only
if another node that is not failing at the type may take it; otherwise the work would circulate among the nodes without
end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.protocol.executor_nodes import refusal
from distop.protocol.frozen import frozen
from distop.protocol.operation_options import fits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from distop.decide.view import ClusterView
    from distop.protocol.records import Node
    from distop.runtime.logs import ContextLogger

PAUSE, LONGEST_PAUSE = 30.0, 600.0
"""Seconds before the node offers a failing type again, first and longest; doubled until a job of the type succeeds."""
MAY_RETURN = 60.0
"""Seconds for which a capable node that has gone still counts: it may only be restarting."""


@frozen
class _Failing:
    """A type that could not run at the last attempt.

    ``since``: seconds since the epoch. ``until``: when the node offers the type again, by the monotonic clock.
    ``pause``: the last pause, in seconds.
    """

    why: str
    since: float
    until: float = 0.0
    pause: float = 0.0


class Capability:
    """The types that one incarnation can run now. ``changed()`` is called on each change."""

    def __init__(self, cluster: ClusterView, incarnation: str, log: ContextLogger, changed: Callable[[], None]) -> None:
        self._cluster = cluster
        self._incarnation = incarnation
        self._log = log
        self._changed = changed
        self._gone: dict[str, tuple[Node, float]] = {}
        """Nodes that have gone recently, with the time."""
        self._lacking: dict[str, str] = {}
        """Type → why it cannot run on this node."""
        self._failing: dict[str, _Failing] = {}
        """Type → why it could not run at the last attempt."""

    @property
    def unable(self) -> Mapping[str, str]:
        """Type → why it cannot run here: the types that the node does not offer now."""
        return {**{name: self._failing[name].why for name in self._failing if self._pausing(name)}, **self._lacking}

    @property
    def failing(self) -> Mapping[str, str]:
        """Type → why it failed at the last attempt, whether or not it is offered again."""
        return {name: one.why for name, one in self._failing.items() if name not in self._lacking}

    def nodes_changed(self, before: Mapping[str, Node]) -> None:
        """Remember the nodes that have gone within the last minute."""
        now = time.monotonic()
        self._gone = {inc: (node, at) for inc, (node, at) in self._gone.items() if now - at < MAY_RETURN}
        self._gone |= {inc: (node, now) for inc, node in before.items() if inc not in self._cluster.nodes}

    def serves(self, type_name: str, tables: Collection[str] = ()) -> bool:
        """Whether this node should run an installed type on these tables.

        True if it can, and also if no node can, since the operations must then end with the reason.
        """
        if type_name in self._lacking:
            return not self._elsewhere(type_name, tables)
        return not self._pausing(type_name) or not self._elsewhere_now(type_name, tables=tables)

    def cannot(self, type_name: str, why: str, tables: Collection[str] = ()) -> bool:
        """Record that this node lacks something that the type needs.

        Returns whether another node may run the type; if not, the job fails.
        """
        if not self._elsewhere(type_name, tables):
            return False
        if type_name not in self._lacking:
            self._lacking[type_name] = why
            message = "Running no more jobs of type %s until this executor is restarted: %s"
            self._log.error(message, type_name, why)
            self._changed()
        return True

    def cannot_now(
        self,
        type_name: str,
        why: str,
        where: Mapping[str, str] | None = None,
        given_back: Collection[str] = (),
        tables: Collection[str] = (),
    ) -> bool:
        """Record that this node cannot run the type for the moment.

        True: another node may take the job, which is released without counting a failure. False: no node would take
        it, so the attempt counts as failed and is repeated.

        ``where``: the labels that the operation requires. ``given_back``: executors that could not run the job either.
        ``tables``: the tables of the operation.
        """
        known, now, before = self._failing.get(type_name), time.monotonic(), (self.unable, self.failing)
        left = self._elsewhere_now(type_name, where, given_back, tables)
        pause = known.pause if known is not None else 0.0
        if known is not None and self._pausing(type_name):
            self._failing[type_name] = _Failing(why, time.time(), known.until, pause)
        elif left:
            pause = min(LONGEST_PAUSE, 2 * pause) if pause else PAUSE
            self._failing[type_name] = _Failing(why, time.time(), now + pause, pause)
            message = "Cannot run operations of type %s on this node; not offering the type for %d s: %s"
            self._log.error(message, type_name, int(pause), why)
        else:
            self._failing[type_name] = _Failing(why, time.time(), 0.0, pause)
        if (self.unable, self.failing) != before:
            self._changed()
        return left

    def succeeded(self, type_name: str, began: float) -> None:
        """Record that a job of the type, started at ``began`` (epoch seconds), succeeded here."""
        known = self._failing.get(type_name)
        if known is not None and began >= known.since:
            del self._failing[type_name]
            self._changed()

    def _pausing(self, type_name: str) -> bool:
        known = self._failing.get(type_name)
        return known is not None and time.monotonic() < known.until

    def _others(self) -> Iterator[Node]:
        """The other nodes, and recently gone nodes that may come back."""
        now = time.monotonic()
        yield from (node for inc, node in self._cluster.nodes.items() if inc != self._incarnation)
        yield from (node for node, at in self._gone.values() if now - at < MAY_RETURN)

    def _elsewhere(self, type_name: str, tables: Collection[str]) -> bool:
        """Whether another node that serves these tables offers the type, or will after a pause or a drain."""
        return any(
            (type_name in node.behaviors or type_name in node.failing) and not refusal(node.serves, type_name, tables)
            for node in self._others()
        )

    def _elsewhere_now(
        self,
        type_name: str,
        where: Mapping[str, str] | None = None,
        given_back: Collection[str] = (),
        tables: Collection[str] = (),
    ) -> bool:
        """Whether another node would take such a job now, and is not failing at the type."""
        return any(
            type_name in node.behaviors
            and type_name not in node.failing
            and node.executor not in self._cluster.drains
            and node.executor not in given_back
            and fits(where or {}, node.labels)
            and not refusal(node.serves, type_name, tables)
            for node in self._others()
        )

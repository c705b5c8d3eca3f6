"""Which of the installed operation types this node can run: one may need what cannot be had here, such as Spark.

What a type needs shows when its code asks for it. The node then leaves that type out of what it offers, and others do
the work, unblamed. Only where nobody else can is the operation brought to its end, with the reason as its error.

A type that fails only for the moment (a Spark session did not start, say) is left out for a pause that doubles each
time. The node record names it in ``failing`` until a job of the type succeeds. A node gives work back unblamed only if
another node that is not failing at the type may take it; else the work would go round among the nodes for ever.
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
"""Seconds before the node offers such a type again, at first and at most; they double until a job of it succeeds."""
MAY_RETURN = 60.0
"""Seconds for which a capable node that has gone is waited for: it may only be starting again."""


@frozen
class _Failing:
    """A type that could not be run at the last attempt.

    ``since``: seconds since the epoch. ``until``: when the node offers the type again, by the monotonic clock.
    ``pause``: the last pause, in seconds.
    """

    why: str
    since: float
    until: float = 0.0
    pause: float = 0.0


class Capability:
    """Which types one incarnation can run now.

    ``changed()`` is called whenever that changes.
    """

    def __init__(self, cluster: ClusterView, incarnation: str, log: ContextLogger, changed: Callable[[], None]) -> None:
        self._cluster = cluster
        self._incarnation = incarnation
        self._log = log
        self._changed = changed
        self._gone: dict[str, tuple[Node, float]] = {}
        """Nodes that have gone recently, and when."""
        self._lacking: dict[str, str] = {}
        """Type → why it can never run here."""
        self._failing: dict[str, _Failing] = {}
        """Type → why it could not run at the last attempt."""

    @property
    def unable(self) -> Mapping[str, str]:
        """Type → why it cannot be run here: the types that the node does not offer now."""
        return {**{name: self._failing[name].why for name in self._failing if self._pausing(name)}, **self._lacking}

    @property
    def failing(self) -> Mapping[str, str]:
        """Type → why it failed at the last attempt, whether or not it is offered again."""
        return {name: one.why for name, one in self._failing.items() if name not in self._lacking}

    def nodes_changed(self, before: Mapping[str, Node]) -> None:
        """Remember which nodes have gone within the last minute."""
        now = time.monotonic()
        self._gone = {inc: (node, at) for inc, (node, at) in self._gone.items() if now - at < MAY_RETURN}
        self._gone |= {inc: (node, now) for inc, node in before.items() if inc not in self._cluster.nodes}

    def serves(self, type_name: str, tables: Collection[str] = ()) -> bool:
        """This node shall work for an installed type on these tables: it can, or nobody can and the operations must be
        told.
        """
        if type_name in self._lacking:
            return not self._elsewhere(type_name, tables)
        return not self._pausing(type_name) or not self._elsewhere_now(type_name, tables=tables)

    def cannot(self, type_name: str, why: str, tables: Collection[str] = ()) -> bool:
        """The type needs what cannot be had here. Whether another node may do the work; else it fails."""
        if not self._elsewhere(type_name, tables):
            return False
        if type_name not in self._lacking:
            self._lacking[type_name] = why
            said = "This executor runs no more jobs of type %s until it is restarted: %s"
            self._log.error(said, type_name, why)
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

        True: another node may do the work meanwhile, so the job is given back unblamed. False: no node would take it,
        so the attempt counts as failed and is repeated.

        ``where``: the labels that the operation asks for. ``given_back``: executors that could not run the job either.
        ``tables``: those that it touches.
        """
        known, now, before = self._failing.get(type_name), time.monotonic(), (self.unable, self.failing)
        left = self._elsewhere_now(type_name, where, given_back, tables)
        pause = known.pause if known is not None else 0.0
        if known is not None and self._pausing(type_name):
            self._failing[type_name] = _Failing(why, time.time(), known.until, pause)
        elif left:
            pause = min(LONGEST_PAUSE, 2 * pause) if pause else PAUSE
            self._failing[type_name] = _Failing(why, time.time(), now + pause, pause)
            said = "Cannot run operations of type %s on this node; not offering the type for %d s: %s"
            self._log.error(said, type_name, int(pause), why)
        else:
            self._failing[type_name] = _Failing(why, time.time(), 0.0, pause)
        if (self.unable, self.failing) != before:
            self._changed()
        return left

    def succeeded(self, type_name: str, began: float) -> None:
        """A job of the type succeeded here that started at ``began`` (epoch seconds)."""
        known = self._failing.get(type_name)
        if known is not None and began >= known.since:
            del self._failing[type_name]
            self._changed()

    def _pausing(self, type_name: str) -> bool:
        known = self._failing.get(type_name)
        return known is not None and time.monotonic() < known.until

    def _others(self) -> Iterator[Node]:
        """The other nodes, and those that have gone so recently that they may come back."""
        now = time.monotonic()
        yield from (node for inc, node in self._cluster.nodes.items() if inc != self._incarnation)
        yield from (node for node, at in self._gone.values() if now - at < MAY_RETURN)

    def _elsewhere(self, type_name: str, tables: Collection[str]) -> bool:
        """Whether another node that serves these tables offers the type, or will after a retry or an undone drain."""
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
        """Whether another node would take such a job now, and has not failed at the type."""
        return any(
            type_name in node.behaviors
            and type_name not in node.failing
            and node.executor not in self._cluster.drains
            and node.executor not in given_back
            and fits(where or {}, node.labels)
            and not refusal(node.serves, type_name, tables)
            for node in self._others()
        )

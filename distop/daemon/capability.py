"""Which of the installed operation types this node can run: one may need what cannot be had here, such as Spark.

What a type needs shows when its code asks for it. The node then leaves that type out of what it offers, and others do
the work, unblamed. Only where nobody else can is the operation brought to its end, with the reason as its error.

What may be had again soon (a Spark session that did not start, say) is left out for a while, longer each time. The node
record names it from the first such attempt until a job of the type succeeds. So a node gives work back unblamed only
where another one may take it that has not just failed at the same: else it would wander among them for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.core.frozen import frozen
from distop.core.options import fits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from distop.core.model import Node
    from distop.core.view import ClusterView
    from distop.logs import ContextLogger

PAUSE, LONGEST_PAUSE = 30.0, 600.0
"""Seconds before the node offers a type again that it could not run for the moment. They double from the first to the
second, until a job of the type succeeds here.
"""
MAY_RETURN = 60.0
"""Seconds for which a capable node that has gone is waited for: it may only be starting again."""


@frozen
class _Failing:
    """What could not be run at the last attempt. ``since``: seconds since the epoch; ``until``: when the node offers it
    again, by the monotonic clock; ``pause``: the last of its pauses, in seconds.
    """

    why: str
    since: float
    until: float = 0.0
    pause: float = 0.0


class Capability:
    """What one incarnation has found out. ``changed()`` is called when it can do less than before, or more."""

    def __init__(self, cluster: ClusterView, incarnation: str, log: ContextLogger, changed: Callable[[], None]) -> None:
        self._cluster = cluster
        self._incarnation = incarnation
        self._log = log
        self._changed = changed
        self._gone: dict[str, tuple[Node, float]] = {}
        """Nodes that went lately, and when."""
        self._lacking: dict[str, str] = {}
        """Type → what it needs and cannot be had here at all."""
        self._failing: dict[str, _Failing] = {}
        """Type → what it needs and could not be had at the last attempt."""

    @property
    def unable(self) -> Mapping[str, str]:
        """Type → what it needs and cannot be had here: what the node does not offer."""
        return {**{name: self._failing[name].why for name in self._failing if self._pausing(name)}, **self._lacking}

    @property
    def failing(self) -> Mapping[str, str]:
        """Type → why it could not be run at the last attempt, be it offered again or not."""
        return {name: one.why for name, one in self._failing.items() if name not in self._lacking}

    def nodes_changed(self, before: Mapping[str, Node]) -> None:
        """Remember which nodes have gone lately."""
        now = time.monotonic()
        self._gone = {inc: (node, at) for inc, (node, at) in self._gone.items() if now - at < MAY_RETURN}
        self._gone |= {inc: (node, now) for inc, node in before.items() if inc not in self._cluster.nodes}

    def serves(self, type_name: str) -> bool:
        """This node shall work for an installed type: it can, or nobody can and the operations must be told."""
        if type_name in self._lacking:
            return not self._elsewhere(type_name)
        return not self._pausing(type_name) or not self._elsewhere_now(type_name)

    def cannot(self, type_name: str, why: str) -> bool:
        """The type needs what cannot be had here. Whether another node may do the work; else it fails."""
        if not self._elsewhere(type_name):
            return False
        if type_name not in self._lacking:
            self._lacking[type_name] = why
            self._log.error("this node offers %s no longer: %s", type_name, why)
            self._changed()
        return True

    def cannot_now(
        self, type_name: str, why: str, where: Mapping[str, str] | None = None, given_back: Collection[str] = ()
    ) -> bool:
        """This node cannot run the type for the moment. True: another node may do the work meanwhile, so that it is
        given back unblamed. False: none would take it, so the attempt counts as failed and is repeated.

        ``where``: the labels that the operation asks for. ``given_back``: executors that could not run the job either.
        """
        known, now, before = self._failing.get(type_name), time.monotonic(), (self.unable, self.failing)
        left = self._elsewhere_now(type_name, where, given_back)
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
        """A job of the type succeeded here that began at this time, in seconds since the epoch."""
        known = self._failing.get(type_name)
        if known is not None and began >= known.since:
            del self._failing[type_name]
            self._changed()

    def _pausing(self, type_name: str) -> bool:
        known = self._failing.get(type_name)
        return known is not None and time.monotonic() < known.until

    def _others(self) -> Iterator[Node]:
        """The other nodes, and those that have gone so lately that they may come back."""
        now = time.monotonic()
        yield from (node for inc, node in self._cluster.nodes.items() if inc != self._incarnation)
        yield from (node for node, at in self._gone.values() if now - at < MAY_RETURN)

    def _elsewhere(self, type_name: str) -> bool:
        """Another node offers the type, or will when it tries it again or is drained no longer."""
        return any(type_name in node.behaviors or type_name in node.failing for node in self._others())

    def _elsewhere_now(
        self, type_name: str, where: Mapping[str, str] | None = None, given_back: Collection[str] = ()
    ) -> bool:
        """Another node would take such a job, and has not failed at the same lately."""
        return any(
            type_name in node.behaviors
            and type_name not in node.failing
            and node.executor not in self._cluster.drains
            and node.executor not in given_back
            and fits(where or {}, node.labels)
            for node in self._others()
        )

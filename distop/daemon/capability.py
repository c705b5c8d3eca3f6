"""Which of the installed operation types this node can run: one may need what cannot be had here, such as Spark.

What a type needs shows when its code asks for it. The node then leaves that type out of what it offers, and others do
the work, unblamed. Only where nobody else can is the operation brought to its end, with the reason as its error.

What may be had again soon (a Spark session that did not start, say) is left out for a while, longer each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.core.model import Node
    from distop.core.view import ClusterView
    from distop.logs import ContextLogger

PAUSE, LONGEST_PAUSE = 30.0, 600.0
"""Seconds before the node offers a type again that it could not run for the moment. They double from the first to the
second, until a job of the type succeeds here.
"""
MAY_RETURN = 60.0
"""Seconds for which a capable node that has gone is waited for: it may only be starting again."""


class Capability:
    """What one incarnation has found out. ``changed()`` is called when it can do less than before."""

    def __init__(self, cluster: ClusterView, incarnation: str, log: ContextLogger, changed: Callable[[], None]) -> None:
        self._cluster = cluster
        self._incarnation = incarnation
        self._log = log
        self._changed = changed
        self._left: dict[str, float] = {}
        self._unable: dict[str, str] = {}
        self._until: dict[str, float] = {}
        """Type → when the node offers it again, by the monotonic clock."""
        self._pauses: dict[str, float] = {}
        """Type → the last of these pauses, in seconds."""

    @property
    def unable(self) -> Mapping[str, str]:
        """Type → what it needs and cannot be had here."""
        if self._until:
            now = time.monotonic()
            for name in [name for name, until in self._until.items() if until <= now]:
                del self._until[name], self._unable[name]
        return self._unable

    def nodes_changed(self, before: Mapping[str, Node]) -> None:
        """Remember which types have lost a node lately."""
        now = time.monotonic()
        self._left = {name: at for name, at in self._left.items() if now - at < MAY_RETURN}
        for incarnation, node in before.items():
            if incarnation not in self._cluster.nodes:
                self._left.update(dict.fromkeys(node.behaviors, now))

    def serves(self, type_name: str) -> bool:
        """This node shall work for an installed type: it can, or nobody can and the operations must be told."""
        return type_name not in self.unable or not self._elsewhere(type_name)

    def cannot(self, type_name: str, why: str) -> bool:
        """The type needs what cannot be had here. Whether another node may do the work; else it fails."""
        if not self._elsewhere(type_name):
            return False
        known = type_name in self.unable and type_name not in self._until
        self._until.pop(type_name, None)
        if not known:
            self._unable[type_name] = why
            self._log.error("this node offers %s no longer: %s", type_name, why)
            self._changed()
        return True

    def cannot_now(self, type_name: str, why: str) -> bool:
        """This node cannot run the type for the moment. True: another node may do the work meanwhile. False: no other
        node offers the type, so the attempt counts as failed and is repeated here.
        """
        if not self._elsewhere(type_name):
            return False
        if type_name not in self.unable:
            pause = min(LONGEST_PAUSE, 2 * self._pauses.get(type_name, PAUSE / 2))
            self._pauses[type_name] = pause
            self._unable[type_name], self._until[type_name] = why, time.monotonic() + pause
            said = "Cannot run operations of type %s on this node; not offering the type for %d s: %s"
            self._log.error(said, type_name, int(pause), why)
            self._changed()
        return True

    def succeeded(self, type_name: str) -> None:
        """A job of the type succeeded here."""
        self._pauses.pop(type_name, None)

    def _elsewhere(self, type_name: str) -> bool:
        """Another node offers the type, be it drained, or has done so until lately."""
        for incarnation, node in self._cluster.nodes.items():
            if incarnation != self._incarnation and type_name in node.behaviors:
                return True
        return time.monotonic() - self._left.get(type_name, -MAY_RETURN) < MAY_RETURN

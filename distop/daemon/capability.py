"""Which of the installed operation types this node can run: one may need what cannot be had here, such as Spark.

What a type needs shows when its code asks for it. The node then leaves that type out of what it offers, and others do
the work, unblamed. Only where nobody else can is the operation brought to its end, with the reason as its error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.core.model import Node
    from distop.core.view import ClusterView
    from distop.logs import ContextLogger

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
        self.unable: dict[str, str] = {}
        """Type → what it needs and cannot be had here."""

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
        if type_name not in self.unable:
            self.unable[type_name] = why
            self._log.error("this node offers %s no longer: %s", type_name, why)
            self._changed()
        return True

    def _elsewhere(self, type_name: str) -> bool:
        """Another node offers the type, be it drained, or has done so until lately."""
        for incarnation, node in self._cluster.nodes.items():
            if incarnation != self._incarnation and type_name in node.behaviors:
                return True
        return time.monotonic() - self._left.get(type_name, -MAY_RETURN) < MAY_RETURN

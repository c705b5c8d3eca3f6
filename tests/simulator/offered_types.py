"""Checks that a node which cannot run a type leaves it to nodes that can.

Nothing may fail for this cause while another node offers the type and has not just failed at it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.decide.job_claims import given_back
from distop.protocol import keys as K
from distop.protocol.executor_nodes import Drain, NodeState, refusal
from distop.protocol.jobs import Claim, Outcome
from distop.protocol.operation_options import fits
from distop.protocol.records import Decision, Node, Spec
from tests.simulator.simulated_behaviors import UNABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.protocol.keys import ParsedKey
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change

_UNABLE = UNABLE.encode()


class OfferedTypes:
    """Folds each revision with its sender. ``found(kind, key, text, op, partition)`` is called for each breach."""

    def __init__(self, found: Callable[..., None]) -> None:
        self._found = found
        self._began: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        """Claim → its number of failures."""
        self._since: dict[str, dict[str, int]] = {}
        """Incarnation → type → the revision since which it has offered the type without failing at it."""
        self._nodes: dict[str, Node] = {}
        self._where: dict[OperationRef, Mapping[str, str]] = {}

    def step(self, revision: int, parsed: Sequence[tuple[ParsedKey, Change]], sender: str) -> None:
        """Fold one whole revision."""
        for key, change in parsed:
            if key.family == K.NODE:
                self._node(key.id, revision, change)
            elif key.family == K.NODE_DRAIN and not change.deleted and Drain.decode(change.kv.value).drain:
                self._since |= {inc: {} for inc, node in self._nodes.items() if node.executor == key.id}
            elif key.name == "spec" and key.ref is not None and not change.deleted:
                self._where[key.ref] = Spec.decode(change.kv.value).where
            elif not change.deleted and _UNABLE in change.kv.value and self._blames(key, change):
                self._judge(key, change, sender)

    def _node(self, incarnation: str, revision: int, change: Change) -> None:
        if change.deleted:
            self._since.pop(incarnation, None)
            self._nodes.pop(incarnation, None)
            return
        self._began.setdefault(incarnation, revision)
        known, node = self._since.get(incarnation, {}), Node.decode(change.kv.value)
        self._nodes[incarnation] = node
        offers = [t for t in node.behaviors if t not in node.failing and node.state is NodeState.ACTIVE]
        self._since[incarnation] = {t: known.get(t, revision) for t in offers}

    def _blames(self, key: ParsedKey, change: Change) -> bool:
        """Whether the record counts a failure because a node cannot run the type.

        A claim also carries the error of the attempt before, which counts no failure.
        """
        if key.name == "outcome":
            return UNABLE in Outcome.decode(change.kv.value).error
        if key.name == "decision":
            return UNABLE in Decision.decode(change.kv.value).error
        if key.family == K.CLAIM:
            claim = Claim.decode(change.kv.value)
            before, self._failures[change.kv.key] = self._failures.get(change.kv.key, 0), claim.failures
            return claim.waiting and claim.failures > before and UNABLE in claim.error
        return key.name == "planning"

    def _judge(self, key: ParsedKey, change: Change, sender: str) -> None:
        """Report a breach if a node has offered the type since before the sender started.

        That node was in the sender's first listing and in all later views, so the sender knew it.
        """
        assert key.ref is not None
        began = self._began.get(sender, 0)
        tried = given_back(Claim.decode(change.kv.value)) if key.family == K.CLAIM else frozenset()
        for incarnation, types in self._since.items():
            node = self._nodes[incarnation]
            if node.executor in tried or not fits(self._where.get(key.ref, {}), node.labels):
                continue
            if refusal(node.serves, key.ref.type, (key.ref.table,)):
                continue
            if incarnation != sender and types.get(key.ref.type, began + 1) <= began:
                text = f"{sender} cannot run {key.ref.type} and counts a failure, although {incarnation} offers it"
                self._found("wrongly blamed", change.kv.key, text, str(key.ref), key.partition)
                return

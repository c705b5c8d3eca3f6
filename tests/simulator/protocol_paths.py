"""Counts which paths the protocols took, by the changes of each revision: the coverage of a simulation."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from distop.protocol import keys as K
from distop.protocol.jobs import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.keys import ParsedKey
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change

ALL = (
    "start with a plan",
    "chunk",
    "group of reports",
    "page of a cleanup",
    "deleted history",
    "group of starts",
    "group of finishes",
    "claims of several operations",
    "claim by an actor",
    "extension by an actor",
    "return by an actor",
    "take-over from an actor",
    "revocation within a limit",
    "replacement",
    "follower of an id",
    "next of a series",
)
"""Paths that a small operation with default limits does not take."""


class ProtocolPaths:
    """Folds each revision. ``count``: how often each path was taken; ``claimed`` and ``elected``: the incarnations
    that claimed a job, or won an election.
    """

    def __init__(self) -> None:
        self.count: Counter[str] = Counter(dict.fromkeys(ALL, 0))
        self.claimed: set[str] = set()
        self.elected: set[str] = set()
        self._actors: dict[str, Claim] = {}
        """Claims by actors, by key."""
        self._holders: dict[str, str] = {}
        """Claim → its holder: an incarnation or an actor."""
        self._open: set[OperationRef] = set()

    def step(self, parsed: Sequence[tuple[ParsedKey, Change]], sender: str) -> None:
        """Fold one whole revision."""
        put: Counter[str] = Counter()
        gone: Counter[str] = Counter()
        follows = again = False
        claimed: set[OperationRef] = set()
        for key, change in parsed:
            if key.family == K.OP:
                what = "chunk" if key.chunk >= 0 else f"job {key.name}" if key.partition >= 0 else key.name
                (gone if change.deleted else put)[what] += 1
                follows = follows or (what == "spec" and not change.deleted and b'"follows"' in change.kv.value)
                again = again or (what == "spec" and not change.deleted and b'#next"' in change.kv.value)
            elif key.family == K.HISTORY:
                if not key.name:
                    (gone if change.deleted else put)["history"] += 1
            elif not change.deleted:
                if key.family == K.CLAIM and key.ref is not None:
                    self.claimed.add(sender)
                    claimed.add(key.ref)
                    self._by_actors(change)
                    self._revoked(key.ref, change, sender)
                elif key.family == K.COORDINATOR:
                    self.elected.add(sender)
            if key.family == K.OPEN and key.ref is not None:
                (self._open.discard if change.deleted else self._open.add)(key.ref)
            if key.family == K.CLAIM and change.deleted and (held := self._actors.pop(change.kv.key, None)):
                self.count["return by an actor" if held.actor == sender else "take-over from an actor"] += 1
        self.count["deleted history"] += gone["history"]
        self.count["group of starts"] += put["spec"] > 1
        self.count["group of finishes"] += put["history"] > 1
        self.count["replacement"] += put["spec"] > 0 and put["history"] > 0
        self.count["follower of an id"] += follows
        self.count["next of a series"] += again
        self.count["claims of several operations"] += len(claimed) > 1
        self.count["start with a plan"] += put["plan"] > 0 and put["spec"] > 0
        self.count["chunk"] += put["chunk"] > 0 and not put["plan"]
        self.count["group of reports"] += put["job state"] > 1
        self.count["page of a cleanup"] += gone["job state"] > 0 and not gone["state"]

    def _revoked(self, ref: OperationRef, change: Change, sender: str) -> None:
        claim = Claim.decode(change.kv.value)
        holder = self._holders.pop(change.kv.key, "")
        if not claim.waiting:
            self._holders[change.kv.key] = claim.incarnation or claim.actor
        elif ref in self._open and holder != sender:
            self.count["revocation within a limit"] += 1

    def _by_actors(self, change: Change) -> None:
        old, new = self._actors.pop(change.kv.key, None), Claim.decode(change.kv.value)
        if new.actor:
            self._actors[change.kv.key] = new
        if old is not None and new.grant == old.grant:
            self.count["extension by an actor"] += 1
            return
        self.count["claim by an actor"] += bool(new.actor)
        if old is not None:
            self.count["return by an actor" if new.waiting else "take-over from an actor"] += 1

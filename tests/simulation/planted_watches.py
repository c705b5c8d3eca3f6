"""Planted bugs in the handling of a server's watch responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distop.protocol.keys import Keys
from distop.store import watch
from distop.store.cluster_identity import Identity
from distop.store.watch_position import Reopen, WatchPosition
from tests.simulation.bug_planting import BUGS, Patch, bug, substitute, wrap
from tests.simulator import scenes


# Rare: a watch has to break before an event whose revision the last header already exceeded.
@bug("liveness", first=24)
def resume_a_watch_at_the_headers_revision(patch: Patch) -> None:
    def beyond(step: Any, given: Any) -> Any:
        if given.response.events and not given.response.fragment:
            given.self.next_revision = max(given.self.next_revision, given.response.revision + 1)
        return step

    wrap(patch, WatchPosition, "feed", beyond)


@bug("liveness", first=11)
def apply_fragments_singly(patch: Patch) -> None:
    former = WatchPosition.feed
    substitute(patch, WatchPosition, "feed", lambda self, response: former(self, replace(response, fragment=False)))


@bug("liveness", focus=("compaction", "refuse", "member-killed"), first=8, drawn=5672)
def ignore_compaction(patch: Patch) -> None:
    former = WatchPosition.feed

    def feed(self: WatchPosition, response: Any) -> Any:
        if response.compact_revision:
            self.next_revision = response.compact_revision
            return Reopen("compacted")
        return former(self, response)

    substitute(patch, WatchPosition, "feed", feed)


# Rare: a watch has to move to a lagging member at the right moment.
@bug("invariant 5", focus=("lag", "cut"), shape=scenes.three_members, first=34, drawn=43524)
def apply_old_events_again(patch: Patch) -> None:
    """A lagging member sends old events again (etcd#20221), and they are applied."""
    former = WatchPosition.feed

    def feed(self: WatchPosition, response: Any) -> Any:
        if response.events and not response.fragment and response.events[0].kv.mod_revision < self.next_revision:
            self.next_revision = response.events[0].kv.mod_revision
        return former(self, response)

    substitute(patch, WatchPosition, "feed", feed)


@bug("liveness", focus=("slow-watches",), shape=scenes.old_server_with_watches_behind, first=908, drawn=36249)
def ask_an_old_server_for_its_progress(patch: Patch) -> None:
    """It answers ahead of pending events (W3), which are then dropped as old."""
    substitute(patch, watch, "orders_requested_progress", lambda version: True)


# Rare: a watch has to lose exactly the event that is needed.
@bug("liveness", focus=("events-lost", "crash"), first=112, drawn=177219)
def never_list_again(patch: Patch) -> None:
    """There are no periodic listings: events that etcd has lost stay lost (etcd#20573)."""
    patch.setattr(watch, "LISTING_SHARE", 1e9)


# Rare: a decision has to be based on a stale read.
@bug("two attempts at once", "outcomes lost", focus=("stale-reads", "crash"), first=74, drawn=112364)
def accept_stale_reads(patch: Patch) -> None:
    """Stale reads are accepted, although their revision shows them (etcd#20418)."""
    former = Identity.see

    def see(self: Identity, header: Any, where: str, *, linearizable_after: int = 0) -> None:
        former(self, header, where)

    substitute(patch, Identity, "see", see)


# Rare: operations of two types, one a prefix of the other, have to run on two executors.
@bug("not the coordinator", first=91)
def a_prefix_without_its_delimiter(patch: Patch) -> None:
    def wider(found: tuple[str, str], _: Any) -> tuple[str, str]:
        start = found[0][:-1]
        return start, start[:-1] + chr(ord(start[-1]) + 1)

    wrap(patch, Keys, "type_range", wider)
    wrap(patch, Keys, "type_claims", wider)


__all__ = ["BUGS"]

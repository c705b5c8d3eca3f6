"""The server's side of watches: events, responses and headers (W1–W9).

A synchronized watch gets the events of each revision in a separate response. A watch that starts in the past, or whose
member was behind, catches up in batches of revisions, whose headers carry the *current* revision (W2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol.supported_versions import orders_requested_progress, parse_version
from distop.store._proto import rpc_pb2 as rpc
from tests.simulator import etcd_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.protocol.revisioned import Change
    from distop.store._proto import kv_pb2 as kv
    from tests.simulator.quorum import Member
    from tests.simulator.sim_etcd import SimEtcd

CATCH_UP = 0.1
"""Seconds between two rounds of the loop that serves watches which are behind."""


FRAGMENT = 2 * 1024 * 1024
"""Maximum bytes of one response, for watches that accept fragments."""


class Watch:
    """One watch on one stream. ``send(response)`` puts a response on the stream."""

    __slots__ = ("end", "fragment", "key", "member", "next", "open", "send", "start", "synced")

    def __init__(self, member: Member, request: Any, send: Callable[[rpc.WatchResponse], None]) -> None:
        self.member = member
        self.key = etcd_wire.to_text(request.key)
        self.end = etcd_wire.to_text(request.range_end)
        self.fragment = request.fragment
        self.send = send
        self.start = request.start_revision
        self.next = self.start or member.applied + 1
        self.synced = self.next > member.applied
        self.open = True

    def wants(self, change: Change) -> bool:
        key = change.kv.key
        return self.key <= key < self.end if self.end else key == self.key


class WatchServer:
    """All watches of a cluster. ``batch``: revisions in one response to a watch that is behind."""

    def __init__(self, etcd: SimEtcd, batch: int) -> None:
        self._etcd = etcd
        self._batch = batch
        self._watches: dict[int, list[Watch]] = {}
        self._events: dict[int, kv.Event] = {}
        self.fragments = 0
        """Maximum events of one response, for watches that accept fragments; 0: limited by bytes only."""
        self.resends = False
        """A watch that starts at a revision ahead of the member also gets earlier events (W9)."""
        self.skips = 0
        """Revisions that a watch which starts in the past skips: their events are lost (etcd#20573)."""
        self.refuses = ""
        """The error with which new watches are refused (W7); "": they are created."""
        self._ordered = orders_requested_progress(parse_version(etcd.version))

    def create(self, member: Member, request: Any, send: Callable[[rpc.WatchResponse], None]) -> Watch | None:
        """Create a watch; None: it was refused."""
        etcd = self._etcd
        if self.refuses:
            send(self._response(member, created=True, canceled=True, watch_id=-1, cancel_reason=self.refuses))
            return None
        watch = Watch(member, request, send)
        if self.resends and watch.next > member.applied + 1:
            watch.next = member.applied + 1
        if self.skips and not watch.synced:
            watch.next = min(watch.next + self.skips, member.applied + 1)
        send(self._response(member, created=True))
        if request.start_revision and request.start_revision < etcd.compacted:
            send(
                self._response(
                    member,
                    canceled=True,
                    compact_revision=etcd.compacted,
                    cancel_reason="etcdserver: mvcc: required revision has been compacted",
                )
            )
            return None
        self._watches.setdefault(member.id, []).append(watch)
        if not watch.synced:
            etcd.loop.world_at(etcd.loop.now + CATCH_UP / 2, self._catch_up, watch)
        return watch

    def close(self, watch: Watch) -> None:
        """Remove a watch whose stream has ended."""
        watch.open = False
        watches = self._watches.get(watch.member.id, [])
        if watch in watches:
            watches.remove(watch)

    def progress(self, member: Member, watches: list[Watch], send: Callable[[rpc.WatchResponse], None]) -> None:
        """Answer a progress request.

        Newer servers answer if all watches of the stream are synchronized and none starts beyond the member's revision
        (W8a); otherwise they drop the request. Older servers answer at once, ahead of pending events (W3).
        """
        if not self._ordered or all(watch.synced and watch.start <= member.applied for watch in watches):
            send(self._response(member, watch_id=-1))

    def advanced(self, member: Member) -> None:
        """Send the new events of a member to its synchronized watches."""
        for watch in self._watches.get(member.id, ()):
            if watch.synced:
                self._send_new(watch)

    def fall_behind(self, member: Member) -> None:
        """Make the member's watches unsynchronized, as when they are served too slowly."""
        for watch in self._watches.get(member.id, ()):
            if watch.synced:
                watch.synced = False
                self._etcd.loop.world_at(self._etcd.loop.now + 5 * CATCH_UP, self._catch_up, watch)

    # ------------------------------------------------------------------- send

    def _history(self, watch: Watch) -> list[tuple[int, tuple[Change, ...]]]:
        return self._etcd.store.between(watch.next, watch.member.applied)

    def _send_new(self, watch: Watch) -> None:
        for revision, changes in self._history(watch):
            events = [change for change in changes if watch.wants(change)]
            if events:
                self.send(watch, events, revision)
        watch.next = max(watch.next, watch.member.applied + 1)

    def _catch_up(self, watch: Watch) -> None:
        if not watch.open or watch.synced:
            return
        if watch.next < self._etcd.compacted:
            watch.send(self._response(watch.member, canceled=True, compact_revision=self._etcd.compacted))
            self.close(watch)
            return
        events: list[Change] = []
        taken = 0
        for revision, changes in self._history(watch):
            watched = [change for change in changes if watch.wants(change)]
            if watched:
                if taken == self._batch:
                    self.send(watch, events, watch.member.applied)
                    watch.next = revision
                    self._etcd.loop.world_at(self._etcd.loop.now + CATCH_UP, self._catch_up, watch)
                    return
                taken += 1
                events += watched
        if events:
            self.send(watch, events, watch.member.applied)
        watch.next = max(watch.next, watch.member.applied + 1)
        watch.synced = True

    def send(self, watch: Watch, changes: list[Change], revision: int) -> None:
        pages = list(self._pages(changes)) if watch.fragment else [changes]
        for n, page in enumerate(pages):
            watch.send(
                self._response(
                    watch.member,
                    revision=revision,
                    events=[self._event(change) for change in page],
                    fragment=n + 1 < len(pages),
                )
            )

    def _event(self, change: Change) -> kv.Event:
        """The event of a change, built once for all watches: the history keeps each change, so its id is unique."""
        event = self._events.get(id(change))
        if event is None:
            event = self._events[id(change)] = etcd_wire.event(change)
        return event

    def _pages(self, changes: list[Change]) -> Iterator[list[Change]]:
        page: list[Change] = []
        size = 0
        for change in changes:
            weight = len(change.kv.key) + len(change.kv.value)
            if page and (size + weight > FRAGMENT or len(page) == self.fragments):
                yield page
                page, size = [], 0
            page.append(change)
            size += weight
        yield page

    def _response(self, member: Member, *, revision: int = 0, **fields: Any) -> rpc.WatchResponse:
        header = rpc.ResponseHeader(
            cluster_id=self._etcd.header(member).cluster_id,
            member_id=member.id,
            revision=revision or member.applied,
            raft_term=self._etcd.quorum.term,
        )
        return rpc.WatchResponse(header=header, **fields)

"""The position of a watch: what to apply of each response, and where to resume (W2–W9). Pure.

The stream's I/O is in ``watch``; the decisions are here, so that tests can feed single responses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from distop.protocol.revisioned import Change


@frozen
class Batch:
    """Events that are applied together (W4): afterwards the view is the range's content at ``revision``.

    ``listing``: the events are the full content (puts only) and replace the view; keys that are not among them are
    deleted (W6). Otherwise they are changes, in order.
    """

    revision: int
    events: tuple[Change, ...]
    listing: bool = False
    gathered: Any = None
    """The ``watch.Gather`` that holds a listing read in pages; then ``events`` is empty."""


@frozen
class Response:
    """The needed fields of a watch response; ``revision`` is the header's."""

    revision: int
    events: tuple[Change, ...] = ()
    created: bool = False
    cancelled: bool = False
    compact_revision: int = 0
    fragment: bool = False
    reason: str = ""


@frozen
class Relist:
    """The watch cannot resume at its position (compaction, W6): list again and watch from there."""

    reason: str


@frozen
class Reopen:
    """The server ended this watch: open another one at the position. ``refused``: it never started (W7)."""

    reason: str
    refused: bool = False


WatchStep: TypeAlias = Batch | Relist | Reopen | None


class WatchPosition:
    """The position of one watch. ``next_revision`` is the revision from which a new watch starts."""

    __slots__ = ("_fragments", "next_revision")

    def __init__(self, listed_at: int = 0) -> None:
        self._fragments: list[Change] = []
        self.next_revision = listed_at + 1

    @property
    def revision(self) -> int:
        """The revision up to which all events were applied."""
        return self.next_revision - 1

    def listed(self, revision: int) -> None:
        """A listing at ``revision`` was applied: watch from the next one (W1)."""
        self._fragments.clear()
        self.next_revision = revision + 1

    def opened(self) -> None:
        """A new stream starts: drop fragments of the old one, since the server sends the response again (W5)."""
        self._fragments.clear()

    def feed(self, response: Response) -> WatchStep:
        """The next step after a response. The position advances, assuming that a returned batch is applied."""
        if response.compact_revision:
            return Relist(f"revision {self.next_revision} was compacted, up to {response.compact_revision} (W6)")
        if response.cancelled:
            return Reopen(response.reason or "the server cancelled the watch", refused=response.created)
        if response.created:
            return None
        if response.fragment:
            self._fragments.extend(response.events)
            return None
        events = response.events
        if self._fragments:
            events = (*self._fragments, *events)
            self._fragments.clear()
        if not events:
            # A progress notification: the only header with a reliable revision (W3).
            if response.revision < self.next_revision:
                return None
            self.next_revision = response.revision + 1
            return Batch(response.revision, ())
        if events[0].kv.mod_revision < self.next_revision:  # resent by a lagging member (W9)
            events = tuple(event for event in events if event.kv.mod_revision >= self.next_revision)
            if not events:
                return None
        # The last event's revision, not the header's, which may be ahead of events that were not sent yet (W2).
        last = events[-1].kv.mod_revision
        self.next_revision = last + 1
        return Batch(last, events)

"""The stream of server-sent events of a page: the parts that have changed since the cursor.

The cursor is the id of the last event that the browser got: the revision of the partitions that it shows, and a digest
of each part. It holds all that the service needs to know of a page, so any instance can resume the stream: what
changed is sent once, and what did not change is not sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from distop.clock import time
from distop.errors import DistopError, Unavailable
from distop.protocol.json_codec import dumps
from distop.server.page.executor_timeline import timeline
from distop.server.page.page_rendering import render
from distop.server.page.partition_grid import grid

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from distop.server.page.partition_reader import OperationPartitions

FASTEST = 0.5
"""Seconds between two readings of what a page shows."""
EVERY = 2.0
"""Seconds between two readings while nothing is known to have changed."""
LOAD_SHARE = 8.0
"""The pause after a reading, as a multiple of its duration: a large list is read less often."""
SLOWEST = 30.0
BEAT = 15.0
"""Seconds without an event after which a comment is sent, so that proxies keep the stream open."""
_DIGEST = 10


class Cursor:
    """What a page shows: the revision of its partitions (-1: none), and the digest of each part by its name."""

    def __init__(self, text: str = "") -> None:
        self.revision, self.digests = -1, dict[str, str]()
        first, *rest = text.split("~") if len(text) <= 2_000 and text.isascii() else [""]
        if first.isdigit() and len(first) < 20:
            self.revision = int(first)
        for one in rest:
            name, _, digest = one.partition(".")
            if name.isidentifier() and digest.isalnum():
                self.digests[name] = digest

    def __str__(self) -> str:
        parts = (f"{name}.{digest}" for name, digest in self.digests.items())
        return "~".join([str(self.revision) if self.revision >= 0 else "", *parts])


def digest(text: str) -> str:
    """A short digest of a part."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]


def event(kind: str, data: Any, cursor: Cursor | None = None) -> bytes:
    """One event."""
    head = f"id: {cursor}\n" if cursor is not None else ""
    return f"{head}event: {kind}\n".encode() + b"data: " + dumps(data) + b"\n\n"


class ContentReader(Protocol):
    """Reads the variables of a page's templates. Raises what the calls raise."""

    def __call__(self) -> Awaitable[Mapping[str, Any]]: ...


def parts_of(names: Mapping[str, str], content: Mapping[str, Any]) -> dict[str, str]:
    """The HTML of each part: its name → its template."""
    return {name: render(template, content) for name, template in names.items()}


def changed_parts(parts: Mapping[str, str], cursor: Cursor) -> list[bytes]:
    """An event for each part that the page does not show yet. The cursor is moved."""
    found = []
    for name, html in parts.items():
        if cursor.digests.get(name) != (made := digest(html)):
            cursor.digests[name] = made
            found.append(event("part", {"name": name, "html": html}, cursor))
    return found


@dataclass
class _StreamProgress:
    """What a stream has sent, and when it reads again. Times are those of the event loop.

    ``sent_at``: when the last event or comment was sent. ``read_due``: when the content is read again.
    ``partitions_version``: the version of the partitions that was sent. ``content_ended``: the content was just
    read, and is that of an ended operation.
    """

    sent_at: float
    read_due: float = 0.0
    partitions_version: int = -1
    content_ended: bool = False


class PageStream:
    """The events of one page, until it ends or the service stops.

    ``read_content``: reads the content of ``templates`` (name → template). ``partitions``: of an operation, for the map
    and the timeline. ``check``: raises if the caller may no longer see them. ``stopped``: the service ends.
    """

    def __init__(
        self,
        read_content: ContentReader,
        templates: Mapping[str, str],
        cursor: Cursor,
        stopped: asyncio.Event,
        partitions: OperationPartitions | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._read_content = read_content
        self._templates = templates
        self._cursor = cursor
        self._stopped = stopped
        self._partitions = partitions
        self._check = check
        self._clock = asyncio.get_running_loop().time

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Events and comments."""
        yield b"retry: 1000\n\n"
        progress = _StreamProgress(sent_at=self._clock())
        while not self._stopped.is_set():
            found: list[bytes] = []
            progress.content_ended = False
            try:
                found += self._changed_partitions(progress)
                if self._clock() >= progress.read_due:
                    found += await self._changed_content(progress)
            except DistopError as error:
                yield event("error-text", {"text": str(error)})
                return
            for one in found:
                progress.sent_at = self._clock()
                yield one
            if progress.content_ended and self._has_all_partitions(progress):
                yield event("end", {}, self._cursor)
                return
            if not found and self._clock() - progress.sent_at > BEAT:
                progress.sent_at = self._clock()
                yield b": waiting\n\n"
            await self._wait(progress)

    async def _changed_content(self, progress: _StreamProgress) -> list[bytes]:
        """An event for each changed part, or that the content cannot be read now. Sets when it is read again."""
        began = self._clock()
        try:
            content = await self._read_content()
            progress.content_ended = content.get("ended") is True
            return changed_parts(parts_of(self._templates, content), self._cursor)
        except Unavailable as error:
            return [event("delayed", {"text": str(error)})]
        finally:
            took = self._clock() - began
            progress.read_due = self._clock() + min(SLOWEST, max(EVERY, LOAD_SHARE * took))

    def _has_all_partitions(self, progress: _StreamProgress) -> bool:
        """Whether the last states of the partitions were sent."""
        return self._partitions is None or (
            self._partitions.ended and self._partitions.version == progress.partitions_version
        )

    async def _wait(self, progress: _StreamProgress) -> None:
        """Wait for a change of the partitions, or until the content is read again."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        left = max(0.05, min(progress.read_due - self._clock(), BEAT))
        try:
            if self._partitions is None:
                await asyncio.wait([stopped], timeout=left)
                return
            version = progress.partitions_version
            changed = asyncio.ensure_future(self._partitions.wait(version, left))
            try:
                await asyncio.wait([stopped, changed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
                await asyncio.gather(changed, return_exceptions=True)
            if self._partitions.version != version:
                # Changes that come together are one event, and the numbers beside the map change with it.
                await asyncio.wait([stopped], timeout=FASTEST if self._partitions.complete else FASTEST / 4)
                now = self._clock()
                progress.read_due = now if self._partitions.ended else min(progress.read_due, now + FASTEST)
        finally:
            stopped.cancel()
            await asyncio.gather(stopped, return_exceptions=True)

    def _changed_partitions(self, progress: _StreamProgress) -> Sequence[bytes]:
        """The events of partitions that have changed since the last call. Raises if the caller may not see them."""
        if self._partitions is None or self._partitions.version == progress.partitions_version:
            return []
        progress.partitions_version = self._partitions.version
        self._check()
        return self._partition_events()

    def _partition_events(self) -> Sequence[bytes]:
        """The changed cells of the map, and the timeline."""
        assert self._partitions is not None
        states, revision = self._partitions.states, self._partitions.revision
        if states is None:
            return []
        cursor = self._cursor
        cells = grid(states, cursor.revision)
        found = []
        if not self._partitions.complete and not states.changed.any():
            return []  # nothing is read yet: all jobs would look open
        if cells["changed"] or cursor.revision < 0:
            # Until all are read, the next event has all of them again: pages of keys come in several orders.
            if self._partitions.complete:
                cursor.revision = max(cursor.revision, revision)
            whole = self._partitions.complete
            found.append(event("map", {**cells, "complete": whole}, cursor))
        drawn = timeline(states, time.time())
        if cursor.digests.get("timeline") != (made := digest(dumps(drawn).decode())):
            cursor.digests["timeline"] = made
            found.append(event("timeline", drawn, cursor))
        return found

"""Watches the claims of one type on one table while operations are cancelled.

Everything else is decided from how the jobs ended, and etcd refuses an end while a claim is left. Each job's claim is
written and deleted, so a coordinator that always watched claims would get twice the events.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.store.watch import Batch, Feed


class ClaimWatch:
    """Starts and stops the watch.

    ``make`` returns a feed that passes its batches to the given function. ``apply`` applies a batch to the view.
    ``forget`` is called when the watch stops, and ``on_failure`` when it fails.
    """

    def __init__(
        self,
        make: Callable[[Callable[[Batch], None]], Feed],
        apply: Callable[[Batch], None],
        forget: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._make = make
        self._apply = apply
        self._forget = forget
        self._on_failure = on_failure
        self._feed: Feed | None = None
        self._follows: set[asyncio.Task[None]] = set()
        """Tasks of the current feed, and of previous feeds until they are closed."""
        self._follow: asyncio.Task[None] | None = None

    def want(self, wanted: bool) -> None:
        """Start or stop the watch. The claims are known after its first listing."""
        if wanted is (self._feed is not None):
            return
        if not wanted:
            assert self._follow is not None
            self._follow.cancel()
            self._feed = self._follow = None
            self._forget()
            return

        def apply(batch: Batch) -> None:
            if self._feed is feed:
                self._apply(batch)

        feed = self._feed = self._make(apply)
        self._follow = asyncio.ensure_future(self._run(feed))
        self._follows.add(self._follow)
        self._follow.add_done_callback(self._follows.discard)

    async def _run(self, feed: Feed) -> None:
        try:
            feed.begin()
            await feed.wait()
        except Exception as error:
            if self._feed is feed:
                self._on_failure(error)
        finally:
            await feed.close()

    async def reached(self, revision: int) -> None:
        """Wait until the watch is applied up to ``revision`` (W11), or has stopped."""
        feed = self._feed
        if feed is not None:
            try:
                await feed.reached(revision)
            except Exception:
                if self._feed is feed:
                    raise

    async def close(self) -> None:
        """Stop. ``apply`` is not called again, and no task is left when this returns."""
        self.want(False)
        await asyncio.gather(*self._follows, return_exceptions=True)

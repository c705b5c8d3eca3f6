"""The claims of one type on one table, watched for as long as its coordinator has to know them: while operations are
being cancelled.

All else is decided from how the jobs ended, and etcd refuses an end while a claim is left. Each job's claim comes and
goes, so a coordinator that watched them without need would get twice the events.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.store.watch import Batch, Feed


class ClaimWatch:
    """``make`` makes a feed that hands over to what it is given; ``apply`` folds what comes, ``forget`` is called when
    nothing will come any more, and ``on_failure`` when a feed has failed.
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
        """Of the feed, and of former ones until they are closed."""
        self._follow: asyncio.Task[None] | None = None

    def want(self, wanted: bool) -> None:
        """Watch from now on, or do not. The first listing tells that the claims are known."""
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
        """Return once what is watched was applied up to ``revision`` (W11), or is not watched any more."""
        feed = self._feed
        if feed is not None:
            try:
                await feed.reached(revision)
            except Exception:
                if self._feed is feed:
                    raise

    async def close(self) -> None:
        """Stop; ``apply`` is not called any more, and nothing is under way when this returns."""
        self.want(False)
        await asyncio.gather(*self._follows, return_exceptions=True)

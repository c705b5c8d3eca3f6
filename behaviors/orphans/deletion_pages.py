"""Pages of files that are deleted together, at a limited rate."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from distop.clock import time

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext

T = TypeVar("T")

_STEP = 0.2
"""Seconds between two checks whether to stop."""


def pages(files: Sequence[T], size: int, rate: float | None, ctx: JobContext, *, first: int = 0) -> Iterator[list[T]]:
    """Pages of at most ``size`` files, from the page ``first`` on.

    ``rate``: files per second, None for no limit. Smaller pages keep a low rate even, and the next one comes only when
    the rate allows it. Raises JobCancelled.
    """
    if rate is not None:
        size = max(1, min(size, int(rate)))
    for at in range(first * size, len(files), size):
        ctx.check_cancelled()
        started = time.monotonic()
        page = list(files[at : at + size])
        yield page
        if rate is not None:
            wait_until(started + len(page) / rate, ctx)


def wait_until(until: float, ctx: JobContext) -> None:
    """Wait until a time of the monotonic clock. Raises JobCancelled."""
    while (left := until - time.monotonic()) > 0:
        ctx.check_cancelled()
        threading.Event().wait(min(_STEP, left))

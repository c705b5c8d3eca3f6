"""The responses of a stream, as long as its caller may have them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

BEAT = 15.0
"""Seconds without a response after which the caller is checked again, and proxies get a sign of life."""


async def checked(responses: AsyncGenerator[Any, None], check: Callable[[], None]) -> AsyncGenerator[Any, None]:
    """The responses, and None after each ``BEAT`` seconds without one.

    ``check`` is called before each of them, and raises if the caller may have no more.
    """
    following: asyncio.Future[Any] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(responses, None))
            while not following.done():
                await asyncio.wait([following], timeout=BEAT)
                if not following.done():
                    check()
                    yield None
            if (found := following.result()) is None:
                return
            check()
            yield found
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await responses.aclose()

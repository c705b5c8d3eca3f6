"""Lists the objects of a bucket by obstore, and refuses listings that are wrong.

obstore takes any XML document with the status 200 for a listing: one that is none counts as empty. An empty listing is
therefore no proof that there are no objects, and a store must show written objects in the self-test
(:mod:`distop.storage.store_check`). Within a listing such an answer is noticed: the last object of full pages is
requested again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from distop.storage.conditional_writes import repeated
from distop.storage.store_errors import ObjectMissing, StoreError, StoreUnavailable, TimedOut, Unsupported, asked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    ObjectMeta = Mapping[str, Any]

T = TypeVar("T")

PAGE = 1000
"""Objects of one request of a listing or a removal: the limit of S3."""


class RemoteListing:
    """A listing of the objects below a prefix, which ends without a slash ("": of all objects)."""

    def __init__(self, store: Any, prefix: str, location: str, what: str, limit: float) -> None:
        """``location``: of the store, and ``what``: the work, for errors. ``limit``: seconds for one call."""
        self._store = store
        self._prefix = prefix
        self._location = location
        self._what = what
        self._limit = limit

    def objects(self, start: str) -> Iterator[ObjectMeta]:
        """The objects, sorted, as obstore describes them, from the first path greater than ``start``.

        Raises Unsupported for a wrong listing.
        """
        previous, last, again = "", "", False
        while True:
            before, count = last, 0
            offset = (previous if again else last) or start.rstrip("/")
            page, pages = repeated(partial(self._first_page, offset), self._limit)
            while page is not None:
                for found in page:
                    count += 1
                    if again:
                        if found["path"] < last:
                            continue
                        if found["path"] > last:
                            self._check_removed(last)
                        again = False
                        if found["path"] == last:
                            continue
                    if self._is_folder(found, last):
                        continue
                    if found["path"] <= last:
                        raise Unsupported(f"{self._location} lists objects unordered, which distop does not support")
                    previous, last = last, found["path"]
                    if last > start:
                        yield found
                try:
                    page = self._listed(partial(anext, pages, None))
                except StoreUnavailable:
                    break  # the page is requested again, from the last object on
            else:
                if again:
                    self._check_removed(last)
                # After full pages the store may have more objects, although it names no further page.
                if last == before or count % PAGE:
                    return
                again = True

    def folder(self) -> tuple[list[str], list[ObjectMeta]]:
        """The names that are followed by a slash, and the objects whose names have none, both sorted.

        Raises Unsupported for a wrong listing.
        """
        import obstore

        def read() -> Any:
            return self._listed(lambda: obstore.list_with_delimiter_async(self._store, self._prefix or None))

        found = repeated(read, self._limit)
        objects = [one for one in found["objects"] if not self._is_folder(one)]
        objects.sort(key=lambda one: str(one["path"]))
        if any(one["path"] == following["path"] for one, following in pairwise(objects)):
            raise Unsupported(f"{self._location} lists an object twice, which distop does not support")
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]}), objects

    def _first_page(self, after: str) -> tuple[Any, AsyncIterator[Any]]:
        import obstore

        pages = aiter(obstore.list(self._store, self._prefix or None, offset=after or None, chunk_size=PAGE))
        return self._listed(partial(anext, pages, None)), pages

    def _listed(self, call: Callable[[], Awaitable[T]]) -> T:
        """A part of a listing. Raises TimedOut after the time limit: a store could name further pages for ever."""
        import asyncio

        async def limited() -> T:
            async with asyncio.timeout(self._limit):
                return await call()

        def run() -> T:
            return asyncio.run(limited())

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            ask = run
        else:
            with ThreadPoolExecutor(1) as pool:
                ask = pool.submit(run).result
        try:
            return asked(ask, self._what)
        except TimeoutError as error:
            if isinstance(error, StoreError):
                raise
            raise TimedOut(f"cannot {self._what}: the listing has not ended within {self._limit:g} s") from None

    def _is_folder(self, found: ObjectMeta, last: str = "") -> bool:
        """Whether a listed object is one that tools create as a folder: ``day=1/``, without bytes.

        obstore leaves out the slash at its end, so that it seems to be out of order. ``last``: the object before it.
        Raises Unsupported if the object is not below the prefix.
        """
        path, prefix = found["path"], self._prefix
        if found["size"] == 0 and (path == prefix or path <= last < f"{path}/"):
            return True
        if prefix and not path.startswith(f"{prefix}/"):
            raise Unsupported(f"{self._location} lists objects of other folders, which distop does not support")
        return False

    def _check_removed(self, path: str) -> None:
        """Raises Unsupported unless an object is gone that was listed before, and now is not."""
        import obstore

        try:
            repeated(lambda: asked(lambda: obstore.head(self._store, path), self._what), self._limit)
        except ObjectMissing:
            return
        raise Unsupported(
            f"cannot {self._what}: an answer of the store lacks an object that exists, so it may be another document "
            "than a listing; check the endpoint with `distop doctor --storage URL`"
        )

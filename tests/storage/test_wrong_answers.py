"""Answers of an object store that are complete HTTP, but wrong: too few bytes, repeated and foreign keys.

A server on the loopback gives them. None of them may become data.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.storage.remote_store import ONE_READ
from distop.storage.storage_options import StorageOptions
from distop.storage.store_errors import TimedOut, Unsupported
from tests.storage.faulty_http import FaultyProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distop.storage.object_store import ObjectStore
    from tests.storage.faulty_http import Seen

_STAMP = 'ETag: "e"\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n'


def answer(status: str, headers: str, body: bytes) -> bytes:
    length = "" if "Content-Length" in headers else f"Content-Length: {len(body)}\r\n"
    return f"HTTP/1.1 {status}\r\n{headers}{length}Connection: close\r\n\r\n".encode() + body


def listing(*keys: str, more: bool = False, token: str = "t") -> bytes:
    rows = "".join(
        f"<Contents><Key>{key}</Key><Size>{0 if key.endswith('/') else 1}</Size><ETag>&quot;e&quot;</ETag>"
        "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    next_page = f"<NextContinuationToken>{token}</NextContinuationToken>" if more and token else ""
    truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
    return answer("200 OK", "", f"<ListBucketResult>{truncated}{next_page}{rows}</ListBucketResult>".encode())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Answers itself: its ``fault`` is set by the test."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tester-secret")
    with FaultyProxy(0) as found:
        configure(found, time_limit=20.0)
        yield found


def configure(server: FaultyProxy, *, time_limit: float) -> None:
    endpoint = f"http://127.0.0.1:{server.port}"
    options = StorageOptions(endpoint=endpoint, region="us-east-1", allow_http=True, time_limit=time_limit)
    storage_options.configure({"s3://lake": options})


@pytest.fixture
def impatient(server: FaultyProxy) -> None:
    """distop gives up soon: for tests in which nothing is to succeed."""
    configure(server, time_limit=0.5)


def always(found: bytes) -> Callable[[Seen, object], bytes]:
    return lambda seen, forward: found


@pytest.mark.parametrize("body", [b"abcde", b"abcdefghijkl"], ids=["short", "long"])
@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.get_ranges("a", [(10, 20)]),
        lambda store: store.get_end("a", 10),
    ],
    ids=["range", "end"],
)
@pytest.mark.usefixtures("impatient")
def test_an_answer_without_exactly_the_requested_bytes_is_no_data(
    read: Callable[[ObjectStore], object], body: bytes, server: FaultyProxy
) -> None:
    server.fault = always(answer("206 Partial Content", f"{_STAMP}Content-Range: bytes 10-19/20\r\n", body))
    with pytest.raises(TimedOut, match=f"the store sends {len(body)} bytes instead of 10"):
        read(open_store("s3://lake"))


@pytest.mark.usefixtures("impatient")
def test_a_large_object_whose_parts_are_short_is_no_data(server: FaultyProxy) -> None:
    size = ONE_READ + 1

    def fault(seen: Seen, forward: object) -> bytes:
        if b"range: bytes=0-" not in seen.whole.lower():
            return answer("200 OK", f"{_STAMP}Content-Length: {size}\r\n", b"")
        end = int(seen.whole.lower().partition(b"range: bytes=0-")[2].partition(b"\r\n")[0])
        return answer("206 Partial Content", f"{_STAMP}Content-Range: bytes 0-{end}/{size}\r\n", b"{}\n")

    server.fault = fault
    with pytest.raises(TimedOut, match="the store sends 3 bytes instead of"):
        open_store("s3://lake").get("a", limit=size)


def test_an_object_that_a_folder_lists_twice_is_refused(server: FaultyProxy) -> None:
    """Its rows would count twice."""
    pages = iter([listing("a", "b", more=True), listing("a", "b")])
    server.fault = lambda seen, forward: next(pages)
    with pytest.raises(Unsupported, match="lists an object twice"):
        open_store("s3://lake").list_folder()


def test_a_listing_that_ends_with_a_full_page_is_continued(server: FaultyProxy) -> None:
    """The store says that there is more, but not how to ask for it."""
    keys = [f"t/{n:04}" for n in range(1_100)]

    def fault(seen: Seen, forward: object) -> bytes:
        after = unquote(seen.target.partition("start-after=")[2].partition("&")[0])
        page = [key for key in keys if key > after][:1_000]
        return listing(*page, more=page[-1] < keys[-1], token="")

    server.fault = fault
    assert [one.key for one in open_store("s3://lake/t").list()] == [key.removeprefix("t/") for key in keys]
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        ((), lambda store: [*store.list()]),
        ((), lambda store: store.list_folder()),
        (("a", "b"), lambda store: store.list_folder()),
    ],
    ids=["all", "empty folder", "folder"],
)
@pytest.mark.usefixtures("impatient")
def test_a_listing_whose_pages_never_end_is_given_up(
    keys: Sequence[str], read: Callable[[ObjectStore], object], server: FaultyProxy
) -> None:
    server.fault = always(listing(*keys, more=True))
    with pytest.raises(TimedOut, match="has not ended within 0.5 s"):
        read(open_store("s3://lake"))


def test_a_listing_in_a_thread_with_an_event_loop(server: FaultyProxy) -> None:
    server.fault = always(listing("a", "b"))

    async def listed() -> list[str]:
        return [one.key for one in open_store("s3://lake").list()]

    assert asyncio.run(listed()) == ["a", "b"]


def test_objects_of_other_folders_in_a_listing_are_refused(server: FaultyProxy) -> None:
    server.fault = always(listing("other/secret.parquet"))
    store = open_store("s3://lake/mine")
    with pytest.raises(Unsupported, match="lists objects of other folders"):
        [*store.list()]
    with pytest.raises(Unsupported, match="lists objects of other folders"):
        store.list_folder()


@pytest.mark.parametrize(
    "keys",
    [
        ("t/", "t/day=1-x/", "t/day=1-x/a", "t/day=1/", "t/day=1/a"),
        ("t/day=1", "t/day=1/", "t/day=1/a"),
    ],
    ids=["of a longer sibling", "of an object's name"],
)
def test_objects_for_folders_are_in_the_order_of_their_keys(keys: Sequence[str], server: FaultyProxy) -> None:
    server.fault = always(listing(*keys))
    found = [one.key for one in open_store("s3://lake/t").list() if one.size]
    assert found == [key.removeprefix("t/") for key in keys if not key.endswith("/")]


def test_an_object_with_bytes_out_of_order_is_refused(server: FaultyProxy) -> None:
    server.fault = always(listing("t/b", "t/a"))
    with pytest.raises(Unsupported, match="lists objects unordered"):
        [*open_store("s3://lake/t").list()]


OTHER_DOCUMENTS = {
    "a page": b"<html><body>Welcome</body></html>",
    "an error": b"<Error><Code>InternalError</Code></Error>",
    "another answer of S3": b"<ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>",
}


@pytest.mark.parametrize("body", OTHER_DOCUMENTS.values(), ids=OTHER_DOCUMENTS)
def test_another_document_is_not_the_end_of_a_listing(body: bytes, server: FaultyProxy) -> None:
    """Rows of the other pages would be missed."""
    keys = [f"t/{n:04}" for n in range(1_000)]
    exists = [True]

    def fault(seen: Seen, forward: object) -> bytes:
        if "list-type=2" not in seen.target:
            return (
                answer("200 OK", f"{_STAMP}Content-Length: 1\r\n", b"")
                if exists[0]
                else answer("404 Not Found", "", b"")
            )
        if "continuation-token" in seen.target or "start-after" in seen.target:
            return answer("200 OK", "", body)
        return listing(*keys, more=True)

    server.fault = fault
    with pytest.raises(Unsupported, match="it may be another document than a listing"):
        [*open_store("s3://lake/t").list()]
    exists[0] = False
    assert len([*open_store("s3://lake/t").list()]) == len(keys), "the last object has been removed meanwhile"


def test_objects_that_are_added_and_removed_between_two_requests(server: FaultyProxy) -> None:
    keys = [f"t/{n:04}" for n in range(1_000)]
    pages = iter([listing(*keys), listing("t/0998-new", "t/0999-new", "t/1000")])

    def fault(seen: Seen, forward: object) -> bytes:
        return next(pages) if "list-type=2" in seen.target else answer("404 Not Found", "", b"")

    server.fault = fault
    found = [one.key for one in open_store("s3://lake/t").list()]
    assert found == [*(key.removeprefix("t/") for key in keys), "0999-new", "1000"]

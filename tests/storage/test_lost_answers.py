"""Answers that are lost, late, repeated or refused: what is in the store decides."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.storage import storage_options
from distop.storage.object_store import PART, Version
from distop.storage.opened_stores import open_store
from distop.storage.store_errors import (
    Denied,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StoreError,
    Throttled,
    TimedOut,
    UnknownWrite,
)
from tests.storage.conftest import REMOTE, S3, use

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.storage.object_store import ObjectStore
    from tests.storage.faulty_http import FaultyProxy, Seen
    from tests.storage.servers import Served

LIMIT = 1 << 24

pytestmark = pytest.mark.timeout(300)  # Azurite starts slowly on a busy machine
on_each = pytest.mark.parametrize("served", REMOTE, indirect=True)
on_s3 = pytest.mark.parametrize("served", S3, indirect=True)


@pytest.fixture
def direct(served: Served, location: str) -> ObjectStore:
    """The store without the proxy, as another program sees it."""
    return open_store(location)


@pytest.fixture
def store(direct: ObjectStore, proxy: FaultyProxy, location: str) -> ObjectStore:
    """The same store behind the proxy."""
    return open_store(location)


@pytest.fixture
def location(served: Served, request: pytest.FixtureRequest) -> str:
    return f"{served.url}/{re.sub(r'[^a-z0-9]+', '-', request.node.name.lower())}"


def within(location: str, **limits: float) -> ObjectStore:
    """The store, with other time limits."""
    for prefix, options in storage_options.configuration().items():
        storage_options.configure({prefix: replace(options, **limits)})
    return open_store(location)


def puts(proxy: FaultyProxy) -> int:
    return sum(seen.method == "PUT" for seen in proxy.seen)


@on_each
def test_a_write_whose_answer_is_lost_is_found_by_reading(
    store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy
) -> None:
    proxy.lose_answers("PUT")
    version = store.put_new("a", b"own")
    assert puts(proxy) == 1
    assert direct.get("a", limit=LIMIT).stored.version == version
    with pytest.raises(ObjectExists):
        direct.put_new("a", b"own")


@on_each
def test_a_lost_answer_does_not_hide_another_writer(
    store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy
) -> None:
    direct.put_new("a", b"same")
    proxy.lose_answers("PUT")
    with pytest.raises(ObjectExists):
        store.put_new("a", b"same")  # the same content, but another writer's token
    assert puts(proxy) == 1


@on_each
def test_a_write_that_did_not_arrive_is_sent_again(store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.lose_requests("PUT", times=2)
    store.put_new("a", b"own")
    assert puts(proxy) == 3
    assert direct.get("a", limit=LIMIT).data == b"own"


@on_each
def test_a_repeated_request_is_not_another_writer(store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.repeat_requests("PUT")
    version = store.put_new("a", b"own")
    version = store.replace_if("a", b"newer", version)
    assert direct.get("a", limit=LIMIT).data == b"newer"
    assert direct.head("a").version == version


@on_each
def test_a_server_error_after_the_write_is_settled_by_reading(
    store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy
) -> None:
    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        answer = forward(seen.whole)
        if seen.method != "PUT":
            return answer
        return b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

    proxy.fault = fault
    version = store.put_new("a", b"1")
    store.replace_if("a", b"2", version)
    assert direct.get("a", limit=LIMIT).data == b"2"


@on_each
def test_a_replacement_whose_answer_is_lost_is_found_by_reading(
    store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy
) -> None:
    first = store.put_new("a", b"1")
    proxy.lose_answers("PUT")
    second = store.replace_if("a", b"2", first)
    assert direct.head("a").version == second
    proxy.lose_requests("PUT")
    store.replace_if("a", b"3", second)
    assert direct.get("a", limit=LIMIT).data == b"3"
    proxy.lose_answers("PUT", times=0)
    with pytest.raises(ObjectChanged):
        store.replace_if("a", b"4", second)


@on_each
def test_a_replacement_that_another_writer_followed_is_unknown(
    store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy
) -> None:
    first = store.put_new("a", b"1")

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        answer = forward(seen.whole)
        if seen.method != "PUT":
            return answer
        direct.replace_if("a", b"another's", direct.head("a").version)
        return None

    proxy.fault = fault
    with pytest.raises(UnknownWrite):
        store.replace_if("a", b"own", first)


@on_each
def test_a_write_that_cannot_be_read_back_is_unknown(direct: ObjectStore, proxy: FaultyProxy, location: str) -> None:
    proxy.fault = lambda seen, forward: (forward(seen.whole), None)[1]
    with pytest.raises(UnknownWrite, match="was lost"):
        within(location, time_limit=0.5).put_new("a", b"own")
    assert direct.get("a", limit=LIMIT).data == b"own"


@on_each
def test_a_write_that_never_arrives_is_unknown(direct: ObjectStore, proxy: FaultyProxy, location: str) -> None:
    """A copy of the request may still be on its way."""
    proxy.lose_requests("PUT", times=1000)
    with pytest.raises(UnknownWrite):
        within(location, time_limit=0.5).put_new("a", b"own")


@on_s3
def test_without_a_token_the_content_decides(store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    """Some stores keep no metadata. The signature is not valid without it, so the object is written directly."""

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
        if seen.method == "PUT":
            return None
        head, end, body = forward(seen.whole).partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"x-amz-meta-")]
        return b"\r\n".join(lines) + end + body

    proxy.fault = fault
    direct.put_new("own", b"content")
    direct.put_new("other", b"another")
    store.put_new("own", b"content")
    with pytest.raises(ObjectExists):
        store.put_new("other", b"content")


@on_each
def test_a_throttled_request_is_repeated(store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    slow = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    proxy.answer("503 Slow Down", slow, method="PUT", times=2)
    version = store.put_new("a", b"1")
    proxy.answer("503 Slow Down", slow, times=2)
    assert store.get("a", limit=LIMIT).stored.version == version
    proxy.answer("429 Too Many Requests", times=2)
    assert [found.key for found in store.list()] == ["a"]
    proxy.answer("503 Slow Down", slow, times=1)
    store.delete_many(["a"])
    assert list(direct.list()) == []


@on_each
def test_a_store_that_throttles_all_requests(direct: ObjectStore, proxy: FaultyProxy, location: str) -> None:
    proxy.answer("503 Slow Down", b"<Error><Code>SlowDown</Code></Error>")
    store = within(location, time_limit=0.5)
    listed = within(location, time_limit=2.0)  # a listing that is slow at its limit was not throttled
    for call in (
        lambda: store.put_new("a", b""),
        lambda: store.head("a"),
        lambda: list(listed.list()),
        lambda: store.delete_many(["a"]),
    ):
        with pytest.raises(Throttled, match="given up after"):
            call()
    assert list(direct.list()) == []


@on_each
def test_lost_answers_to_reads(store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    direct.put_new("a", b"x" * 3_000_000)
    for method in ("GET", "HEAD"):
        proxy.lose_answers(method)
        assert store.head("a").size == 3_000_000
        proxy.lose_answers(method)
        assert len(store.get("a", limit=LIMIT).data) == 3_000_000
        proxy.lose_answers(method)
        assert store.get_ranges("a", [(0, 2), (2_500_000, 2_500_001)]) == [b"xx", b"x"]


@on_each
def test_an_answer_that_ends_too_early(store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    direct.put_new("a", b"x" * 100_000)
    left = [2]

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        answer = forward(seen.whole)
        left[0] -= 1
        return answer[:-1000] if left[0] >= 0 else answer

    proxy.fault = fault
    assert store.get("a", limit=LIMIT).data == b"x" * 100_000
    left[0] = 1
    assert store.get_ranges("a", [(0, 50_000)]) == [b"x" * 50_000]


@on_each
def test_a_store_that_does_not_answer(direct: ObjectStore, proxy: FaultyProxy, location: str) -> None:
    ended = threading.Event()

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> None:
        ended.wait(20)

    proxy.fault = fault
    store = within(location, time_limit=0.3, request_timeout=0.2)
    try:
        with pytest.raises(TimedOut, match="no answer in time"):
            store.get("a", limit=LIMIT)
        with pytest.raises(UnknownWrite):
            store.put_new("a", b"")
    finally:
        ended.set()


@on_s3
def test_a_store_that_cannot_be_reached(served: Served, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(served, monkeypatch, port=1)
    store = within(location, time_limit=0.3)
    for call in (lambda: store.get("a", limit=1), lambda: store.put_new("a", b"")):
        with pytest.raises(TimedOut, match="no connection"):
            call()


@pytest.mark.rotating
@on_s3
def test_a_lost_page_of_a_listing_is_requested_again(
    store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy
) -> None:
    wanted = [f"{n:04d}" for n in range(1005)]
    for key in wanted:
        direct.put_new(key, b"")
    listed = iter(store.list())
    found = [next(listed).key for _ in range(10)]
    proxy.lose_answers("GET")
    found += [one.key for one in listed]
    assert found == wanted
    assert sum(seen.method == "GET" for seen in proxy.seen) == 3  # the second page was requested twice


@on_each
def test_a_large_object_is_written_despite_lost_answers(
    store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy
) -> None:
    content = b"y" * (2 * PART + 7)
    for n, method in enumerate(("POST", "PUT")):
        proxy.lose_answers(method)
        store.put_large(f"a/{n}", iter([content]))
        assert direct.get(f"a/{n}", limit=len(content)).data == content
    assert [found.key for found in direct.list()] == ["a/0", "a/1"]


@on_each
def test_a_copy_whose_answers_are_lost(store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    direct.put_new("a", b"content")
    direct.put_new("other", b"another")
    for n, method in enumerate(("POST", "PUT")):
        proxy.lose_answers(method)
        version = store.copy_new("a", f"b{n}")
        assert direct.head(f"b{n}").version == version
        proxy.lose_answers(method)
        with pytest.raises(ObjectExists):
            store.copy_new("a", "other")


@on_each
def test_a_removal_whose_answer_is_lost(store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    for key in ("a", "b"):
        direct.put_new(key, b"")
    for method in ("POST", "DELETE"):
        proxy.lose_answers(method)
        store.delete_many(["a", "b"])
        assert list(direct.list()) == []


@on_each
def test_refused_credentials_are_distinguished_from_a_missing_object(
    store: ObjectStore, direct: ObjectStore, proxy: FaultyProxy
) -> None:
    with pytest.raises(ObjectMissing, match="no such object"):
        store.head("a")
    proxy.answer("403 Forbidden", b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
    for call in (
        lambda: store.get("a", limit=1),
        lambda: store.head("a"),
        lambda: list(store.list()),
        lambda: store.put_new("a", b""),
        lambda: store.delete_many(["a"]),
    ):
        with pytest.raises(Denied):
            call()
    proxy.answer("400 Bad Request", b"<Error><Code>InvalidArgument</Code><Message>No</Message></Error>")
    with pytest.raises(StoreError, match="status 400 InvalidArgument No"):
        store.put_new("a", b"")


@pytest.mark.parametrize("served", ["versitygw"], indirect=True)
def test_a_wrong_secret(served: Served, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-shown")
    store = within(location, connect_timeout=4.0)
    for call in (lambda: store.get("a", limit=1), lambda: store.put_new("a", b""), lambda: list(store.list())):
        with pytest.raises(Denied) as error:
            call()
        assert "SignatureDoesNotMatch" in str(error.value)
        assert "AWS4-HMAC" not in str(error.value)
        assert "never-shown" not in str(error.value)


@pytest.mark.parametrize("served", ["versitygw"], indirect=True)
def test_an_unknown_access_key(
    served: Served, direct: ObjectStore, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """versitygw answers as for a missing object, with the status 404."""
    direct.put_new("a", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    store = within(location, connect_timeout=4.0)
    for call in (
        lambda: store.get("a", limit=1),
        lambda: store.get_ranges("a", [(0, 1)]),
        lambda: store.get_end("a", 1),
        lambda: store.head("a"),
        lambda: list(store.list()),
        lambda: store.put_new("b", b""),
        lambda: store.put_large("b", iter([b"x" * (PART + 1)])),
        lambda: store.replace_if("a", b"", Version('"1"')),
        lambda: store.copy_new("a", "b"),
        lambda: store.delete_many(["a"]),
    ):
        with pytest.raises(Denied, match="status 404 XAdminUserNotFound No user exists with the provided access key"):
            call()


@on_s3
def test_a_missing_bucket(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    [options] = served.options().values()
    storage_options.configure({"s3://": options})
    store = open_store("s3://no-such-bucket/a")
    for call in (
        lambda: store.put_new("a", b""),
        lambda: store.put_large("a", iter([b"x" * (PART + 1)])),
        lambda: list(store.list()),
        lambda: store.get("a", limit=1),
        lambda: store.head("a"),
    ):
        with pytest.raises(ObjectMissing, match="no such bucket"):
            call()


@on_s3
def test_a_signed_url_is_read_without_credentials(direct: ObjectStore) -> None:
    from tests.storage.servers import request

    direct.put_new("a", b"content")
    assert request(direct.signed_url("a", 60)) == b"content"

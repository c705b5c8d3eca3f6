"""The errors of obstore as those of a store, for answers that no server of these tests gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from obstore.exceptions import GenericError

from distop.errors import TableRefused
from distop.storage.location import Location
from distop.storage.opened_stores import memory_store, open_store
from distop.storage.store_errors import AnswerLost, Denied, TimedOut, translated
from tests.support.refusing_store import RefusingStore

if TYPE_CHECKING:
    from distop.storage.object_store import StoredObject


@pytest.mark.usefixtures("short_time_limit")
def test_a_request_that_s3_has_not_read_in_time_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    # https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html: RequestTimeout has the status 400.
    with RefusingStore(400, "RequestTimeout") as store:
        store.serve(monkeypatch)
        with pytest.raises(TimedOut, match="status 400 RequestTimeout no .given up after"):
            open_store("s3://bucket/t").get("a", limit=1)


def test_an_unknown_access_key_is_no_missing_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """versitygw answers 404. An answer to HEAD has no code."""
    with RefusingStore(404, "XAdminUserNotFound") as refusing:
        refusing.serve(monkeypatch)
        store = open_store("s3://bucket/t")
        for call in (
            lambda: store.get("a", limit=1),
            lambda: store.head("a"),
            lambda: list(store.list()),
            lambda: store.put_new("a", b""),
            lambda: store.delete_many(["a"]),
        ):
            with pytest.raises(Denied, match="status 404 XAdminUserNotFound no"):
                call()
        with pytest.raises(TableRefused, match="XAdminUserNotFound.*; check this machine's access"):
            list(Location.of("s3://bucket/t").walk())


def test_the_message_of_a_store_is_plain_text() -> None:
    answer = "<Code>Malformed</Code><Message>the region &#34;a&#34; is wrong; expecting &quot;b&quot;</Message>"
    error = GenericError(f"Client error with status: Server returned non-2xx status code: 400 Bad Request: {answer}")
    assert str(translated(error, "read c")).endswith('status 400 Malformed the region "a" is wrong; expecting "b"')


def test_an_error_in_an_answer_with_the_status_200_leaves_a_write_unknown() -> None:
    error = GenericError("Generic S3 error: Got invalid multipart response: missing field `ETag`")
    assert isinstance(translated(error, "copy a to b"), AnswerLost)


@pytest.mark.parametrize(
    "request_text",
    [
        "PUT http://store/lake/latest/api/token",
        "PUT http://store/lake/169.254.169.254",
        "POST http://store/lake/REDACTED?uploadId=1",
        "PUT http://store/lake/Error%20performing%20POST%20REDACTED%20in%205ms",
    ],
)
def test_a_key_that_looks_like_a_request_for_credentials_leaves_a_write_unknown(
    request_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a request for credentials is known to have changed nothing."""
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://metadata")
    answer = "Server returned non-2xx status code: 500 No: Generic S3 error: Error performing POST REDACTED in 5ms"
    error = GenericError(f"Generic S3 error: Error performing {request_text} in 5ms - {answer}")
    assert isinstance(translated(error, "create a"), AnswerLost)


def test_a_hidden_url_of_azure_is_no_request_for_credentials() -> None:
    error = GenericError("Generic MicrosoftAzure error: Error performing PUT REDACTED in 5ms - status code: HttpError")
    assert isinstance(translated(error, "create a"), AnswerLost)


def test_a_copy_whose_version_is_not_answered_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    store.put_new("a", b"content")
    head, failures = store.head, [TimedOut("no answer")]

    def unanswered(key: str) -> StoredObject:
        if failures:
            raise failures.pop()
        return head(key)

    monkeypatch.setattr(store, "head", unanswered)
    assert store.copy_new("a", "b") == head("b").version
    assert not failures


@pytest.mark.parametrize("key", ["t//a.parquet", "t/./a.parquet", "t/a/../b.parquet"])
def test_a_key_that_is_no_path_is_refused_by_name(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with RefusingStore(files={"t/0.parquet": b"x", key: b"x"}) as store:
        store.serve(monkeypatch)
        with pytest.raises(TableRefused, match="has an object whose key distop does not support: .*t/"):
            list(Location.of("s3://bucket/t").walk())

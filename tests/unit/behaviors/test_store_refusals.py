"""A store that refuses all files of a table: a few are probed, without a verdict."""

from __future__ import annotations

import errno
import io
import socket
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord, load, select
from distop.errors import TableBusy, TableRefused
from distop.storage import storage_options
from distop.storage.storage_options import StorageOptions
from distop.storage.store_errors import Denied, StoreError, Throttled, TimedOut, Unreachable
from distop.tables import plan_table
from distop.tables.reading import parquet_footers, store_refusals
from distop.tables.reading.file_facts import FileFacts, Unreadable
from tests.support.context import FakeContext
from tests.support.refusing_store import RefusingStore

if TYPE_CHECKING:
    from pathlib import Path

    from distop.tables.reading.file_facts import PlannedFile

FILES = 365


def planned(count: int = FILES) -> list[PlannedFile]:
    return [(f"s3://bucket/refused/day={n}/a.parquet", 1_000, 1) for n in range(count)]


def parquet() -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2]}), data)
    return data.getvalue()


@pytest.mark.parametrize(
    ("status", "code", "cause"),
    [
        (403, "AccessDenied", store_refusals.DENIED),
        (403, "SignatureDoesNotMatch", store_refusals.CREDENTIALS),
        (301, "PermanentRedirect", store_refusals.REDIRECTED),
        (307, "TemporaryRedirect", store_refusals.REDIRECTED),
        (400, "ExpiredToken", store_refusals.CREDENTIALS),
        (400, "InvalidRequest", store_refusals.NOT_ACCEPTED),
        (401, "Unauthorized", store_refusals.CREDENTIALS),
        (404, "XAdminUserNotFound", store_refusals.CREDENTIALS),
        (407, "ProxyAuthenticationRequired", store_refusals.PROXY),
        (418, "Teapot", f"{store_refusals.OTHER_STATUS} 418"),
        (501, "NotImplemented", store_refusals.INTERNAL_ERROR),
    ],
)
def test_a_few_files_show_that_all_are_refused(
    status: int, code: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RefusingStore(status, code) as store:
        store.serve(monkeypatch)
        found = parquet_footers.read_all(planned(), frozenset({"a"}))
        asked = {line.partition("?")[0] for line in store.requests}
    assert all(isinstance(one, Unreadable) for one in found)
    assert parquet_footers.refusal(found[: parquet_footers.THREADS]) == cause
    assert len(found) == FILES
    assert len(asked) == parquet_footers.THREADS


_HEAD = "When getting information for key 'k' in bucket 'b': "
MESSAGES = {
    f"{_HEAD}AWS Error ACCESS_DENIED during HeadObject operation: No response body.": store_refusals.DENIED,
    f"{_HEAD}AWS Error INVALID_ACCESS_KEY_ID during GetObject operation: no": store_refusals.CREDENTIALS,
    f"{_HEAD}AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation: no": store_refusals.NO_BUCKET,
    f"{_HEAD}AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body.": (
        store_refusals.INTERNAL_ERROR
    ),
    # pyarrow retries these for up to a minute, so that no test asks a store for them.
    f"{_HEAD}AWS Error UNKNOWN (HTTP status 429) during HeadObject operation: No response body.": (
        store_refusals.THROTTLED
    ),
    f"{_HEAD}AWS Error UNKNOWN (HTTP status 509) during HeadObject operation: No response body.": (
        store_refusals.INTERNAL_ERROR
    ),
    f"{_HEAD}AWS Error UNKNOWN (HTTP status 404) during ListObjectsV2 operation: Unable to parse ExceptionName": None,
    f"{_HEAD}AWS Error UNKNOWN (HTTP status 404) during ListObjectsV2 operation: Unable to parse ExceptionName: "
    "XAdminUserNotFound Message: No user exists with the provided access key ID.": store_refusals.CREDENTIALS,
    f"{_HEAD}AWS Error UNKNOWN (HTTP status 410) during HeadObject operation: No response body.": None,
    f"{_HEAD}AWS Error UNKNOWN (HTTP status 416) during GetObject operation: No response body.": None,
    f"{_HEAD}AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7, Could not connect to server": (
        store_refusals.NOT_CONNECTED
    ),
    f"{_HEAD}AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 6, Could not resolve hostname": (
        store_refusals.UNKNOWN_HOST
    ),
    "google::cloud::Status(PERMISSION_DENIED: Permanent error, with a last message of no": store_refusals.DENIED,
    "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of PerformWork() - CURL error "
    "[7]=Could not connect to server": store_refusals.NOT_CONNECTED,
    f"{_HEAD}AWS Error NO_SUCH_KEY during GetObject operation: no": None,
    "Parquet magic bytes not found in footer": None,
}
"""Messages of pyarrow, and the cause derived from each."""


@pytest.mark.parametrize("text", MESSAGES)
def test_the_cause_is_derived_from_the_code_of_the_service(text: str) -> None:
    assert store_refusals.cause_of_python_error(OSError(text)) == MESSAGES[text]
    assert store_refusals.cause_of_python_error(ValueError(text)) is None


class Thrown(Exception):
    """An error of Spark with a Java exception of this class and message."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.java_exception = self
        self._name = name

    def getClass(self) -> Thrown | None:
        return self

    def getName(self) -> str:
        return self._name

    def getSuperclass(self) -> None:
        return None

    def getMessage(self) -> str:
        return str(self)

    def getCause(self) -> None:
        return None


_GOOGLE = "com.google.cloud.hadoop.repackaged.gcs.com.google.api.client.googleapis.json.GoogleJsonResponseException"
_ABFS = "org.apache.hadoop.fs.azurebfs.contracts.exceptions.AbfsRestOperationException"
_S3 = "software.amazon.awssdk.services.s3.model.S3Exception"
_HTTP = "software.amazon.awssdk.thirdparty.org.apache.http"


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        (_S3, "no (Service: S3, Status Code: 403, Request ID: 7)", store_refusals.DENIED),
        (_GOOGLE, "401 Unauthorized\nGET https://storage.googleapis.com/b/a", store_refusals.CREDENTIALS),
        (_S3, "no (Service: S3, Status Code: 400, Request ID: 7)", store_refusals.NOT_ACCEPTED),
        (_S3, "no (Service: S3, Status Code: 301, Request ID: 7)", store_refusals.REDIRECTED),
        (_S3, "no (Service: S3, Status Code: 404, Request ID: 7)", None),
        (
            _S3,
            "No user exists with the provided access key ID. (Service: S3, Status Code: 404, Request ID: 7)",
            store_refusals.CREDENTIALS,
        ),
        (_S3, "no (Service: S3, Status Code: 416, Request ID: 7)", None),
        (_GOOGLE, "429 Too Many Requests\nGET https://storage.googleapis.com/b/a", store_refusals.THROTTLED),
        (_ABFS, 'Operation failed: "no", 503, HEAD, https://a.dfs.core.windows.net/b', store_refusals.INTERNAL_ERROR),
        (
            _ABFS,
            'Operation failed: "no", 418, HEAD, https://a.dfs.core.windows.net/b',
            f"{store_refusals.OTHER_STATUS} 418",
        ),
        (_GOOGLE, "404 Not Found\nGET https://storage.googleapis.com/b/403", None),
        (_ABFS, 'Operation failed: "no", 403, HEAD, https://a.dfs.core.windows.net/b', store_refusals.DENIED),
        (_ABFS, 'Operation failed: "no", 404, HEAD, https://a.dfs.core.windows.net/403', None),
        ("java.lang.IllegalStateException", "403 Forbidden", None),
        ("java.net.SocketException", "Connection reset", store_refusals.NOT_CONNECTED),
        (f"{_HTTP}.NoHttpResponseException", "store:443 failed to respond", store_refusals.NOT_CONNECTED),
        (f"{_HTTP}.conn.ConnectTimeoutException", "Connect to store:443 timed out", store_refusals.NO_ANSWER),
        (
            "org.apache.http.ConnectionClosedException",
            "Premature end of the message body",
            store_refusals.NOT_CONNECTED,
        ),
        ("org.apache.http.ParseException", "no", None),
        ("org.apache.hadoop.fs.s3a.AWSServiceThrottledException", "Slow Down", store_refusals.THROTTLED),
    ],
)
def test_the_cause_is_derived_from_the_status_that_a_client_of_a_service_quotes(
    name: str, text: str, cause: str | None
) -> None:
    assert store_refusals.cause_of_spark_error(Thrown(name, text)) == cause


def test_the_cause_of_a_system_error_is_derived_from_its_number() -> None:
    assert store_refusals.cause_of_python_error(PermissionError(errno.EACCES, "no")) == store_refusals.DENIED
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "no")
    assert store_refusals.cause_of_python_error(refused) == store_refusals.NOT_CONNECTED
    assert store_refusals.cause_of_python_error(FileNotFoundError(errno.ENOENT, "no")) is None


@pytest.mark.parametrize("error", [Throttled("no"), TimedOut("no"), Unreachable("no")])
def test_a_store_that_fails_in_the_middle_of_a_batch_gives_no_file_a_verdict(error: StoreError) -> None:
    """The files that were not read had the verdict error, although the store said nothing about them."""
    unread = Unreadable("the file s3://bucket/b cannot be read")
    unread.__cause__ = error
    read = FileFacts("s3://bucket/a", 1)
    with pytest.raises(TableBusy, match="s3://bucket/b"):
        parquet_footers.check_store([read, unread])
    unread.__cause__ = Denied("no")
    parquet_footers.check_store([read, unread])


def test_refused_files_do_not_affect_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    data = parquet()
    files: dict[str, bytes | None] = {f"mixed/day={n}/a.parquet": None if n < 7 else data for n in range(20)}
    with RefusingStore(files=files) as store:
        store.serve(monkeypatch)
        plan = [(f"s3://bucket/{key}", len(data), 1_359_655_200_000_000_000) for key in files]
        found = parquet_footers.read_all(plan, frozenset({"a"}))
    assert [isinstance(one, Unreadable) for one in found] == [True] * 7 + [False] * 13


@pytest.mark.timeout(60)
def test_an_unreachable_store_of_google_is_abandoned_soon(request: pytest.FixtureRequest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = StorageOptions(endpoint=f"http://127.0.0.1:{port}", allow_http=True, time_limit=1.0)
    request.addfinalizer(lambda: storage_options.configure({}))
    storage_options.configure({"gs://bucket": options})
    plan = [(f"gs://anonymous@bucket/{n}.parquet", 1_000, 1) for n in range(20)]
    assert (
        parquet_footers.refusal(parquet_footers.read_all(plan, frozenset({"a"}))[: parquet_footers.THREADS])
        == store_refusals.NOT_CONNECTED
    )
    with pytest.raises(Unreadable, match="cannot be read"):
        parquet_footers.check_unchanged(*plan[0])


@pytest.mark.parametrize("mode", ["only", "auto"])
@pytest.mark.parametrize("refused", ["own", "other"])
def test_a_check_of_keys_gives_no_verdict_on_a_table_that_cannot_be_read(
    refused: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an error of the check, which ended the operation, although another executor could read it."""
    (tmp_path / "here" / "a.parquet").parent.mkdir()
    (tmp_path / "here" / "a.parquet").write_bytes(parquet())
    with RefusingStore(files={f"listed/day={n}/a.parquet": None for n in range(FILES)}) as store:
        store.serve(monkeypatch)
        here = TableRecord("here", "parquet", str(tmp_path / "here"))
        away = TableRecord("away", "parquet", "s3://bucket/listed")
        table, other = (away, here) if refused == "own" else (here, away)
        checks: list[Any] = [{"references": {"column": "a", "table": other.name, "to": "a"}}]
        behavior, ctx = load("validate"), FakeContext(tmp_path, table)
        ctx.tables[other.name] = other
        if refused == "own":
            checks.insert(0, {"unique": "a"})
        arg = behavior.Arg.model_validate({"checks": checks, "statistics": mode})
        planned = behavior.partitions(table, arg, ctx)
        plans = [p for p in select(behavior.jobs(arg, planned.partitions, None, ctx), None) if p.name == "@table"]
        assert len(plans) == 1
        with pytest.raises(TableRefused, match=rf"files: {FILES}\) from this executor: access is denied"):
            list(behavior.run_batch(arg, plans, ctx))


@pytest.mark.parametrize("mode", ["only", "auto"])
def test_a_table_that_can_be_listed_but_not_read_gets_no_verdict(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, bytes | None] = {f"listed/day={n}/a.parquet": None for n in range(FILES)}
    with RefusingStore(files=files) as store:
        store.serve(monkeypatch)
        table = TableRecord("t", "parquet", "s3://bucket/listed")
        plans = plan_table(table).partitions
        assert len(plans) == FILES
        behavior = load("validate")
        arg = behavior.Arg.model_validate({"checks": [{"not_null": "a"}], "statistics": mode})
        with pytest.raises(TableRefused, match=rf"files: {FILES}\) from this executor: access is denied"):
            list(behavior.run_batch(arg, plans, FakeContext(tmp_path, table)))
        asked = {line.partition("?")[0] for line in store.requests if "day" in line}
    assert len(asked) == parquet_footers.THREADS

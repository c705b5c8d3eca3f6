"""The self-test of stores: which ones are refused, and what ``distop doctor --storage`` reports."""

from __future__ import annotations

import json
import re
import socket
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from distop.cli.main import run
from distop.errors import InvalidArgument
from distop.runtime import time_limit
from distop.services import storage_doctor
from distop.storage import storage_options, store_check
from distop.storage.deletion import Place
from distop.storage.opened_stores import open_store
from distop.storage.store_check import check_store, publishing_store, require_suitable
from distop.storage.store_errors import Denied, TimedOut, Unsupported
from tests.storage.conftest import ALL, S3
from tests.storage.faulty_http import without_header
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.storage.object_store import ObjectStore
    from tests.storage.faulty_http import FaultyProxy, Seen
    from tests.storage.servers import Served

pytestmark = pytest.mark.timeout(300)  # Azurite starts slowly on a busy machine
on_moto = pytest.mark.parametrize("served", ["moto"], indirect=True)  # it checks no signatures


@pytest.fixture
def location(served: Served) -> str:
    return f"{served.url}/{uuid.uuid4().hex}"


@pytest.mark.parametrize("store", ALL, indirect=True)
def test_a_suitable_store(store: ObjectStore) -> None:
    report = check_store(store)
    assert report.suitable, report.defects
    assert list(store.list()) == []


@pytest.mark.parametrize("store", ["folder", "memory", "moto"], indirect=True)
def test_objects_of_a_check_that_was_killed_are_removed_later(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing removed them."""
    store.put_new("_distop-check/killed/race", b"1")
    check_store(store)
    assert [found.key for found in store.list()] == ["_distop-check/killed/race"], "the other check may still run"
    monkeypatch.setattr(store_check, "ABANDONED", -60.0)
    check_store(store)
    assert list(store.list()) == []


@on_moto
def test_a_store_that_ignores_that_an_object_must_be_new(proxy: FaultyProxy, location: str) -> None:
    proxy.fault = without_header(b"if-none-match")
    report = check_store(open_store(location))
    assert list(report.defects) == [
        "of 16 writers of a new object 16 won, not 1",
        "it overwrites an object that must be new",
    ]
    with pytest.raises(Unsupported, match="is not safe, so distop writes nothing there: of 16 writers"):
        require_suitable(location)


@on_moto
def test_a_store_that_ignores_versions(proxy: FaultyProxy, location: str) -> None:
    proxy.fault = without_header(b"if-match")
    assert list(check_store(open_store(location)).defects) == [
        "it replaces an object for an older version",
        "it replaces an object for an unknown version",
    ]


@on_moto
@pytest.mark.parametrize(
    "empty",
    [
        b"<ListBucketResult><Name>lake</Name><IsTruncated>false</IsTruncated><KeyCount>0</KeyCount></ListBucketResult>",
        b"<html><body>Welcome</body></html>",
    ],
    ids=["late", "other documents"],
)
def test_a_store_whose_listings_lack_objects(proxy: FaultyProxy, location: str, empty: bytes) -> None:
    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        if "list-type=2" not in seen.target:
            return forward(seen.whole)
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(empty), empty)

    proxy.fault = fault
    store = open_store(location)
    assert list(check_store(store).defects) == ["its listing lacks 2 objects that had been written"]
    proxy.fault = lambda seen, forward: forward(seen.whole)
    assert list(store.list()) == [], "the check removes its objects by their names"


@on_moto
def test_a_check_that_may_not_list_removes_its_objects(proxy: FaultyProxy, location: str) -> None:
    denied = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    proxy.fault = lambda seen, forward: denied if "list-type=2" in seen.target else forward(seen.whole)
    store = open_store(location)
    with pytest.raises(Denied, match="cannot list"):
        check_store(store)
    proxy.fault = lambda seen, forward: forward(seen.whole)
    assert list(store.list()) == []


@on_moto
def test_the_clock_of_a_store(proxy: FaultyProxy, location: str) -> None:
    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        return re.sub(
            rb"(?i)last-modified: [^\r]*", b"Last-Modified: Fri, 02 Jan 2026 03:04:05 GMT", forward(seen.whole)
        )

    proxy.fault = fault
    report = check_store(open_store(location))
    assert report.suitable
    assert report.clock_offset < -3600


@on_moto
def test_a_place_is_checked_once(proxy: FaultyProxy, location: str) -> None:
    require_suitable(location)
    seen = len(proxy.seen)
    assert seen > 16
    require_suitable(f"{location}/")
    assert len(proxy.seen) == seen
    require_suitable(f"{location}/below")
    assert len(proxy.seen) > seen


@on_moto
def test_all_stages_of_a_namespace_are_checked_together(proxy: FaultyProxy, location: str) -> None:
    publishing_store(Place(location, "c0ffee/stage/a"))
    seen = len(proxy.seen)
    assert seen > 16
    publishing_store(Place(location, "c0ffee/stage/b"))
    publishing_store(Place(location, "c0ffee"))
    assert len(proxy.seen) == seen
    publishing_store(Place(location, "beefed/stage/a"))
    assert len(proxy.seen) > seen


@on_moto
def test_a_store_that_could_not_be_reached_is_checked_again(served: Served, proxy: FaultyProxy, location: str) -> None:
    [(prefix, options)] = served.options(proxy.port).items()
    storage_options.configure({prefix: storage_options.StorageOptions(**{**_values(options), "time_limit": 0.2})})
    proxy.answer("503 Slow Down")
    with pytest.raises((TimedOut, OSError), match="given up"):
        require_suitable(location)
    proxy.fault = lambda seen, forward: forward(seen.whole)
    storage_options.configure({prefix: options})
    require_suitable(location)


def _values(options: storage_options.StorageOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in storage_options.NAMES}


# ---- distop doctor --storage


def doctor(
    capsys: pytest.CaptureFixture[str], folder: Path, url: str, port: int, *options: str
) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and status and text of each check."""
    config = folder / "distop.toml"
    config.write_text(
        f'[storage."s3://lake"]\nendpoint = "http://127.0.0.1:{port}"\nallow_http = true\ntime_limit = 5\n'
    )
    code = run(["doctor", "--storage", url, "--json", "--config", str(config), *options])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    return code, {one["name"]: (one["status"], one["text"]) for one in found["checks"]}


@pytest.mark.parametrize("served", S3, indirect=True)
def test_doctor_on_a_suitable_store(
    served: Served, location: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, found = doctor(capsys, tmp_path, location, served.port, "--no-spark")
    assert code == 0, found
    assert found == {
        "storage settings": ("ok", f"the bucket s3://lake at http://127.0.0.1:{served.port} in us-east-1"),
        "obstore": ("ok", "writes, reads and lists files"),
        "pyarrow": ("ok", "reads what obstore has written"),
        "spark reader": ("skipped", "not tried (--no-spark)"),
        "conditional writes": ("ok", "one of 16 writers wins, nothing is overwritten, and listings are current"),
        "store clock": ("ok", "within 5 s of this machine's"),
    }
    assert list(open_store(location).list()) == []


@on_moto
def test_doctor_on_a_store_that_is_not_suitable(
    proxy: FaultyProxy, location: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    proxy.fault = without_header(b"if-none-match")
    code, found = doctor(capsys, tmp_path, location, proxy.port, "--no-spark")
    assert code == 1
    assert [name for name, (status, _) in found.items() if status == "error"] == ["conditional writes"]
    assert "the store is not safe, so distop writes nothing there" in found["conditional writes"][1]


@on_moto
def test_doctor_on_a_store_that_answers_listings_with_another_document(
    proxy: FaultyProxy, location: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = b"<html><body>Welcome</body></html>"

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        if "list-type=2" not in seen.target:
            return forward(seen.whole)
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page)

    proxy.fault = fault
    code, found = doctor(capsys, tmp_path, location, proxy.port, "--no-spark")
    assert code == 1
    assert [name for name, (status, _) in found.items() if status == "error"] == ["obstore"]
    assert "a listing does not show s3://lake/" in found["obstore"][1]


@on_moto
def test_doctor_names_the_wrong_library(
    proxy: FaultyProxy, location: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    refusal = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(denied), denied)

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        return refusal if b"aws-sdk-cpp" in seen.whole.lower() else forward(seen.whole)  # pyarrow's

    proxy.fault = fault
    code, found = doctor(capsys, tmp_path, location, proxy.port, "--no-spark")
    assert code == 1
    assert [name for name, (status, _) in found.items() if status == "error"] == ["pyarrow"]
    assert "ACCESS_DENIED" in found["pyarrow"][1].upper().replace(" ", "_")


@pytest.mark.parametrize("served", ["versitygw"], indirect=True)
@pytest.mark.parametrize(
    ("variable", "code_of_store"),
    [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "XAdminUserNotFound")],
    ids=["secret", "key"],
)
def test_doctor_with_wrong_credentials(
    variable: str,
    code_of_store: str,
    served: Served,
    location: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, "never-shown")
    code, found = doctor(capsys, tmp_path, f"{location}/wrong", served.port)
    assert code == 1
    assert {name: status for name, (status, _) in found.items()} == {
        "storage settings": "ok",
        "obstore": "error",
        "pyarrow": "skipped",
        "spark reader": "skipped",
        "conditional writes": "skipped",
    }
    assert code_of_store in found["obstore"][1]
    assert "never-shown" not in json.dumps(found)


def test_doctor_on_an_endpoint_without_a_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_doctor, "CALL_SECONDS", 1.0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens there
        code, found = doctor(capsys, tmp_path, "s3://lake/shared", taken.getsockname()[1])
    assert code == 1
    status, text = found["obstore"]
    assert status == "error"
    assert "given up after 1 s" in text
    assert {status for name, (status, _) in found.items() if name not in ("storage settings", "obstore")} == {"skipped"}


@on_moto
def test_doctor_reports_its_findings_if_it_cannot_remove_its_object(
    proxy: FaultyProxy,
    location: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy.answer("403 Forbidden")
    monkeypatch.setattr(time_limit, "LIMIT", 0.0)  # of the removal
    code, found = doctor(capsys, tmp_path, location, proxy.port)
    assert code == 1
    assert found["obstore"][0] == "error"


def test_doctor_on_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = doctor(capsys, tmp_path, str(tmp_path / "shared"), 1)
    assert code == 0
    assert {name: status for name, (status, _) in found.items()} == {
        "storage settings": "ok",
        "folder": "ok",
        "conditional writes": "ok",
        "store clock": "ok",
    }


@pytest.mark.spark
@on_moto
def test_doctor_names_the_missing_connector_of_spark(
    served: Served, location: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from distop.runtime.java import judge

    need(judge({}).level == "ok", "Java 17 or newer: install openjdk-17-jre-headless")
    code, found = doctor(capsys, tmp_path, location, served.port)
    assert code == 1
    assert [name for name, (status, _) in found.items() if status == "error"] == ["spark reader"]
    assert "Spark has no connector for S3: add org.apache.hadoop:hadoop-aws" in found["spark reader"][1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "--no-spark"], "--no-spark belongs to --storage"),
        (["doctor", "--storage", "s4://lake"], "which is not known"),
        (["doctor", "--storage", "relative/path"], "must be an absolute path or a URL"),
        (["doctor", "--storage", "s3://lake?endpoint_override=evil"], "has parameters"),
    ],
)
def test_refused_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == InvalidArgument.exit_code
    assert message in capsys.readouterr().err

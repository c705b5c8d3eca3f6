"""Calls with a time limit: results, errors, and no remaining thread or process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from distop import tables
from distop.errors import InvalidArgument, NotFound, TableUnavailable
from distop.protocol.records import TableRecord
from distop.runtime import time_limit
from distop.storage import storage_options
from distop.storage.location import Location
from distop.tables import check_within_limit
from tests.support.processes import children

LOCATIONS = {"s3": "s3://bucket/table", "gs": "gs://bucket/table"}
"""A location for each kind of object store, by its scheme."""


class SilentServer:
    """Accepts connections and never answers; the first one sets ``connected``."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.connected = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings by which this server is the object store of all :data:`LOCATIONS`."""
        options = {"endpoint": f"http://{self.address}", "allow_http": True, "anonymous": True}
        return {"s3://bucket": {**options, "region": "us-east-1"}, "gs://bucket": options}

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(connection)
            self.connected.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for connection in self._open:
            connection.close()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not reached():  # noqa: ASYNC110  # there is no event for the end of a process
            await asyncio.sleep(0.01)


def test_a_call_in_a_thread_returns_its_result_and_raises_its_error() -> None:
    def wrong() -> None:
        raise NotFound("there is none")

    assert asyncio.run(time_limit.in_thread(lambda: 7)) == 7
    with pytest.raises(NotFound, match="there is none"):
        asyncio.run(time_limit.in_thread(wrong))
    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(time_limit.in_thread(lambda: (_ for _ in ()).throw(TimeoutError("its own"))))


def test_a_call_in_a_thread_is_abandoned_at_its_limit() -> None:
    forever = threading.Event()
    with pytest.raises(time_limit.TimeLimitExceeded):
        asyncio.run(time_limit.in_thread(forever.wait, 0.05))
    forever.set()


def test_a_call_in_a_process_returns_its_result_and_raises_its_error() -> None:
    assert asyncio.run(time_limit.in_process("os.path:basename", "/a/b")) == "b"
    asked = {"table": TableRecord("t", "parquet", "/no/such/folder").to_json(), "storage": {}}
    with pytest.raises(InvalidArgument, match="'/no/such/folder' does not exist"):
        asyncio.run(time_limit.in_process("distop.tables:check_json", asked))


def test_a_process_without_an_answer_is_reported_with_its_last_output() -> None:
    with pytest.raises(time_limit.Aborted, match="with exit code 3: no error output"):
        asyncio.run(time_limit.in_process("os:_exit", 3))
    with pytest.raises(time_limit.Aborted, match="with SIGABRT"):
        asyncio.run(time_limit.in_process("signal:raise_signal", signal.SIGABRT))


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_process_is_killed_at_its_limit_and_when_its_caller_is_cancelled(cancelled: bool) -> None:
    async def main() -> None:
        before = set(children(os.getpid()))
        task = asyncio.create_task(time_limit.in_process("time:sleep", 1_000, 60 if cancelled else 1))
        await until(lambda: bool(set(children(os.getpid())) - before))
        (child,) = set(children(os.getpid())) - before
        if cancelled:
            task.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else time_limit.TimeLimitExceeded):
            await task
        await until(lambda: child not in children(os.getpid()))

    asyncio.run(main())


@pytest.mark.parametrize(("scheme", "file_format"), [("s3", "iceberg"), ("gs", "parquet")])
def test_a_location_that_never_answers_is_refused_after_the_limit(
    scheme: str, file_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "LIMIT", 5.0)
    with SilentServer() as server:
        storage_options.configure(storage_options.read_settings(server.settings))
        try:
            record = TableRecord("t", file_format, LOCATIONS[scheme])
            with pytest.raises(InvalidArgument, match=f"{scheme}://.* did not answer within 5 s: check its address"):
                asyncio.run(check_within_limit(record))
        finally:
            storage_options.configure({})
        assert server.connected.is_set()


def test_L13_a_job_does_not_wait_forever_for_a_location_that_does_not_respond(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as a folder on a file server that is down: reading it blocks until the server is back."""
    away = threading.Event()
    monkeypatch.setattr(Location, "check", lambda _: away.wait(60))
    monkeypatch.setattr(tables, "LOCATION_TIMEOUT", 0.05)
    try:
        with pytest.raises(TableUnavailable, match=f"{tmp_path}.* did not answer within 0.05 s"):
            tables.check_reachable(TableRecord("t", "parquet", str(tmp_path)))
    finally:
        away.set()


def test_ctrl_c_ends_the_registration_of_a_table_that_never_answers(tmp_path: Path) -> None:
    with SilentServer() as server:
        settings = tmp_path / "distop.toml"
        sections = (
            [f'[storage."{place}"]', *(f"{k} = {json.dumps(v)}" for k, v in options.items())]
            for place, options in server.settings.items()
        )
        settings.write_text("\n".join(line for section in sections for line in section))
        command = ["table", "add", "t", "--format", "parquet", "--location", LOCATIONS["gs"]]
        argv = [sys.executable, "-m", "distop.cli", *command, "--etcd", "127.0.0.1:1", "--config", str(settings)]
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        try:
            assert server.connected.wait(60)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)  # without the signal it would take 15 minutes
        finally:
            process.kill()
    assert (process.returncode, stderr) == (130, "interrupted\n")


INVALID: dict[str, str] = {
    "s3://": "names no bucket",
    "gs://": "names no bucket",
    "file://": "is not a path on this machine",
    "file://other/folder": "is not a path on this machine",
    "s3://bucket?endpoint_override=%zz": "has parameters, which could choose an endpoint",
    "nothing://known": "has the scheme 'nothing', which is not known",
    "a\0b": "must be a path or a URL",
    "": "must be a path or a URL",
}


@pytest.mark.parametrize("file_format", ["parquet", "iceberg"])
@pytest.mark.parametrize("location", INVALID)
def test_an_invalid_location_is_refused_in_one_sentence(location: str, file_format: str) -> None:
    with pytest.raises(InvalidArgument, match=INVALID[location]) as refused:
        asyncio.run(check_within_limit(TableRecord("t", file_format, location)))
    assert "\n" not in str(refused.value)

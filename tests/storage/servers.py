"""Object stores on the loopback, each with one bucket, and how distop reaches them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from distop.storage.storage_options import StorageOptions
from scripts import built_programs
from tests.storage.faulty_http import FaultyProxy
from tests.storage.gcs_xml_writes import XmlWrites
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

BUCKET = "lake"
KEY, SECRET = "tester", "tester-secret"
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's documented account, which every installation has."""
_STARTS_WITHIN = 180.0
_TRIES = 5


@dataclass(frozen=True)
class Served:
    """A running store. ``url``: of its bucket; ``environment``: its credentials."""

    name: str
    url: str
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    process: ServerProcess | None = None
    """None: the server runs in this process."""

    def options(self, port: int = 0) -> dict[str, StorageOptions]:
        """Its configuration. ``port``: of a proxy in front of it."""
        prefix = "abfs://lake@devstoreaccount1" if self.name == "azurite" else self.url
        region = "us-east-1" if self.url.startswith("s3:") else ""
        options = StorageOptions(
            endpoint=f"http://127.0.0.1:{port or self.port}",
            region=region,
            allow_http=True,
            connect_timeout=5.0,
            request_timeout=5.0,
            time_limit=20.0,
        )
        return {prefix: options}


@contextlib.contextmanager
def versitygw(folder: Path) -> Iterator[Served]:
    (folder / "data" / BUCKET).mkdir(parents=True)
    environment = {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}

    def words(port: int) -> Sequence[str]:
        return ("--port", f"127.0.0.1:{port}", "--quiet", "posix", str(folder / "data"))

    with _running("versitygw", folder, words, environment) as process:
        yield _s3("versitygw", process.port, process)


@contextlib.contextmanager
def moto() -> Iterator[Served]:
    """moto's server in this process. It checks no credentials.

    It serves one request at a time: its conditional writes are not atomic, so of two at once both may succeed.
    """
    from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    application, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def in_turn(environ: Any, start_response: Any) -> list[bytes]:
        with turn:
            return list(application(environ, start_response))

    server = make_server("127.0.0.1", 0, in_turn, threaded=True, request_handler=MotoRequestHandler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        request(f"http://127.0.0.1:{server.port}/{BUCKET}", "PUT")
        yield _s3("moto", server.port)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[Served]:
    """fake-gcs-server, behind a proxy for writes by the XML API, which it lacks."""

    def words(port: int) -> Sequence[str]:
        own = f"127.0.0.1:{port}"
        return (
            *("-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
            *("-external-url", f"http://{own}", "-public-host", own, "-log-level", "error"),
        )

    with _running("fake-gcs-server", folder, words, {}) as process, FaultyProxy(process.port) as front:
        front.fault = XmlWrites(process.port).answer
        port, endpoint = front.port, f"http://127.0.0.1:{front.port}"
        request(f"{endpoint}/storage/v1/b?project=p", "POST", json.dumps({"name": BUCKET}).encode())
        account = folder / "account.json"
        # obstore signs writes even if it is told not to, except with an account like this one.
        credentials = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
        account.write_text(json.dumps({**credentials, "private_key_id": ""}))
        yield Served("fake-gcs-server", f"gs://{BUCKET}", port, {"GOOGLE_SERVICE_ACCOUNT": str(account)})


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Served]:
    def words(port: int) -> Sequence[str]:
        flags = ("--silent", "--disableTelemetry", "--inMemoryPersistence", "--skipApiVersionCheck")
        return ("--blobHost", "127.0.0.1", "--blobPort", str(port), *flags)

    with _running("azurite", folder, words, {}) as process:
        port = process.port
        _make_container(port)
        url = f"abfss://{BUCKET}@{_AZURE_ACCOUNT}.dfs.core.windows.net"
        yield Served("azurite", url, port, {"AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY})


def _s3(name: str, port: int, process: ServerProcess | None = None) -> Served:
    environment = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    return Served(name, f"s3://{BUCKET}", port, environment, process)


def _make_container(port: int) -> None:
    date, version = formatdate(usegmt=True), "2021-08-06"
    path = f"/{_AZURE_ACCOUNT}/{BUCKET}"
    lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}", f"/{_AZURE_ACCOUNT}{path}"]
    signed = "\n".join([*lines, "restype:container"])
    digest = hmac.new(base64.b64decode(_AZURE_KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    request(f"http://127.0.0.1:{port}{path}?restype=container", "PUT", headers=headers)


def request(url: str, method: str = "GET", body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """The body of the answer to a request. Raises HTTPError."""
    asked = urllib.request.Request(url, data=body or None, method=method, headers=dict(headers or {}))
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=20) as answer:
        return bytes(answer.read())


class ServerProcess:
    """A server on a port, which can be killed and started again with the data that it keeps."""

    def __init__(self, words: Sequence[str], port: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.port = port
        self.log = folder / "server.log"
        self._words = words
        self._folder = folder
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Start it and wait until it answers; False: it has ended."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words, cwd=self._folder, env=self._environment, stdout=log, stderr=log
            )
        return _answers(self._process, self.port)

    def kill(self) -> None:
        """Kill it (SIGKILL) and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def _running(
    name: str, folder: Path, words: Callable[[int], Sequence[str]], environment: Mapping[str, str]
) -> Iterator[ServerProcess]:
    """Run a server on a free port. Another process may take the port first, so it is tried again."""
    command = built_programs.command(name)
    need(command, built_programs.needs(name))
    assert command is not None
    for _ in range(_TRIES):
        port = _free_port()
        process = ServerProcess([*command, *words(port)], port, folder, environment)
        try:
            if process.start():
                yield process
                return
        finally:
            process.kill()
    raise AssertionError(f"{name} does not start: {process.log.read_text()[-1000:]}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until a server answers; False: it has ended."""
    end = time.monotonic() + _STARTS_WITHIN
    while time.monotonic() < end and process.poll() is None:
        try:
            request(f"http://127.0.0.1:{port}/")
        except urllib.error.HTTPError:
            return True
        except OSError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        else:
            return True
    return False

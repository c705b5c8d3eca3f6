"""The stores that the contract is tested on. Each test gets a new place in each of them."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.storage import storage_options
from distop.storage.opened_stores import memory_store, open_store
from tests.storage import servers
from tests.storage.faulty_http import FaultyProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.storage.object_store import ObjectStore
    from tests.storage.servers import Served

S3 = ("versitygw", "moto")
REMOTE = (*S3, "fake-gcs-server", "azurite")
ALL = ("folder", "memory", *REMOTE)
_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")


@pytest.fixture(scope="session")
def _versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with servers.versitygw(tmp_path_factory.mktemp("versitygw")) as served:
        yield served


@pytest.fixture(scope="session")
def _moto() -> Iterator[Served]:
    with servers.moto() as served:
        yield served


@pytest.fixture(scope="session")
def _fake_gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with servers.fake_gcs(tmp_path_factory.mktemp("gcs")) as served:
        yield served


@pytest.fixture(scope="session")
def _azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as served:
        yield served


@pytest.fixture(autouse=True)
def _own_configuration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the configuration of this machine or of another test."""
    for name in list(os.environ):
        if name.startswith(_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/credentials")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent/config")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield
    storage_options.configure({})


@pytest.fixture
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The server that the test is parametrized with (``indirect``), which distop is configured for."""
    found: Served = request.getfixturevalue("_" + request.param.replace("-", "_"))
    use(found, monkeypatch)
    return found


def use(served: Served, monkeypatch: pytest.MonkeyPatch, *, port: int = 0) -> None:
    """Configure distop for a server, or for a proxy in front of it."""
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    storage_options.configure(served.options(port))


@pytest.fixture
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """A new and empty store of the kind that the test is parametrized with (``indirect``)."""
    name: str = request.param
    if name == "memory":
        return memory_store()
    if name == "folder":
        return open_store(str(request.getfixturevalue("tmp_path") / "own"))
    served: Served = request.getfixturevalue("_" + name.replace("-", "_"))
    use(served, request.getfixturevalue("monkeypatch"))
    return open_store(f"{served.url}/{uuid.uuid4().hex}")


@pytest.fixture
def proxy(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the server, which distop is configured for."""
    with FaultyProxy(served.port) as found:
        use(served, monkeypatch, port=found.port)
        yield found


@pytest.fixture
def impatient(served: Served, proxy: FaultyProxy) -> None:
    """distop gives a request up at once."""
    [(prefix, options)] = served.options(proxy.port).items()
    storage_options.configure({prefix: replace(options, time_limit=0.05)})

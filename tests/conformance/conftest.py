"""Fixtures: each conformance test runs against each supported version of etcd.

The versions are in :mod:`scripts.etcd_servers`.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest

from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.embedded import EmbeddedEtcd
from scripts import etcd_servers
from tests.support.etcd import own_etcd, small_etcd
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

__all__ = ["own_etcd", "small_etcd"]

_numbers = itertools.count()


def _rotating(name: str) -> Any:
    """Mark the tests of this server as rotating, unless it is the default server."""
    rotates = name != etcd_servers.DEFAULT and len(etcd_servers.each()) > 1
    return pytest.param(name, marks=pytest.mark.rotating) if rotates else name


@pytest.fixture(scope="session", autouse=True, params=[_rotating(name) for name in etcd_servers.each()])
def server(request: pytest.FixtureRequest) -> Iterator[etcd_servers.Server]:
    """Put this etcd server first on ``PATH``, so that a test's etcd members run it."""
    found = etcd_servers.find(request.param)
    need(found, f"etcd {request.param}, which scripts/etcd builds with Go")
    assert found is not None
    path = os.environ["PATH"]
    os.environ["PATH"] = found.precede(path)
    yield found
    os.environ["PATH"] = path


@pytest.fixture(scope="session")
def shared_etcd(server: etcd_servers.Server) -> Iterator[EmbeddedEtcd]:
    """One etcd for the tests that neither stop nor compact it.

    Each test writes keys with its own prefix.
    """
    with EmbeddedEtcd(compaction=None) as etcd:
        yield etcd


@pytest.fixture
async def client(shared_etcd: EmbeddedEtcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(EtcdConfig((shared_etcd.endpoint,))) as client:
        yield client


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses."""
    return f"t{next(_numbers)}."

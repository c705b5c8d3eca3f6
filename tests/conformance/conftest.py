"""The store against real etcd servers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from distop.store.client import EtcdClient
from distop.store.config import EtcdConfig
from tests.support.etcd import own_etcd, shared_etcd, small_etcd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from distop.store.embedded import EmbeddedEtcd

__all__ = ["own_etcd", "shared_etcd", "small_etcd"]

_numbers = itertools.count()


@pytest.fixture
async def client(shared_etcd: EmbeddedEtcd) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(EtcdConfig((shared_etcd.endpoint,))) as client:
        yield client


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test writes below."""
    return f"t{next(_numbers)}."

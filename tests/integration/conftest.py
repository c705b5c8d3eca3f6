"""Fixtures: real daemons on a real etcd, whose history is checked against the invariants after each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import TableRecord
from distop.store.embedded import EmbeddedEtcd
from tests.support.daemons import Daemons, daemons
from tests.support.etcd import CHEAP_PASSWORDS, shared_etcd  # noqa: F401
from tests.support.replay import violations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TABLE = "t"


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    """An etcd for one test, which keeps its whole history."""
    with EmbeddedEtcd(compaction=None, arguments=CHEAP_PASSWORDS) as server:
        yield server


@pytest.fixture
def group(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Daemons]:
    """A group without daemons yet, with a client and a table ``t`` for noop operations."""
    with daemons(etcd.endpoint, tmp_path) as found:
        found.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
        yield found
    found_violations = violations(etcd.endpoint)
    assert not found_violations, "\n".join(found_violations[:3])

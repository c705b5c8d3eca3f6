"""Real daemons on a real etcd. After each test the history of its etcd is checked against the invariants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import TableRecord
from distop.store.embedded import EmbeddedEtcd
from tests.support.daemons import Daemons, daemons
from tests.support.etcd import shared_etcd  # noqa: F401
from tests.support.replay import violations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TABLE = "t"


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    """An etcd of the test's own that keeps all of its history."""
    with EmbeddedEtcd(compaction=None) as server:
        yield server


@pytest.fixture
def group(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Daemons]:
    """No daemons yet, a client, and a table ``t`` for the no-op."""
    with daemons(etcd.endpoint, tmp_path) as found:
        found.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
        yield found
    broken = violations(etcd.endpoint)
    assert not broken, "\n".join(broken[:3])

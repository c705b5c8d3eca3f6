"""A member of etcd that lost the others, but not us: our streams stay open on it. (The form of it that always runs,
with a proxy on the loopback, is in test_etcd_faults.)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import OperationRef, TableRecord
from tests.support import netns
from tests.support.daemons import daemons
from tests.support.etcd import connected
from tests.support.needs import need
from tests.support.replay import Written
from tests.support.writing import assert_data

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.writing import Journal

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.rotating]

TABLE = "t"
JOBS, ROWS = 12, 20


@pytest.mark.parametrize("which", ["leader", "follower"])
def test_a_member_without_the_others_loses_us_too(
    which: str, tmp_path: Path, journal: Journal, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no leader, says so (W8), and the daemon goes on with another member under the same session."""
    need(netns.possible(), "root and network namespaces: run it as root, with iproute2")
    monkeypatch.setenv("DISTOP_ACCEPT_ETCD_DEFECTS", "1")
    with netns.NamespacedEtcd(tmp_path) as etcd:
        everywhere = ",".join(etcd.endpoints)
        number = _member(etcd.endpoints, leader=which == "leader")
        # The daemon begins with the member that will be lost.
        mine = [etcd.endpoints[number], *(e for n, e in enumerate(etcd.endpoints) if n != number)]
        with daemons(everywhere, tmp_path) as group:
            group.client.add_table(TableRecord(TABLE, "parquet", str(tmp_path)), check=False)
            ann = group.spawn("ann", "--etcd", ",".join(mine), ttl=10, env=sample_env)
            group.await_ready("ann")
            before = set(group.client.nodes())
            arg = {"jobs": JOBS, "rows": ROWS, "pause": 0.1, "journal": str(journal.path)}
            operation = group.client.start_operation("writing", TABLE, arg)
            group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
            etcd.isolate(number)
            result = operation.wait(120)
            assert result.state == "success", group.tails()
            assert "failed; using" in ann.log.read_text()
            assert set(group.client.nodes()) == before, "its session went on by another member"
            etcd.rejoin(number)
            written = Written(everywhere, OperationRef.parse(operation.ref))
            assert_data(written, journal, JOBS, ROWS)


def _member(endpoints: tuple[str, ...], *, leader: bool) -> int:
    async def ask(endpoint: str) -> bool:
        async with connected(endpoint) as client:
            status = await client.status()
            return bool(status.leader == status.member_id)

    return next(n for n, endpoint in enumerate(endpoints) if asyncio.run(ask(endpoint)) is leader)

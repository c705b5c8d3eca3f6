"""Maintenance of etcd (defragmentation and restarts) under busy daemons."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import OperationRef
from tests.support.contract import etcdctl
from tests.support.replay import Written
from tests.support.writing import assert_data

if TYPE_CHECKING:
    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons
    from tests.support.writing import Journal

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

TABLE = "t"
JOBS, ROWS = 12, 10


def test_sessions_survive_repeated_defragmentation(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str]
) -> None:
    """F22: etcd answers no requests while it defragments, which repeats until the operation has ended."""
    group.start("ann", "bob", ttl=10, env=sample_env)
    before = set(group.client.nodes())
    arg = {"jobs": JOBS, "rows": ROWS, "pause": 0.1, "journal": str(journal.path)}
    operation = group.client.start_operation("writing", TABLE, arg)
    times = 0
    while not operation.status().ended:
        command = [etcdctl(), "--endpoints", etcd.endpoint, "defrag"]
        subprocess.run(command, check=True, capture_output=True, env={"ETCDCTL_API": "3"})
        times += 1
    assert times > 3
    assert operation.wait(1).state == "success", group.tails()
    assert set(group.client.nodes()) == before, "no daemon lost its session"
    assert_data(Written(group.endpoint, OperationRef.parse(operation.ref)), journal, JOBS, ROWS)


def test_sessions_and_jobs_survive_a_regular_restart_of_etcd(
    group: Daemons, etcd: EmbeddedEtcd, journal: Journal, sample_env: dict[str, str]
) -> None:
    """etcd closes its connections and accepts no new ones until it is back."""
    group.start("ann", "bob", ttl=30, env=sample_env)
    before = set(group.client.nodes())
    arg = {"jobs": JOBS, "rows": ROWS, "pause": 0.1, "journal": str(journal.path)}
    operation = group.client.start_operation("writing", TABLE, arg)
    group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
    etcd.halt()
    assert not etcd.running
    etcd.restart()
    assert operation.wait(120).state == "success", group.tails()
    assert set(group.client.nodes()) == before, "no daemon lost its session"
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert all('"failures":0' in claim for claims in written.claims.values() for claim in claims)
    assert_data(written, journal, JOBS, ROWS)

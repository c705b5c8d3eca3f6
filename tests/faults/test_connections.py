"""Connections of busy daemons to etcd that fail silently or in one direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import OperationRef
from tests.integration.test_daemons import holders
from tests.support.proxy import Mode, ThreadedProxy
from tests.support.replay import Written
from tests.support.writing import assert_data

if TYPE_CHECKING:
    from distop.blocking import Operation
    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemon, Daemons
    from tests.support.writing import Journal

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.rotating]

TABLE = "t"
JOBS, ROWS = 4, 30


def start(group: Daemons, journal: Journal) -> Operation:
    settings = {"jobs": JOBS, "rows": ROWS, "pause": 0.1, "journal": str(journal.path)}
    return group.client.start_operation("writing", TABLE, settings)


def start_behind_proxy(group: Daemons, proxy: ThreadedProxy, ttl: float, env: dict[str, str]) -> Daemon:
    """Start a daemon that reaches etcd only through the proxy."""
    daemon = group.spawn("ann", "--etcd", proxy.endpoint, ttl=ttl, env=env)
    group.await_ready("ann")
    return daemon


def assert_success(group: Daemons, operation: Operation, journal: Journal) -> None:
    result = operation.wait(120)
    assert result.state == "success", group.tails()
    assert_data(Written(group.endpoint, OperationRef.parse(operation.ref)), journal, JOBS, ROWS)


def test_a_session_survives_connections_that_die_silently(
    etcd: EmbeddedEtcd, group: Daemons, journal: Journal, sample_env: dict[str, str]
) -> None:
    """There is only one endpoint, so the daemon must reconnect to it before its session ends."""
    with ThreadedProxy(etcd.port) as proxy:
        ann = start_behind_proxy(group, proxy, 10, sample_env)
        before = set(group.client.nodes())
        operation = start(group, journal)
        group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
        proxy.drop_connections_silently()
        assert_success(group, operation, journal)
        assert set(group.client.nodes()) == before
        assert "Session lost" not in ann.log.read_text()
        assert ann.stop() == 0


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(Mode.DROP_ANSWERS, id="answers lost"),
        pytest.param(Mode.HOLD_REQUESTS, id="requests held", marks=pytest.mark.slow),
    ],
)
def test_a_daemon_with_a_one_way_connection_stops_and_its_jobs_are_taken_over(
    etcd: EmbeddedEtcd, group: Daemons, journal: Journal, sample_env: dict[str, str], mode: Mode
) -> None:
    """With lost answers, etcd renews the lease and applies every write. With held requests, writes arrive after the
    end of their session. In both cases the daemon stops by its own clock, and no job counts twice.
    """
    with ThreadedProxy(etcd.port) as proxy:
        ann = start_behind_proxy(group, proxy, 4, sample_env)
        before = set(group.client.nodes())
        operation = start(group, journal)
        group.eventually(lambda: set(holders(group)) == {"ann"} and len(journal.lines()) > 10, "the jobs write")
        proxy.set(mode)
        group.eventually(lambda: "Session lost" in ann.log.read_text(), "ann stops by its own clock", "ann")
        group.start("bob", env=sample_env)
        group.eventually(lambda: set(holders(group)) == {"bob"}, "bob takes over the jobs")
        proxy.set(Mode.PASS)
        assert_success(group, operation, journal)
        assert not before & set(group.client.nodes())
        assert ann.stop() == 0

"""Connections to etcd that fail in one direction, or in silence, under daemons at work. The audit follows."""

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


def far(group: Daemons, proxy: ThreadedProxy, ttl: float, env: dict[str, str]) -> Daemon:
    """A daemon that reaches etcd through the proxy alone."""
    daemon = group.spawn("ann", "--etcd", proxy.endpoint, ttl=ttl, env=env)
    group.await_ready("ann")
    return daemon


def assert_whole(group: Daemons, operation: Operation, journal: Journal) -> None:
    result = operation.wait(120)
    assert result.state == "success", group.tails()
    assert_data(Written(group.endpoint, OperationRef.parse(operation.ref)), journal, JOBS, ROWS)


def test_connections_that_die_in_silence(
    etcd: EmbeddedEtcd, group: Daemons, journal: Journal, sample_env: dict[str, str]
) -> None:
    """With one endpoint there is nowhere else to go: the daemon connects anew before its session ends."""
    with ThreadedProxy(etcd.port) as proxy:
        ann = far(group, proxy, 10, sample_env)
        before = set(group.client.nodes())
        operation = start(group, journal)
        group.eventually(lambda: len(journal.lines()) > 10, "the jobs write")
        proxy.drop_connections_silently()
        assert_whole(group, operation, journal)
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
def test_a_cut_in_one_direction(
    etcd: EmbeddedEtcd, group: Daemons, journal: Journal, sample_env: dict[str, str], mode: Mode
) -> None:
    """Answers lost: etcd renews the lease and takes every write, and the daemon hears nothing of it. Requests held:
    what the session wrote arrives when it has ended. Either way it stops by its own clock, and nothing is done twice.
    """
    with ThreadedProxy(etcd.port) as proxy:
        ann = far(group, proxy, 4, sample_env)
        before = set(group.client.nodes())
        operation = start(group, journal)
        group.eventually(lambda: set(holders(group)) == {"ann"} and len(journal.lines()) > 10, "the jobs write")
        proxy.set(mode)
        group.eventually(lambda: "Session lost" in ann.log.read_text(), "it stops by its own clock", "ann")
        group.start("bob", env=sample_env)
        group.eventually(lambda: set(holders(group)) == {"bob"}, "its jobs are taken over")
        proxy.set(Mode.PASS)
        assert_whole(group, operation, journal)
        assert not before & set(group.client.nodes())
        assert ann.stop() == 0

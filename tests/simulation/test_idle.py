"""An idle cluster: no watch is reopened because it is silent for minutes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.protocol.txn import Put, Txn
from tests.simulator.run import Simulation
from tests.simulator.scenario import plain

if TYPE_CHECKING:
    from tests.simulator.scenario import Scenario

IDLE = 400.0
"""Seconds of idle time: watches are opened again after a listing when nothing has been written for minutes."""


def idle(version: str) -> Scenario:
    return replace(plain(1, 2, (), types=("check",), calm=IDLE), members=3, version=version)


@pytest.mark.parametrize("version", ["3.4.23", "3.5.33", "3.6.16"])
def test_idle_watches_are_not_reopened(version: str, caplog: pytest.LogCaptureFixture) -> None:
    """Servers from 3.5.8 on do not answer progress requests for a watch beyond the store's revision (W8a)."""
    caplog.set_level(logging.INFO, "distop.store")
    store = logging.getLogger("distop.store")
    store.addHandler(caplog.handler)
    try:
        report = Simulation(idle(version)).run()
    finally:
        store.removeHandler(caplog.handler)
    assert report.breaches == []
    assert report.seconds >= IDLE
    assert [text for text in caplog.messages if "failed; using" in text] == []


def test_a_write_elsewhere_after_a_progress_request_fails_no_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    """The server dropped the progress request before the write, so no answer is due."""
    caplog.set_level(logging.INFO, "distop.store")
    store = logging.getLogger("distop.store")
    store.addHandler(caplog.handler)
    try:
        sim = Simulation(idle("3.6.16"))

        def write() -> None:
            before = sim.etcd.revision
            sim.etcd.store.apply(Txn((), (Put("not distop's", b"1"),)))
            sim.etcd._commit(before, "somebody")

        for n in range(1, 12):
            sim.loop.world_at(31.0 * n, write)
        sim.run()
    finally:
        store.removeHandler(caplog.handler)
    assert [text for text in caplog.messages if "failed; using" in text] == []

"""A cluster where nothing happens for minutes: no watch is reopened for silence."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.testing.simulation.run import Simulation
from distop.testing.simulation.scenario import plain

if TYPE_CHECKING:
    from distop.testing.simulation.scenario import Scenario

IDLE = 400.0
"""Seconds: watches that are opened after their first listing again start when nothing has been written for minutes."""


def idle(version: str) -> Scenario:
    return replace(plain(1, 2, (), types=("check",), calm=IDLE), members=3, version=version)


@pytest.mark.parametrize("version", ["3.4.23", "3.5.33"])
def test_idle_watches_are_not_reopened(version: str, caplog: pytest.LogCaptureFixture) -> None:
    """Servers from 3.5.8 on do not answer for a watch beyond the store's revision.

    See W8a.
    """
    caplog.set_level(logging.INFO, "distop.store")
    store = logging.getLogger("distop.store")
    store.addHandler(caplog.handler)
    try:
        report = Simulation(idle(version)).run()
    finally:
        store.removeHandler(caplog.handler)
    assert report.breaches == []
    assert report.seconds >= IDLE
    assert [text for text in caplog.messages if "going on with" in text] == []

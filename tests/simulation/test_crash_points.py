"""Every step of every protocol, with the process killed, frozen or cut off at it: the list is generated."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter

import pytest

from distop.testing.simulation.points import discover, one_strike, references, strikes
from distop.testing.simulation.run import quietly

STEPS = (
    "put arg, put distOpPending, put nextInstanceId, put runOps, put spec, put state",  # start
    "put planning",
    "put distOpClaim",  # claim, take over, retry, release
    "put job progress",
    "delete distOpClaim, put job outcome, put job state",  # report
    "delete distOpOpen, put distOpPending, put state",  # pause
    "delete distOpPending, put distOpOpen, put state",  # resume
    "delete distOpOpen, put cancel, put distOpPending, put state",
    "delete distOpClaim",  # reap
    "delete distOpOpen, put decision, put distOpPending",
    "put decision",  # completion failed
    "put distOpHistory, put distOpPending, put runOps, put state",  # finish
    "put distOpCoordinator",  # elect
    "put distOpNode",
    "put distOpNodeDrain",
    "LeaseGrant",
    "LeaseKeepAlive",
)
"""That the discovery finds these is checked; it finds whatever else there is as well."""


def test_the_reference_runs_go_through_every_protocol() -> None:
    with quietly():
        found = Counter(point.what for wanted in references().values() for point in discover(wanted))
    assert [step for step in STEPS if not found[step]] == []


@pytest.mark.timeout(600)
def test_no_strike_at_any_point_breaches_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with quietly():
        listed = strikes(every=False)
    with multiprocessing.get_context("spawn").Pool(min(2, os.cpu_count() or 1)) as pool:
        outcomes = list(pool.imap_unordered(one_strike, listed, chunksize=16))
    with capsys.disabled():
        points = len({(struck.reference, struck.point) for struck in listed})
        print(f"\n{len(outcomes)} strikes at {points} points of {len(references())} runs")
    assert [f"{struck}: {breach}" for struck, breaches in outcomes for breach in breaches[:1]] == []

"""Real daemons under faults. After each test etcd's history is audited and what was written is compared, whatever the
test itself looks at.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.faults.aftermath import problems
from tests.faults.striking import Strikes
from tests.integration.conftest import etcd, group
from tests.support import daemons
from tests.support.behaviors import sample_env
from tests.support.replay import read_steps
from tests.support.writing import Journal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

__all__ = ["aftermath", "etcd", "group", "sample_env"]

PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def aftermath(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whenever the daemons of a test have ended: no invariant is broken, and the data is what the outcomes name. Two
    attempts of a job have not written at once, unless the test is marked ``overlaps``.
    """
    looked = []

    def look(endpoint: str) -> None:
        """With the user whom the daemons had from the environment, if any."""
        names = {"username": "DISTOP_USER", "password": "DISTOP_PASSWORD"}
        user = {option: os.environ[name] for option, name in names.items() if name in os.environ}
        overlaps = request.node.get_closest_marker("overlaps") is not None
        found = problems(read_steps(endpoint, **user), overlaps=overlaps)
        looked.append(endpoint)
        assert not found, "\n".join(found)

    daemons.FINAL_CHECKS.append(look)
    yield
    daemons.FINAL_CHECKS.remove(look)
    assert looked or not request.node.stash.get(PASSED, False), "nothing was audited: start daemons by daemons(...)"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Where the writing jobs write down what they do."""
    return Journal(tmp_path / "journal.jsonl")


@pytest.fixture
def strikes(tmp_path: Path) -> Strikes:
    """What strikes the behaviors of ``tests.faults.struck_apply`` and ``struck_validate``."""
    return Strikes(tmp_path / "strikes")


@pytest.fixture
def struck_env(sample_env: dict[str, str], strikes: Strikes) -> dict[str, str]:
    """The environment of daemons whose children are struck."""
    return {**sample_env, **strikes.env}

"""Fixtures for real daemons under faults.

After each test etcd's history is audited, and written data is compared with the jobs' outcomes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.faults.data_checks import find_problems
from tests.faults.fault_injection import FaultInjector
from tests.faults.s3_lake import s3_lake
from tests.integration.conftest import etcd, group
from tests.support import daemons
from tests.support.behaviors import sample_env
from tests.support.replay import read_steps
from tests.support.writing import Journal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from tests.faults.s3_lake import S3Lake

__all__ = ["check_history_and_data", "etcd", "group", "sample_env"]

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
def check_history_and_data(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check the history and the written data whenever the daemons of a test have ended.

    Two attempts of a job must not have written at the same time, unless the test is marked ``overlaps``.
    """
    checked_endpoints = []

    def check(endpoint: str) -> None:
        """Read the history as the user from the daemons' environment, if any."""
        names = {"username": "DISTOP_USER", "password": "DISTOP_PASSWORD"}
        user = {option: os.environ[name] for option, name in names.items() if name in os.environ}
        overlaps = request.node.get_closest_marker("overlaps") is not None
        found = find_problems(read_steps(endpoint, **user), overlaps=overlaps)
        checked_endpoints.append(endpoint)
        assert not found, "\n".join(found)

    daemons.FINAL_CHECKS.append(check)
    yield
    daemons.FINAL_CHECKS.remove(check)
    assert checked_endpoints or not request.node.stash.get(PASSED, False), (
        "nothing was audited: start daemons by daemons(...)"
    )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """The journal in which the writing jobs record their work."""
    return Journal(tmp_path / "journal.jsonl")


@pytest.fixture
def faults(tmp_path: Path) -> FaultInjector:
    """Injects faults into the behaviors of ``tests.faults.faulty_apply`` and ``faulty_validate``."""
    return FaultInjector(tmp_path / "faults")


@pytest.fixture
def faulty_env(sample_env: dict[str, str], faults: FaultInjector) -> dict[str, str]:
    """The environment of daemons whose children have injected faults."""
    return {**sample_env, **faults.env}


@pytest.fixture
def lake(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Lake]:
    """A place on S3, on the server of the test's parameter (``indirect``), else on moto's server."""
    folder = tmp_path / "s3"
    folder.mkdir()
    with s3_lake(getattr(request, "param", "moto"), folder, monkeypatch) as found:
        yield found


@pytest.fixture
def lake_of_kind(request: pytest.FixtureRequest) -> S3Lake | None:
    """The place on S3 of a test that has a parameter for it. Request this before the daemons, which use it longer."""
    given = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    wanted = any("S3" in (one if isinstance(one, str) else getattr(one, "__name__", "")) for one in given)
    return request.getfixturevalue("lake") if wanted else None

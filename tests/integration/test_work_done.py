"""The work that jobs and completions report is in the status while they run, and what was committed in the record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import WorkDone
from tests.support.behaviors import ROOT, install, python_path
from tests.support.contract import dump
from tests.support.coordinator_behaviors import ENTRY_POINTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemons

TABLE = "t"
pytestmark = [pytest.mark.rotating]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "distop-stumbling", ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", python_path(site, ROOT)["PYTHONPATH"])


def shown(operation: Any, *names: str) -> tuple[Any, ...]:
    work = operation.status().work or {}
    return tuple(work.get(name) for name in names)


def test_a_status_has_the_work_of_ended_and_running_jobs_and_of_the_completion(group: Daemons, tmp_path: Path) -> None:
    group.start("ann")
    arg = {"job": str(tmp_path / "job"), "complete": str(tmp_path / "complete")}
    operation = group.client.start_operation("working", TABLE, arg)
    names = ("files", "bytes", "of_files", "of_bytes", "commits", "committed_files", "committed_bytes")
    group.eventually(
        lambda: shown(operation, *names) == (15, 150, 20, 200, 2, 15, 150),
        "one job has ended, half of the other is done",
    )
    assert operation.status().eta_seconds is not None
    (tmp_path / "job").touch()
    group.eventually(lambda: shown(operation, "files", "of_files") == (3, 6), "the completion reports")
    (tmp_path / "complete").touch()
    result = operation.wait(60)
    assert (result.state, result.work) == ("success", WorkDone(20, 200, 0, 0, 2, 20, 200)), group.tails()
    group.eventually(lambda: '"work":' not in str(dump(group.endpoint, "distOpNode.")), "the executor reports no more")


def test_a_cancelled_operation_says_what_stays(group: Daemons, tmp_path: Path) -> None:
    group.start("ann")
    operation = group.client.start_operation("working", TABLE, {"job": str(tmp_path / "job"), "complete": ""})
    group.eventually(lambda: shown(operation, "committed_files") == (15,), "one job has ended, the other has committed")
    operation.cancel()
    result = operation.wait(60)
    assert (result.state, result.work) == ("cancelled", WorkDone(10, 100, 0, 0, 1, 10, 100)), group.tails()

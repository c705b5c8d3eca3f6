"""Statuses of jobs are published with a delay, rarely, and only while the jobs run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from distop.daemon import job_progress
from distop.daemon.job_progress import JobStatuses
from distop.protocol.records import Node
from distop.worker.daemon_side.requests import RunRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

FIRST, SECOND = (RunRequest("t/sample/1", "sample", None, None, (), batch=True) for _ in range(2))
OTHER = replace(FIRST, op="u/sample/1")


class Timers:
    """Replaces the loop's timers; ``come`` lets the last one fire."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pauses: list[float] = []
        self.published: list[Mapping[str, str]] = []
        self.nodes = 3
        self.doing = JobStatuses(lambda: self.nodes, lambda: self.published.append(self.doing.published))
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", self._call_later)

    def _call_later(self, pause: float, due: object, *_: object, **__: object) -> asyncio.TimerHandle:
        self.pauses.append(pause)
        self._due = due
        return asyncio.TimerHandle(0, lambda: None, (), asyncio.get_running_loop())

    def come(self) -> None:
        self._due()  # type: ignore[operator]


async def test_the_status_of_a_long_run_is_published_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    statuses = timers.doing
    statuses.set_text(FIRST, "reading footers")
    statuses.set_text(FIRST, "scanning 9 files")
    statuses.set_tasks(FIRST, 3, 2_000)
    statuses.set_tasks(SECOND, 0, 1)
    statuses.set_tasks(OTHER, 1, 1)
    assert (timers.pauses, timers.published) == ([job_progress.LEAST_PAUSE], []), "one timer for all of them"
    timers.come()
    both = {"t/sample/1": "scanning 9 files: 3 of 2,000 Spark tasks (and 1 more)", "u/sample/1": "1 of 1 Spark tasks"}
    assert timers.published == [both]
    statuses.set_text(FIRST, "fetching samples")
    for run in (SECOND, OTHER):
        statuses.remove(run)
    timers.come()
    assert timers.published[1:] == [{"t/sample/1": "fetching samples"}]
    statuses.remove(FIRST)
    timers.come()
    assert timers.published[2:] == [{}]


async def test_a_job_with_an_empty_status_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a job that has started Spark and had no status before."""
    timers = Timers(monkeypatch)
    timers.doing.set_text(FIRST, "starting Spark")
    timers.come()
    timers.doing.set_text(FIRST, "")
    timers.come()
    assert timers.published == [{"t/sample/1": "starting Spark"}, {}]


async def test_the_status_of_a_short_run_is_never_published(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    timers.doing.set_text(FIRST, "reading footers")
    timers.doing.remove(FIRST)
    timers.come()
    assert timers.published == []


async def test_statuses_are_published_less_often_with_more_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    timers.nodes = 1_000
    runs = [replace(FIRST, op=f"t/sample/{n}") for n in range(2 * job_progress.MOST_OPERATIONS)]
    for run in runs:
        timers.doing.set_text(run, "x" * 10_000)
    assert timers.pauses == [job_progress.PAUSE_PER_NODE * 1_000]
    timers.come()
    (report,) = timers.published
    assert len(report) <= job_progress.MOST_OPERATIONS
    node = replace(Node("e", "h", 2, ("sample",)), doing=report)
    assert Node.decode(node.encode()) == node
    assert len(node.encode()) < 4_096


async def test_the_work_of_running_jobs_is_published_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    statuses = timers.doing
    statuses.set_work(FIRST, 3, {"files": 2, "bytes": 20})
    statuses.set_work(FIRST, 3, {"files": 4, "bytes": 40, "commits": "x"})
    statuses.set_text(FIRST, "copying")
    statuses.set_work(SECOND, 5, {"committed_files": 1})
    assert len(timers.pauses) == 1, "one timer for all of them, and for the texts"
    timers.come()
    (found,) = (statuses.published_work["t/sample/1"],)
    assert [{**one, "since": ""} for one in found] == [
        {"partition": 3, "since": "", "files": 4, "bytes": 40},
        {"partition": 5, "since": "", "committed_files": 1},
    ]
    since = found[0]["since"]
    statuses.set_work(FIRST, 3, {"files": 5})
    statuses.remove_work(SECOND, [5])
    timers.come()
    assert statuses.published_work == {"t/sample/1": [{"partition": 3, "since": since, "files": 5}]}
    statuses.remove(FIRST)
    timers.come()
    assert (statuses.published, statuses.published_work) == ({}, {})


async def test_the_work_of_many_jobs_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    for p in range(job_progress.MOST_JOBS + 5):
        timers.doing.set_work(FIRST, p, {"files": 1})
    timers.come()
    found = timers.doing.published_work["t/sample/1"]
    assert (len(found), found[-1]["partition"], sum(one["files"] for one in found)) == (
        job_progress.MOST_JOBS,
        -1,
        job_progress.MOST_JOBS + 5,
    )
    runs = [replace(FIRST, op=f"t/sample/{n}") for n in range(2 * job_progress.MOST_OPERATIONS)]
    for run in runs:
        timers.doing.set_work(run, 0, {"files": 1})
    timers.come()
    assert len(timers.doing.published_work) == job_progress.MOST_OPERATIONS
    node = replace(Node("e", "h", 2, ("sample",)), work=timers.doing.published_work)
    assert Node.decode(node.encode()) == node

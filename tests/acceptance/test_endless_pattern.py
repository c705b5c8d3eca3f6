"""A pattern that Java matches for ever: its job ends at the time limit, and other jobs keep the JVM."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord
from distop.tables import plan_table
from distop.worker.daemon_side.requests import JobItem, RunRequest
from tests.integration.test_worker_runs import child_pid, diary, kinds, request, run, running_worker, sample_env, until

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["sample_env"]

SECONDS = 240
"""Time limit of a run, with the start of Spark on a busy machine."""


def validate(folder: Path, check: str, op: str, time_limit: float = 0.0) -> RunRequest:
    table = TableRecord("t", "parquet", str(folder))
    (plan,) = plan_table(table).partitions
    item, arg = JobItem(plan.to_json(), 1, 100), {"checks": [{"check": check}]}
    return RunRequest(op, "validate", arg, table.to_json(), (item,), batch=True, time_limit=time_limit)


@pytest.mark.slow  # each run has tests/integration/test_time_limit_of_jobs.py, without Spark
@pytest.mark.timeout(300)
async def test_hole_9_an_endless_check_ends_at_its_time_limit_and_other_jobs_keep_the_jvm(
    tmp_path: Path, sample_env: dict[str, str]
) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"s": ["a" * 60 + "b"]}), tmp_path / "t" / "part.parquet")
    async with running_worker(tmp_path, sample_env, spark_master="local[2]") as worker:
        neighbour = replace(request({"n": "hold"}, "n", tmp_path), op="t/sample/2")
        neighbour_run = asyncio.ensure_future(run(worker, neighbour, SECONDS))
        await until(lambda: "start n" in diary(tmp_path), "the neighbour runs")
        first = child_pid(worker)
        # This starts Spark, whose start must not count towards the limit below.
        (end,) = (await run(worker, validate(tmp_path / "t", "s RLIKE 'a{20}b'", "t/validate/1"), SECONDS)).values()
        assert (end.kind, end.error) == ("success", "")
        hopeless = validate(tmp_path / "t", "s RLIKE '(.*a){20}c'", "t/validate/2", time_limit=5.0)
        (end,) = (await run(worker, hopeless)).values()
        assert (end.kind, end.error) == ("error", "the job ran longer than its time limit of 5 s")
        await until(lambda: bool(worker.stuck), "the worker reports the stuck task")
        assert child_pid(worker) == first
        (tmp_path / "work/ops/t/sample/2/go").touch()
        assert kinds(await neighbour_run) == "n:success"
        assert diary(tmp_path).count("start n") == 1
        await until(lambda: worker.running and child_pid(worker) != first, "the child is replaced")
        assert not worker.stuck

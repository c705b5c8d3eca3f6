"""A pattern that Java matches for ever: its job ends at its time limit, and its neighbour keeps the JVM."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.integration.test_worker_runs import child_pid, diary, kinds, request, run, sample_env, started, until

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["sample_env"]


async def test_a_hopeless_pattern_ends_at_its_time_limit_and_its_neighbour_keeps_its_jvm(
    tmp_path: Path, sample_env: dict[str, str]
) -> None:
    async with started(tmp_path, sample_env, spark_master="local[2]") as worker:
        neighbour = replace(request({"n": "hold"}, "n", tmp_path), op="t/sample/2")
        beside = asyncio.ensure_future(run(worker, neighbour))
        await until(lambda: "start n" in diary(tmp_path), "the neighbour runs")
        first = child_pid(worker)
        # The limit is not to be used up by the start of Spark.
        assert kinds(await run(worker, replace(request({"s": "spark"}, "s", tmp_path), op="t/sample/3"))) == "s:success"
        ends = await run(worker, request({"b": "spark-pattern"}, "b", tmp_path, time_limit=5.0))
        assert kinds(ends) == "b:error"
        assert ends["b"].error == "the job ran longer than its time limit of 5 s"
        await until(lambda: bool(worker.stuck), "the task is known to run on")
        assert child_pid(worker) == first
        (tmp_path / "work/ops/t/sample/2/go").touch()
        assert kinds(await beside) == "n:success"
        assert diary(tmp_path).count("start n") == 1
        await until(lambda: worker.running and child_pid(worker) != first, "the child is replaced")
        assert not worker.stuck

"""``noop`` on @cluster, where there is one job and no table; with a table, tests/integration run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from distop_behaviors.noop import Noop, NoopArg
from tests.unit.support.running import Child

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("arg", "sentence"),
    [
        ({"jobs": 3, "fail": ["0"]}, "jobs is 3, but an operation on @cluster has one job: leave jobs out"),
        ({"jobs": 0}, "jobs is 0, but an operation on @cluster has one job: leave jobs out"),
        ({"fail": ["all", "0"]}, "'fail' has '0', but @cluster has only the partition 'all'"),
    ],
)
def test_noop_on_cluster_refuses_several_jobs_and_unknown_partitions(
    tmp_path: Path, arg: Any, sentence: str, *, batch: bool
) -> None:
    end = Child(Noop(), tmp_path, arg).ends(["all"], batch=batch)["all"]
    assert (end.kind, end.error) == ("fatal", sentence)


@pytest.mark.parametrize("batch", [False, True])
def test_noop_on_cluster_runs_its_one_job(tmp_path: Path, *, batch: bool) -> None:
    assert Child(Noop(), tmp_path, {}).ends(["all"], batch=batch)["all"].kind == "success"
    failed = Child(Noop(), tmp_path, {"fail": ["all"]}).ends(["all"], batch=batch)["all"]
    assert (failed.kind, failed.error) == ("verdict", "partition all fails as the argument demands")


@pytest.mark.parametrize("seconds", [3_601, 1e9, float("inf")])
def test_a_noop_job_sleeps_at_most_an_hour(seconds: float) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 3600"):
        NoopArg(sleep=seconds)


def test_noop_has_no_argument_that_harms_a_node() -> None:
    """Every user who may start operations may start this one, on every executor."""
    assert set(NoopArg.model_fields) == {"jobs", "sleep", "fail"}

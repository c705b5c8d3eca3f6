"""``noop`` on @cluster, where there is one job and no table; with a table, tests/integration run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from distop_behaviors.noop import Noop, NoopArg
from tests.support.running import Child

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("arg", "sentence"),
    [
        ({"jobs": 3, "fail": ["0"]}, "an operation on @cluster has one job: leave out jobs (3 here)"),
        ({"jobs": 0}, "an operation on @cluster has one job: leave out jobs (0 here)"),
        ({"fail": ["all", "0"]}, "@cluster has one partition, 'all': fail names '0'"),
    ],
)
def test_what_cluster_does_not_have_is_refused(tmp_path: Path, arg: Any, sentence: str, *, batch: bool) -> None:
    end = Child(Noop(), tmp_path, arg).ends(["all"], batch=batch)["all"]
    assert (end.kind, end.error) == ("fatal", sentence)


@pytest.mark.parametrize("batch", [False, True])
def test_what_it_has_is_done(tmp_path: Path, *, batch: bool) -> None:
    assert Child(Noop(), tmp_path, {}).ends(["all"], batch=batch)["all"].kind == "success"
    failed = Child(Noop(), tmp_path, {"fail": ["all"]}).ends(["all"], batch=batch)["all"]
    assert (failed.kind, failed.error) == ("verdict", "partition all was told to fail")


@pytest.mark.parametrize("seconds", [3_601, 1e9, float("inf")])
def test_a_job_sleeps_an_hour_at_most(seconds: float) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 3600"):
        NoopArg(sleep=seconds)


def test_it_offers_nothing_that_harms_a_node() -> None:
    """Everybody who may start operations may start this one, on every executor."""
    assert set(NoopArg.model_fields) == {"jobs", "sleep", "fail"}

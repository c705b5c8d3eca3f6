"""``distop.testing.FakeContext``: the context of a behavior's methods in a unit test."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import JobCancelled, JobContext, PartitionPlan, TableRecord
from distop.errors import InvalidArgument
from distop.protocol.jobs import MAX_BYTES
from distop.testing import FakeContext
from distop.worker.child_side.job_context import ChildContext, JobScope

if TYPE_CHECKING:
    from collections.abc import Callable

PARTITION = PartitionPlan(3, "p=3")
SALES = TableRecord("sales", "parquet", "/d")


def test_a_fake_context_has_each_member_of_a_context(tmp_path: Path) -> None:
    """No behavior raises an AttributeError in a unit test alone."""
    ctx = FakeContext(tmp_path, partition=PARTITION)
    declared = {name for one in JobContext.__mro__ for name in vars(one) if not name.startswith("_")}
    declared |= set(JobContext.__annotations__)
    missing = {name for name in declared - {"spark"} if not hasattr(ctx, name)}
    assert missing == set()
    assert (ctx.operation, ctx.attempt, ctx.again, ctx.superseded) == ("@cluster/test/1", 1, False, False)
    assert FakeContext(tmp_path, SALES).operation == "sales/test/1"


def test_a_fake_context_records_statuses_checkpoints_and_follow_ups(tmp_path: Path) -> None:
    ctx = FakeContext(tmp_path, SALES, PARTITION, attempt=2, checkpoint={"done": 1})
    assert ctx.progress.load() == {"done": 1}
    for done in (2, 3):
        assert ctx.progress.save({"done": done}), "a save soon after another is not skipped"
        ctx.status(f"done {done}")
    ctx.start_operation("validate", "sales", {"checks": []})
    assert ctx.progress.load() == {"done": 3}
    assert ctx.progress.saved == [{"done": 1}, {"done": 2}, {"done": 3}]
    assert ctx.statuses == ["done 2", "done 3"]
    assert [one["type"] for one in ctx.follow_ups] == ["validate"]


def test_a_checkpoint_is_bounded_as_in_an_executor(tmp_path: Path) -> None:
    ctx = FakeContext(tmp_path)
    with pytest.raises(InvalidArgument, match="a checkpoint must be a JSON value"):
        ctx.progress.save({1, 2})
    with pytest.raises(InvalidArgument, match=f"at most {MAX_BYTES} are allowed"):
        ctx.progress.save("x" * MAX_BYTES)


def test_a_fake_context_can_be_cancelled(tmp_path: Path) -> None:
    ctx = FakeContext(tmp_path, partition=PARTITION)
    ctx.check_cancelled()
    ctx.cancel()
    assert ctx.is_cancelled(PARTITION)
    with pytest.raises(JobCancelled):
        ctx.check_cancelled()


def test_each_attempt_has_a_stage_of_its_own(tmp_path: Path) -> None:
    stages = [FakeContext(tmp_path, partition=PARTITION, attempt=n).stage for n in (1, 2)]
    assert len(set(stages)) == 2
    assert all(Path(stage).is_dir() and Path(stage).is_relative_to(tmp_path) for stage in stages)
    ctx = FakeContext(tmp_path)
    assert ctx.stage_of(PARTITION) == stages[0]
    with pytest.raises(InvalidArgument, match="use stage_of"):
        _ = ctx.stage
    with pytest.raises(InvalidArgument, match="one stage for each partition"):
        _ = ctx.stage_place


def test_a_fake_context_has_the_given_tables_and_history_records(tmp_path: Path) -> None:
    other = TableRecord("other", "parquet", "/d")
    ctx = FakeContext(tmp_path, tables=[other], history={"t/validate/1": {"state": "success"}})
    assert ctx.other_table("other") is other
    assert ctx.history_record("t/validate/1") == {"state": "success"}
    with pytest.raises(InvalidArgument, match="there is no table 'none': pass it to FakeContext"):
        ctx.other_table("none")
    with pytest.raises(InvalidArgument, match="there is no history record of t/validate/2: pass it to FakeContext"):
        ctx.history_record("t/validate/2")


def contexts(folder: Path) -> list[JobContext]:
    """The context of a unit test, and that of an executor's child in a completion."""

    def no_table(name: str) -> TableRecord:
        raise AssertionError(f"searched for {name!r}")

    scope = JobScope("sales/test/1", SALES, follow_ups=[], find_table=no_table)
    environment: Any = None  # an argument that is refused needs nothing of it
    return [FakeContext(folder, SALES), ChildContext(environment, scope)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda ctx: ctx.start_operation(5, "sales"), "the operation type must be a text, not 5"),
        (lambda ctx: ctx.start_operation("no type!", "sales"), "'no type!' is not an operation type"),
        (lambda ctx: ctx.start_operation("noop", 5), "the name of a table must be a text, not 5"),
        (lambda ctx: ctx.start_operation("noop", "other"), "followed by operations on its own table alone"),
        (lambda ctx: ctx.start_operation("noop", "sales", {1, 2}), "the argument is not JSON"),
        (lambda ctx: ctx.start_operation("noop", "sales", partitions="a"), "partitions must be a list of names"),
        (lambda ctx: ctx.start_operation("noop", "sales", partitions=5), "partitions must be a list of names, not 5"),
        (lambda ctx: ctx.start_operation("noop", "sales", partitions=[5]), "a partition's name must be a text"),
        (lambda ctx: ctx.start_operation("noop", "sales", delay="1"), "the delay must be a number of seconds"),
        (lambda ctx: ctx.start_operation("noop", "sales", delay=True), "the delay must be a number of seconds"),
        (lambda ctx: ctx.start_operation("noop", "sales", delay=math.nan), "the delay must be a number of seconds"),
        (lambda ctx: ctx.start_operation("noop", "sales", delay=1e12), "longer than a hundred years"),
        (lambda ctx: ctx.history_record(5), "the name of an operation must be a text, not 5"),
        (lambda ctx: ctx.history_record("sales"), "'sales' is not an operation"),
        (lambda ctx: ctx.other_table(5), "the name of a table must be a text, not 5"),
        (lambda ctx: ctx.status(5), "the status must be a text, not 5"),
    ],
)
def test_nonsense_is_refused_by_both_contexts(call: Callable[[JobContext], Any], words: str, tmp_path: Path) -> None:
    for ctx in contexts(tmp_path):
        with pytest.raises(InvalidArgument, match=re.escape(words)):
            call(ctx)


def test_both_contexts_record_the_same_follow_up(tmp_path: Path) -> None:
    fake, real = contexts(tmp_path)
    for ctx in (fake, real):
        ctx.start_operation("noop", "sales", {"n": 1}, partitions=("a", "b"))
    assert isinstance(fake, FakeContext)
    assert isinstance(real, ChildContext)
    expected = {"type": "noop", "table": "sales", "arg": {"n": 1}, "partitions": ["a", "b"]}
    assert fake.follow_ups == [{**expected, "delay": None}]
    assert real._scope.follow_ups == [expected]

"""Batches in the child: splitting of failed ones, and the cleanup of each job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import Behavior, JobContext, JobFailed, PartitionPlan
from distop.errors import FatalError, InvalidArgument, TableUnavailable
from distop.worker.child_side.spark_session import SparkUnavailable
from tests.unit.support.running import Child, NoArg, kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Failing(Behavior):
    """Calls ``first`` for all partitions of a batch before any job, ``then`` before each job."""

    type_name = "failing"
    Arg = NoArg

    def __init__(
        self, *, first: Callable[[str], None] | None = None, then: Callable[[str], None] | None = None
    ) -> None:
        self.first, self.then = first, then
        self.batches: list[str] = []

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        raise NotImplementedError

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        self.batches.append("".join(p.name for p in partitions))
        for partition in partitions if self.first else ():
            assert self.first is not None
            self.first(partition.name)
        for partition in partitions:
            if self.then:
                self.then(partition.name)
            yield partition, partition.name


def raises_for_f(error: Exception) -> Callable[[str], None]:
    """Raises for the partition ``f``."""

    def look(name: str) -> None:
        if name == "f":
            raise error

    return look


ONE_OF_EIGHT = "a:success b:success c:success d:success e:success f:fatal g:success h:success"


@pytest.mark.parametrize("error", [InvalidArgument("f is strange"), FatalError("f is strange")])
@pytest.mark.parametrize("when", ["first", "then"])
def test_a_partition_with_a_fatal_error_fails_alone(tmp_path: Path, when: str, error: Exception) -> None:
    behavior = Failing(**{when: raises_for_f(error)})
    ends = Child(behavior, tmp_path).ends("abcdefgh")
    assert kinds(ends) == ONE_OF_EIGHT
    assert ends["f"].error == "f is strange"
    assert "f" in behavior.batches, "it ran alone"


def test_is_fatal_decides_on_the_error_of_a_batch(tmp_path: Path) -> None:
    class Judging(Failing):
        def is_fatal(self, error: BaseException) -> bool:
            return isinstance(error, KeyError)

    ends = Child(Judging(then=raises_for_f(KeyError("f"))), tmp_path).ends("abcdefgh")
    assert kinds(ends) == ONE_OF_EIGHT


def test_a_batch_without_spark_fails_without_being_split(tmp_path: Path) -> None:
    def no_java(_: str) -> None:
        raise SparkUnavailable("Java is missing")

    behavior = Failing(first=no_java)
    ends = Child(behavior, tmp_path).ends("abcdefgh")
    assert {(end.kind, end.error) for end in ends.values()} == {("unable", "Java is missing")}
    assert behavior.batches == ["abcdefgh"], "halves would fail, too"


def test_a_table_that_cannot_be_reached_ends_its_batch_at_once(tmp_path: Path) -> None:
    """Each half would retry for minutes and get the same error for each file."""

    def refused(name: str) -> None:
        if name == "c":
            raise TableUnavailable("the store refuses all files: access is denied")

    behavior = Failing(then=refused)
    ends = Child(behavior, tmp_path).ends("abcdefgh")
    assert kinds(ends) == "a:success b:success c:error d:error e:error f:error g:error h:error"
    assert {end.error for end in ends.values()} == {"", "the store refuses all files: access is denied"}
    assert behavior.batches == ["abcdefgh"]


class Staging(Behavior):
    """Writes a file into the stage of each partition, and removes it in the cleanup."""

    type_name = "staging"
    Arg = NoArg
    staged_output = "keep"

    def __init__(self) -> None:
        self.does: dict[str, Callable[[], None]] = {}
        self.cleaned: list[tuple[str, int, str, Any]] = []
        """Partition, attempt, text of the file in its stage, checkpoint."""
        self.tags: list[str] = []
        """The Spark job tags of the batch and the cleanups."""

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        raise NotImplementedError

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        self.tags.append(ctx.tag)  # type: ignore[attr-defined]
        for partition in partitions:
            Path(ctx.stage_of(partition), "rows").write_text(partition.name)
            try:
                self.does.get(partition.name, lambda: None)()
                yield partition, None
            except JobFailed as error:
                yield partition, error

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        assert ctx.partition == partition
        rows = Path(ctx.stage, "rows")
        found = rows.read_text() if rows.exists() else ""
        rows.unlink(missing_ok=True)
        self.cleaned.append((partition.name, ctx.attempt, found, ctx.progress.load()))
        self.tags.append(ctx.tag)  # type: ignore[attr-defined]


def fail() -> None:
    raise JobFailed("the answer is no", {"why": "told to"})


def fail_batch() -> None:
    raise RuntimeError("the batch fails")


def test_a_verdict_in_a_batch_cleans_up_its_own_job(tmp_path: Path) -> None:
    behavior = Staging()
    behavior.does["c"] = fail
    ends = Child(behavior, tmp_path).ends("abcd")
    assert kinds(ends) == "a:success b:success c:verdict d:success"
    assert ends["c"].result == {"why": "told to"}
    assert behavior.cleaned == [("c", 3, "c", None)]


def test_each_job_is_cleaned_up_on_its_own_before_a_batch_is_retried(tmp_path: Path) -> None:
    behavior = Staging()
    ends = Child(behavior, tmp_path).ends("ab", cleanup=True, progress={"b": {"at": 7}})
    assert kinds(ends) == "a:success b:success"
    assert behavior.cleaned == [("a", 1, "", None), ("b", 2, "", {"at": 7})]


def test_each_job_is_cleaned_up_on_its_own_before_a_batch_is_split(tmp_path: Path) -> None:
    behavior = Staging()
    behavior.does["c"] = fail_batch
    ends = Child(behavior, tmp_path).ends("abcd")
    assert kinds(ends) == "a:success b:success c:error d:success"
    assert behavior.cleaned == [("c", 3, "c", None), ("d", 4, "", None)]


def test_cancelled_jobs_of_a_batch_are_cleaned_up_on_their_own(tmp_path: Path) -> None:
    behavior = Staging()
    child = Child(behavior, tmp_path)
    run = child.run("abcd")
    run.cancel([0])
    behavior.does["c"] = lambda: run.cancel([2, 3])
    run.run()
    assert [child.sent.ends[i].kind for i in range(4)] == ["cancelled", "success", "success", "cancelled"]
    assert behavior.cleaned == [("a", 1, "", None), ("d", 4, "", None)]


def test_a_cleanup_in_a_batch_leaves_the_thread_bound_to_the_batch(tmp_path: Path) -> None:
    behavior = Staging()
    behavior.does["b"] = fail
    Child(behavior, tmp_path).ends("abc")
    assert [name for name, *_ in behavior.cleaned] == ["b"]
    assert len(behavior.tags) == 2
    assert len(set(behavior.tags)) == 1


def test_the_cleanup_of_a_job_outside_a_run_is_the_same(tmp_path: Path) -> None:
    behavior = Staging()
    behavior.does["b"] = fail_batch
    child = Child(behavior, tmp_path)
    assert kinds(child.ends("b")) == "b:error"
    child.clean("b")
    assert child.sent.messages[-1]["t"] == "result"
    assert behavior.cleaned == [("b", 1, "b", None)]


@pytest.mark.parametrize("row", [{"files": "abc"}, {"files": [[]]}, {"beside": [{"files": 5}]}])
def test_an_invalid_handwritten_plan_fails_only_its_own_jobs(row: dict[str, Any], tmp_path: Path) -> None:
    """It once ended the thread that reads for the jobs of all tables, and so the child."""
    behavior = Failing()
    child = Child(behavior, tmp_path)
    run = child.run("a")
    run.add({"items": [({"partition": 1, "name": "b", **row}, 2, 101, None)], "cancelled": []})
    run.run()
    assert [child.sent.ends[i].kind for i in range(2)] == ["fatal", "fatal"]
    assert "the plan has an unreadable row" in child.sent.ends[1].error
    assert behavior.batches == []

"""A job, a batch or a completion that meets a busy object store waits for it within its attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import Behavior, JobContext, JobFailed, PartitionPlan, Retry, Summary, TableRecord
from distop.errors import FatalError, TableBusy, TableUnavailable
from distop.protocol.executor_nodes import WAITS_FOR_STORE
from distop.protocol.records import OperationRef
from distop.storage import store_waits
from distop.storage.store_errors import Throttled
from tests.unit.support.running import Child, NoArg, kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("short_store_waits")


def statuses(child: Child) -> list[str]:
    """The texts that the jobs have shown, without the details of a wait."""
    texts = [one["text"] for one in child.sent.messages if one["t"] == "status"]
    return [WAITS_FOR_STORE if text.startswith(WAITS_FOR_STORE) else text for text in texts]


class Publishing(Behavior):
    """Its completion starts an operation, and then meets a busy store ``busy`` times."""

    type_name = "publishing"
    Arg = NoArg

    def __init__(self, busy: int) -> None:
        self.busy = busy

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        return None

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        ctx.start_operation("noop", OperationRef.parse(ctx.operation).table)
        self.busy -= 1
        if self.busy >= 0:
            raise TableUnavailable("cannot publish") from TableBusy("SlowDown")
        return {"published": True}


class Reading(Behavior):
    """A job that runs ``steps`` in turn, one for each call. ``calls``: what it did."""

    type_name = "reading"
    Arg = NoArg

    def __init__(self, *steps: Callable[[JobContext], Any]) -> None:
        self.steps = list(steps)
        self.calls: list[str] = []

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        self.calls.append("start")
        return self.steps.pop(0)(ctx)

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        self.calls.append("clean")


class Resuming(Reading):
    resumable = True


def busy(ctx: JobContext) -> Any:
    raise Throttled("SlowDown")


def save(value: Any, *, force: bool = True) -> Callable[[JobContext], Any]:
    def step(ctx: JobContext) -> Any:
        ctx.progress.save(value, force=force)
        return busy(ctx)

    return step


def load(ctx: JobContext) -> Any:
    return ctx.progress.load()


def test_a_job_that_meets_a_busy_store_is_cleaned_up_and_called_again(tmp_path: Path) -> None:
    """It counted as a failed attempt, except for build-index and validate, which waited themselves."""
    behavior = Reading(busy, busy, lambda _: "read")
    child = Child(behavior, tmp_path)
    assert child.ends("a", batch=False)["a"].result == "read"
    assert behavior.calls == ["start", "clean", "start", "clean", "start"]
    assert statuses(child) == [WAITS_FOR_STORE, "", WAITS_FOR_STORE, ""], "the status of the job comes back"


def test_a_job_uses_its_stage_again_after_a_wait(tmp_path: Path) -> None:
    """Its folder exists already, and no other attempt may have created it."""

    def write(ctx: JobContext) -> str:
        return str(ctx.stage)

    def write_and_fail(ctx: JobContext) -> Any:
        write(ctx)
        return busy(ctx)

    class WithoutCleanup(Behavior):
        type_name = "staging"
        staged_output = "remove"
        Arg = NoArg
        steps = [write_and_fail, write]  # noqa: RUF012

        def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
            return type(self).steps.pop(0)(ctx)

    end = Child(WithoutCleanup(), tmp_path).ends("a", batch=False)["a"]
    assert end.kind == "success", end.error
    assert "/stage/" in end.result


@pytest.mark.parametrize("force", [True, False])
def test_a_resumable_job_continues_from_its_last_checkpoint(force: bool, tmp_path: Path) -> None:
    """Also from one that the rate limit has held back."""
    behavior = Resuming(save(1), save(2, force=force), load)
    child = Child(behavior, tmp_path)
    assert child.ends("a", batch=False)["a"].result == 2
    assert behavior.calls == ["start", "start", "start"], "nothing is cleaned up"
    assert child.sent.progress == {0: 2}


def test_a_job_whose_checkpoint_may_be_saved_is_not_called_again(tmp_path: Path) -> None:
    """Only the next attempt can read which checkpoint etcd has."""
    behavior = Resuming(save(1), load)
    child = Child(behavior, tmp_path)
    child.sent.saves = False
    assert kinds(child.ends("a", batch=False)) == "a:error"
    assert behavior.calls == ["start"]


def test_a_job_fails_if_the_store_stays_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is saved again and again is no progress."""
    monkeypatch.setattr(store_waits, "LIMIT", 0.05)
    end = Child(Resuming(*[save(1)] * 1_000), tmp_path).ends("a", batch=False)["a"]
    assert (end.kind, "SlowDown" in end.error) == ("error", True)


class Clock:
    """A clock that advances by a second each time it is read."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize(("saved", "kind"), [((1, 2, 3), "success"), ((1, 1, 1), "error")])
def test_the_time_limit_begins_anew_after_a_new_checkpoint(
    saved: tuple[int, ...], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(store_waits, "time", clock)

    def slow(step: Callable[[JobContext], Any]) -> Callable[[JobContext], Any]:
        def run(ctx: JobContext) -> Any:
            clock.now += 0.6 * store_waits.LIMIT
            return step(ctx)

        return run

    behavior = Resuming(*(slow(save(value)) for value in saved), load)
    assert Child(behavior, tmp_path).ends("a", batch=False)["a"].kind == kind


class Once(Reading):
    retry = Retry(attempts=1)


class Endless(Once):
    can_fail = False


def raised(error: Exception) -> Callable[[JobContext], Any]:
    def step(ctx: JobContext) -> Any:
        raise error from TableBusy("SlowDown")

    return step


@pytest.mark.parametrize(
    ("behavior", "kind"),
    [
        (Once(busy), "error"),
        (Reading(raised(JobFailed("no"))), "verdict"),
        (Reading(raised(FatalError("no"))), "fatal"),
        (Reading(raised(ValueError("no")), lambda _: 1), "success"),
        (Endless(busy, lambda _: 1), "success"),
    ],
)
def test_a_job_with_one_attempt_and_final_errors_are_not_repeated(behavior: Reading, kind: str, tmp_path: Path) -> None:
    assert Child(behavior, tmp_path).ends("a", batch=False)["a"].kind == kind


def test_a_job_that_is_cancelled_while_it_waits_is_cleaned_up(tmp_path: Path) -> None:
    def cancelled(ctx: JobContext) -> Any:
        run.cancel(None)
        return busy(ctx)

    behavior = Reading(cancelled)
    child = Child(behavior, tmp_path)
    run = child.run("a", batch=False)
    run.run()
    assert kinds({"a": child.sent.ends[0]}) == "a:cancelled"
    assert behavior.calls == ["start", "clean"]


class Batches(Behavior):
    """A batch yields one outcome, and then meets a busy store ``busy`` times. ``batches``: the jobs of each call.

    ``yields``: it yields the error of the second job, instead of raising it.
    """

    type_name = "batches"
    Arg = NoArg

    def __init__(self, busy: int, *, yields: bool = False) -> None:
        self.busy = busy
        self.yields = yields
        self.batches: list[str] = []

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        raise AssertionError("jobs run as a batch")

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        self.batches.append("".join(one.name for one in partitions))
        yield partitions[0], partitions[0].name
        self.busy -= 1
        if self.busy >= 0 and not self.yields:
            raise Throttled("SlowDown")
        for one in partitions[1:]:
            fails = self.busy >= 0 and one is partitions[1]
            yield one, Throttled("SlowDown") if fails else one.name


def test_a_batch_is_repeated_for_the_jobs_without_an_outcome(tmp_path: Path) -> None:
    behavior = Batches(2)
    ends = Child(behavior, tmp_path).ends("abcd")
    assert kinds(ends) == "a:success b:success c:success d:success"
    assert behavior.batches == ["abcd", "bcd", "cd"], "it is not halved"


def test_a_job_of_a_batch_whose_error_is_yielded_is_repeated(tmp_path: Path) -> None:
    behavior = Batches(1, yields=True)
    assert kinds(Child(behavior, tmp_path).ends("abcd")) == "a:success b:success c:success d:success"
    assert behavior.batches == ["abcd", "b"]


def test_all_jobs_of_a_batch_fail_at_once_if_the_store_stays_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halves of a batch would wait, too."""
    monkeypatch.setattr(store_waits, "LIMIT", 0.0)
    behavior = Batches(1_000)
    assert kinds(Child(behavior, tmp_path).ends("abcd")) == "a:success b:error c:error d:error"
    assert behavior.batches == ["abcd"]


def test_a_completion_that_meets_a_busy_store_is_called_again(tmp_path: Path) -> None:
    """Each call that met a busy store counted as a failed attempt of the operation."""
    child = Child(Publishing(2), tmp_path)
    done = child.complete()["value"]
    assert done["report"] == {"published": True}
    assert [one["type"] for one in done["follow_ups"]] == ["noop"], "those of the last call"
    assert statuses(child) == [WAITS_FOR_STORE, "", WAITS_FOR_STORE, ""]
    assert {one["call"] for one in child.sent.messages if one["t"] == "status"} == {3}


def test_a_completion_fails_if_the_store_stays_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_waits, "LIMIT", 0.05)
    failed = Child(Publishing(1_000), tmp_path).complete()
    assert (failed["t"], failed["kind"]) == ("failed", "transient")
    assert "cannot publish" in failed["message"]

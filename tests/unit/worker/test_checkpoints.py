"""Checkpoints of a resumable job in the child: a verdict abandons its checkpoint before the cleanup."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import Behavior, JobContext, JobFailed, PartitionPlan
from distop.protocol.jobs import MARGIN, MAX_BYTES, for_cleanup, given_up, to_go_on_from
from distop.protocol.json_codec import dumps
from distop.worker.child_side.checkpoints import JobProgress
from tests.unit.support.running import Child, NoArg, Sent, kinds

if TYPE_CHECKING:
    from collections.abc import Callable


class Steps(Behavior):
    """Each attempt runs ``job``. ``calls``: the called methods, with the checkpoint found."""

    type_name = "steps"
    Arg = NoArg
    resumable = True

    def __init__(self, job: Callable[[JobContext], None]) -> None:
        self.job = job
        self.calls: list[tuple[str, Any]] = []

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        self.calls.append(("job", ctx.progress.load()))
        self.job(ctx)

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        self.calls.append(("cleanup", ctx.progress.load()))


def fails_after_a_checkpoint(ctx: JobContext) -> None:
    ctx.progress.save({"at": 3}, force=True)
    raise JobFailed("the answer is no")


def test_a_verdict_abandons_the_checkpoint_before_its_cleanup(tmp_path: Path) -> None:
    behavior = Steps(fails_after_a_checkpoint)
    child = Child(behavior, tmp_path)
    assert kinds(child.ends("a", batch=False)) == "a:verdict"
    assert behavior.calls == [("job", None), ("cleanup", {"at": 3})]
    assert to_go_on_from(child.sent.progress[0]) is None
    assert for_cleanup(child.sent.progress[0]) == {"at": 3}


def test_an_attempt_with_an_abandoned_checkpoint_cleans_up_and_starts_over(tmp_path: Path) -> None:
    behavior = Steps(lambda ctx: None)
    ends = Child(behavior, tmp_path).ends("a", batch=False, cleanup=True, progress={"a": given_up({"at": 3})})
    assert kinds(ends) == "a:success"
    assert behavior.calls == [("cleanup", {"at": 3}), ("job", None)]


def test_a_verdict_whose_checkpoint_cannot_be_abandoned_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behavior = Steps(fails_after_a_checkpoint)
    child = Child(behavior, tmp_path)
    monkeypatch.setattr(child.sent, "ask", lambda message, timeout: message["value"] == {"at": 3})
    ends = child.ends("a", batch=False)
    assert kinds(ends) == "a:error"
    assert "could not be marked as abandoned" in ends["a"].error
    assert behavior.calls == [("job", None)], "no cleanup: the checkpoint is still valid"


def test_a_checkpoint_saved_without_an_answer_is_abandoned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behavior = Steps(fails_after_a_checkpoint)
    child = Child(behavior, tmp_path)
    asked: list[Any] = []

    def ask(message: Any, timeout: float) -> Any:
        asked.append(message["value"])
        if len(asked) == 1:
            raise TimeoutError
        return True

    monkeypatch.setattr(child.sent, "ask", ask)
    assert kinds(child.ends("a", batch=False)) == "a:verdict"
    assert len(asked) == 2
    assert to_go_on_from(asked[1]) is None


def test_after_a_save_without_an_answer_there_may_be_a_checkpoint(tmp_path: Path) -> None:
    """A job that stops to resume later is not cleaned up then: the save may still succeed."""

    class Silent(Sent):
        def ask(self, message: Any, timeout: float) -> Any:
            raise TimeoutError

    progress = JobProgress(Silent(), 1, 0, None)
    assert not progress.settle()
    assert not progress.save({"at": 3}, force=True)
    assert progress.settle()


def test_a_job_without_a_checkpoint_abandons_none(tmp_path: Path) -> None:
    def fails(ctx: JobContext) -> None:
        raise JobFailed("the answer is no")

    child = Child(Steps(fails), tmp_path)
    assert kinds(child.ends("a", batch=False)) == "a:verdict"
    assert child.sent.progress == {}


def test_the_largest_checkpoint_can_be_abandoned() -> None:
    largest = "x" * (MAX_BYTES - 2)
    assert len(dumps(largest)) == MAX_BYTES
    assert len(dumps(given_up(largest))) <= MAX_BYTES + MARGIN
    assert given_up(given_up(largest)) == given_up(largest)

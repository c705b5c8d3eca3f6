"""A resumable job's checkpoint in the child: given up before the cleanup after a verdict; what follows finds that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from distop.behavior import Behavior, JobContext, JobFailed, PartitionPlan
from distop.protocol.jobs import MARGIN, MAX_BYTES, for_cleanup, given_up, to_go_on_from
from distop.protocol.json_codec import dumps
from distop.worker.child_side.checkpoints import JobProgress
from tests.support.running import Child, Sent, kinds

if TYPE_CHECKING:
    from collections.abc import Callable


class NoArg(BaseModel):
    """Nothing to say."""


class Steps(Behavior):
    """``job`` is done by each attempt. ``story``: what was called, with the checkpoint that was found."""

    type_name = "steps"
    Arg = NoArg
    resumable = True

    def __init__(self, job: Callable[[JobContext], None]) -> None:
        self.job = job
        self.story: list[tuple[str, Any]] = []

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        self.story.append(("job", ctx.progress.load()))
        self.job(ctx)

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        self.story.append(("cleanup", ctx.progress.load()))


def fails_after_a_checkpoint(ctx: JobContext) -> None:
    ctx.progress.save({"at": 3}, force=True)
    raise JobFailed("the answer is no")


def test_a_verdict_gives_the_checkpoint_up_before_its_cleanup(tmp_path: Path) -> None:
    behavior = Steps(fails_after_a_checkpoint)
    child = Child(behavior, tmp_path)
    assert kinds(child.ends("a", batch=False)) == "a:verdict"
    assert behavior.story == [("job", None), ("cleanup", {"at": 3})]
    assert to_go_on_from(child.sent.progress[0]) is None
    assert for_cleanup(child.sent.progress[0]) == {"at": 3}


def test_who_follows_one_that_gave_up_cleans_up_with_its_checkpoint_and_starts_over(tmp_path: Path) -> None:
    behavior = Steps(lambda ctx: None)
    ends = Child(behavior, tmp_path).ends("a", batch=False, cleanup=True, progress={"a": given_up({"at": 3})})
    assert kinds(ends) == "a:success"
    assert behavior.story == [("cleanup", {"at": 3}), ("job", None)]


def test_a_verdict_whose_checkpoint_cannot_be_given_up_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behavior = Steps(fails_after_a_checkpoint)
    child = Child(behavior, tmp_path)
    monkeypatch.setattr(child.sent, "ask", lambda message, timeout: message["value"] == {"at": 3})
    ends = child.ends("a", batch=False)
    assert kinds(ends) == "a:error"
    assert "could not be marked as abandoned" in ends["a"].error
    assert behavior.story == [("job", None)], "what it speaks of is still there"


def test_a_save_without_an_answer_may_have_come_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_a_save_without_an_answer_may_have_written_is_not_cleaned_up_after(tmp_path: Path) -> None:
    """A job that stops to go on later: the save may come through after that."""

    class Silent(Sent):
        def ask(self, message: Any, timeout: float) -> Any:
            raise TimeoutError

    progress = JobProgress(Silent(), 1, 0, None)
    assert not progress.settle()
    assert not progress.save({"at": 3}, force=True)
    assert progress.settle()


def test_a_job_without_a_checkpoint_has_none_to_give_up(tmp_path: Path) -> None:
    def fails(ctx: JobContext) -> None:
        raise JobFailed("the answer is no")

    child = Child(Steps(fails), tmp_path)
    assert kinds(child.ends("a", batch=False)) == "a:verdict"
    assert child.sent.progress == {}


def test_the_largest_checkpoint_can_be_given_up() -> None:
    largest = "x" * (MAX_BYTES - 2)
    assert len(dumps(largest)) == MAX_BYTES
    assert len(dumps(given_up(largest))) <= MAX_BYTES + MARGIN
    assert given_up(given_up(largest)) == given_up(largest)

"""``build-index`` and ``drop-index`` that stand still at a moment of a test's choice, or meet a disk that is full."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.behavior import Retry
from distop.worker.child_side.checkpoints import JobProgress
from distop_behaviors import index
from distop_behaviors.index import BuildIndex, DropIndex, postings, segments
from distop_behaviors.index.index_argument import BuildArgument, DropArgument
from distop_behaviors.index.index_folder import Folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.behavior import JobContext, PartitionPlan, Summary, TableRecord

POINTS: dict[str, tuple[Any, str]] = {
    "segment": (postings, "write"),
    "journal": (segments.Job, "_write"),
    "checkpoint": (JobProgress, "save"),
    "report": (segments.Job, "run"),
    "merge": (postings, "merge"),
    "add": (Folder, "add"),
    "publish": (Folder, "publish"),
    "drop": (Folder, "drop"),
    "data": (Folder, "_empty"),
    "sweep": (Folder, "sweep"),
    "stages": (index, "remove_stages"),
    "given-back": (index, "delete_or_log"),
}
"""What changes a file that another attempt, or a reader, could see; and a job's end, after which it is reported."""
MOMENTS = [
    *("before-segment", "after-segment", "after-journal", "after-checkpoint", "after-report"),
    *("before-merge", "after-add", "before-publish", "after-publish", "after-sweep", "after-stages"),
]
"""Of which each leaves other files than the one before."""
DROP_MOMENTS = ["before-publish", "after-publish", "before-data", "after-data", "after-drop", "after-given-back"]
FULL = 100_000
"""Bytes that a file of this process can have while its disk is full: more than a line of a log."""

_lock = threading.Lock()
_now: list[HeldArgument | HeldDropArgument] = []
"""The argument of the operation that runs in this process."""


class HeldArgument(BuildArgument):
    """``at``: the moment; whoever comes there first writes ``<folder>/<at>``, with its process, and goes on once
    ``<folder>/go`` is there. While ``<folder>/full`` is there, jobs and completion can write small files only; one
    that failed for it writes ``<folder>/failed``, and ends once there is space. Who ends writes ``<folder>/ended-PID``.
    """

    at: str = ""
    folder: str


class HeldDropArgument(DropArgument):
    """As :class:`HeldArgument`."""

    at: str = ""
    folder: str


class HeldBuild(BuildIndex):
    """The same code, under another name."""

    type_name = "held-index"
    Arg = HeldArgument
    retry = Retry(attempts=20, initial=0.1, maximum=0.2)

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        with _watched(arg):
            return super().start_or_resume_job(arg, partition, ctx)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        with _watched(arg):
            return super().complete_operation(arg, table, summary, ctx)


class HeldDrop(DropIndex):
    """The same code, under another name."""

    type_name = "held-drop"
    Arg = HeldDropArgument
    retry = HeldBuild.retry

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        with _watched(arg):
            return super().start_or_resume_job(arg, partition, ctx)


@contextlib.contextmanager
def _watched(arg: HeldArgument | HeldDropArgument) -> Iterator[None]:
    with _lock:
        if not _now:
            segments.SEGMENT_FILES = 1
            for point, (owner, name) in POINTS.items():
                setattr(owner, name, _held(point, getattr(owner, name)))
        _now[:] = [arg]
    full = Path(arg.folder, "full")
    try:
        yield
    except OSError:
        if full.exists():
            Path(arg.folder, "failed").touch()
        while full.exists():
            time.sleep(0.005)
        raise
    finally:
        _limit(full=False)
        Path(arg.folder, f"ended-{os.getpid()}").touch()


def _limit(*, full: bool) -> None:
    """A write beyond it fails, as it does where there is no space."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL if full else hard, hard))


def _held(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _moment(f"before-{point}")
        _limit(full=Path(_now[0].folder, "full").exists())
        found = function(*args, **kwargs)
        _moment(f"after-{point}")
        return found

    return call


def _moment(name: str) -> None:
    arg = _now[0]
    if arg.at != name:
        return
    folder = Path(arg.folder)
    scratch = folder / f".{os.getpid()}-{threading.get_ident()}"
    scratch.write_text(str(os.getpid()))
    try:
        os.link(scratch, folder / name)
    except FileExistsError:
        return
    while not (folder / "go").exists():
        time.sleep(0.005)

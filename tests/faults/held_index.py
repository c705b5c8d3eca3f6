"""``build-index`` and ``drop-index`` that block at a moment of the test's choice, or find the disk full."""

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
from distop.worker.child_side.stage_sweeping import StageSweeper
from distop_behaviors.index import BuildIndex, DropIndex, postings, segments
from distop_behaviors.index.index_argument import BuildArgument, DropArgument
from distop_behaviors.index.index_folder import Folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.behavior import JobContext, PartitionPlan, Summary, TableRecord

POINTS: dict[str, tuple[Any, str]] = {
    "segment": (postings, "write"),
    "journal": (segments.SegmentWriter, "_write"),
    "checkpoint": (JobProgress, "save"),
    "report": (segments.SegmentWriter, "run"),
    "merge": (postings, "merge"),
    "add": (Folder, "add"),
    "publish": (Folder, "publish"),
    "drop": (Folder, "drop"),
    "data": (Folder, "_empty"),
    "sweep": (Folder, "sweep"),
    "stages": (StageSweeper, "remove_all"),
}
"""Functions that change a file which other attempts or readers can see, and the end of a job."""
MOMENTS = [
    *("before-segment", "after-segment", "after-journal", "after-checkpoint", "after-report"),
    *("before-merge", "after-add", "before-publish", "after-publish", "after-sweep", "after-stages"),
]
"""Moments of a build, with different files on disk at each."""
DROP_MOMENTS = ["before-publish", "after-publish", "before-data", "after-data", "after-drop"]
FULL = 100_000
"""The maximum size in bytes of a file of this process while its disk counts as full: more than a log line."""

_lock = threading.Lock()
_argument: list[HeldArgument | HeldDropArgument] = []
"""The argument of the operation in this process, if any."""


class HeldArgument(BuildArgument):
    """``at``: the moment at which the first process blocks until ``<folder>/go`` exists.

    That process writes its pid to ``<folder>/<at>``. While ``<folder>/full`` exists, jobs and completion can only write
    small files. A call that fails for this writes ``<folder>/failed``, and ends once there is space. Each call that
    ends writes ``<folder>/ended-PID``.

    ``segment_files``: files after which a segment is closed, and a checkpoint saved. A job with fewer files saves none.
    """

    at: str = ""
    folder: str
    segment_files: int = 1


class HeldDropArgument(DropArgument):
    """As :class:`HeldArgument`."""

    at: str = ""
    folder: str


class HeldBuild(BuildIndex):
    """The original code with the moments of ``POINTS`` patched in."""

    type_name = "held-index"
    Arg = HeldArgument
    retry = Retry(attempts=20, initial=0.1, maximum=0.2)

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        with _patched_call(arg):
            return super().start_or_resume_job(arg, partition, ctx)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        with _patched_call(arg):
            return super().complete_operation(arg, table, summary, ctx)


class HeldDrop(DropIndex):
    """The original code with the moments of ``POINTS`` patched in."""

    type_name = "held-drop"
    Arg = HeldDropArgument
    retry = HeldBuild.retry

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        with _patched_call(arg):
            return super().start_or_resume_job(arg, partition, ctx)


@contextlib.contextmanager
def _patched_call(arg: HeldArgument | HeldDropArgument) -> Iterator[None]:
    with _lock:
        if not _argument:
            for point, (owner, name) in POINTS.items():
                setattr(owner, name, _with_moments(point, getattr(owner, name)))
        _argument[:] = [arg]
        if isinstance(arg, HeldArgument):
            segments.SEGMENT_FILES = arg.segment_files
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
    """With ``full``, limit the size of files, so that larger writes fail as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL if full else hard, hard))


def _with_moments(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _block_at(f"before-{point}")
        _limit(full=Path(_argument[0].folder, "full").exists())
        found = function(*args, **kwargs)
        _block_at(f"after-{point}")
        return found

    return call


def _block_at(name: str) -> None:
    arg = _argument[0]
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

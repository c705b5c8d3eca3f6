"""The checkpoint of a job in the child."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from distop.behavior import Progress
from distop.errors import InvalidArgument
from distop.protocol.jobs import MAX_BYTES, for_cleanup, given_up, to_go_on_from
from distop.protocol.json_codec import dumps
from distop.worker import child_messages
from distop.worker.child_side.outbox import ANSWER_SECONDS

if TYPE_CHECKING:
    from distop.worker.child_side.outbox import Outbox

PROGRESS_SECONDS = 1.0
"""Minimum seconds between two saved checkpoints of a job."""


class JobProgress(Progress):
    """The checkpoint of one job. The daemon writes it to etcd under the claim's fence."""

    def __init__(self, outbox: Outbox, run: int, partition: int, value: Any) -> None:
        self._outbox = outbox
        self._run = run
        self._partition = partition
        self._value = value
        self._sent = value is not None
        """etcd may have a checkpoint: one was sent, whatever its answer was."""
        self._last = float("-inf")
        self._skipped: Any = None
        """The last checkpoint that was not saved, because of the rate limit or an error."""
        self.saves = 0
        """The number of saved checkpoints of this attempt that differ from the one before."""

    def load(self) -> Any:
        return for_cleanup(self._value)

    def save(self, value: Any, *, force: bool = False) -> bool:
        """See Progress.save. Also False if the daemon could not save it (the claim is lost, or etcd is unavailable).

        Raises InvalidArgument for values that are not JSON or larger than 64 KiB.
        """
        if not force and time.monotonic() - self._last < PROGRESS_SECONDS:
            self._skipped = value
            return False
        try:
            size = len(dumps(value))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"a checkpoint must be a JSON value: {error}") from error
        if size > MAX_BYTES:
            raise InvalidArgument(f"a checkpoint has {size} bytes: at most {MAX_BYTES} are allowed")
        return self._save(value)

    def _save(self, value: Any) -> bool:
        self._last, self._sent = time.monotonic(), True
        question = child_messages.ProgressMessage(
            t="progress", run=self._run, partition=self._partition, value=value, seq=0
        )
        try:
            saved = bool(self._outbox.ask(question, ANSWER_SECONDS))
        except (TimeoutError, RuntimeError):
            saved = False
        self.saves += saved and value != self._value
        self._value, self._skipped = (value, None) if saved else (self._value, value)
        return saved

    @property
    def resumes(self) -> bool:
        """Whether there is a checkpoint from which a resumable job continues."""
        return to_go_on_from(self._value) is not None

    @property
    def settled(self) -> bool:
        """Whether etcd has no other checkpoint than this object, and none was held back."""
        return self._skipped is None

    def give_up(self) -> bool:
        """Mark the checkpoint as abandoned: no attempt may resume from it, and its files must be removed.

        Returns whether the mark was saved.
        """
        return not self._sent or self._save(given_up(self._value))

    def begin_anew(self) -> None:
        """Forget the checkpoint if it was abandoned: its files were removed."""
        self._value = to_go_on_from(self._value)

    def settle(self) -> bool:
        """Save the checkpoint that was held back, because the job stops and resumes later, maybe on another node.

        Returns whether there may be a checkpoint: a save without an answer may still succeed.
        """
        if self._skipped is not None:
            with contextlib.suppress(InvalidArgument):
                self.save(self._skipped, force=True)
        return self._sent


class NoProgress(Progress):
    """The progress of a batch, a planning or a completion, which have no checkpoint, or of a cleanup.

    A cleanup can read the checkpoint of its job, but not write one.
    """

    saves = 0
    resumes = False
    settled = True

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def load(self) -> Any:
        return for_cleanup(self._value)

    def save(self, value: Any, *, force: bool = False) -> bool:
        return False

    def give_up(self) -> bool:
        """There is no checkpoint to abandon."""
        return True

    def begin_anew(self) -> None:
        """There is no checkpoint to forget."""

    def settle(self) -> bool:
        """There is no checkpoint to resume from."""
        return False

"""The states of an operation's jobs in arrays, about 60 bytes for each: a million of them fit in memory.

It is filled from the keys of jobs and claims. The state of an ended job never changes.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from distop.protocol.frozen import frozen
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import UNREADABLE, parse_time
from distop.protocol.keys import claim_ordinal, job_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.jobs import Tried
    from distop.protocol.txn import KeyValue

MOST_STORIES = 2_000
"""Jobs of which the errors of former attempts are kept."""
SUCCESS_VALUE = JobState.SUCCESS.encode()


class PartitionStage(IntEnum):
    """The state of a job. The higher one is shown if a cell has several."""

    OPEN = 0
    SUCCESS = 1
    RUNNING = 2
    WAITING = 3
    FAILED = 4

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self in (PartitionStage.SUCCESS, PartitionStage.FAILED)


STAGES = tuple(PartitionStage)


@frozen
class FormerAttempts:
    """What is known of the attempts before the last one.

    ``failures``: how many of them failed or lost their executor; the others gave the job back. ``losses``: how many
    lost their executor.
    """

    failures: int = 0
    losses: int = 0
    tried: tuple[Tried, ...] = ()

    @classmethod
    def of(cls, claim: Claim) -> FormerAttempts:
        """Those of a claim."""
        return cls(claim.failures, claim.losses, claim.tried)


class PartitionStates:
    """The states of ``count`` jobs. ``changed`` is the revision in which each changed last."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stage = np.zeros(count, np.uint8)
        self.attempt = np.zeros(count, np.uint16)
        self.executor = np.zeros(count, np.uint16)
        self.started = np.zeros(count, np.float64)
        self.finished = np.zeros(count, np.float64)
        self.rows = np.full(count, -1, np.int64)
        self.changed = np.zeros(count, np.int64)
        self.executors: list[str] = [""]
        self.former: dict[int, FormerAttempts] = {}
        self.retried: dict[int, int] = {}
        """Ordinals of ended jobs with several attempts, whose former attempts are to be read: the revision before."""
        self._numbers = {"": 0}

    def add_jobs(self, kvs: Iterable[KeyValue]) -> None:
        """Add what keys of jobs say. Keys with an unknown form are left out."""
        for kv in kvs:
            ordinal, name = job_name(kv.key)
            if not 0 <= ordinal < self.count:
                continue
            if name == "state":
                self.stage[ordinal] = PartitionStage.SUCCESS if kv.value == SUCCESS_VALUE else PartitionStage.FAILED
                self.changed[ordinal] = kv.mod_revision
            elif name == "outcome":
                try:
                    self._add_outcome(ordinal, kv)
                except UNREADABLE:
                    continue

    def _add_outcome(self, ordinal: int, kv: KeyValue) -> None:
        data = json.loads(kv.value)
        attempt = int(data.get("attempt", 1))
        self.attempt[ordinal] = min(attempt, 65_535)
        self.executor[ordinal] = self._number(data.get("executor", ""))
        self.started[ordinal] = parse_time(data.get("started", ""))
        self.finished[ordinal] = parse_time(data.get("finished", ""))
        self.rows[ordinal] = _rows(data.get("result"))
        self.changed[ordinal] = kv.mod_revision
        if attempt > 1 and ordinal not in self.former and len(self.retried) < MOST_STORIES:
            self.retried[ordinal] = kv.mod_revision - 1
            if data.get("errors"):
                tried = Outcome.decode(kv.value).tried
                self._tell(ordinal, FormerAttempts(len(tried), 0, tried))

    def add_claim(self, kv: KeyValue, now: float) -> None:
        """Add a claim that was read or changed at the time ``now``."""
        ordinal = claim_ordinal(kv.key)
        if not 0 <= ordinal < self.count or PartitionStage(self.stage[ordinal]).ended:
            return
        try:
            claim = Claim.decode(kv.value)
        except UNREADABLE:
            return
        known = self.stage[ordinal] == PartitionStage.RUNNING and self.attempt[ordinal] == claim.attempt
        self.stage[ordinal] = PartitionStage.WAITING if claim.waiting else PartitionStage.RUNNING
        self.attempt[ordinal] = min(claim.attempt, 65_535)
        self.executor[ordinal] = self._number(claim.executor or claim.actor)
        if not known:
            self.started[ordinal] = parse_time(claim.since) or now
        self.changed[ordinal] = kv.mod_revision
        if claim.failures or claim.tried:
            self._tell(ordinal, FormerAttempts.of(claim))

    def add_former(self, ordinal: int, claim: Claim) -> None:
        """Add the last claim of an ended job."""
        self._tell(ordinal, FormerAttempts.of(claim))

    def remove_claim(self, key: str, revision: int) -> None:
        """A claim was deleted: the job has ended, or was released."""
        ordinal = claim_ordinal(key)
        if 0 <= ordinal < self.count and not PartitionStage(self.stage[ordinal]).ended:
            self.stage[ordinal] = PartitionStage.OPEN
            self.changed[ordinal] = revision

    def keep_claims(self, present: set[int], revision: int) -> None:
        """After a listing of the claims: jobs that are not claimed are not running."""
        held = np.isin(self.stage, (PartitionStage.RUNNING, PartitionStage.WAITING))
        for ordinal in np.flatnonzero(held):
            if int(ordinal) not in present:
                self.stage[ordinal] = PartitionStage.OPEN
                self.changed[ordinal] = revision

    def totals(self) -> dict[PartitionStage, int]:
        """The number of jobs in each state."""
        found = np.bincount(self.stage, minlength=len(STAGES))
        return {stage: int(found[stage]) for stage in STAGES}

    def _tell(self, ordinal: int, former: FormerAttempts) -> None:
        if ordinal in self.former or len(self.former) < MOST_STORIES:
            self.former[ordinal] = former

    def _number(self, executor: Any) -> int:
        name = executor if isinstance(executor, str) else ""
        number = self._numbers.get(name)
        if number is None:
            if len(self.executors) > 60_000:
                return 0
            number = self._numbers[name] = len(self.executors)
            self.executors.append(name)
        return number


def _rows(result: Any) -> int:
    """The rows that a result counts; -1: it does not."""
    rows = result.get("rows") if isinstance(result, dict) else None
    return rows if isinstance(rows, int) and not isinstance(rows, bool) and 0 <= rows < 1 << 62 else -1

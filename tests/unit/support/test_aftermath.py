"""What is looked at after each test of faults: a break of an invariant, and data that is not whole, are seen there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.revisioned import Change
from distop.protocol.txn import KeyValue
from distop.store.history import CaughtUp, HistoryStart, Revision
from tests.faults.data_checks import data_problems, find_problems
from tests.support.writing import digest, note

if TYPE_CHECKING:
    from pathlib import Path

    from distop.store.history import Step

ROOT = "distOp.t.writing.1"
RECORD = "distOpHistory.t.writing.1"


class Told:
    """The history of an operation with two jobs, whose output is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal.jsonl"
        self.arg = {"jobs": 2, "rows": 3, "journal": str(self.journal)}
        self.steps: list[Step] = []
        self.write(f"{ROOT}.arg", self.arg)

    def file(self, partition: int) -> Path:
        return self.folder / f"{partition}-abc" / "rows.txt"

    def outcome(self, partition: int) -> dict[str, Any]:
        file = self.file(partition)
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"p={partition} {row}\n" for row in range(3)))
        result = {"file": str(file), "rows": 3, "sha256": digest(file)}
        return {"name": f"p={partition}", "incarnation": "abc", "attempt": 1, "result": result}

    def write(self, key: str, value: object) -> None:
        number = len(self.steps) + 1
        kv = KeyValue(key, json.dumps(value).encode(), number, number, 1)
        self.steps.append(Revision(number, (Change(kv, deleted=False),)))

    def end(self, *partitions: int, state: str = "success") -> list[str]:
        """These jobs report, the operation ends, and all is looked at."""
        for partition in partitions:
            self.write(f"{ROOT}.{partition:06d}.outcome", self.outcome(partition))
        self.write(RECORD, {"state": state})
        return data_problems(self.steps)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_whole_data_is_no_problem(told: Told) -> None:
    assert told.end(0, 1) == []


def test_a_failed_operation_needs_an_outcome_or_an_error_of_each_job(told: Told) -> None:
    told.write(f"{ROOT}.000001.outcome", {"name": "p=1", "incarnation": "abc", "error": "it broke"})
    assert told.end(0, state="failed") == []
    told.write(f"{ROOT}.000002.outcome", {"name": "p=2", "incarnation": "abc"})
    (problem,) = data_problems(told.steps)
    assert "job 2 has neither a result nor an error" in problem


def test_an_outcome_that_is_missing_or_written_twice_is_seen(told: Told) -> None:
    (missing,) = told.end(0)
    assert missing == "t/writing/1: it succeeded with 1 outcomes of 2"
    doubled, _ = told.end(0)
    assert doubled == "t/writing/1: job 0 has 2 outcomes"


def test_a_file_that_is_not_what_was_named_is_seen(told: Told) -> None:
    assert told.end(0, 1) == []
    told.file(1).write_text("p=1 0\np=1 1\n")
    (short,) = data_problems(told.steps)
    assert short.endswith("has 2 rows of 3")
    told.file(1).unlink()
    assert data_problems(told.steps) != []


def test_two_attempts_that_wrote_at_once_are_seen(told: Told) -> None:
    for attempt in (1, 2, 1):
        note(str(told.journal), 0, attempt, "row")
    (problem,) = told.end(0, 1)
    assert "partition 0: 1 wrote until" in problem
    assert data_problems(told.steps, overlaps=True) == []


def test_what_was_written_before_history_begins_counts(told: Told) -> None:
    """After a compaction: what was still there, and how often it had been written."""
    arg = KeyValue(f"{ROOT}.arg", json.dumps(told.arg).encode(), 1, 1, 1)
    first, second = (
        KeyValue(f"{ROOT}.00000{n}.outcome", json.dumps(told.outcome(n)).encode(), 1, 2, 1 + n) for n in range(2)
    )
    told.steps[:] = [HistoryStart(5, 1, (arg, first, second))]
    assert told.end() == ["t/writing/1: job 1 has 2 outcomes"]


def test_a_broken_invariant_is_told_with_its_story(told: Told) -> None:
    key = f"{ROOT}.state"
    told.steps.append(Revision(2, (Change(KeyValue(key, b"nonsense", 2, 2, 1), deleted=False),)))
    told.steps.append(CaughtUp(2))
    assert any(key in problem for problem in find_problems(told.steps))

"""The checks after each fault test find broken invariants and incomplete data."""

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

    from distop.store.history import HistoryStep

ROOT = "distOp.t.writing.1"
RECORD = "distOpHistory.t.writing.1"


class RecordedOperation:
    """The history of an operation with two jobs, and the files that they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal.jsonl"
        self.arg = {"jobs": 2, "rows": 3, "journal": str(self.journal)}
        self.steps: list[HistoryStep] = []
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
        """Write outcomes of these jobs and the end of the operation; return the problems found."""
        for partition in partitions:
            self.write(f"{ROOT}.{partition:06d}.outcome", self.outcome(partition))
        self.write(RECORD, {"state": state})
        return data_problems(self.steps)


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedOperation:
    return RecordedOperation(tmp_path)


def test_complete_data_has_no_problems(recorded: RecordedOperation) -> None:
    assert recorded.end(0, 1) == []


def test_each_outcome_needs_a_result_or_an_error(recorded: RecordedOperation) -> None:
    recorded.write(f"{ROOT}.000001.outcome", {"name": "p=1", "incarnation": "abc", "error": "it broke"})
    assert recorded.end(0, state="failed") == []
    recorded.write(f"{ROOT}.000002.outcome", {"name": "p=2", "incarnation": "abc"})
    (problem,) = data_problems(recorded.steps)
    assert "job 2 has neither a result nor an error" in problem


def test_missing_and_duplicated_outcomes_are_found(recorded: RecordedOperation) -> None:
    (missing,) = recorded.end(0)
    assert missing == "t/writing/1: it succeeded with 1 outcomes of 2"
    doubled, _ = recorded.end(0)
    assert doubled == "t/writing/1: job 0 has 2 outcomes"


def test_an_incomplete_or_missing_file_is_found(recorded: RecordedOperation) -> None:
    assert recorded.end(0, 1) == []
    recorded.file(1).write_text("p=1 0\np=1 1\n")
    (short,) = data_problems(recorded.steps)
    assert short.endswith("has 2 rows of 3")
    recorded.file(1).unlink()
    assert data_problems(recorded.steps) != []


def test_overlapping_writes_of_two_attempts_are_found(recorded: RecordedOperation) -> None:
    for attempt in (1, 2, 1):
        note(str(recorded.journal), 0, attempt, "row")
    (problem,) = recorded.end(0, 1)
    assert "partition 0: 1 wrote until" in problem
    assert data_problems(recorded.steps, overlaps=True) == []


def test_writes_before_the_start_of_the_history_count(recorded: RecordedOperation) -> None:
    """After a compaction the history starts with the existing keys and their versions."""
    arg = KeyValue(f"{ROOT}.arg", json.dumps(recorded.arg).encode(), 1, 1, 1)
    first, second = (
        KeyValue(f"{ROOT}.00000{n}.outcome", json.dumps(recorded.outcome(n)).encode(), 1, 2, 1 + n) for n in range(2)
    )
    recorded.steps[:] = [HistoryStart(5, 1, (arg, first, second))]
    assert recorded.end() == ["t/writing/1: job 1 has 2 outcomes"]


def test_a_broken_invariant_is_reported_with_its_key(recorded: RecordedOperation) -> None:
    key = f"{ROOT}.state"
    recorded.steps.append(Revision(2, (Change(KeyValue(key, b"nonsense", 2, 2, 1), deleted=False),)))
    recorded.steps.append(CaughtUp(2))
    assert any(key in problem for problem in find_problems(recorded.steps))

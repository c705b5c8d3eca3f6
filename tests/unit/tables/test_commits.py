"""Commits that are attempted again: pauses, the maximum number of attempts, and what ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distop.tables import commits
from distop.tables.commits import ATTEMPTS, CommitUnknown, Conflict, commit_with_retries
from distop.testing import FakeContext

if TYPE_CHECKING:
    from pathlib import Path


class Pauses:
    """Replaces the event that :func:`commit_with_retries` waits for; notes the pauses instead of waiting."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    found = Pauses()
    monkeypatch.setattr(commits, "Event", lambda: found)
    return found


@pytest.mark.parametrize("error", [Conflict("another writer"), CommitUnknown("no answer")])
def test_an_attempt_is_repeated_after_a_pause(tmp_path: Path, pauses: Pauses, error: Exception) -> None:
    answers = [error, error, "version 3"]

    def attempt() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert commit_with_retries(attempt, FakeContext(tmp_path)) == "version 3"
    assert len(pauses.seconds) == 2


def test_pauses_grow_differ_and_are_limited(tmp_path: Path, pauses: Pauses) -> None:
    """Without pauses, writers that conflict once conflict in all attempts."""
    calls = []

    def attempt() -> None:
        calls.append(1)
        raise Conflict("another writer")

    with pytest.raises(Conflict, match="another writer"):
        commit_with_retries(attempt, FakeContext(tmp_path))
    assert (len(calls), len(pauses.seconds)) == (ATTEMPTS, ATTEMPTS - 1)
    assert 0 < pauses.seconds[0] <= commits.FIRST_PAUSE
    assert max(pauses.seconds[:3]) < min(pauses.seconds[-3:])
    assert max(pauses.seconds) <= commits.LONGEST_PAUSE
    assert len(set(pauses.seconds)) == len(pauses.seconds)
    assert sum(pauses.seconds) < 90


def test_other_errors_and_a_cancel_end_the_attempts(tmp_path: Path, pauses: Pauses) -> None:
    class Cancelled(Exception):
        pass

    class Context(FakeContext):
        def check_cancelled(self) -> None:
            if calls:
                raise Cancelled

    calls: list[int] = []

    def attempt() -> None:
        calls.append(1)
        raise Conflict("another writer")

    with pytest.raises(Cancelled):
        commit_with_retries(attempt, Context(tmp_path))
    with pytest.raises(ZeroDivisionError):
        commit_with_retries(lambda: 1 // 0, FakeContext(tmp_path))
    assert len(calls) == len(pauses.seconds) == 1

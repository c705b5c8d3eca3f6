"""The comparison of ``scripts/bench operations`` with Celery, and the message without it."""

from __future__ import annotations

import pytest
from benchmarks import celerytasks, operations
from benchmarks.common import Result


def installed(monkeypatch: pytest.MonkeyPatch, *there: str) -> None:
    monkeypatch.setattr(celerytasks, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(celerytasks.shutil, "which", lambda name: name if name in there else None)


def test_missing_programs_are_reported_and_the_result_is_unchanged(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, "celery")
    result = Result("operations", {})
    operations._add_celery(result, 4, 2)
    assert (result.rows, result.samples) == ([], {})
    assert "because these are not installed: redis, redis-server" in capfd.readouterr().err


def test_celery_is_measured_if_all_programs_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "celery", "redis", "redis-server")
    monkeypatch.setattr(celerytasks, "rate", lambda tasks, clients, processes: tasks / clients / processes)
    result = Result("operations", {})
    operations._add_celery(result, 4, 2)
    assert [row.value for row in result.rows] == [operations.CELERY_TASKS / 8]
    assert result.rows[0].target is None

"""What ``scripts/bench operations`` sets its figures beside, and what it says where that is not there."""

from __future__ import annotations

import pytest
from benchmarks import celerytasks, operations
from benchmarks.common import Result


def installed(monkeypatch: pytest.MonkeyPatch, *there: str) -> None:
    monkeypatch.setattr(celerytasks, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(celerytasks.shutil, "which", lambda name: name if name in there else None)


def test_what_the_comparison_lacks_is_said_and_the_result_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, "celery")
    result = Result("operations", {})
    operations._add_celery(result, 4, 2)
    assert (result.rows, result.samples) == ([], {})
    assert "because redis, redis-server is not installed" in capfd.readouterr().err


def test_where_all_is_there_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "celery", "redis", "redis-server")
    monkeypatch.setattr(celerytasks, "rate", lambda tasks, clients, processes: tasks / clients / processes)
    result = Result("operations", {})
    operations._add_celery(result, 4, 2)
    assert [row.value for row in result.rows] == [operations.CELERY_TASKS / 8]
    assert result.rows[0].target is None

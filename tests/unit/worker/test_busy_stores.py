"""A completion that meets a busy object store waits for it within its attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import Behavior, JobContext, PartitionPlan, Summary, TableRecord
from distop.errors import TableBusy, TableUnavailable
from distop.protocol.records import OperationRef
from distop.storage import store_waits
from tests.unit.support.running import Child, NoArg

if TYPE_CHECKING:
    from pathlib import Path


class Publishing(Behavior):
    """Its completion starts an operation, and then meets a busy store ``busy`` times."""

    type_name = "publishing"
    Arg = NoArg

    def __init__(self, busy: int) -> None:
        self.busy = busy

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        return None

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        ctx.start_operation("noop", OperationRef.parse(ctx.operation).table)
        self.busy -= 1
        if self.busy >= 0:
            raise TableUnavailable("cannot publish") from TableBusy("SlowDown")
        return {"published": True}


def test_a_completion_that_meets_a_busy_store_is_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that met a busy store counted as a failed attempt of the operation."""
    monkeypatch.setattr(store_waits, "FIRST_PAUSE", 0.01)
    done = Child(Publishing(2), tmp_path).complete()["value"]
    assert done["report"] == {"published": True}
    assert [one["type"] for one in done["follow_ups"]] == ["noop"], "those of the last call"


def test_a_completion_fails_if_the_store_stays_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_waits, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(store_waits, "LIMIT", 0.05)
    failed = Child(Publishing(1_000), tmp_path).complete()
    assert (failed["t"], failed["kind"]) == ("failed", "transient")
    assert "cannot publish" in failed["message"]

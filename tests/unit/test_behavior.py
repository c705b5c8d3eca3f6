"""Behaviors: their declarations, refused class attributes, and installed behaviors."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from distop import behavior as b
from distop.behavior import Behavior, OutcomeRow, Planned, Summary
from distop.errors import InvalidArgument, UnknownBehavior
from distop.protocol.behavior_declaration import Declaration, Retry
from distop.protocol.plan import PartitionPlan

if TYPE_CHECKING:
    from collections.abc import Iterator


class Arg(BaseModel):
    column: str
    limit: int = 3


class Result(BaseModel):
    rows: int


class Build(Behavior):
    """Builds something.

    And more about it.
    """

    type_name = "build"
    Arg = Arg
    Result = Result
    object_field = "column"
    conflicts_with = ("drop",)
    needs_table = True
    retry = Retry(attempts=5)

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: Any) -> Any:
        return {"rows": 0}


class Batch(Build):
    type_name = "batch"
    instances = "one"

    def run_batch(self, arg: Any, partitions: Any, ctx: Any) -> Iterator[Any]:
        yield from ()

    def complete_operation(self, arg: Any, table: Any, summary: Summary, ctx: Any) -> Any:
        return {"rows": summary.total}


def test_a_declaration_holds_the_class_attributes() -> None:
    declaration = Build.declaration()
    assert declaration == Declaration.decode(declaration.encode())
    assert declaration.type_name == "build"
    assert declaration.description == "Builds something."
    assert declaration.object_field == "column"
    assert declaration.conflicts_with == ("drop",)
    assert declaration.needs_table
    assert declaration.arg_schema["properties"]["limit"]["default"] == 3
    assert declaration.result_schema["required"] == ["rows"]
    assert declaration.report_schema == {}
    assert (declaration.instances, declaration.can_fail, declaration.lost) == ("many", True, "retry")
    assert declaration.rules().retry.attempts == 5
    assert (declaration.batch, declaration.completes, declaration.reports_only) == (False, False, False)


def test_a_declaration_lists_the_optional_methods() -> None:
    declaration = Batch.declaration()
    assert (declaration.batch, declaration.completes, declaration.instances) == (True, True, "one")
    assert declaration.description == ""  # a description is not inherited


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type_name": "runOps"}, "not an operation type"),
        ({"type_name": "no dots.here"}, "not an operation type"),
        ({"type_name": ""}, "not an operation type"),
        ({"instances": "several"}, "instances is 'several', but must be one of many, one"),
        ({"lost": "ignore"}, "lost is 'ignore', but must be one of retry, fail"),
        ({"failure_policy": "hope"}, "failure_policy is 'hope', but must be one of fail_fast, collect_all"),
        ({"object_field": "index"}, "object_field 'index' is not a field of Arg"),
        ({"can_fail": False, "lost": "fail"}, "can_fail is false, so lost must be 'retry'"),
        ({"reports_only": True}, "reports_only is true, so it must define complete_operation"),
        ({"conflicts_with": "drop"}, "conflicts_with"),
        ({"conflicts_with": ("no dots.here",)}, "not an operation type"),
        ({"retry": Retry(attempts=0)}, "attempts"),
        ({"Arg": dict}, "Arg"),
    ],
)
def test_invalid_class_attributes_are_refused(fields: dict[str, Any], message: str) -> None:
    kind = type("Spoiled", (Build,), fields)
    with pytest.raises(InvalidArgument, match=message):
        kind.declaration()


def test_a_behavior_without_type_name_or_arg_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        type("Nameless", (Behavior,), {"Arg": Arg}).declaration()
    with pytest.raises(InvalidArgument, match="Arg"):
        type("Argless", (Behavior,), {"type_name": "argless"}).declaration()
    with pytest.raises(TypeError):
        type("Jobless", (Behavior,), {"type_name": "jobless", "Arg": Arg})()


def test_a_summary_reads_outcomes_lazily() -> None:
    asked = []

    def rows() -> Iterator[OutcomeRow]:
        asked.append(True)
        yield OutcomeRow(0, "p=0", True, {"rows": 1}, "")

    summary = Summary("success", 1, 1, 0, rows)
    assert not asked
    assert [row.name for row in summary.outcomes()] == ["p=0"]
    assert list(Summary("success", 0, 0, 0).outcomes()) == []
    assert Planned([PartitionPlan(0, "p")]).version == ""


def entry(name: str, value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name, value, b.ENTRY_POINTS)


def test_installed_behaviors_are_found_by_type_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    found = [entry("build", f"{here}:Build"), entry("other", f"{here}:Build")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: found if group == b.ENTRY_POINTS else [])
    assert set(b.registered()) == {"build", "other"}
    assert type(b.load("build")).__name__ == "Build"
    with pytest.raises(UnknownBehavior, match="loads a behavior whose type_name is 'build'"):
        b.load("other")
    with pytest.raises(UnknownBehavior, match=r"'other' is installed here \(installed: build\)"):
        b.load("other", {"build": found[0]})
    with pytest.raises(UnknownBehavior, match=r"no behavior 'nope' is installed here \(installed: build, other\)"):
        b.load("nope")

"""Results and reports are validated against the models that the behavior declares."""

from __future__ import annotations

import json
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, Field, RootModel, field_validator

from distop.behavior import Behavior, JobContext, JobFailed, OperationFailed, PartitionPlan, Summary, TableRecord
from distop.worker.child_side.answer_checks import dump, validate_result
from distop_behaviors.validate.partition_result import Answer, CheckResult, Result, Sample
from tests.unit.support.running import Child, NoArg, kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Count(BaseModel):
    rows: int
    day: date | None = None


class Other(BaseModel):
    rows: int


class Counting(Behavior):
    """Jobs, batches and the completion give ``gives``."""

    type_name = "counting"
    Arg = NoArg
    Result: type[BaseModel] | None = Count
    Report: type[BaseModel] | None = Count

    def __init__(self, gives: Any) -> None:
        self.gives = gives

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        for partition in partitions:
            yield partition, Count(rows=1) if partition.name == "z" else self.gives

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives


class Undeclared(Counting):
    """Declares no models."""

    type_name = "undeclared"
    Result = None
    Report = None


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("gives", "stored"),
    [
        (Count(rows=3), {"rows": 3, "day": None}),
        ({"rows": 3}, {"rows": 3, "day": None}),
        ({"rows": "3", "day": date(2013, 1, 2)}, {"rows": 3, "day": "2013-01-02"}),
    ],
)
def test_a_result_is_stored_as_its_model(tmp_path: Path, gives: Any, stored: Any, *, batch: bool) -> None:
    ends = Child(Counting(gives), tmp_path).ends("az", batch=batch)
    assert kinds(ends) == "a:success z:success"
    assert ends["a"].result == stored


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("gives", "wrong"),
    [
        ({"rows": "many"}, "rows: Input should be a valid integer"),
        ({"row": 3}, "rows: Field required"),
        (Other(rows=3), "Input should be a valid dictionary or instance of Count"),
        ([3], "Input should be a valid dictionary"),
        (None, "Input should be a valid dictionary"),
    ],
)
def test_a_result_that_its_model_rejects_fails_only_its_job(
    tmp_path: Path, gives: Any, wrong: str, *, batch: bool
) -> None:
    end = Child(Counting(gives), tmp_path).ends("az", batch=batch)
    assert end["a"].kind == "fatal"
    assert end["a"].error.startswith("the result of partition a does not fit Count: ")
    assert wrong in end["a"].error
    assert "\n" not in end["a"].error
    assert end["a"].result is None
    assert end["z"].kind == ("success" if batch else "fatal")


def test_the_result_of_a_verdict_is_validated(tmp_path: Path) -> None:
    assert kinds(Child(Counting(JobFailed("no")), tmp_path).ends("a")) == "a:verdict"
    verdict = Child(Counting(JobFailed("no", {"rows": 3})), tmp_path).ends("a")["a"]
    assert (verdict.kind, verdict.result, verdict.error) == ("verdict", {"rows": 3, "day": None}, "no")
    wrong = Child(Counting(JobFailed("no", {"why": "told to"})), tmp_path).ends("a")["a"]
    assert (wrong.kind, wrong.result) == ("fatal", None)
    assert wrong.error == "the result of partition a does not fit Count: rows: Field required"


@pytest.mark.parametrize("gives", [None, [3], {"row": 3}, Other(rows=3)])
def test_without_a_declared_model_any_json_value_is_accepted(tmp_path: Path, gives: Any) -> None:
    child = Child(Undeclared(gives), tmp_path)
    ends = child.ends("a")
    plain = {"rows": 3} if isinstance(gives, Other) else gives
    assert (ends["a"].kind, ends["a"].result) == ("success", plain)
    assert child.complete()["value"]["report"] == plain


def test_an_unexpected_error_in_a_model_is_reported(tmp_path: Path) -> None:
    class Fragile(BaseModel):
        rows: Any

        @field_validator("rows")
        @classmethod
        def first(cls, value: Any) -> Any:
            return value[0]

    class Counts(Counting):
        Result = Fragile

    end = Child(Counts({"rows": 3}), tmp_path).ends("a")["a"]
    assert end.kind == "fatal"
    assert end.error.startswith("the result of partition a does not fit Fragile: TypeError: ")


def test_a_result_is_stored_by_the_names_of_its_schema(tmp_path: Path) -> None:
    class Named(BaseModel):
        rows: int = Field(alias="Rows")

    class Counts(Counting):
        Result = Named

    end = Child(Counts({"Rows": 3}), tmp_path).ends("a")["a"]
    assert (end.kind, end.result) == ("success", {"Rows": 3})


@pytest.mark.parametrize("gives", [Count(rows=3), {"rows": "3"}])
def test_a_report_is_stored_as_its_model(tmp_path: Path, gives: Any) -> None:
    done = Child(Counting(gives), tmp_path).complete()
    assert done["value"]["report"] == {"rows": 3, "day": None}


def test_a_missing_report_is_not_validated(tmp_path: Path) -> None:
    """A completion may have no report, such as that of a cancelled operation."""
    assert Child(Counting(None), tmp_path).complete("cancelled")["value"]["report"] is None
    failed = Child(Counting(OperationFailed("no")), tmp_path).complete()
    assert failed["value"] == {"report": None, "follow_ups": [], "failure": "no"}


@pytest.mark.parametrize("gives", [{"row": 3}, OperationFailed("no", {"row": 3})])
def test_a_report_that_its_model_rejects_is_a_fatal_error(tmp_path: Path, gives: Any) -> None:
    done = Child(Counting(gives), tmp_path).complete()
    assert (done["t"], done["kind"]) == ("failed", "fatal")
    assert done["message"] == "the report does not fit Count: rows: Field required"


def test_an_instance_is_not_validated_again() -> None:
    looks: list[int] = []

    class Careful(RootModel[int]):
        @field_validator("root")
        @classmethod
        def look(cls, value: int) -> int:
            looks.append(value)
            return value

    one = Careful(3)
    assert validate_result(Careful, one, "it") is one
    assert looks == [3]
    assert validate_result(Careful, 4, "it") == Careful(4)


def test_an_answer_of_validate_is_stored_compactly_and_read_back() -> None:
    sample = Sample(partition="p", file="f", row_index=1, values={"a": None})
    checks = [CheckResult(files_statistics=3), CheckResult("violated", 2, samples=[sample]), CheckResult(error="no")]
    answer = Answer(Result("violated", 9, checks))
    stored = json.loads(dump(validate_result(Answer, answer, "it")))
    assert stored == answer.root.compact()
    assert stored["checks"][0] == {"verdict": "valid", "files_statistics": 3}
    assert Answer.model_validate(stored) == answer

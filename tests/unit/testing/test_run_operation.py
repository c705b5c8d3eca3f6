"""``distop.testing.run_operation``: a whole operation in the test's process, by the rules of an executor."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from distop.behavior import (
    Behavior,
    FatalError,
    JobContext,
    JobFailed,
    OperationFailed,
    PartitionPlan,
    Planned,
    Retry,
    StagedOutput,
    Summary,
    TableRecord,
    TableUnavailable,
)
from distop.errors import InvalidArgument, NotFound
from distop.invariants.checker import check
from distop.protocol.jobs import MAX_OUTCOME_BYTES
from distop.protocol.keys import Keys
from distop.testing import ModelStore, run_operation
from distop.worker.child_messages import MAX_REPORT_BYTES
from tests.support.tables import write_partitions

PLAN = [PartitionPlan(n, name) for n, name in enumerate("abcd")]


class Arg(BaseModel):
    does: dict[str, str] = {}
    """The action of each job, by the name of its partition."""
    completes: str = ""


class Result(BaseModel):
    n: int


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


class Scripted(Behavior):
    """Its jobs act as its argument specifies."""

    type_name = "scripted"
    Arg = Arg
    Result = Result
    failure_policy = "collect_all"
    log: ClassVar[list[str]] = []

    def start_or_resume_job(self, arg: Arg, partition: PartitionPlan, ctx: JobContext) -> Any:
        self.log.append(f"{partition.name}{ctx.attempt}")
        return self.act(arg.does.get(partition.name, ""), partition, ctx)

    def act(self, what: str, partition: PartitionPlan, ctx: JobContext) -> Any:
        if what == "verdict":
            raise JobFailed("no", Result(n=-1))
        if what == "error" or (what == "once" and ctx.attempt == 1):
            raise ValueError("broken")
        if what == "fatal":
            raise FatalError("never")
        if what == "unreadable":
            raise Unreadable
        if what == "misfit":
            return {"n": "many"}
        if what == "unreachable":
            raise TableUnavailable("the table cannot be reached")
        return Result(n=partition.partition)

    def complete_operation(self, arg: Arg, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        self.log.append(f"complete {summary.verdict}")
        if arg.completes == "fails":
            raise OperationFailed("not good enough", {"n": 0})
        if arg.completes == "error":
            raise ValueError("broken")
        if arg.completes == "unreadable":
            raise Unreadable
        if arg.completes == "large":
            return "x" * (MAX_REPORT_BYTES + 1)
        if arg.completes == "follows":
            ctx.start_operation("scripted", "table", {"does": {}}, delay=5)
        return {o.name: o.success for o in summary.outcomes()}


@pytest.fixture(autouse=True)
def log() -> list[str]:
    Scripted.log.clear()
    return Scripted.log


def test_an_operation_is_planned_run_and_completed(tmp_path: Path) -> None:
    import pyarrow as pa

    class Files(Scripted):
        def start_or_resume_job(self, arg: Arg, partition: PartitionPlan, ctx: JobContext) -> Any:
            assert (ctx.table is not None, ctx.partition) == (True, partition)
            return {"n": len(partition.files)}

    folder = write_partitions(pa.table({"x": [1, 2, 3], "p": [1, 1, 2]}), tmp_path / "table", ["p"])
    run = run_operation(Files, table=folder)
    assert (run.state, run.report, run.errors) == ("success", {"p=1": True, "p=2": True}, ())
    assert [(job.partition, job.name, job.result, job.attempt) for job in run.jobs] == [
        (0, "p=1", {"n": 1}, 1),
        (1, "p=2", {"n": 1}, 1),
    ]
    assert run.result.op == "table/scripted/1"
    assert run.result.jobs == {"total": 2, "success": 2, "failed": 0}
    assert [job.name for job in run_operation(Files, table=str(folder), partitions=["p=2"]).jobs] == ["p=2"]
    record = TableRecord("sales.orders", "parquet", str(folder))
    assert run_operation(Files, table=record).result.op == "sales.orders/scripted/1"


def test_without_a_table_there_is_one_job_or_a_given_plan() -> None:
    assert [job.name for job in run_operation(Scripted).jobs] == ["all"]
    run = run_operation(Scripted, partitions=PLAN)
    assert [(job.name, job.result) for job in run.jobs] == [(p.name, {"n": p.partition}) for p in PLAN]


def test_an_unexpected_error_is_retried_and_job_failed_is_not(log: list[str]) -> None:
    does = {"a": "once", "b": "verdict", "c": "error"}
    run = run_operation(Scripted, {"does": does}, partitions=PLAN)
    assert log == ["a1", "b1", "c1", "d1", "a2", "c2", "c3", "complete failed"]
    assert (run.state, run.result.jobs) == ("failed", {"total": 4, "success": 2, "failed": 2})
    assert [(job.success, job.attempt, job.result) for job in run.jobs] == [
        (True, 2, {"n": 0}),
        (False, 1, {"n": -1}),
        (False, 3, None),
        (True, 1, {"n": 3}),
    ]
    assert run.job("b").error == "no"
    assert run.job("c").error.startswith("ValueError: broken")
    assert run.errors[0] == {"partition": "b", "text": "no", "verdict": True}
    assert [one["attempt"] for one in run.errors[1]["attempts"]] == [1, 2, 3]
    with pytest.raises(NotFound, match=r"no job 'e' has ended \(ended: a, b, c, d\)"):
        run.job("e")


def test_an_error_without_a_readable_message_is_an_error_as_any_other() -> None:
    """Its job would never end: nothing would report it, and a cancel would wait for it."""
    run = run_operation(Scripted, {"does": {"a": "unreadable"}}, partitions=PLAN)
    assert (run.state, run.job("a").attempt) == ("failed", 3)
    assert run.job("a").error.startswith("Unreadable: its message cannot be read: ValueError\n")
    run = run_operation(Scripted, {"completes": "unreadable"})
    assert run.state == "failed"
    assert "completion failed: Unreadable: its message cannot be read: ValueError" in run.errors[0]["text"]


def test_run_operation_passes_options_of_the_start(log: list[str]) -> None:
    run = run_operation(Scripted, {"does": {"a": "error"}}, partitions=PLAN[:1], retry_attempts=1)
    assert (run.state, log) == ("failed", ["a1", "complete failed"])
    log.clear()
    does = {"a": "verdict", "b": "verdict"}
    run = run_operation(Scripted, {"does": does}, partitions=PLAN, failure_policy="fail_fast", max_failed=1)
    assert (log, run.state) == (["a1", "b1", "complete failed"], "failed")


def test_fail_fast_runs_nothing_more(log: list[str]) -> None:
    class Fast(Scripted):
        failure_policy = "fail_fast"

    run = run_operation(Fast, {"does": {"b": "verdict"}}, partitions=PLAN)
    assert (run.state, run.report) == ("failed", {"a": True, "b": False})
    assert (log, [job.name for job in run.jobs]) == (["a1", "b1", "complete failed"], ["a", "b"])


def test_fatal_errors_are_not_retried_unless_jobs_cannot_fail(log: list[str]) -> None:
    run = run_operation(Scripted, {"does": {"a": "fatal", "b": "misfit"}}, partitions=PLAN[:2])
    assert log == ["a1", "b1", "complete failed"]
    assert run.job("a").error == "never"
    assert "the result of partition b does not fit Result" in run.job("b").error

    class Cannot(Scripted):
        can_fail = False

        def act(self, what: str, partition: PartitionPlan, ctx: JobContext) -> Any:
            return super().act(what if ctx.attempt < 5 else "", partition, ctx)

    log.clear()
    assert run_operation(Cannot, {"does": {"a": "fatal"}}, partitions=PLAN[:1]).state == "success"
    assert log == ["a1", "a2", "a3", "a4", "a5", "complete success"]


def test_a_job_that_cannot_fail_but_always_does_ends_the_test() -> None:
    class Cannot(Scripted):
        can_fail = False

    with pytest.raises(AssertionError, match="a has failed 100 times, but can_fail is False: ValueError: broken"):
        run_operation(Cannot, {"does": {"a": "error"}}, partitions=PLAN[:1])


def test_table_unavailable_counts_as_an_error(log: list[str]) -> None:
    run = run_operation(Scripted, {"does": {"a": "unreachable"}}, partitions=PLAN[:1])
    assert log[:3] == ["a1", "a2", "a3"]
    assert run.job("a").error == "the table cannot be reached"


def test_a_result_that_is_too_large_fails_the_job_or_goes_to_a_file() -> None:
    class Large(Scripted):
        Result = None

        def act(self, what: str, partition: PartitionPlan, ctx: JobContext) -> Any:
            return "x" * MAX_OUTCOME_BYTES

    run = run_operation(Large, partitions=PLAN[:1])
    assert (run.state, "at most 64512 are allowed" in run.job("a").error) == ("failed", True)

    class ToFile(Large):
        large_results = "file"

    run = run_operation(ToFile, partitions=PLAN[:1])
    assert (run.state, len(run.job("a").result)) == ("success", MAX_OUTCOME_BYTES)


def test_the_completion_can_fail_the_operation(log: list[str]) -> None:
    run = run_operation(Scripted, {"completes": "fails"}, partitions=PLAN[:1])
    assert (run.state, run.report) == ("failed", {"n": 0})
    assert run.errors[0] == {"partition": None, "text": "not good enough", "verdict": True}
    log.clear()
    run = run_operation(Scripted, {"completes": "error"}, partitions=PLAN[:1])
    assert (run.state, run.report) == ("failed", None)
    assert log == ["a1", *3 * ["complete success"]]
    assert run.errors[0]["text"].startswith("completion failed: ValueError: broken")
    log.clear()
    run = run_operation(Scripted, {"completes": "large"}, partitions=PLAN[:1])
    assert (run.state, log.count("complete success")) == ("failed", 1)
    assert f"at most {MAX_REPORT_BYTES} are allowed" in run.errors[0]["text"]
    (follow_up,) = run_operation(Scripted, {"completes": "follows"}, partitions=PLAN[:1]).follow_ups
    assert (follow_up["type"], follow_up["table"], "not_before" in follow_up) == ("scripted", "table", True)


@pytest.mark.parametrize("reports_only", [False, True])
def test_a_failing_completion_is_tried_three_times(log: list[str], reports_only: bool) -> None:
    class Reports(Scripted):
        pass

    Reports.reports_only = reports_only
    run = run_operation(Reports, {"completes": "error"}, partitions=PLAN[:1])
    assert (run.state, log.count("complete success")) == ("failed", 3)


def test_a_plan_that_cannot_be_made_fails_the_operation(tmp_path: Path) -> None:
    tries = []

    class Unplanned(Scripted):
        retry = Retry(attempts=2)

        def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
            tries.append(arg.completes)
            raise (InvalidArgument("no such column") if arg.completes else OSError("no answer"))

    import pyarrow as pa

    folder = write_partitions(pa.table({"x": [1], "p": [1]}), tmp_path / "table", ["p"])
    run = run_operation(Unplanned, table=folder)
    assert (run.state, run.jobs, tries) == ("failed", (), ["", ""])
    assert run.errors[0]["text"].startswith("planning failed: OSError: no answer")
    tries.clear()
    run = run_operation(Unplanned, {"completes": "x"}, table=folder)
    assert (run.state, tries, run.errors[0]["text"]) == ("failed", ["x"], "planning failed: no such column")


def test_cleanup_is_called_when_an_executor_calls_it(log: list[str]) -> None:
    class Cleans(Scripted):
        def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
            log.append(f"clean {partition.name}{ctx.attempt}")

    run_operation(Cleans, {"does": {"a": "once", "b": "verdict", "c": "fatal"}}, partitions=PLAN[:3])
    expected = ["a1", "b1", "clean b1", "c1", "clean c1", "clean a2", "a2", "complete failed"]
    assert log == expected


def test_a_resumable_job_continues_from_its_checkpoint(log: list[str]) -> None:
    class Steps(Scripted):
        resumable = True
        Result = None

        def act(self, what: str, partition: PartitionPlan, ctx: JobContext) -> Any:
            before = ctx.progress.load()
            ctx.progress.save((before or 0) + 1, force=True)
            return super().act(what, partition, ctx) if ctx.attempt < 3 else before

        def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
            log.append(f"clean {ctx.progress.load()}")

    run = run_operation(Steps, {"does": {"a": "error"}}, partitions=PLAN[:1])
    assert (run.job("a").result, log) == (2, ["a1", "a2", "a3", "complete success"])
    log.clear()
    run = run_operation(Steps, {"does": {"a": "error"}}, partitions=PLAN[:1], retry_attempts=2)
    assert log == ["a1", "a2", "clean 2", "complete failed"]


class Batches(Scripted):
    """The same in batches."""

    def run_batch(self, arg: Arg, partitions: Any, ctx: JobContext) -> Any:  # type: ignore[override]
        self.log.append("".join(p.name for p in partitions))
        for partition in partitions:
            if arg.does.get(partition.name) == "batch error":
                raise ValueError("broken")
            try:
                yield partition, self.act(arg.does.get(partition.name, ""), partition, ctx)
            except JobFailed as error:
                yield partition, error


def test_a_failing_batch_is_split(log: list[str]) -> None:
    run = run_operation(Batches, {"does": {"b": "batch error", "d": "verdict"}}, partitions=PLAN, retry_attempts=1)
    assert log == ["abcd", "b", "cd", "complete failed"]
    assert [(job.success, job.error.partition("\n")[0]) for job in run.jobs] == [
        (True, ""),
        (False, "ValueError: broken"),
        (True, ""),
        (False, "no"),
    ]


def test_a_batch_stops_after_too_many_failures(log: list[str]) -> None:
    class Fast(Batches):
        failure_policy = "fail_fast"

        def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
            log.append(f"clean {partition.name}")

    run = run_operation(Fast, {"does": {"b": "verdict"}}, partitions=PLAN)
    assert (run.state, [job.name for job in run.jobs]) == ("failed", ["a", "b"])
    assert log[:4] == ["abcd", "clean b", "clean c", "clean d"]


def test_jobs_can_read_other_tables_and_earlier_operations(tmp_path: Path) -> None:
    class Asks(Scripted):
        Result = None

        def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
            assert ctx.other_table("other").location == "/nowhere"
            with pytest.raises(InvalidArgument, match="there is no table 'none'"):
                ctx.other_table("none")
            assert [one.name for one in ctx.registered_tables()] == ["other", "table"]
            return Planned(PLAN[:1], "v7")

        def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
            with pytest.raises(InvalidArgument, match="there is no history record of table/asks/9"):
                ctx.history_record("table/asks/9")
            with pytest.raises(InvalidArgument, match="in planning only"):
                ctx.registered_tables()
            return ctx.history_record("table/scripted/1")["report"]

        def complete_operation(self, arg: Any, table: Any, summary: Summary, ctx: JobContext) -> Any:
            return [summary.version, summary.whole, [p.name for p in summary.partitions()]]

    store = ModelStore()
    run_operation(Scripted, partitions=PLAN, store=store)
    import pyarrow as pa

    folder = write_partitions(pa.table({"x": [1], "p": [1]}), tmp_path / "table", ["p"])
    other = TableRecord("other", "parquet", "/nowhere")
    run = run_operation(Asks, table=folder, tables=[other], store=store)
    run.result.raise_for_state()
    assert (run.result.op, run.report) == ("table/scripted/2", ["v7", True, ["a"]])
    assert run.job("a").result == dict.fromkeys("abcd", True)
    assert run.store is store


def test_run_operation_raises_the_error_of_a_refused_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does"):
        run_operation(Scripted, {"does": 1})
    with pytest.raises(InvalidArgument, match="partition names need a table"):
        run_operation(Scripted, partitions=["a"])
    with pytest.raises(InvalidArgument, match="does not exist"):
        run_operation(Scripted, table=tmp_path / "none")
    with pytest.raises(InvalidArgument, match="failure policy"):
        run_operation(Scripted, failure_policy="never")

    class Needs(Scripted):
        needs_table = True

    with pytest.raises(InvalidArgument, match="scripted needs a table"):
        run_operation(Needs)


def test_temporary_files_are_removed_with_the_result_and_a_given_folder_stays(tmp_path: Path) -> None:
    class Writes(Scripted):
        Result = None
        staged_output = "keep"

        def act(self, what: str, partition: PartitionPlan, ctx: JobContext) -> Any:
            (Path(ctx.stage) / "out").write_text("x")
            return ctx.stage

    run = run_operation(Writes, partitions=PLAN[:1])
    folder = run.folder
    assert (Path(run.job("a").result) / "out").read_text() == "x"
    assert Path(run.job("a").result).is_relative_to(folder)
    del run
    gc.collect()
    assert not folder.exists()
    run = run_operation(Writes, partitions=PLAN[:1], folder=tmp_path)
    assert Path(run.job("a").result).is_relative_to(tmp_path)


def test_an_interrupt_does_not_fail_the_job() -> None:
    stopped = threading.Event()

    class Slow(Scripted):
        def act(self, what: str, partition: PartitionPlan, ctx: JobContext) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            while not ctx.cancelled:
                threading.Event().wait(0.01)
            stopped.set()
            ctx.check_cancelled()

    with pytest.raises(KeyboardInterrupt):
        run_operation(Slow, partitions=PLAN[:1])
    assert stopped.wait(10)


def test_the_audit_finds_nothing_in_the_operations_keys() -> None:
    """The invariants hold for each revision, as in a cluster."""
    store = ModelStore()
    for behavior in (Scripted, Batches):
        for arg in ({}, {"does": {"a": "once", "b": "verdict", "c": "error"}}, {"completes": "error"}):
            for policy in ("collect_all", "fail_fast"):
                run_operation(behavior, arg, partitions=PLAN, store=store, failure_policy=policy)
    assert check(Keys(), store.history) == []


class CopyArg(BaseModel):
    text: str = "one\ntwo\n"


class CopyResult(BaseModel):
    output: StagedOutput


class CopyReport(BaseModel):
    rows: int
    text: str


class Copying(Behavior):
    """Stages a file in each job, and reads all of them in completion."""

    type_name = "copying"
    Arg = CopyArg
    Result = CopyResult
    Report = CopyReport
    staged_output = "remove"

    def start_or_resume_job(self, arg: CopyArg, partition: PartitionPlan, ctx: JobContext) -> CopyResult:
        (Path(ctx.stage) / "rows.txt").write_text(f"{partition.name}\n{arg.text}")
        if ctx.attempt == 1:
            raise RuntimeError("the first attempt fails after it has written its file")
        return CopyResult(output=ctx.manifest({"rows.txt": 3}))

    def complete_operation(
        self, arg: CopyArg, table: TableRecord | None, summary: Summary, ctx: JobContext
    ) -> CopyReport:
        rows, texts = 0, []
        for row in summary.outcomes():
            output = CopyResult.model_validate(row.result).output
            staged = ctx.staged(row, output)
            for file in staged.files:
                staged.check(file)
                texts.append(staged.read(file, limit=1 << 20).decode())
            rows += output.rows or 0
        return CopyReport(rows=rows, text="".join(texts))


def test_F28_staged_output_is_read_by_its_manifest_and_then_removed(tmp_path: Path) -> None:
    run = run_operation(Copying, {"text": "x\n"}, partitions=PLAN[:2], folder=tmp_path)
    assert run.state == "success", run.errors
    assert run.report == {"rows": 6, "text": "a\nx\nb\nx\n"}
    assert [one.result["output"]["files"] for one in run.jobs] == [1, 1]
    assert not [path for path in tmp_path.rglob("*") if path.name == "rows.txt"]


def test_F28_output_that_users_read_stays_and_that_of_failed_attempts_goes(tmp_path: Path) -> None:
    class Keeping(Copying):
        staged_output = "keep"
        complete_operation = Behavior.complete_operation

    run = run_operation(Keeping, partitions=PLAN[:1], folder=tmp_path)
    assert run.state == "success", run.errors
    assert [path.parent.name for path in tmp_path.rglob("rows.txt")] == [
        path.parent.name for path in tmp_path.rglob("distop-manifest.json")
    ]
    assert len(list(tmp_path.rglob("rows.txt"))) == 1


def test_a_behavior_that_declares_no_staged_output_has_no_stage() -> None:
    class Undeclared(Copying):
        staged_output = "refuse"
        complete_operation = Behavior.complete_operation

    run = run_operation(Undeclared, partitions=PLAN[:1])
    assert run.state == "failed"
    assert "declares no staged output: set staged_output to 'remove' or 'keep' in its class" in str(run.errors[0])


def test_a_wrong_declaration_of_staged_output_is_refused() -> None:
    class Wrong(Copying):
        staged_output = "always"  # type: ignore[assignment]

    with pytest.raises(InvalidArgument, match="staged_output is 'always', but must be one of refuse, remove, keep"):
        Wrong.declaration()

"""``compact`` on Delta tables, without a JVM: rows stay the same, whatever other writers and crashes do."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from distop.behavior import JobFailed, Summary, TableRecord, select
from distop.errors import InvalidArgument, UnsafePath
from distop.storage.deletion import Place
from distop.tables.commits import CommitUnknown, GroupStatus, Marks
from distop.tables.delta import delta_replacer
from distop.tables.delta.delta_replacer import DeltaReplacer
from distop.tables.delta.log_publisher import LogPublisher
from distop.tables.reading import arrow_copy
from distop.tables.staged_files import StagedFiles
from distop.testing import MemoryProgress
from distop_behaviors.compact import Compact, CompactTableJob
from distop_behaviors.compact.compact_argument import CompactArgument
from distop_behaviors.compact.group_committer import REASONS, GroupCommitter
from distop_behaviors.compact.group_rewrite import GroupRewrite
from tests.support.context import FakeContext, Ran, complete, run_jobs, run_operation
from tests.support.delta_logs import DeltaLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.behavior import OutcomeRow, PartitionPlan

SMALL = {"target_bytes": 1 << 20, "min_input_files": 2}


def table_of(first: int, count: int = 50, **more: Any) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"id": list(ids), "c": [None if i % 7 == 0 else f"text {i}" for i in ids], **more})


class Bench:
    """A Delta table of many small files, and operations on it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "t"
        self.work = folder / "work"
        self.work.mkdir()
        self.record = TableRecord("t", "delta", str(self.path))
        self.number = 0

    def append(self, *firsts: int, **given: Any) -> Bench:
        for first in firsts:
            write_deltalake(self.path, table_of(first), mode="append", **given)
        return self

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.path)

    @property
    def files(self) -> list[str]:
        return sorted(self.table.file_uris())

    @property
    def rows(self) -> Counter[tuple[Any, ...]]:
        """The rows as delta-rs reads them, as a multiset."""
        found = self.table.to_pyarrow_table()
        return Counter(tuple(row[name] for name in sorted(row)) for row in found.to_pylist())

    def context(self) -> FakeContext:
        ctx = FakeContext(self.work, self.record)
        ctx.operation = f"t/compact/{self.number}"
        ctx.progress = MemoryProgress()
        return ctx

    def compact(self, **arg: Any) -> Ran:
        self.number += 1
        return run_operation(Compact(), self.record, {**SMALL, **arg}, lambda _: self.context())

    def plan(self, **arg: Any) -> tuple[CompactArgument, list[PartitionPlan], str]:
        self.number += 1
        argument, ctx = CompactArgument.model_validate({**SMALL, **arg}), self.context()
        planned = Compact().partitions(self.record, argument, ctx)
        return argument, select(Compact().jobs(argument, planned.partitions, None, ctx), None), planned.version

    def run(self, argument: CompactArgument, plans: list[PartitionPlan]) -> list[OutcomeRow]:
        return run_jobs(Compact(), argument, plans, self.context())

    def complete(self, argument: CompactArgument, plans: list[PartitionPlan], rows: list[OutcomeRow]) -> Ran:
        return complete(Compact(), argument, self.record, rows, plans, self.context(), version="")

    def staged(self) -> list[Path]:
        """The data files below the folder of staged files, whether they are in the table or not."""
        return sorted((self.path / "distop-staged").rglob("*.parquet"))

    def commits(self) -> list[dict[str, Any]]:
        return [one for one in self.table.history() if one["operation"] == "distop compact"]


def groups_of(ran: Ran) -> dict[str, int]:
    """The numbers of groups in a report that are not 0."""
    return {name: count for name, count in ran.report["groups"].items() if count}


class Killed(BaseException):
    """The process ends here."""


def kill_at(patch: pytest.MonkeyPatch, owner: Any, method: str, moment: str, number: int = 1) -> None:
    """Raise Killed before or after call ``number`` of a method, and let all other calls through."""
    original, calls = getattr(owner, method), [0]

    def wrapped(self: Any, *args: Any, **given: Any) -> Any:
        calls[0] += 1
        if calls[0] != number:
            return original(self, *args, **given)
        if moment == "after":
            original(self, *args, **given)
        raise Killed

    patch.setattr(owner, method, wrapped)


def at_commit(patch: pytest.MonkeyPatch, act: Callable[[], Any], number: int = 1) -> None:
    """Act as another writer just before the commit of this number, after the committer has loaded the table."""
    original, calls = DeltaReplacer.commit, [0]

    def wrapped(self: DeltaReplacer, *args: Any) -> str:
        calls[0] += 1
        if calls[0] == number:
            act()
        return original(self, *args)

    patch.setattr(DeltaReplacer, "commit", wrapped)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def days(bench: Bench) -> Bench:
    """A table of six partitions with three small files each."""
    for n in range(3):
        rows = pa.concat_tables(table_of(100 * day + 10 * n, 10, day=[f"d{day}"] * 10) for day in range(6))
        write_deltalake(bench.path, rows, mode="append", partition_by=["day"])
    return bench


def test_small_files_become_one_file_with_the_same_rows(bench: Bench) -> None:
    bench.append(0, 50, 100, 150)
    rows = bench.rows
    ran = bench.compact()
    assert ran.report["verdict"] == "compacted"
    assert groups_of(ran) == {"planned": 1, "committed": 1}
    assert (ran.report["before"]["files"], ran.report["after"]["files"]) == (4, 1)
    assert ran.report["before"]["rows"] == ran.report["after"]["rows"] == 200
    assert ran.report["bytes_read"] == ran.report["before"]["bytes"] > 0
    assert ran.report["bytes_written"] == ran.report["after"]["bytes"] > 0
    assert bench.rows == rows
    assert len(bench.files) == 1
    (commit,) = bench.commits()
    assert commit["operationParameters"]["distop.operation"] == "t/compact/1"
    assert commit["operationParameters"]["distop.batch"] == "0"


def test_the_commit_changes_no_data_and_has_a_transaction(bench: Bench) -> None:
    bench.append(0, 50)
    bench.compact()
    text = (bench.path / "_delta_log" / f"{2:020}.json").read_text()
    actions = [json.loads(line) for line in text.splitlines()]
    assert [next(iter(action)) for action in actions] == ["commitInfo", "txn", "remove", "remove", "add"]
    assert not any(action[kind]["dataChange"] for action in actions for kind in ("add", "remove") if kind in action)
    assert actions[1]["txn"] == {**actions[1]["txn"], "appId": "distop/t/compact/1/0", "version": 1}
    found = json.loads(actions[-1]["add"]["stats"])
    assert found["numRecords"] == 100
    assert found["minValues"] == {"id": 0, "c": "text 1"}
    assert found["maxValues"] == {"id": 99, "c": "text 99"}
    assert found["nullCount"] == {"id": 0, "c": 15}


def test_a_second_run_does_nothing(days: Bench) -> None:
    first = days.compact()
    version, files, rows = days.table.version(), days.files, days.rows
    second = days.compact()
    assert (first.report["verdict"], second.report["verdict"]) == ("compacted", "nothing to do")
    assert (days.table.version(), days.files, days.rows) == (version, files, rows)


def test_a_group_is_split_into_files_near_the_target(bench: Bench) -> None:
    noise = random.Random(1)
    for first in range(0, 60_000, 10_000):
        texts = [noise.randbytes(20).hex() for _ in range(10_000)]
        write_deltalake(bench.path, pa.table({"id": range(first, first + 10_000), "c": texts}), mode="append")
    total = sum(file.stat().st_size for file in bench.path.glob("*.parquet"))
    rows, target = bench.rows, total // 3
    ran = bench.compact(target_bytes=target, min_input_files=2)
    assert ran.report["after"]["sizes"]["around_target"] == 3, ran.report
    assert ran.report["after"]["files"] == 3
    assert bench.rows == rows
    assert bench.compact(target_bytes=target, min_input_files=2).report["verdict"] == "nothing to do"


def test_an_unsorted_group_keeps_the_order_of_its_rows(bench: Bench) -> None:
    chance = random.Random(3)
    for _ in range(4):
        write_deltalake(bench.path, pa.table({"id": chance.sample(range(1000), 50)}), mode="append")

    def ids(path: str) -> list[int]:
        return [int(str(one)) for one in pq.ParquetFile(path).read()["id"].to_pylist()]

    argument, plans, _ = bench.plan()
    expected = [one for path, _, _ in plans[0].files for one in ids(path)]
    bench.complete(argument, plans, bench.run(argument, plans))
    (new,) = bench.files
    assert ids(new) == expected


def test_groups_are_committed_in_batches_while_others_run(days: Bench) -> None:
    rows = days.rows
    argument, plans, _ = days.plan(commit_every=2)
    assert len(plans) == 6
    outcomes = days.run(argument, plans[:2])
    assert len(days.commits()) == 1
    assert [row.result["state"] for row in outcomes] == ["staged", "committed"]
    assert days.rows == rows
    outcomes += days.run(argument, plans[2:])
    assert len(days.commits()) == 3
    ran = days.complete(argument, plans, outcomes)
    assert (ran.report["verdict"], ran.report["commits"], groups_of(ran)) == (
        "compacted",
        3,
        {"planned": 6, "committed": 6},
    )
    assert [one["operationParameters"]["distop.batch"] for one in reversed(days.commits())] == ["0,1", "2,3", "4,5"]
    assert days.rows == rows


def test_a_slow_group_does_not_delay_the_commits_of_others(days: Bench) -> None:
    """Batches were fixed windows of consecutive groups."""
    argument, plans, _ = days.plan(commit_every=2)
    outcomes = days.run(argument, [plans[n] for n in (0, 2, 5, 3)])
    batches = [one["operationParameters"]["distop.batch"] for one in reversed(days.commits())]
    assert batches == ["0,2", "3,5"]
    assert [row.result["state"] for row in outcomes] == ["staged", "committed", "staged", "committed"]
    outcomes += days.run(argument, [plans[n] for n in (4, 1)])
    ran = days.complete(argument, plans, outcomes)
    assert (ran.report["commits"], groups_of(ran)) == (3, {"planned": 6, "committed": 6})


def test_a_group_that_cannot_be_committed_does_not_delay_the_commits_of_others(days: Bench) -> None:
    argument, plans, _ = days.plan(commit_every=2)
    days.run(argument, plans[:1])
    days.table.delete("day = 'd0'")
    days.run(argument, plans[1:3])
    assert [one["operationParameters"]["distop.batch"] for one in days.commits()] == ["1,2"]


def test_two_jobs_do_not_commit_the_same_groups(days: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job ends while a batch is committed."""
    argument, plans, _ = days.plan(commit_every=2)
    states: list[str] = []
    at_commit(monkeypatch, lambda: states.extend(row.result["state"] for row in days.run(argument, plans[2:3])))
    days.run(argument, plans[:2])
    assert (states, len(days.commits())) == (["staged"], 1)


def test_without_batches_there_is_one_commit_at_the_end(days: Bench) -> None:
    ran = days.compact(commit_every=None)
    assert (ran.report["commits"], groups_of(ran)) == (1, {"planned": 6, "committed": 6})


def test_a_reused_group_has_the_digest_of_its_record(days: Bench) -> None:
    argument, plans, _ = days.plan(commit_every=None)
    first, again = (days.run(argument, plans[:1])[0].result for _ in range(2))
    assert (first["reused"], again["reused"]) == (False, True)
    (record,) = days.work.rglob("staged.json")
    assert first["record"] == again["record"] == hashlib.blake2b(record.read_bytes(), digest_size=16).hexdigest()


def test_a_dry_run_changes_nothing(days: Bench) -> None:
    version, files = days.table.version(), sorted(days.path.rglob("*"))
    ran = days.compact(dry_run=True)
    assert (ran.report["verdict"], groups_of(ran), ran.report["before"]["files"]) == ("planned", {"planned": 6}, 18)
    assert (days.table.version(), sorted(days.path.rglob("*"))) == (version, files)


def test_named_partitions_are_compacted_alone(days: Bench) -> None:
    argument, ctx = CompactArgument.model_validate(SMALL), days.context()
    planned = Compact().partitions(days.record, argument, ctx)
    names = [one.name for one in Compact().jobs(argument, planned.partitions, ["day=d1", "day=d4#0"], ctx)]
    assert names == ["day=d1#0", "day=d4#0"]
    with pytest.raises(InvalidArgument, match="no partition 'day=d9'"):
        Compact().jobs(argument, planned.partitions, ["day=d9"], ctx)


def test_a_condition_chooses_partitions(days: Bench) -> None:
    rows = days.rows
    ran = days.compact(where="day >= 'd1' and day < 'd3'")
    assert groups_of(ran) == {"planned": 2, "committed": 2}
    assert len(days.files) == 6 * 3 - 2 * 2
    assert days.compact(where="day in ('d1', 'd2', 'd9')").report["verdict"] == "nothing to do"
    argument, ctx = CompactArgument.model_validate({**SMALL, "where": "not day = 'd0'"}), days.context()
    planned = Compact().partitions(days.record, argument, ctx)
    assert [one.name for one in Compact().jobs(argument, planned.partitions, ["day=d0"], ctx)] == ["@nothing"]
    assert days.rows == rows


def test_a_condition_on_another_column_is_refused(days: Bench) -> None:
    version, files = days.table.version(), sorted(days.path.rglob("*"))
    with pytest.raises(InvalidArgument, match=r"where names 'id', which is not a partition column of the table 't'"):
        days.compact(where="day = 'd1' and id = 3")
    assert (days.table.version(), sorted(days.path.rglob("*"))) == (version, files)


def test_the_alias_is_the_same_operation(bench: Bench) -> None:
    bench.append(0, 50)
    bench.number = 1
    ran = run_operation(CompactTableJob(), bench.record, SMALL, lambda _: bench.context())
    assert ran.report["verdict"] == "compacted"
    assert set(CompactTableJob.conflicts_with) == {"apply", "compact"}


# ---------------------------------------------------------------------- other writers


WRITERS = {
    "append": lambda bench: bench.append(1000),
    "delete rows": lambda bench: bench.table.delete("id = 3"),
    "update rows": lambda bench: bench.table.update(updates={"c": "'new'"}, predicate="id = 3"),
    "overwrite": lambda bench: write_deltalake(bench.path, table_of(2000), mode="overwrite"),
    "new column": lambda bench: write_deltalake(
        bench.path, table_of(3000, extra=[1] * 50), mode="append", schema_mode="merge"
    ),
    "compaction": lambda bench: bench.table.optimize.compact(),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("moment", ["before the job", "before the commit"])
def test_a_concurrent_writer_loses_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, moment: str
) -> None:
    """The rows are those that the other writer alone would have left."""
    alone_folder = tmp_path / "alone"
    alone_folder.mkdir()
    alone = Bench(alone_folder).append(0, 50, 100)
    WRITERS[writer](alone)
    bench.append(0, 50, 100)
    argument, plans, _ = bench.plan()
    if moment == "before the job":
        WRITERS[writer](bench)
    else:
        at_commit(monkeypatch, lambda: WRITERS[writer](bench))
    ran = bench.complete(argument, plans, bench.run(argument, plans))
    assert bench.rows == alone.rows
    done = ran.report["groups"]["committed"]
    assert done == (0 if writer in ("overwrite", "compaction") else 1), ran.message
    # Of the files below the table, no staged one is left that the table does not have.
    live = {uri.rpartition("/")[2] for uri in bench.files}
    assert {path.name for path in bench.staged()} <= live


def test_a_conflict_redoes_its_group_alone(days: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """iceberg#9521: one conflicting group made the commit of all groups fail."""
    expected = days.rows
    at_commit(monkeypatch, lambda: days.table.delete("id = 105"))
    ran = days.compact(commit_every=6)
    expected.subtract([key for key in expected if key[2] == 105])
    assert days.rows == +expected
    assert groups_of(ran) == {"planned": 6, "committed": 6, "redone": 1}
    assert ran.report["bytes_read"] > ran.report["before"]["bytes"], "the group was rewritten twice"
    assert ran.report["bytes_written"] > ran.report["after"]["bytes"]
    assert [one["operationParameters"]["distop.batch"] for one in reversed(days.commits())] == ["0,2,3,4,5", "1"]


def test_zero_commits_are_no_success(bench: Bench) -> None:
    """iceberg#9611: a rewrite whose commits all failed was reported as success."""
    bench.append(0, 50)
    argument, plans, _ = bench.plan()
    outcomes = bench.run(argument, plans)
    write_deltalake(bench.path, table_of(7), mode="overwrite")
    ran = bench.complete(argument, plans, outcomes)
    assert "nothing was committed" in ran.message
    assert (ran.report["verdict"], ran.report["commits"]) == ("failed", 0)
    assert ran.report["left_out"][0]["reason"] == "other writers have removed or rewritten the files of the group"


def test_a_doomed_group_is_not_rewritten(days: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """iceberg#6579: a group that could not be committed any more was still rewritten."""
    argument, plans, _ = days.plan()
    days.table.delete("day = 'd0'")

    def rewrite(*_: Any) -> None:
        raise AssertionError("the group must not be read")

    monkeypatch.setattr(DeltaReplacer, "rewrite", rewrite)
    (row,) = days.run(argument, plans[:1])
    assert (row.result["state"], row.result["reason"]) == (
        "conflicted",
        "another writer has removed files of the group",
    )


def test_a_group_that_becomes_doomed_is_given_up(days: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """iceberg#6579, while the group is rewritten."""
    monkeypatch.setattr("distop_behaviors.compact.group_rewrite.CHECK_EVERY", 0.0)
    original, calls = arrow_copy.copy, [0]

    def copy(*args: Any) -> Any:
        calls[0] += 1
        days.table.delete("day = 'd0'")
        return original(*args)

    monkeypatch.setattr(arrow_copy, "copy", copy)
    argument, plans, _ = days.plan()
    (row,) = days.run(argument, plans[:1])
    assert (row.result["state"], row.result["reason"]) == ("conflicted", REASONS[GroupStatus.REMOVED])
    assert (calls[0], list(days.work.rglob("staged.json"))) == (1, [])


# ---------------------------------------------------------------------- crashes and lost answers


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "method"),
    [(DeltaReplacer, "rewrite"), (StagedFiles, "offer"), (StagedFiles, "decide"), (DeltaReplacer, "commit")],
    ids=["rewrite", "offer", "decide", "commit"],
)
def test_a_killed_job_is_repeated_without_a_trace(days: Bench, owner: Any, method: str, moment: str) -> None:
    rows, behavior = days.rows, Compact()
    argument, plans, _ = days.plan(commit_every=2)
    outcomes = []
    for plan in plans:
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, owner, method, moment)
            ctx = days.context()
            ctx.partition = plan
            with suppress(Killed):
                behavior.start_or_resume_job(argument, plan, ctx)
        behavior.cancel_job_and_cleanup(argument, plan, ctx)
        again = days.context()
        again.fence = 2
        outcomes += run_jobs(behavior, argument, [plan], again)
        assert days.rows == rows
    ran = days.complete(argument, plans, outcomes)
    assert groups_of(ran) == {"planned": 6, "committed": 6}
    assert days.rows == rows
    assert len(days.files) == 6
    # Offered files are reused, others are removed: nothing is written twice.
    assert len(days.staged()) == 6
    assert len(days.commits()) == 3


@pytest.mark.parametrize("fence", [1, 2], ids=["same claim", "new claim"])
def test_a_cleanup_before_an_attempt_does_not_stop_it(days: Bench, monkeypatch: pytest.MonkeyPatch, fence: int) -> None:
    """An executor cleans up in the context of the next attempt, and after the death of a child in that of the same."""
    behavior = Compact()
    argument, plans, _ = days.plan(commit_every=1)
    ctx = days.context()
    ctx.partition = plans[0]
    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        kill_at(patch, DeltaReplacer, "rewrite", "after")
        behavior.start_or_resume_job(argument, plans[0], ctx)
    again = days.context()
    again.partition, again.fence = plans[0], fence
    behavior.cancel_job_and_cleanup(argument, plans[0], again)
    result = behavior.start_or_resume_job(argument, plans[0], again)
    assert result.state == "committed"
    assert len(days.staged()) == (1 if fence == 1 else 2)
    days.complete(argument, plans[:1], run_jobs(behavior, argument, plans[:1], again))
    assert len(days.staged()) == 1


def test_jobs_of_a_large_batch_do_not_read_all_its_offers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job read the records of all groups that were offered before it: 78 reads for these 12 groups."""
    days = range(12)
    for n in range(2):
        write_deltalake(bench.path, table_of(100 * n, 12, day=list(days)), mode="append", partition_by=["day"])
    reads, original = list[int](), StagedFiles.offered

    def offered(self: StagedFiles, *, withdrawn: bool = False) -> Any:
        reads.append(1)
        return original(self, withdrawn=withdrawn)

    argument, plans, _ = bench.plan(commit_every=12)
    with monkeypatch.context() as patch:
        patch.setattr(StagedFiles, "offered", offered)
        outcomes = bench.run(argument, plans)
    assert (len(plans), len(bench.commits())) == (12, 1)
    assert 12 <= len(reads) <= 2 * 12
    assert groups_of(bench.complete(argument, plans, outcomes)) == {"planned": 12, "committed": 12}


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_completion_is_repeated(days: Bench, moment: str, number: int) -> None:
    rows = days.rows
    argument, plans, _ = days.plan(commit_every=2)
    with pytest.MonkeyPatch.context() as patch:
        # The jobs commit nothing, as if their batches had always been incomplete.
        patch.setattr("distop_behaviors.compact.group_rewrite.GroupRewrite.commit_batch", lambda *_: None)
        outcomes = days.run(argument, plans)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, DeltaReplacer, "commit", moment, number)
        with pytest.raises(Killed):
            days.complete(argument, plans, outcomes)
    assert days.rows == rows
    ran = days.complete(argument, plans, outcomes)
    assert groups_of(ran) == {"planned": 6, "committed": 6}
    assert (ran.report["commits"], len(days.commits()), len(days.files)) == (3, 3, 6)
    assert ran.report["after"]["rows"] == 180
    assert days.rows == rows


@pytest.mark.parametrize("landed", [True, False])
def test_an_unknown_outcome_is_settled_by_reading(bench: Bench, monkeypatch: pytest.MonkeyPatch, landed: bool) -> None:
    """ClickHouse#115390: files of a commit whose outcome is unknown must stay, and must not be added twice."""
    bench.append(0, 50)
    rows, original, calls = bench.rows, DeltaReplacer.commit, [0]

    def commit(self: DeltaReplacer, *args: Any) -> str:
        calls[0] += 1
        if calls[0] > 1:
            return original(self, *args)
        if landed:
            original(self, *args)
        raise CommitUnknown("the answer was lost")

    monkeypatch.setattr(DeltaReplacer, "commit", commit)
    ran = bench.compact()
    assert groups_of(ran) == {"planned": 1, "committed": 1}
    assert (len(bench.commits()), calls[0]) == (1, 1 if landed else 2)
    assert bench.rows == rows


def test_a_late_answer_after_another_commit_is_settled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.append(0, 50)
    original, calls = DeltaReplacer.commit, [0]

    def commit(self: DeltaReplacer, *args: Any) -> str:
        calls[0] += 1
        original(self, *args)
        bench.append(500, 550)
        bench.table.optimize.compact()  # the new file is replaced again
        raise CommitUnknown("the answer was lost")

    monkeypatch.setattr(DeltaReplacer, "commit", commit)
    ran = bench.compact()
    assert (groups_of(ran), calls[0]) == ({"planned": 1, "committed": 1}, 1)
    assert sum(bench.rows.values()) == 200


def test_committed_files_stay_if_the_log_with_their_commit_was_cleaned_up(bench: Bench) -> None:
    """No commit shows then that the group was committed, and yet the table has the new files."""
    bench.append(0, 50)
    argument, plans, _ = bench.plan(commit_every=1)
    outcomes = bench.run(argument, plans)
    assert [row.result["state"] for row in outcomes] == ["committed"]
    bench.append(100)
    bench.table.create_checkpoint()
    last = bench.table.version()
    for commit in (bench.path / "_delta_log").glob("*.json"):
        if commit.stem.isdigit() and int(commit.stem) < last:
            commit.unlink()
    rows, staged = bench.rows, bench.staged()
    ran = bench.complete(argument, plans, outcomes)
    assert bench.staged() == staged
    assert bench.rows == rows
    assert ran.report["left_bytes"] == staged[0].stat().st_size


def test_files_of_an_earlier_version_stay(bench: Bench) -> None:
    """The table was restored, and another attempt at the group was committed: an earlier version needs the first."""
    bench.append(0, 50)
    argument, plans, _ = bench.plan(commit_every=1)
    bench.run(argument, plans)
    version, rows = bench.table.version(), bench.rows
    bench.table.restore(version - 1)
    again = bench.context()
    again.fence = 2
    again.partition = plans[0]
    rewrite = GroupRewrite(argument, again, "x")
    stage = rewrite.committer.stage_at(again.stage_place)
    stage.begin()
    replacement = rewrite.rewrite_and_offer(plans[0], stage)
    # A process that had looked at the table before it was restored, and at its version afterwards.
    rewrite.replacer.commit(rewrite.replacer.load(), [replacement], Marks(again.operation, "2"))
    bench.complete(argument, plans, run_jobs(Compact(), argument, plans, again))
    assert len(bench.staged()) == 2
    assert bench.rows == rows
    assert DeltaTable(bench.path, version=version).to_pyarrow_table().num_rows == 100


def test_iceberg_12545_files_of_commits_that_failed_are_removed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster writer made each commit of a compaction fail, and the new files of all attempts stayed as orphans."""
    bench.append(0, 50)
    original, calls = DeltaReplacer.commit, [0]

    def commit(self: DeltaReplacer, *args: Any) -> str:
        calls[0] += 1
        bench.table.update(updates={"c": f"'{calls[0]}'"}, predicate="id IN (3, 60)")
        return original(self, *args)

    monkeypatch.setattr(DeltaReplacer, "commit", commit)
    ran = bench.compact()
    assert calls[0] > 0
    assert (ran.report["verdict"], ran.report["left_bytes"]) == ("failed", 0)
    assert bench.staged() == []
    assert sum(bench.rows.values()) == 100


@pytest.mark.parametrize("moment", ["before the offer is withdrawn", "while the files are removed"])
def test_a_process_that_wakes_up_after_the_end_commits_no_removed_files(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The files of a group that others have removed go at the end. But somebody restores the table at this moment."""
    bench.append(0, 50)
    rows = bench.rows
    argument, plans, _ = bench.plan()
    outcomes = bench.run(argument, plans)
    version = bench.table.version()
    write_deltalake(bench.path, table_of(7), mode="overwrite")
    ctx = bench.context()
    ctx.partition = plans[0]
    committer = GroupRewrite(argument, ctx, "paused").committer
    (stage, paused), commit, held = committer.offered(0)[0], LogPublisher.commit, list[Any]()

    def hold(self: LogPublisher, *args: Any) -> None:
        """The paused process has loaded the table, and has looked at everything: only its request is missing."""
        held.append((self, *args))
        raise Killed

    def wake(action: Callable[[], Any]) -> Any:
        bench.table.restore(version)
        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            patch.setattr(LogPublisher, "commit", hold)
            committer.commit([paused])
        done = action()
        for request in held:
            commit(*request)
        return done

    name = "withdraw" if moment.startswith("before") else "remove_withdrawn"
    original = getattr(StagedFiles, name)
    monkeypatch.setattr(StagedFiles, name, lambda self, *args: wake(lambda: original(self, *args)))
    bench.complete(argument, plans, outcomes)
    assert (stage.place, len(held)) == (paused.stage.place, 1 if moment.startswith("before") else 0)
    assert bench.rows == rows
    assert len(bench.staged()) == len(held)


def test_a_restored_group_is_not_committed_again(days: Bench) -> None:
    """RESTORE during the run undoes the first batch: another commit of its files would undo RESTORE."""
    rows = days.rows
    argument, plans, _ = days.plan(commit_every=2)
    outcomes = days.run(argument, plans[:2])
    version = days.table.version()
    days.table.restore(version - 1)
    outcomes += days.run(argument, plans[2:])
    ran = days.complete(argument, plans, outcomes)
    assert groups_of(ran) == {"planned": 6, "committed": 4, "conflicted": 2}
    assert (ran.report["verdict"], ran.report["commits"]) == ("partial", 2)
    assert {one["reason"] for one in ran.report["left_out"]} == {REASONS[GroupStatus.ROLLED_BACK]}
    assert [one["operationParameters"]["distop.batch"] for one in reversed(days.commits())] == ["0,1", "2,3", "4,5"]
    assert (days.rows, len(days.files)) == (rows, 10)
    assert DeltaTable(days.path, version=version).to_pyarrow_table().num_rows == sum(rows.values())


@pytest.mark.parametrize("again", [False, True])
def test_a_repeated_attempt_leaves_a_restored_group(days: Bench, again: bool) -> None:
    """The executor was killed after its commit. ``again``: RESTORE was undone by another RESTORE."""
    argument, plans, _ = days.plan(commit_every=1)
    days.run(argument, plans[:1])
    version = days.table.version()
    days.table.restore(version - 1)
    if again:
        days.table.restore(version)
    (row,) = days.run(argument, plans[:1])
    if again:
        assert row.result["state"] == "committed"
    else:
        assert (row.result["state"], row.result["reason"]) == ("conflicted", REASONS[GroupStatus.ROLLED_BACK])
    assert len(days.commits()) == 1


def test_a_commit_of_an_unknown_outcome_that_was_restored_is_not_repeated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.append(0, 50)
    rows, original, calls = bench.rows, DeltaReplacer.commit, [0]

    def commit(self: DeltaReplacer, *args: Any) -> str:
        calls[0] += 1
        original(self, *args)
        bench.table.restore(bench.table.version() - 1)
        raise CommitUnknown("the answer was lost")

    monkeypatch.setattr(DeltaReplacer, "commit", commit)
    ran = bench.compact()
    assert (calls[0], ran.report["verdict"]) == (1, "failed")
    assert REASONS[GroupStatus.ROLLED_BACK] in ran.message
    assert (bench.rows, len(bench.files)) == (rows, 2)


def test_a_table_that_is_restored_to_a_version_before_the_plan_is_compacted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group is compared with the restored version: its rows are what it had, and nothing else comes back."""
    bench.append(0, 50)
    rows = bench.rows
    bench.append(100)
    argument, plans, _ = bench.plan()
    at_commit(monkeypatch, lambda: bench.table.restore(1))
    ran = bench.complete(argument, plans, bench.run(argument, plans))
    assert (groups_of(ran), len(bench.files)) == ({"planned": 1, "committed": 1, "redone": 1}, 1)
    assert bench.rows == rows


def test_new_files_of_a_commit_that_the_log_no_longer_has_are_never_committed_again(bench: Bench) -> None:
    """The commit was restored, and the log cleaned up: VACUUM may delete its files. Only new files are safe then."""
    bench.append(0, 50)
    rows = bench.rows
    argument, plans, _ = bench.plan(commit_every=1)
    outcomes = bench.run(argument, plans)
    old = bench.staged()
    bench.table.restore(bench.table.version() - 1)
    bench.append(100)
    bench.table.create_checkpoint()
    last = bench.table.version()
    for commit in (bench.path / "_delta_log").glob("*.json"):
        if commit.stem.isdigit() and int(commit.stem) < last:
            commit.unlink()
    delta_replacer._commits.clear()  # of another process
    ran = bench.complete(argument, plans, outcomes)
    assert groups_of(ran) == {"planned": 1, "committed": 1, "redone": 1}
    assert not {uri.rpartition("/")[2] for uri in bench.files} & {path.name for path in old}
    assert sum(bench.rows.values()) == sum(rows.values()) + 50


@pytest.mark.parametrize("feature", ["rowTracking", "clustering"])
def test_a_table_that_got_a_refused_feature_meanwhile_is_not_changed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    """With row tracking, every file needs row ids, which the new files do not have."""
    bench.append(0, 50)
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": [feature, "domainMetadata"]}

    def enable() -> None:
        name = f"{bench.table.version() + 1:020}.json"
        (bench.path / "_delta_log" / name).write_text(json.dumps({"protocol": protocol}))

    at_commit(monkeypatch, enable)
    with pytest.raises(InvalidArgument, match=f"has the feature {feature}"):
        bench.compact()
    assert not any(path.read_text().count('"distop compact"') for path in (bench.path / "_delta_log").glob("*.json"))


def test_a_cancelled_operation_keeps_what_was_committed(days: Bench) -> None:
    rows = days.rows
    argument, plans, _ = days.plan(commit_every=2)
    outcomes = days.run(argument, plans[:3])
    summary = Summary("cancelled", 6, 3, 0, lambda: iter(outcomes), plan=lambda: iter(plans))
    report = Compact().complete_operation(argument, days.record, summary, days.context())
    assert (report.verdict, report.commits) == ("cancelled", 1)
    assert (report.groups.committed, report.groups.unfinished) == (2, 4)
    assert report.left_bytes > 0  # the third group: a paused process could still commit it
    assert days.rows == rows


def test_offered_files_are_not_removed_and_discarded_ones_not_offered(
    days: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    argument, plans, _ = days.plan()
    days.run(argument, plans[:1])
    ctx = days.context()
    ctx.partition = plans[0]
    Compact().cancel_job_and_cleanup(argument, plans[0], ctx)
    assert len(days.staged()) == 1
    offer, stages = StagedFiles.offer, list[StagedFiles]()

    def discarded(self: StagedFiles, replacement: Any) -> str | None:
        stages.append(self)
        assert self.decide("discarded") == "discarded"  # by the cleanup of an attempt that seems to be dead
        return offer(self, replacement)

    monkeypatch.setattr(StagedFiles, "offer", discarded)
    with pytest.raises(RuntimeError, match="discarded before they were offered"):
        days.run(argument, plans[1:2])
    assert stages[0].offered() is None


def test_nothing_is_offered_after_the_end(days: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that was suspended before its offer wakes up after the end: a cleanup may still remove its files."""
    argument, plans, _ = days.plan(commit_every=1)
    offer, version = StagedFiles.offer, days.table.version()

    def late(self: StagedFiles, replacement: Any) -> str | None:
        summary = Summary("cancelled", 6, 0, 0, lambda: iter(()), plan=lambda: iter(plans))
        Compact().complete_operation(argument, days.record, summary, days.context())
        return offer(self, replacement)

    monkeypatch.setattr(StagedFiles, "offer", late)
    with pytest.raises(RuntimeError, match="discarded before they were offered"):
        days.run(argument, plans[:1])
    assert days.table.version() == version


@pytest.mark.parametrize("late", ["cleanup", "paused cleanup"])
def test_a_cleanup_after_the_end_removes_no_committed_files(days: Bench, late: str) -> None:
    """An executor was suspended, and its job was taken over: it cleans up when it wakes up, after all has ended.

    The decision is gone with the stage then, so that the cleanup could create another one.
    """
    rows = days.rows
    argument, plans, _ = days.plan(commit_every=1)
    outcomes = days.run(argument, plans)
    ctx = days.context()
    ctx.partition = plans[0]
    stages = GroupRewrite(argument, ctx, "x").committer.of_attempt(ctx.stage_place)
    assert len(stages) == 1
    days.complete(argument, plans, outcomes)
    if late == "cleanup":
        Compact().cancel_job_and_cleanup(argument, plans[0], ctx)
    else:  # it had found the stage before
        assert not stages[0].discard(ctx.log)
    assert len(days.staged()) == 6
    assert days.rows == rows


def test_a_missing_new_file_is_not_committed(days: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = days.rows
    argument, plans, _ = days.plan()
    outcomes = days.run(argument, plans)
    days.staged()[0].unlink()

    def failing(*_: Any) -> None:
        raise JobFailed("the disk is full")

    monkeypatch.setattr(GroupRewrite, "rewrite_and_offer", failing)
    ran = days.complete(argument, plans, outcomes)
    assert groups_of(ran) == {"planned": 6, "committed": 5, "conflicted": 1}
    assert [one["reason"] for one in ran.report["left_out"]] == ["the disk is full"]
    assert days.rows == rows
    assert len(days.commits()) == 1


def test_a_group_whose_new_file_is_missing_is_rewritten_alone(days: Bench) -> None:
    rows = days.rows
    argument, plans, _ = days.plan()
    outcomes = days.run(argument, plans)
    lost, changed, *_ = days.staged()
    lost.unlink()
    changed.write_bytes(changed.read_bytes()[:-1])
    ran = days.complete(argument, plans, outcomes)
    assert groups_of(ran) == {"planned": 6, "committed": 6, "redone": 2}
    assert (ran.report["verdict"], ran.report["left_out"]) == ("compacted", [])
    assert days.rows == rows
    assert len(days.files) == 6


def test_of_two_attempts_the_one_whose_files_are_all_there_is_committed(
    days: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = days.rows
    argument, plans, _ = days.plan()
    with monkeypatch.context() as patch:
        patch.setattr(GroupCommitter, "offered", lambda *_: [])
        days.run(argument, plans[:1])  # by an executor that does not see what the other one has offered
        outcomes = days.run(argument, plans)
    found = GroupRewrite(argument, days.context(), "x").committer.all_offered()[plans[0].partition]
    assert len(found) == 2
    for file in days.staged():
        if str(file).startswith(f"{found[-1][0].data.location}/"):
            file.unlink()
    ran = days.complete(argument, plans, outcomes)
    assert groups_of(ran) == {"planned": 6, "committed": 6}
    assert days.rows == rows


@pytest.mark.parametrize("path", ["id=1.parquet", "distop-staged/../id=1.parquet", "distop-staged/x/id=1.parquet"])
def test_a_forged_record_adds_no_other_file(days: Bench, path: str) -> None:
    rows = days.rows
    argument, plans, _ = days.plan()
    outcomes = days.run(argument, plans)
    record = next(days.work.rglob("staged.json"))
    forged = json.loads(record.read_text())
    forged["detail"]["added"][0]["path"] = path
    record.write_text(json.dumps(forged))
    with pytest.raises(UnsafePath, match="the record of a stage has the file"):
        days.complete(argument, plans, outcomes)
    assert days.rows == rows
    assert days.commits() == []


def test_a_group_with_other_rows_fails_alone(days: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls, rows = arrow_copy.copy, [0], days.rows

    def copy(paths: Any, *args: Any) -> Any:
        calls[0] += 1
        return original(paths[1:] if calls[0] == 1 else paths, *args)

    monkeypatch.setattr(arrow_copy, "copy", copy)
    ran = days.compact()
    assert "1 of 6 groups failed, 5 were committed" in ran.message
    assert "the new files differ from their source" in ran.message
    assert groups_of(ran) == {"planned": 6, "committed": 5, "failed": 1}
    assert days.rows == rows


# ---------------------------------------------------------------------- refusals


def test_tables_that_cannot_be_compacted_are_refused(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(InvalidArgument, match='"swap": "hive" replaces them in several steps'):
        run_operation(Compact(), TableRecord("p", "parquet", str(folder)), SMALL, lambda _: bench.context())
    log = DeltaLog(bench.path).create(
        {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["rowTracking", "domainMetadata"]}
    )
    assert log.record == bench.record
    with pytest.raises(InvalidArgument, match="rowTracking: each file needs row ids"):
        bench.compact()


def test_an_unknown_writer_feature_is_refused_with_what_compacts_the_table(bench: Bench) -> None:
    DeltaLog(bench.path).create({"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["newFeature"]})
    with pytest.raises(InvalidArgument, match=r"'newFeature', .* nothing was changed; use OPTIMIZE instead"):
        bench.compact()


def test_an_unknown_column_to_sort_by_is_refused(bench: Bench) -> None:
    bench.append(0, 50)
    with pytest.raises(InvalidArgument, match=r"sort_by names 'ids' \(did you mean 'id'\?\)"):
        bench.compact(sort_by=["ids"])


def test_a_stage_outside_of_the_shared_directory_is_refused(days: Bench) -> None:
    ctx = days.context()
    with pytest.raises(UnsafePath):
        StagedFiles.of(Place("/elsewhere", "stage/x"), ctx.shared, "", str(days.path))


# ---------------------------------------------------------------------- generated tables


TYPES: dict[str, Any] = {
    "int64": lambda n: n * 7919,
    "int32": lambda n: n - 500,
    "float64": lambda n: float("nan") if n % 13 == 0 else n / 3,
    "string": lambda n: "é" * (n % 40) if n % 5 else None,
    "bool_": lambda n: n % 2 == 0,
    "date32": lambda n: n,
    "binary": lambda n: bytes([n % 256]),
}


def random_rows(chance: random.Random, columns: dict[str, str], first: int) -> pa.Table:
    count = chance.randint(1, 40)
    numbers = range(first, first + count)
    found: dict[str, Any] = {
        "id": pa.array(numbers, pa.int64()),
        "p": [f"p {n % 3}" if n % 4 else None for n in numbers],
    }
    for name, kind in columns.items():
        found[name] = pa.array([TYPES[kind](n) for n in numbers], getattr(pa, kind)())
    return pa.table(found)


def key_of(rows: Counter[tuple[Any, ...]]) -> Counter[str]:
    """Rows that can be compared: NaN differs from itself."""
    return Counter({repr(row): count for row, count in rows.items()})


@pytest.mark.parametrize("seed", range(12))
def test_generated_tables_keep_their_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random types, partitions, schema changes and deletes, with a random writer at a random commit."""
    chance = random.Random(seed)
    partitions = chance.choice([None, ["p"]])
    # delta-rs cannot partition rows with binary columns.
    kinds = sorted(TYPES) if partitions is None else sorted(TYPES.keys() - {"binary"})
    columns = {f"c{n}": kind for n, kind in enumerate(chance.sample(kinds, 3))}
    first = 0

    def write() -> None:
        nonlocal first
        rows = random_rows(chance, columns, first)
        first += rows.num_rows
        merging = {"schema_mode": "merge"} if partitions is None else {}
        write_deltalake(bench.path, rows, mode="append", partition_by=partitions, **merging)

    for step in range(chance.randint(3, 8)):
        if step and partitions is None and chance.random() < 0.3:
            bench.table.delete(f"id % {chance.randint(5, 30)} = 0")
        write()
        if partitions is None and chance.random() < 0.2:
            columns = columns | {f"d{step}": chance.choice(sorted(TYPES))}
    write()
    argument, plans, _ = bench.plan(
        commit_every=chance.choice([None, 1, 2]), target_bytes=chance.choice([4096, 1 << 20])
    )
    # delta-rs cannot delete rows of some partitioned tables.
    writer = chance.choice([write, (lambda: bench.table.delete("id % 3 = 0")) if partitions is None else write])
    expected: list[Counter[str]] = []

    def act() -> None:
        writer()
        expected.append(key_of(bench.rows))

    expected.append(key_of(bench.rows))
    at_commit(monkeypatch, act, chance.randint(1, 2))
    ran = bench.complete(argument, plans, bench.run(argument, plans))
    assert key_of(bench.rows) == expected[-1]
    if writer is write:  # an append never conflicts
        assert ran.report["verdict"] in ("compacted", "nothing to do"), (ran.message, ran.report)
    assert bench.table.to_pyarrow_table().num_rows == sum(expected[-1].values())
    monkeypatch.undo()
    follow_up = bench.compact(target_bytes=argument.target_bytes)
    assert key_of(bench.rows) == expected[-1]
    assert follow_up.report["verdict"] in ("compacted", "nothing to do")


def test_the_statuses_have_reasons() -> None:
    assert set(REASONS) == set(GroupStatus) - {GroupStatus.PENDING, GroupStatus.COMMITTED}

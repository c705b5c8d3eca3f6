"""How much of an operation's work is done: by its plan, its jobs' results, and executors' reports."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import InvalidArgument
from distop.protocol.behavior_declaration import Declaration, Rules
from distop.protocol.jobs import Claim, Outcome
from distop.protocol.json_codec import rfc3339
from distop.protocol.keys import Keys
from distop.protocol.plan import PartitionPlan, Plan, encode_chunk
from distop.protocol.records import Decision, Node, OperationRef, Spec, State
from distop.protocol.txn import Put, Txn
from distop.protocol.work_done import WorkDone, checked_work
from distop.services.inspection import work as work_module
from distop.services.inspection.status import Pace, Snapshot, judge, status, take
from distop.services.inspection.work import KnownWork, WorkReader
from distop.testing import FakeContext
from tests.unit.support.modelclient import ModelClient

if TYPE_CHECKING:
    from pathlib import Path

KEYS = Keys()
REF = OperationRef("t", "compact", "", 1)
NOW = 1_000_000.0
HELD = Claim("e1", "i1", 1, 0)
NODE = Node("e1", "h", 2, ("compact",))
OPEN = Snapshot(REF, State.RUNNING, None, Spec("r", rfc3339(NOW), "me", Rules()), Plan(4, "", "", 1))
TOTAL = WorkDone(40, 4_000)


def reporting(*entries: dict[str, Any], incarnation: str = "i1", executor: str = "e1") -> dict[str, Node]:
    return {incarnation: replace(NODE, executor=executor, work={str(REF): list(entries)})}


def entry(partition: int, since: float = NOW, **numbers: int) -> dict[str, Any]:
    return {"partition": partition, "since": rfc3339(since), **numbers}


def test_ended_and_running_jobs_are_added_up() -> None:
    known = KnownWork(TOTAL, WorkDone(10, 1_000), WorkDone(10, 1_000), WorkDone(0, 0, 0, 0, 1, 10, 1_000))
    snapshot = replace(OPEN, success=1, claims={1: HELD, 2: HELD}, work=known, pace=Pace(NOW - 10, 1))
    nodes = reporting(
        entry(1, files=5, bytes=500, commits=1, committed_files=3, committed_bytes=300), entry(2, files=1, bytes=500)
    )
    seen = judge(snapshot, nodes, NOW + 10)
    assert seen.work == {
        "files": 16,
        "bytes": 2_000,
        "of_files": 40,
        "of_bytes": 4_000,
        "files_per_second": 0.8,
        "bytes_per_second": 100.0,
        "commits": 2,
        "committed_files": 13,
        "committed_bytes": 1_300,
    }
    assert seen.eta_seconds == 20.0, "2,000 bytes are left; the jobs alone gave 60 s"
    assert seen.to_json()["work"] == seen.work


def test_reports_of_ended_jobs_and_of_other_holders_do_not_count() -> None:
    snapshot = replace(OPEN, success=1, claims={1: HELD}, work=KnownWork(TOTAL, WorkDone(10, 1_000)))
    nodes = reporting(entry(0, files=10, bytes=1_000), entry(1, files=2, bytes=200))
    nodes |= reporting(entry(1, files=9, bytes=900), incarnation="i2", executor="e2")
    work = judge(snapshot, nodes, NOW).work
    assert work is not None
    assert (work["files"], work["bytes"]) == (12, 1_200)
    assert (work["bytes_per_second"], work["files_per_second"]) == (None, None), "too early for a rate"


def test_more_than_everything_is_never_done() -> None:
    """The report of a job that has just ended may be seen together with its end."""
    snapshot = replace(OPEN, claims={1: HELD}, work=KnownWork(TOTAL, WorkDone(35, 3_500)))
    work = judge(snapshot, reporting(entry(1, files=10, bytes=1_000)), NOW).work
    assert work is not None
    assert (work["files"], work["bytes"]) == (40, 4_000)


def test_a_completion_reports_its_own_work() -> None:
    snapshot = replace(OPEN, decision=Decision(State.SUCCESS, 4, 4, 0))
    assert judge(snapshot, {"i1": NODE}, NOW).work is None
    nodes = reporting(entry(-1, NOW, files=50, bytes=500, of_files=200, of_bytes=1_000, commits=1, committed_files=50))
    seen = judge(snapshot, nodes, NOW + 10)
    assert seen.work is not None
    assert (seen.work["of_files"], seen.work["committed_files"], seen.eta_seconds) == (200, 50, 10.0)


def test_reports_of_jobs_without_a_known_plan_are_no_sum() -> None:
    """Of several jobs, the ended ones are missing in it. One job, such as that of a restoration, is all there is."""
    nodes = reporting(entry(0, files=5, of_files=9, committed_files=5))
    snapshot = replace(OPEN, claims={0: HELD}, work=KnownWork())
    assert judge(snapshot, nodes, NOW).work is None
    alone = judge(replace(snapshot, plan=Plan(1, "", "", 1)), nodes, NOW).work
    assert alone is not None
    assert (alone["files"], alone["of_files"], alone["committed_files"]) == (5, 9, 5)


def test_a_list_of_operations_reads_no_plans() -> None:
    known = replace(OPEN, claims={0: HELD}, work=None)
    assert judge(known, reporting(entry(0, files=5)), NOW).work is None


def test_without_bytes_the_files_give_the_remaining_time() -> None:
    snapshot = replace(OPEN, claims={0: HELD}, work=KnownWork(WorkDone(40)))
    assert judge(snapshot, reporting(entry(0, NOW, files=10)), NOW + 10).eta_seconds == 30.0


@pytest.mark.parametrize(
    "wrong", ["x", {"partition": "0"}, ["x", None, {"partition": 0, "files": "many", "since": 3}], [entry(0, files=-1)]]
)
def test_a_report_that_is_written_by_hand_does_no_harm(wrong: Any) -> None:
    nodes = {"i1": replace(NODE, work={str(REF): wrong})}
    snapshot = replace(OPEN, claims={0: HELD}, work=KnownWork(TOTAL))
    work = judge(snapshot, nodes, NOW + 10).work
    assert work is not None
    assert (work["files"], work["bytes"]) == (0, 0)
    assert Node.decode(nodes["i1"].encode()).work == nodes["i1"].work


class Etcd(ModelClient):
    """An operation with four jobs of ten files, two of which have ended."""

    def __init__(self, schema: dict[str, Any], plans: list[PartitionPlan]) -> None:
        super().__init__()
        declared = Declaration("compact", {}, result_schema=schema)
        self.put(KEYS.behavior("compact"), declared.encode())
        self.put(KEYS.of(REF, "state"), b"running")
        self.put(KEYS.of(REF, "spec"), Spec("r", rfc3339(NOW), "me", Rules()).encode())
        self.put(KEYS.of(REF, "plan"), Plan(len(plans), "", "", 1).encode())
        self.put(KEYS.chunk(REF, 0), encode_chunk(plans))
        self.put(KEYS.gate(REF), b"{}")

    def put(self, key: str, value: bytes) -> None:
        self.store.apply(Txn((), (Put(key, value),)))

    def end(self, partition: int, result: Any, state: bytes = b"success") -> None:
        outcome = Outcome(f"p{partition}", "e1", "i1", 1, rfc3339(NOW), rfc3339(NOW + 5), result)
        self.put(KEYS.job(REF, partition, "state"), state)
        self.put(KEYS.job(REF, partition, "outcome"), outcome.encode())

    async def alarms(self) -> tuple[str, ...]:
        return ()


FILES = tuple((f"/t/{n}", 10, 0) for n in range(10))
PLANS = [PartitionPlan(n, f"p{n}", 100, FILES) for n in range(4)]
WITH_WORK = {"type": "object", "properties": {"work": {"type": "object"}}}


async def test_the_plan_and_the_results_tell_the_work() -> None:
    etcd: Any = Etcd(WITH_WORK, PLANS)
    etcd.end(0, {"work": {"files": 10, "commits": 1, "committed_files": 20, "committed_bytes": 200}})
    etcd.end(1, {"work": {"files": 10}})
    seen = await status(etcd, KEYS, REF)
    assert seen.work is not None
    shown = {name: seen.work[name] for name in ("files", "bytes", "of_files", "of_bytes", "commits", "committed_files")}
    assert shown == {
        "files": 20,
        "bytes": 200,
        "of_files": 40,
        "of_bytes": 400,
        "commits": 1,
        "committed_files": 20,
    }


async def test_a_snapshot_for_a_list_has_no_work() -> None:
    etcd: Any = Etcd(WITH_WORK, PLANS)
    etcd.end(0, {"work": {"files": 10}})
    assert (await take(etcd, KEYS, REF)).work is None
    read = await take(etcd, KEYS, REF, work=True)
    assert read.work is not None
    assert read.work.total == WorkDone(40, 400)


async def test_nothing_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd: Any = Etcd(WITH_WORK, PLANS)
    reader = WorkReader()
    etcd.end(0, {"work": {"committed_files": 1}})
    await reader.known(etcd, KEYS, REF, Plan(4, "", "", 1), [0], [0])
    before = len(etcd.requests)
    found = await reader.known(etcd, KEYS, REF, Plan(4, "", "", 1), [0], [])
    assert (len(etcd.requests), found.committed.committed_files) == (before, 1)
    assert (found.ended, found.since_gate) == (WorkDone(10, 100), WorkDone())


async def test_results_without_a_declared_work_are_not_read() -> None:
    etcd: Any = Etcd({}, PLANS)
    etcd.end(0, {"work": {"committed_files": 1}})
    found = await WorkReader().known(etcd, KEYS, REF, Plan(4, "", "", 1), [0], [0])
    assert found.committed == WorkDone()


async def test_no_more_results_are_read_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "MOST_RESULTS", 1)
    etcd: Any = Etcd(WITH_WORK, PLANS)
    for p in (0, 1):
        etcd.end(p, {"work": {"committed_files": 1}})
    reader = WorkReader()
    for _ in range(2):
        found = await reader.known(etcd, KEYS, REF, Plan(4, "", "", 1), [0, 1], [])
        assert found.committed.committed_files == 1


async def test_large_plans_and_plans_without_files_have_no_work() -> None:
    etcd: Any = Etcd(WITH_WORK, [PartitionPlan(0, "all")])
    assert await WorkReader().known(etcd, KEYS, REF, Plan(1, "", "", 1), [], []) == KnownWork()
    etcd = Etcd(WITH_WORK, PLANS)
    many = Plan(4, "", "", work_module.MOST_CHUNKS + 1)
    assert await WorkReader().known(etcd, KEYS, REF, many, [], []) == KnownWork()
    gone = Plan(4, "", "", 2)
    assert await WorkReader().known(etcd, KEYS, REF, gone, [], []) == KnownWork(), "its last chunk is deleted"


async def test_file_lists_in_the_shared_directory_leave_the_bytes() -> None:
    etcd: Any = Etcd(WITH_WORK, [replace(PLANS[0], files=(), files_at="lists/0"), PLANS[1]])
    found = await WorkReader().known(etcd, KEYS, REF, Plan(2, "", "", 1), [1], [])
    assert (found.total, found.ended) == (WorkDone(0, 200), WorkDone(0, 100))


def test_an_author_reports_whole_numbers(tmp_path: Path) -> None:
    ctx = FakeContext(tmp_path)
    ctx.work_done(files=1, of_files=2, bytes=3)
    assert ctx.works == [WorkDone(1, 3, 2)]
    for wrong in (-1, 1.5, True, "1", 2**60):
        with pytest.raises(InvalidArgument, match="files must be a whole number"):
            ctx.work_done(files=wrong)  # type: ignore[arg-type]
    assert checked_work({}) == WorkDone()
    assert not WorkDone()
    assert WorkDone.from_json(WorkDone(1, 2, 3, 4, 5, 6, 7).to_json()) == WorkDone(1, 2, 3, 4, 5, 6, 7)

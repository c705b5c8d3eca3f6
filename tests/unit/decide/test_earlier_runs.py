"""Jobs of earlier runs on an executor: the decision about their data, and the run files."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distop.daemon.executor.reconciliation import Reconciler
from distop.daemon.local_jobs import LocalJobs, RunFiles
from distop.decide.earlier_runs import Disposition, judge
from distop.protocol.jobs import Claim, Outcome
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef, State
from distop.protocol.size_limits import DEFAULT
from distop.protocol.txn import Get, GetResult, KeyValue
from distop.worker.daemon_side.requests import JobItem

LIVE = {"old", "now", "bob"}
REF = OperationRef("a.b", "steps", "7/8", 3)
"""Its private directory is a/b.. by no means: dots, slashes and digits in names survive the way there and back."""


def outcome(incarnation: str, attempt: int) -> Outcome:
    return Outcome("p", "ex", incarnation, attempt, "", "")


@pytest.mark.parametrize(
    ("state", "claim", "reported", "fate"),
    [
        (None, None, None, Disposition.CLEANED),
        (State.SUCCESS, None, None, Disposition.CLEANED),
        (State.CANCELLING, Claim("ann", "old", 1, 0), None, Disposition.CLEANED),
        (State.RUNNING, None, outcome("old", 1), Disposition.SETTLED),
        (State.SUCCESS, None, outcome("old", 1), Disposition.SETTLED),
        (State.RUNNING, None, outcome("bob", 2), Disposition.CLEANED),
        (State.RUNNING, None, outcome("old", 2), Disposition.CLEANED),
        (State.RUNNING, Claim("bob", "bob", 2, 1), None, Disposition.CLEANED),
        (State.RUNNING, Claim("ann", "now", 2, 1), None, Disposition.SETTLED),
        (State.RUNNING, Claim("ann", "old", 1, 0), None, Disposition.STAYS),
        (State.RUNNING, Claim("eve", "dead", 2, 1), None, Disposition.STAYS),
        (State.PAUSED, Claim("bob", "", 1, 0), None, Disposition.STAYS),
        (State.RUNNING, None, None, Disposition.STAYS),
    ],
)
def test_each_fate_of_a_former_attempt(
    state: State | None, claim: Claim | None, reported: Outcome | None, fate: Disposition
) -> None:
    assert judge(("old", 1), state, claim, reported, LIVE, "ann", "now") is fate


def item(partition: int, attempt: int = 1) -> JobItem:
    return JobItem({"partition": partition, "name": str(partition), "files": [["/x", 1, 2]]}, attempt, 17)


async def test_a_run_is_recorded_on_disk_until_it_is_cleaned_up(tmp_path: Path) -> None:
    before = LocalJobs(RunFiles(tmp_path), "inc1")
    before.load()
    await before.begin(REF, {"x": 1}, {"name": "a.b"}, [item(0), item(1), item(2)])
    before.ended(REF, 1)

    after = LocalJobs(RunFiles(tmp_path), "inc2")
    after.load()
    (run,) = after.former
    assert (run.op, run.incarnation, run.arg, run.table) == (REF, "inc1", {"x": 1}, {"name": "a.b"})
    assert {p: (i.attempt, i.fence, i.partition["files"]) for p, i in run.left.items()} == {
        p: (1, 17, [["/x", 1, 2]]) for p in range(3)
    }, "what ended after it was written is told apart by etcd"
    await after.begin(REF, {"x": 1}, None, [item(0, 2), item(2, 2)])
    assert list(run.left) == [1], "a new run takes over what the former one left"
    after.settled(run, [1])
    assert (after.former, len(list((tmp_path / "runs").iterdir()))) == ([], 1)
    after.released(REF, 0)
    assert [list(left.left) for left in after.former] == [[0, 2]]
    assert after.running(after.former[0], 2)
    assert not after.running(after.former[0], 0)
    after.settled(after.former[0], [0])
    after.ended(REF, 2)
    assert (after.former, list((tmp_path / "runs").iterdir())) == ([], [])


def test_a_torn_record_counts_as_never_started(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for name, text in (("a.json", '{"op": '), ("b.json", "{}"), ("c.new", "{}"), ("d.json", '{"op": "x", "items": 3}')):
        (folder / name).write_text(text)
    local = LocalJobs(RunFiles(tmp_path), "inc")
    local.load()
    assert (local.former, list(folder.iterdir())) == ([], [])


@pytest.mark.parametrize(
    "ref",
    [REF, OperationRef("t", "noop", "", 12), OperationRef(".x", "noop", "100%", 1), OperationRef("t", "noop", "12", 3)],
)
def test_private_directories_are_found_by_their_names(tmp_path: Path, ref: OperationRef) -> None:
    from distop.worker.child_side.shared_files import operation_path

    (tmp_path / "ops" / operation_path(str(ref)) / "0" / "1").mkdir(parents=True)
    (tmp_path / "ops" / "unknown" / "thing").mkdir(parents=True)
    assert list(LocalJobs(RunFiles(tmp_path), "inc").operations()) == [ref]


class Node:
    """An executor with one former run; ``meanwhile`` happens while etcd is asked about it."""

    def __init__(self, local: LocalJobs, stored: dict[str, bytes], meanwhile: Any) -> None:
        self.local = local
        self.cleaned: list[int] = []
        self._stored = stored
        self._meanwhile = meanwhile
        self.context: Any = SimpleNamespace(
            keys=Keys(), client=self, worker=self, log=logging.getLogger("tests"), cluster=SimpleNamespace(nodes=LIVE),
            executor_id="ann", incarnation="now", types={REF.type}, limits=DEFAULT, admits=lambda *_: True,
        )  # fmt: skip

    async def get(self, key: str) -> KeyValue | None:
        return KeyValue(key, self._stored[key], 1) if key in self._stored else None

    async def read(self, *wanted: Get) -> list[GetResult]:
        found = [GetResult((kv,) if (kv := await self.get(get.key)) is not None else (), 1) for get in wanted]
        await self._meanwhile()
        return found

    async def cleanup(self, op: str, type_name: str, arg: Any, table: Any, items: list[JobItem], **_: Any) -> None:
        self.cleaned += [item.ordinal for item in items]


async def test_a_job_restarted_during_a_read_does_not_count_as_a_former_run(tmp_path: Path) -> None:
    """The read shows both jobs with another executor, but by now this executor has restarted one of them.

    (In the simulator this ended in a KeyError, and the data of all earlier runs stayed.)
    """
    before = LocalJobs(RunFiles(tmp_path), "old")
    before.load()
    await before.begin(REF, {}, None, [item(0), item(1)])
    local = LocalJobs(RunFiles(tmp_path), "now")
    local.load()
    keys = Keys()
    theirs = Claim("bob", "bob", 2, 0).encode()
    stored = {keys.of(REF, "state"): b"running", keys.claim(REF, 0): theirs, keys.claim(REF, 1): theirs}
    node = Node(local, stored, lambda: local.begin(REF, {}, None, [item(1, 3)]))
    await Reconciler(node.context, local)._settle(local.former[0])
    assert node.cleaned == [0]
    assert local.former == []
    assert len(list((tmp_path / "runs").iterdir())) == 1, "the run that has begun stays written down"


async def left_by_a_former_run(tmp_path: Path, *partitions: int) -> Node:
    """Each of these jobs was left by a former run, and another executor has it by now."""
    before = LocalJobs(RunFiles(tmp_path), "old")
    before.load()
    await before.begin(REF, {}, None, [item(p) for p in partitions])
    local = LocalJobs(RunFiles(tmp_path), "now")
    local.load()
    keys = Keys()
    theirs = Claim("bob", "bob", 2, 0).encode()
    stored = {keys.of(REF, "state"): b"running", **{keys.claim(REF, p): theirs for p in partitions}}

    async def nothing() -> None:
        pass

    return Node(local, stored, nothing)


async def test_jobs_of_a_former_run_are_settled_page_by_page(tmp_path: Path) -> None:
    node = await left_by_a_former_run(tmp_path, *range(5))
    node.context.limits = replace(DEFAULT, settled=2)
    await Reconciler(node.context, node.local).look()
    assert node.cleaned == [0, 1, 2, 3, 4]
    assert node.local.former == []


async def test_remains_of_a_former_run_are_checked_again_beside_other_work(tmp_path: Path) -> None:
    """At each poll: its fate may not have been decided at the start."""
    node = await left_by_a_former_run(tmp_path, 0)
    node.context.cluster = SimpleNamespace(nodes=LIVE, gates={REF: None}, pending={})
    reconciler = Reconciler(node.context, node.local)
    reconciler.look_soon()
    reconciler.look_soon()
    assert reconciler._looking is not None
    await asyncio.wait({reconciler._looking}, timeout=10.0)
    assert node.cleaned == [0]
    assert node.local.former == []

"""``distop audit`` over histories of the model store: violations, output and exit codes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import typer

from distop.cli import audit as command
from distop.cli.command_context import GlobalOptions, use
from distop.errors import NotFound
from distop.protocol.jobs import JobState
from distop.protocol.revisioned import Change
from distop.protocol.txn import Delete, KeyValue, Put
from distop.services.audit import Audit
from distop.store.history import CaughtUp, HistoryStart, Revision
from tests.support.history_age import age_model_history
from tests.support.world import TABLE, TYPE, World
from tests.unit.invariants.plants import opened
from tests.unit.invariants.policy_plants import PLANTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from distop.protocol.records import OperationRef
    from distop.store.history import HistoryStep

UNTOUCHED = {
    *("no_number_taken", "run_ops_forgets_to_count_down", "a_removed_policy_leaves_its_state", "started_by_no_policy"),
    *("started_during_a_pause", "started_as_another_type", "started_without_an_evaluation"),
    "started_from_a_former_state",
}
"""Where the violation is that a key was not written: policies that operations name are those of other revisions."""


@pytest.fixture
def as_json() -> Iterator[None]:
    use(GlobalOptions(json=True))
    yield
    use(GlobalOptions())


async def stream_of(*steps: HistoryStep) -> AsyncGenerator[HistoryStep, None]:
    for step in steps:
        yield step


def steps(world: World) -> list[HistoryStep]:
    history: list[HistoryStep] = [Revision(number, tuple(changes)) for number, changes in world.store.history]
    return [*history, CaughtUp(world.store.revision)]


def run(world: World, ref: OperationRef | None = None, *after: HistoryStep) -> int:
    """The command's exit code."""
    checked = Audit(world.keys, ref)
    try:
        asyncio.run(command.run(checked, stream_of(*steps(world), *after), str(ref) if ref else None))
    except typer.Exit as left:
        return left.exit_code
    return 0


@pytest.mark.parametrize(("number", "name", "spoil"), PLANTS, ids=[f"{n}-{name}" for n, name, _ in PLANTS])
def test_each_planted_violation_is_reported(
    number: int,
    name: str,
    spoil: Callable[[World, OperationRef], None],
    as_json: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world, ref = opened()
    before = world.store.revision
    spoil(world, ref)
    assert run(world) == 1
    output = json.loads(capsys.readouterr().out)
    assert (output["ok"], output["first_revision"]) == (False, 1)
    violation = output["violation"]
    assert before < violation["revision"] == output["last_revision"]
    if name not in UNTOUCHED:
        assert violation["story"][-1].startswith(f"{violation['revision']}: "), violation
    assert violation["story"] == sorted(violation["story"], key=lambda line: int(line.partition(":")[0]))


def test_a_clean_history_gets_a_summary(as_json: None, capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.run_operation(3)
    world.run_operation(2, failing=[1])
    assert run(world) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["ok"]
    assert (output["operations"], output["jobs"], output["lost"], output["violation"]) == (2, 5, [], None)
    assert (output["first_revision"], output["last_revision"]) == (1, world.store.revision)
    assert output["revisions"] == len(world.store.history)
    assert output["invariants"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def test_the_summary_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.run_operation(2)
    assert run(world) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"checked revisions 1 to {world.store.revision} (")
    assert out.endswith("1 operation, 2 jobs, 19 invariants; no violation\n")


def test_a_violation_is_reported_with_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    world, ref = opened()
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    revision = world.tamper(Put(world.keys.job(ref, 0, "state"), b"failed"))
    assert run(world) == 1
    first, second, *story = capsys.readouterr().out.splitlines()
    assert first == (
        f"invariant 1 at revision {revision}: distOp.sales%2Eorders.noop.1.000000.state: "
        "the job's state was written twice: first success, then failed"
    )
    assert second == "what happened, by revision:"
    assert any("distOpClaim.sales%2Eorders.noop.1.000000" in line for line in story)
    assert story[-1] == f"  {revision}: distOp.sales%2Eorders.noop.1.000000.state = failed"


def test_an_audit_of_one_operation_reports_only_its_violations() -> None:
    world, ref = opened()
    other = world.next_ref()
    world.do(world.start(other))
    world.tamper(Delete(world.keys.pending(other)))
    assert run(world, ref) == 0
    assert run(world, other) == 1
    world.tamper(Delete(world.keys.run_ops(TABLE)))
    assert run(world, ref) == 1, "it depends on the counters of its table"


def audit_of(ref: OperationRef, world: World, *after: HistoryStep, follow: bool = False) -> Audit:
    """The audit of an operation where history is compacted up to the present."""
    listing = HistoryStart(world.store.revision, 1, tuple(world.store.listing()))
    checked = Audit(world.keys, ref)
    history = stream_of(listing, *after, CaughtUp(world.store.revision + len(after)))
    asyncio.run(command.run(checked, history, str(ref), follow=follow))
    return checked


def stranger(world: World) -> Revision:
    """One more revision, of nothing but a node."""
    return Revision(world.store.revision + 1, (Change(KeyValue(world.keys.node("z"), b"{}", 1, 1)),))


def test_an_operation_with_only_a_history_record_counts_as_unchecked() -> None:
    world = World()
    ref = world.run_operation(1)
    at = world.store.revision
    with pytest.raises(NotFound, match=f"'{ref}' was not checked: etcd's history is compacted up to revision {at}"):
        audit_of(ref, world, stranger(world))


def test_deleting_the_history_record_does_not_make_an_operation_checked() -> None:
    world = World()
    ref = world.run_operation(1)
    age_model_history(world.store, world.keys)
    dropped = Revision(world.store.revision + 1, tuple(_deleted_record(world, ref)))
    with pytest.raises(NotFound, match="was not checked"):
        audit_of(ref, world, dropped)


def _deleted_record(world: World, ref: OperationRef) -> list[Change]:
    keys = (world.keys.history(ref), world.keys.request(TABLE, TYPE, f"request-{ref}"))
    kvs = [kv for key in keys if (kv := world.store.get(key)) is not None]
    assert len(kvs) == 2
    return [Change(replace(kv, value=b"", mod_revision=world.store.revision + 1), deleted=True) for kv in kvs]


def test_an_unchanged_open_operation_counts_as_unchecked() -> None:
    world, ref = opened()
    with pytest.raises(NotFound, match="no later revision has a key of it"):
        audit_of(ref, world, stranger(world))


def test_an_unchanged_open_operation_is_followed(as_json: None, capsys: pytest.CaptureFixture[str]) -> None:
    world, ref = opened()
    at = world.store.revision
    audit_of(ref, world, stranger(world), follow=True)
    output = json.loads(capsys.readouterr().out)
    assert (output["operations"], output["jobs"]) == (0, 0)
    assert output["summary"] == (
        f"checked nothing of {ref}: revisions {at + 1} to {at + 1} have no changes of it; not checked: revisions 1–{at}"
    )


def test_an_audit_reports_that_no_revisions_remain_after_the_compaction(capsys: pytest.CaptureFixture[str]) -> None:
    world, _ = opened()
    at = world.store.revision
    listing = HistoryStart(at, 1, tuple(world.store.listing()))
    asyncio.run(command.run(Audit(world.keys), stream_of(listing, CaughtUp(at)), None))
    assert capsys.readouterr().out == (
        f"checked nothing: there are no revisions after {at}; not checked: revisions 1–{at}; no violation\n"
    )


def test_an_audit_of_one_operation_counts_its_revisions(capsys: pytest.CaptureFixture[str]) -> None:
    world, _ = opened()
    before = len(world.store.history)
    second = world.next_ref()
    world.do(world.start(second))
    assert run(world, second) == 0
    assert f"({before + 1} of distop, 1 of them of {second}, " in capsys.readouterr().out


def test_an_unknown_operation_is_not_found() -> None:
    world, ref = opened()
    with pytest.raises(NotFound, match="no operation 'sales.orders/noop/9'"):
        run(world, replace(ref, instance=9))


def test_compacted_history_is_reported(as_json: None, capsys: pytest.CaptureFixture[str]) -> None:
    world, ref = opened()
    at = world.store.revision
    listing = HistoryStart(at, 1, tuple(world.store.listing()))
    world.do(world.claim(ref, "a", [0]))
    later = [Revision(n, tuple(changes)) for n, changes in world.store.history if n > at]
    checked = Audit(world.keys)
    asyncio.run(command.run(checked, stream_of(listing, *later, CaughtUp(world.store.revision)), None))
    printed = capsys.readouterr()
    assert json.loads(printed.out)["lost"] == [[1, at]]
    assert json.loads(printed.out)["first_revision"] == at + 1
    assert f"history up to revision {at} is compacted" in printed.err


def test_history_that_is_compacted_during_the_audit_is_reported(
    as_json: None, capsys: pytest.CaptureFixture[str]
) -> None:
    world, ref = opened()
    at = world.store.revision
    before = [Revision(n, tuple(changes)) for n, changes in world.store.history]
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    gap = HistoryStart(world.store.revision, at + 1, tuple(world.store.listing()))
    wrong = world.tamper(Delete(world.keys.job(ref, 0, "state")))
    after = [Revision(n, tuple(changes)) for n, changes in world.store.history if n == wrong]
    checked = Audit(world.keys)
    with pytest.raises(typer.Exit):
        asyncio.run(command.run(checked, stream_of(*before, gap, *after), None))
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["first_revision"], found["lost"]) == (1, [[at + 1, wrong - 1]])
    assert found["violation"]["invariant"] == 1
    assert f"revisions {at + 1} to {wrong - 1} were compacted before they could be read" in printed.err


def test_a_good_result_says_what_was_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    world, ref = opened()
    at = world.store.revision
    before = [Revision(n, tuple(changes)) for n, changes in world.store.history]
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    gap = HistoryStart(at + 2, at + 1, tuple(world.store.listing()))
    checked = Audit(world.keys)
    asyncio.run(command.run(checked, stream_of(*before, gap, CaughtUp(at + 2)), None))
    assert capsys.readouterr().out.endswith(f" 19 invariants; not checked: revisions {at + 1}–{at + 2}; no violation\n")
    assert f"not checked: revisions {at + 1}–{at + 2}" in checked.to_json()["summary"]


def test_a_following_audit_continues_after_the_current_revision() -> None:
    world, ref = opened()
    revision = world.store.revision
    later = Revision(revision + 1, tuple(_deleted(world, world.keys.of(ref, "spec"))))
    assert run(world, None, later) == 1


def _deleted(world: World, key: str):
    world.tamper(Delete(key))
    return world.store.history[-1][1]


def test_types_share_no_counters() -> None:
    world, ref = opened()
    assert (ref.table, ref.type) == (TABLE, TYPE)
    world.tamper(Put(world.keys.next_instance(TABLE, "other"), b"7"))
    assert run(world, ref) == 0
    assert run(world) == 1

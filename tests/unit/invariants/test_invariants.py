"""Each invariant has violations planted by hand that the check must find; clean lives have none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.invariants.checker import Checker, check
from distop.invariants.replay_state import NUMBERS
from distop.protocol import keys as K
from distop.protocol import operation_finish as f
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.jobs import JobState
from distop.protocol.json_codec import parse_time, rfc3339
from distop.protocol.operation_options import Options
from distop.protocol.records import Cancel, OperationRef, State, TableRecord
from distop.protocol.schedule import Series
from distop.protocol.txn import Delete, Put
from tests.support.history_age import age_model_history
from tests.support.world import TABLE, TIME, World
from tests.unit.invariants.plants import EMPTY, GARBAGE, SPOILED, begin, end_in_series, opened
from tests.unit.invariants.policy_plants import PLANTS
from tests.unit.invariants.policy_plants import life as life_of_a_policy
from tests.unit.support.model_submission import Etcd, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.invariants.replay_state import Violation
    from distop.protocol.txn import KeyValue


def found(world: World) -> list[Violation]:
    return check(world.keys, world.store.history)


def numbers(world: World) -> set[int]:
    return {v.invariant for v in found(world)}


# ---------------------------------------------------------------- clean lives


def test_complete_lives_of_operations_are_clean() -> None:
    world = World()
    world.run_operation(3)
    world.run_operation(2, failing=[1])
    world.run_operation(0)
    assert found(world) == []


def test_all_commands_and_evaluations_of_a_policy_violate_no_invariant() -> None:
    world, _ = opened()
    life_of_a_policy(world)
    assert found(world) == []


def test_an_operation_with_all_events_violates_no_invariant() -> None:
    world, ref = opened(3)
    world.do(world.claim(ref, "a", [0, 1, 2]))
    world.do(world.checkpoint(ref, 0, b"1"))
    world.do(world.wait_again(ref, 0, failed=True))
    world.do(world.wait_again(ref, 1, failed=False))
    world.do(world.pause(ref))
    world.do(world.report(ref, 2, JobState.SUCCESS))
    world.do(world.resume(ref))
    world.do(world.claim(ref, "a", [0, 1]))
    world.die("a")
    world.do(world.elect("b"))
    world.do(world.claim(ref, "b", [1]))
    world.do(world.report(ref, 1, JobState.FAILED))
    world.do(world.fail_fast(ref))
    world.do(world.revoke(ref, 0))
    world.do(world.reap(ref, 0))
    world.do(world.finish_at_once(ref))
    world.do(world.end(ref))
    assert found(world) == []


def test_a_lost_job_at_the_limit_is_clean() -> None:
    world, ref = opened(1, Rules(retry=Retry(attempts=1)))
    world.do(world.claim(ref, "a", [0]))
    world.die("a")
    world.do(world.elect("b"))
    world.do(world.fail_lost(ref, "b", 0))
    world.do(world.finish_at_once(ref))
    assert found(world) == []


@pytest.mark.parametrize("state", JobState)
def test_a_finish_that_deletes_the_operation_is_clean(state: JobState) -> None:
    world, ref = opened(1)
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, state))
    world.do(world.finish_and_end(ref))
    assert world.store.get(world.keys.of(ref, "state")) is None
    world.run_operation(1)
    assert found(world) == []


def test_a_finish_that_deletes_the_operation_is_judged_as_both_transactions() -> None:
    world, ref = opened(1)
    world.do(world.claim(ref, "a", [0]))
    txn = world.finish_and_end(ref)
    world.tamper(*txn.success)
    words = {v.text.partition(" ")[0] for v in found(world)}
    assert {v.invariant for v in found(world)} == {5, 9}, words
    assert any("finished while 1 claim existed" in v.text for v in found(world))
    assert any("remained after the operation's end" in v.text for v in found(world))


def test_a_finish_that_deletes_the_operation_must_count_its_jobs_correctly() -> None:
    world, ref = opened(1)
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.FAILED))
    record = replace(world.history(ref), state=State.SUCCESS, success=1, failed=0, failed_ranges="")
    seen = world.counters()
    final = replace(world._final(ref, 0), history=record, gate_mod=world.op(ref).opened)
    world.do(f.finish(world.keys, world.election, seen.run_ops, seen.run_ops_mod, [final]))
    assert [v.invariant for v in found(world)] == [5, 5]


def test_a_deletion_without_a_history_record_is_found() -> None:
    world, ref = opened(1)
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    history = world.keys.history(ref)
    world.tamper(*(op for op in world.finish_and_end(ref).success if getattr(op, "key", "") != history))
    assert {1, 9} <= numbers(world)


def test_one_at_a_time_and_planned_starts_are_clean() -> None:
    world = World(one_at_a_time=True)
    world.join("a")
    ref = world.next_ref("idx.a")
    world.do(world.start_planned(ref, 1))
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    world.do(world.elect("a"))
    world.do(world.finish_at_once(ref))
    assert found(world) == []


@pytest.mark.parametrize(
    "series",
    [
        Series(60.0, until=rfc3339(parse_time(TIME) + 59.0)),
        Series(60.0, since="start", due=rfc3339(parse_time(TIME) - 90.0), until=rfc3339(parse_time(TIME) - 31.0)),
        Series(60.0, on="failure"),
        Series(60.0, left=0),
    ],
)
def test_an_ended_series_has_no_next_operation(series: Series) -> None:
    """By the end in the history record its last time has passed, or the series does not repeat after such an end."""
    world, _ = opened()
    end_in_series(world, series)
    assert found(world) == []


def test_a_series_ends_if_its_table_was_removed_even_if_it_was_registered_again() -> None:
    """The next operation was refused in between. Found by a schedule of the simulator: seed 1508364."""
    world, _ = opened()
    table = world.keys.table(TABLE)
    again = Put(table, TableRecord(TABLE, "parquet", "/data").encode())
    end_in_series(world, Series(60.0, left=2), Delete(table), again)
    assert found(world) == []


def test_a_permit_that_a_takeover_keeps_is_clean() -> None:
    world, ref = opened(3)
    world.do(world.alter(ref, Options(max_jobs=2)))
    world.do(world.claim(ref, "a", [0, 1]))
    world.do(world.wait_again(ref, 1, failed=True))
    world.die("a")
    world.do(world.elect("b"))
    world.do(world.claim(ref, "b", [0, 1]))
    assert world.claim_of(ref, 0).permit >= 0
    world.do(world.report(ref, 0, JobState.SUCCESS))
    world.do(world.claim(ref, "b", [2]))
    assert found(world) == []


def test_a_replay_may_start_from_a_listing() -> None:
    world, ref = opened(2)
    world.do(world.claim(ref, "a", [0]))
    listing, seen = world.store.listing(), len(world.store.history)
    world.do(world.claim(ref, "a", [1]))
    for p in (0, 1):
        world.do(world.report(ref, p, JobState.SUCCESS))
    world.do(world.finish_at_once(ref))
    world.do(world.end(ref))
    world.run_operation(1)
    assert check(world.keys, world.store.history[seen:], listing) == []


def test_foreign_keys_and_other_namespaces_are_ignored() -> None:
    world = World()
    world.tamper(Put("somebody.else", b"x"), Put("prod/distOp.t.noop.1.state", b"nonsense"), Put("distOp.what", b""))
    assert found(world) == []


def test_operations_of_a_newer_release_are_not_judged() -> None:
    world, ref = opened(1)
    world.tamper(Put(world.keys.of(ref, "spec"), replace(world.spec(ref), version=99).encode()))
    count = len(found(world))
    world.tamper(Put(world.keys.job(ref, 0, "state"), b"success"))
    assert len(found(world)) == count


# --------------------------------------------------------- planted violations


@pytest.mark.parametrize(("number", "name", "spoil"), PLANTS, ids=[f"{n}-{name}" for n, name, _ in PLANTS])
def test_planted_violations_are_found(number: int, name: str, spoil: Callable[[World, OperationRef], None]) -> None:
    world, ref = opened()
    before = found(world)
    assert before == []
    spoil(world, ref)
    violations = found(world)
    assert number in {v.invariant for v in violations}, [str(v) for v in violations]
    assert all(v.revision for v in violations)


def test_every_visible_invariant_has_a_planted_violation() -> None:
    assert {number for number, _, _ in PLANTS} == {0, *NUMBERS}


@pytest.mark.parametrize("value", [GARBAGE, EMPTY], ids=["garbage", "empty-list"])
@pytest.mark.parametrize("record", SPOILED)
def test_an_unreadable_record_is_a_violation_of_its_key(record: str, value: bytes) -> None:
    numbers, writes = SPOILED[record]
    world, ref = opened()
    spoiled = writes(world, ref, value)
    keys = {op.key for op in spoiled if isinstance(op, Put) and op.value == value}
    world.tamper(*spoiled)
    violations = found(world)
    expected = numbers[value == EMPTY]
    if expected == 0:
        assert {v.key for v in violations if v.invariant == 0} == keys, [str(v) for v in violations]
    elif expected < 0:
        assert violations == []
    Checker(world.keys).begin(world.store.listing())


def test_a_claim_of_an_impossible_holder_does_not_break_the_check() -> None:
    world, ref = opened()
    world.tamper(Put(world.keys.claim(ref, 0), b'{"v":1,"executor":"ex-a","incarnation":["a"],"attempt":1}'))
    assert [(v.invariant, v.key) for v in found(world)] == [(0, world.keys.claim(ref, 0))]


def test_unreadable_records_of_every_kind_are_tested() -> None:
    world = World()
    written = [op for _, writes in SPOILED.values() for op in writes(*opened(), EMPTY)]
    parsed = [world.keys.parse(op.key) for op in written if isinstance(op, Put) and op.value == EMPTY]
    assert {(key.family, key.name, key.chunk >= 0, key.partition >= 0) for key in parsed} == {
        *((K.OP, name, False, False) for name in {*K.OPERATION_NAMES, "runOps", "nextInstanceId", "current"}),
        *((K.OP, name, False, True) for name in K.JOB_NAMES),
        *((K.HISTORY, name, False, False) for name in {*K.HISTORY_NAMES, ""}),
        *((family, "plan", True, False) for family in (K.OP, K.HISTORY)),
        *((f, "", False, False) for f in (K.OPEN, K.PENDING, K.NODE, K.NODE_DRAIN, K.COORDINATOR, K.BEHAVIOR)),
        *((f, "", False, False) for f in (K.TABLE, K.TABLE_ACTIONS, K.UNIQUE, K.REQUEST)),
        (K.CLAIM, "", False, True),
    }


def test_a_violation_lists_the_last_events_of_its_key() -> None:
    world, ref = opened()
    world.do(world.claim(ref, "a", [0]))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    revision = world.tamper(Delete(world.keys.job(ref, 0, "state")))
    violation = found(world)[0]
    assert (violation.invariant, violation.revision) == (1, revision)
    assert str(violation).startswith(f"invariant 1 at revision {revision}: distOp.sales%2Eorders.noop.1.000000.state:")
    story = "\n".join(violation.story)
    assert "distOpClaim" in story
    assert "000000.state = success" in story
    assert story.endswith("000000.state deleted")


def test_a_cancel_by_a_person_needs_no_election() -> None:
    world, ref = opened()
    world.do(world.resign())
    world.do(world.cancel(ref))
    assert Cancel.decode(world.store.get(world.keys.of(ref, "cancel")).value).reason == "user"
    assert found(world) == []


# ------------------------------------------------------------------ as a stream


def test_the_checker_returns_the_violations_of_each_revision() -> None:
    world, ref = opened()
    wrong = world.tamper(Delete(world.keys.run_ops(TABLE)))
    checker = Checker(world.keys)
    by_revision = {revision: checker.feed(revision, changes) for revision, changes in world.store.history}
    assert {revision for revision, violations in by_revision.items() if violations} == {wrong}
    assert [v for violations in by_revision.values() for v in violations] == found(world)
    assert checker.operations == {ref}


def test_ended_operations_take_no_memory() -> None:
    world = World()
    for _ in range(5):
        world.run_operation(3)
    checker = Checker(world.keys)
    for revision, changes in world.store.history:
        assert not checker.feed(revision, changes)
    assert not checker.operations
    assert not checker._existing
    assert not checker._job_roots


def test_a_request_id_is_unique_for_a_type_on_a_table() -> None:
    """A pipeline's id that starts an operation on each of its tables is no request that started twice."""

    async def work(etcd: Etcd) -> None:
        etcd.put(etcd.client.keys.table("u"), TableRecord("u", "parquet", "/u").encode())
        for table in ("t", "u", "t"):
            await etcd.client.start_operation("noop", table, {}, request_id="migration-17", delay=60.0)

    run(work)


def test_a_request_is_forgotten_with_its_history() -> None:
    world = World()
    ref = world.run_operation(1)
    mark = age_model_history(world.store, world.keys)
    world.do(f.forget(world.keys, [(ref, world.store.mod(world.keys.history(ref)), f"request-{ref}")], mark))
    assert found(world) == []
    world.tamper(*begin(world, replace(ref, instance=2), 3, f"request-{ref}"))
    assert 14 not in numbers(world)


@pytest.mark.parametrize("at", range(1, 30))
def test_a_replay_may_start_at_any_revision(at: int) -> None:
    world, ref = opened(3)
    world.do(world.claim(ref, "a", [0, 1, 2]))
    world.do(world.wait_again(ref, 0, failed=True))
    world.do(world.report(ref, 2, JobState.SUCCESS))
    world.die("a")
    world.do(world.elect("b"))
    world.do(world.claim(ref, "b", [0]))
    world.do(world.report(ref, 0, JobState.FAILED))
    world.do(world.fail_fast(ref))
    world.do(world.revoke(ref, 1))
    world.do(world.reap(ref, 1))
    world.do(world.decide(ref))
    world.do(world.finish(ref))
    world.do(world.clean(ref))
    world.do(world.end(ref))
    world.do(world.start(world.next_ref()))
    content: dict[str, KeyValue] = {}
    for revision, changes in world.store.history:
        if revision <= at:
            for change in changes:
                content.pop(change.kv.key, None)
                if not change.deleted:
                    content[change.kv.key] = change.kv
    later = [(revision, changes) for revision, changes in world.store.history if revision > at]
    assert check(world.keys, later, sorted(content.values(), key=lambda kv: kv.key)) == []

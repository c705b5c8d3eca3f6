"""The decisions: what a coordinator does in each stage, what an executor claims, in which order and how much."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.decide import job_claims, work_shares
from distop.decide import next_steps as d
from distop.decide.job_claims import claim_for, claimable
from distop.decide.next_steps import next_step
from distop.decide.work_shares import block_size, cost, rendezvous, shares
from distop.protocol import job_transitions
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.jobs import MAX_OUTCOME_BYTES, Claim, JobState, Outcome, Tried, bounded_errors
from distop.protocol.json_codec import rfc3339
from distop.protocol.records import Cancel, Decision, OperationRef, State
from distop.protocol.revisioned import Seen
from distop.protocol.state_tables import Stage
from tests.support.world import World

NOW, POLL = 1_700_000_000.0, 30.0
COMPLETES = Rules(retry=Retry(attempts=3), failure_policy="collect_all", completes=True)


def world_with(rules: Rules = COMPLETES, *, jobs: int | None = 2) -> tuple[World, OperationRef]:
    world = World(rules=rules)
    world.join("a")
    world.join("b")
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.elect("a"))
    if jobs is not None:
        world.do(world.plan(ref, jobs))
    return world, ref


def step(world: World, ref: OperationRef, now: float = NOW) -> d.NextStep:
    return next_step(world.keys, world.op(ref), set(world.leases), world.election, now, POLL)


def run(world: World, ref: OperationRef, p: int, state: JobState) -> None:
    world.do(world.claim(ref, "a", [p]))
    world.do(world.report(ref, p, state))


# ----------------------------------------------------------------- coordinator


def test_nothing_to_do() -> None:
    world, ref = world_with()
    assert step(world, replace(ref, instance=9)) is None
    assert step(world, ref) is None  # open, jobs to be run
    world.do(world.pause(ref))
    assert step(world, ref) is None


def test_an_operation_of_a_newer_release_is_skipped() -> None:
    world, ref = world_with(jobs=None)
    op = world.op(ref)
    assert op.spec is not None
    op.spec = replace(op.spec, version=99)
    assert next_step(world.keys, op, {"a"}, world.election, NOW, POLL) is None


def test_planning() -> None:
    world, ref = world_with(jobs=None)
    assert step(world, ref) == d.MakePlan()
    op = world.op(ref)

    def after(retry_at: str) -> d.NextStep:
        from distop.protocol.records import Attempts

        op.planning = Seen(Attempts(1, "no", retry_at), 5)
        return next_step(world.keys, op, {"a"}, world.election, NOW, POLL)

    assert after(rfc3339(NOW + 10)) == d.WakeAt(NOW + 10)
    assert after(rfc3339(NOW)) == d.MakePlan()
    assert after("") == d.MakePlan()
    assert after("soon") == d.MakePlan()
    assert after(rfc3339(NOW + 3600)) == d.MakePlan()  # a clock that is an hour ahead wrote it (fault 40)


def test_all_jobs_ended() -> None:
    world, ref = world_with()
    run(world, ref, 0, JobState.SUCCESS)
    assert step(world, ref) is None
    run(world, ref, 1, JobState.SUCCESS)
    todo = step(world, ref)
    assert isinstance(todo, d.Commit)
    assert todo.txn.label == "decide"
    behind = world.op(ref)
    behind.claims = {1: Seen(Claim("ex-a", "a", 1, 0), 1)}  # the watch of the claims lags behind that of the jobs
    assert next_step(world.keys, behind, {"a"}, world.election, NOW, POLL) == todo
    world.do(todo.txn)
    op = world.op(ref)
    assert op.decision is not None
    assert op.decision.value == Decision(State.SUCCESS, 2, 2, 0)
    assert step(world, ref) == d.RunCompletion(op.decision.value)


def test_a_failed_job_fails_the_operation_when_all_have_ended() -> None:
    world, ref = world_with()
    run(world, ref, 0, JobState.FAILED)
    assert step(world, ref) is None  # collect_all
    run(world, ref, 1, JobState.SUCCESS)
    world.do(world.pause(ref))  # a pause does not hold up what has ended
    todo = step(world, ref)
    assert isinstance(todo, d.Commit)
    world.do(todo.txn)
    op = world.op(ref)
    assert op.decision is not None
    assert op.decision.value == Decision(State.FAILED, 2, 1, 1, "0")


def test_no_jobs_is_success() -> None:
    world, ref = world_with(jobs=0)
    todo = step(world, ref)
    assert isinstance(todo, d.Commit)
    assert todo.txn.label == "decide"
    quick, ref = world_with(replace(COMPLETES, completes=False), jobs=0)
    assert step(quick, ref) == d.Finish(Decision(State.SUCCESS, 0, 0, 0), 0)


def test_a_report_is_made_before_the_decision() -> None:
    world, ref = world_with(replace(COMPLETES, reports_only=True))
    run(world, ref, 0, JobState.FAILED)
    run(world, ref, 1, JobState.SUCCESS)
    todo = step(world, ref)
    assert isinstance(todo, d.CompleteFirst)
    assert todo.decision == Decision(State.FAILED, 2, 1, 1, "0")
    world.do(todo.otherwise.txn)
    assert step(world, ref) == d.RunCompletion(todo.decision), "decided first, it is completed as any other"


def test_an_operation_may_end_soon_once_one_group_of_reports_is_left() -> None:
    jobs = job_transitions.REPORTS_PER_TXN + 1
    world, ref = world_with(jobs=jobs)
    op = world.op(ref)
    op.claims_known = False
    assert not d.may_end_soon(op)
    run(world, ref, 0, JobState.SUCCESS)
    assert d.may_end_soon(world.op(ref))
    world.do(world.pause(ref))
    assert not d.may_end_soon(world.op(ref))


def test_the_report_of_a_cancelled_operation_is_made_after_the_decision() -> None:
    world, ref = world_with(replace(COMPLETES, reports_only=True))
    world.do(world.cancel(ref))
    decide = step(world, ref)
    assert isinstance(decide, d.Commit)
    assert decide.txn.label == "decide"


def test_a_cancelled_operation_waits_until_its_claims_are_known() -> None:
    world, ref = world_with()
    world.do(world.cancel(ref))
    op = world.op(ref)
    op.claims_known = False
    assert d.next_step(world.keys, op, {"a"}, world.election, NOW, 30.0) is None


def test_fail_fast() -> None:
    world, ref = world_with(replace(COMPLETES, failure_policy="fail_fast"))
    run(world, ref, 0, JobState.FAILED)
    todo = step(world, ref)
    assert isinstance(todo, d.Commit)
    assert todo.txn.label == "fail_fast"
    world.do(todo.txn)
    assert world.op(ref).cancel == Cancel("failed", "1 of 2 jobs failed")
    decide = step(world, ref)
    assert isinstance(decide, d.Commit)
    world.do(decide.txn)
    decision = world.op(ref).decision
    assert decision is not None
    assert decision.value.verdict is State.FAILED


def test_cancelling_waits_for_live_holders_and_reaps_other_claims() -> None:
    world, ref = world_with(jobs=3)
    world.do(world.claim(ref, "a", [0, 1]))
    world.do(world.claim(ref, "b", [2]))
    world.do(world.wait_again(ref, 1, failed=False))
    world.do(world.cancel(ref))
    fences = [world.fence(ref, p) for p in range(3)]
    assert step(world, ref) == d.Reap(((1, fences[1]),))
    world.do(world.reap(ref, 1))
    assert step(world, ref) is None
    world.die("b")
    assert step(world, ref) == d.Reap(((2, fences[2]),))
    world.do(world.revoke(ref, 2))
    assert step(world, ref) == d.Reap(((2, world.fence(ref, 2)),))
    world.do(world.reap(ref, 2))
    world.do(world.report(ref, 0, JobState.SUCCESS))
    todo = step(world, ref)
    assert isinstance(todo, d.Commit)
    world.do(todo.txn)
    decision = world.op(ref).decision
    assert decision is not None
    assert decision.value == Decision(State.CANCELLED, 3, 1, 0)


def test_a_cancelled_operation_is_checked_before_an_actors_claim_is_abandoned() -> None:
    """Later than now, whatever is left: the look would be repeated without end where time moves in steps."""
    world, ref = world_with(jobs=1)
    world.do(world.claim(ref, "a", [0]))
    world.do(world.cancel(ref))
    actors = {0: 1e-9}
    todo = next_step(world.keys, world.op(ref), set(world.leases), world.election, NOW, POLL, actors)
    assert isinstance(todo, d.WakeAt)
    assert NOW < todo.time < NOW + 1.0


def test_completing() -> None:
    world, ref = world_with(jobs=0)
    world.do(world.decide(ref))
    op = world.op(ref)
    assert op.decision is not None
    first = op.decision.value

    def after(decision: Decision) -> d.NextStep:
        op.decision = Seen(decision, 77)
        return next_step(world.keys, op, {"a"}, world.election, NOW, POLL)

    assert after(first) == d.RunCompletion(first)
    tried = replace(first, attempts=1, retry_at=rfc3339(NOW + 5))
    assert after(tried) == d.WakeAt(NOW + 5)
    late = replace(tried, retry_at=rfc3339(NOW + 3600))
    assert after(late) == d.RunCompletion(late)
    spent = replace(first, attempts=3, verdict=State.FAILED)
    assert after(spent) == d.Finish(spent, 77)
    assert op.spec is not None
    op.spec = replace(op.spec, rules=replace(COMPLETES, can_fail=False))
    assert after(tried) == d.WakeAt(NOW + 5)
    assert after(spent) == d.Finish(spent, 77), "can_fail speaks of jobs, not of the completion code"


def test_an_operation_without_a_plan_is_finished_without_completion_code() -> None:
    world, ref = world_with(jobs=None)
    world.do(world.give_up(ref))
    todo = step(world, ref)
    assert isinstance(todo, d.Finish)
    assert todo.decision.verdict is State.FAILED
    assert todo.decision_mod == world.mod(ref, "decision")


def test_cleaning() -> None:
    world, ref = world_with()
    for p in (0, 1):
        run(world, ref, p, JobState.SUCCESS)
    world.do(world.finish_at_once(ref))
    assert world.stage(ref) is Stage.CLEANING
    assert step(world, ref) == d.Clean(2)


# -------------------------------------------------------------------- executor


def look(claims: dict[int, Claim], **more: object) -> job_claims.Claimable:
    by: dict[str, object] = {"name": "ex-a", "live": {"a", "b"}, "others": ("ex-b",), "patience": 60.0}
    given_: dict[str, object] = {"count": 6, "ended": {5}, "now": NOW, "unchanged_for": {}}
    for name, value in more.items():
        (by if name in by else given_)[name] = value
    found = {p: Seen(c, 1) for p, c in claims.items()}
    return claimable(claims=found, by=job_claims.Claimant(**by), **given_)  # type: ignore[arg-type]


def test_claimable() -> None:
    found = look(
        {
            0: Claim("ex-b", "b", 1, 0),
            1: Claim("ex-z", "z", 1, 0),
            2: Claim("ex-b", "", 1, 1, rfc3339(NOW - 1)),
            3: Claim("ex-b", "", 1, 1, rfc3339(NOW + 7)),
        }
    )
    assert found == job_claims.Claimable((4,), (2,), (1,), NOW + 7)


def test_a_released_job_is_due_at_once() -> None:
    assert look({0: Claim("ex-b", "", 1, 0)}).waiting == (0,)
    assert look({0: Claim("ex-a", "", 1, 0)}).waiting == (0,)


def test_an_executor_that_failed_a_job_leaves_it_to_others_at_first() -> None:
    mine = {0: Claim("ex-a", "", 1, 1, rfc3339(NOW - 1))}
    assert look(mine).waiting == ()
    assert look(mine).next_due == NOW - 1 + 60
    assert look(mine, others=()).waiting == (0,)
    assert look(mine, now=NOW + 61).waiting == (0,)
    assert look(mine, name="ex-b").waiting == (0,)


def test_an_executor_leaves_a_job_to_others_longer_after_each_failure() -> None:
    """A broken node has free slots again at once."""
    tried = (Tried(1, "ex-a", "x"), Tried(2, "ex-b", "x"), Tried(3, "ex-a", "x"))
    for former, left in ((tried[:1], job_claims.LEFT_TO_OTHERS), (tried, 2 * job_claims.LEFT_TO_OTHERS)):
        mine = {0: Claim("ex-a", "", len(former), len(former), rfc3339(NOW), "x", tried=former)}
        assert look(mine, patience=1.0).next_due == NOW + left
        assert look(mine, patience=1.0, unchanged_for={0: left - 1}).next_due == NOW + 1
        assert look(mine, patience=1.0, unchanged_for={0: left}).waiting == (0,)
        assert look(mine, patience=1.0, name="ex-b").waiting == (0,)
        assert look(mine, patience=1.0, others=()).waiting == (0,)
    assert job_claims.LEFT_TO_OTHERS < 120.0, "others may not come"


def test_a_clock_that_is_ahead_delays_a_job_at_most_by_the_patience() -> None:
    claims = {0: Claim("ex-b", "", 1, 1, rfc3339(NOW + 3600))}
    assert look(claims).next_due == NOW + 60
    assert look(claims, unchanged_for={0: 45.0}).next_due == NOW + 15
    assert look(claims, unchanged_for={0: 60.0}).waiting == (0,)
    assert look({0: Claim("ex-b", "", 1, 1, "not a time")}).waiting == (0,)


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 100),
    st.booleans(),
    st.integers(-1, 64),
    st.integers(0, 10**5),
)
def test_block_size(jobs: int, mine: int, executors: int, batch: bool, free: int, limit: int) -> None:
    size = block_size(jobs, mine, executors, batch, free, limit)
    assert 0 <= size <= min(jobs, limit)
    if free <= 0:
        assert size == 0
    elif batch:
        assert size == min(mine or -(-jobs // max(executors, 1)), jobs, limit)
        assert size > 0 or not jobs or not limit
    else:
        assert size == min(free, jobs, limit)


executors = st.lists(st.text("abc123", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)


def order(name: str, among: list[str], count: int, salt: str = "op") -> tuple[list[int], int]:
    return rendezvous(range(count), name, [other for other in among if other != name], salt)


@given(st.integers(0, 200), executors)
def test_rendezvous_is_a_permutation(count: int, names: list[str]) -> None:
    for name in names:
        assert sorted(order(name, names, count)[0]) == list(range(count))
        assert order(name, names, count) == order(name, list(reversed(names)), count)


@given(st.integers(0, 200), executors)
def test_rendezvous_gives_every_job_to_one_executor(count: int, names: list[str]) -> None:
    own = [order(name, names, count) for name in names]
    assert sorted(p for ordered, mine in own for p in ordered[:mine]) == list(range(count))


def test_rendezvous_spreads() -> None:
    names, count = [f"node-{n}" for n in range(4)], 4_000
    for name in names:
        assert 0.85 * count / len(names) < order(name, names, count)[1] < 1.15 * count / len(names)
    assert order("node-0", names, count)[0] != order("node-0", names, count, "other")[0]


def test_rendezvous_moves_little_when_one_leaves() -> None:
    names, count = [f"node-{n}" for n in range(4)], 2_000
    for name in names[:3]:
        before, mine = order(name, names, count)
        after, more = order(name, names[:3], count)
        assert set(before[:mine]) < set(after[:more])


@given(st.integers(0, 3_000), executors)
def test_shares_of_a_fresh_plan_are_disjoint_equal_and_complete(count: int, names: list[str]) -> None:
    dealt = [shares(count, name, [other for other in names if other != name], "op") for name in names]
    assert all(sorted(ordered) == list(range(count)) for ordered, _ in dealt)
    assert sorted(p for ordered, mine in dealt for p in ordered[:mine]) == list(range(count))
    sizes = [mine for _, mine in dealt]
    assert max(sizes) - min(sizes) <= work_shares.LONGEST_RUN
    even = [shares(count, name, [other for other in names if other != name], "op", [7] * count) for name in names]
    assert even == dealt, "what all cost the same changes nothing"


@given(st.lists(st.integers(1, 1_000) | st.integers(10**6, 10**9), max_size=400), executors)
def test_shares_by_cost_are_disjoint_complete_and_differ_by_no_more_than_one_run(
    costs: list[int], names: list[str]
) -> None:
    count = len(costs)
    dealt = [shares(count, name, [other for other in names if other != name], "op", costs) for name in names]
    assert all(sorted(ordered) == list(range(count)) for ordered, _ in dealt)
    assert sorted(p for ordered, mine in dealt for p in ordered[:mine]) == list(range(count))
    weights = [sum(costs[p] for p in ordered[:mine]) for ordered, mine in dealt]
    length = max(1, min(work_shares.LONGEST_RUN, count // (8 * len(names))))
    heaviest = max((sum(costs[n : n + length]) for n in range(0, count, length)), default=0)
    assert max(weights) - min(weights) <= heaviest


def test_the_most_expensive_partitions_come_first() -> None:
    costs = [cost({"bytes": 1_000, "files": [["a", 1_000, 0]]})] * 2_000 + [cost({"bytes": 4 * 1024**3})]
    (first, mine), (second, others) = (shares(len(costs), name, [other], "op", costs) for name, other in ("ab", "ba"))
    owner = first if 2_000 in first[:mine] else second
    assert owner.index(2_000) < work_shares.LONGEST_RUN
    assert sorted(first[:mine] + second[:others]) == list(range(2_001))
    assert 200 < min(mine, others) < max(mine, others) < 1_800, "tiny files cost what opening them costs"


@pytest.mark.parametrize(
    ("sizes", "slots", "fitting"),
    [
        ((), 2, 0),
        ((1, 2, 3), 1, 3),
        ((work_shares.BATCH_BYTES_PER_SLOT + 1, 1), 1, 1),
        ((work_shares.BATCH_BYTES_PER_SLOT, 1), 1, 1),
        ((work_shares.BATCH_BYTES_PER_SLOT, 1), 2, 2),
        ((1, work_shares.BATCH_BYTES_PER_SLOT, 1), 1, 1),
    ],
)
def test_a_batch_is_cut_by_bytes_and_slots_and_never_empty(sizes: tuple[int, ...], slots: int, fitting: int) -> None:
    assert work_shares.within_bytes(sizes, slots) == fitting


# ---------------------------------------------------------------------- claims


def test_claim_for() -> None:
    rules = Rules(retry=Retry(attempts=2))
    assert claim_for(None, "ex", "i", False, rules) == (Claim("ex", "i", 1, 0), 0, False)
    waiting = Seen(Claim("ex-b", "", 3, 1, "", "why"), 9)
    assert claim_for(waiting, "ex", "i", False, rules) == (Claim("ex", "i", 4, 1, error="why"), 9, False)
    held = Seen(Claim("ex-b", "b", 1, 0), 9)
    story = (Tried(1, "ex-b", job_claims.LOST),)
    assert claim_for(held, "ex", "i", True, rules) == (Claim("ex", "i", 2, 1, losses=1, tried=story), 9, False)
    assert claim_for(Seen(Claim("ex-b", "b", 2, 1), 9), "ex", "i", True, rules)[2]
    assert claim_for(held, "ex", "i", True, replace(rules, lost="fail"))[2]
    assert not claim_for(held, "ex", "i", True, replace(rules, lost="fail", can_fail=False))[2]


def test_retried_and_released() -> None:
    claim = Claim("ex", "i", 2, 1, error="before")
    broken = job_claims.retried(claim, "ex", "now", "later")
    assert broken == Claim("ex", "", 2, 2, "later", "now", tried=(Tried(2, "ex", "now"),))
    assert job_claims.released(claim, "ex") == Claim("ex", "", 2, 1, "", "before")


def test_the_errors_of_a_job_are_bounded_in_count_and_bytes() -> None:
    story: tuple[Tried, ...] = ()
    for attempt in range(1, 40):
        story = bounded_errors(story, Tried(attempt, "ex", "é" * 10_000))
        assert [one.attempt for one in story] == sorted({1, *range(max(1, attempt - 3), attempt + 1)})
    assert [one.attempt for one in story] == [1, 36, 37, 38, 39]
    value = Claim("ex", "i", 40, 39, error="é" * 10_000, tried=story).encode()
    assert len(value) < 16_000
    assert [one.attempt for one in Claim.decode(value).tried] == [1, 36, 37, 38, 39]
    outcome = Outcome("p", "ex", "i", 40, "", "", "x" * (MAX_OUTCOME_BYTES - 300), "", story)
    assert Outcome.decode(outcome.encode()).tried == (), "the result is worth more"


@pytest.mark.parametrize(
    ("failures", "losses", "lost", "alone"),
    [(0, 0, True, False), (1, 1, True, True), (2, 1, False, True), (2, 0, False, False), (2, 2, True, False)],
)
def test_suspects_run_alone(failures: int, losses: int, lost: bool, alone: bool) -> None:
    """With three attempts: once the next loss would be one too many, and only after a loss."""
    claim = Claim("ex", "", 3, failures, losses=losses)
    assert job_claims.suspect(claim, lost, Rules(retry=Retry(attempts=3))) is alone
    assert not job_claims.suspect(claim, lost, Rules(can_fail=False))
    assert not job_claims.suspect(claim, True, Rules(lost="fail"))


def test_candidates_for_an_election_have_different_turns() -> None:
    nodes = ["a", "b", "c", "d"]
    for subject in ("t/noop", "u/noop", "t/validate"):
        assert sorted(work_shares.turn(nodes, name, subject) for name in nodes) == [0, 1, 2, 3]
    first = {next(n for n in nodes if work_shares.turn(nodes, n, f"t{i}/noop") == 0) for i in range(40)}
    assert first == set(nodes), "nobody is the first for everything"
    assert work_shares.turn([], "a", "t/noop") == 0


def test_a_resumable_job_is_left_to_the_executor_with_its_state_for_a_moment() -> None:
    """A lost or released job of a live executor, for its head start; not a job that failed there."""
    claims = {
        0: Seen(Claim("home", "gone", 1, 0), 5),
        1: Seen(Claim("home", "", 1, 0), 6),
        2: Seen(Claim("home", "", 1, 1), 7),
        3: Seen(Claim("away", "", 1, 0), 8),
    }

    def look(executor: str, homes: list[str], since: float) -> job_claims.Claimable:
        unchanged = dict.fromkeys(claims, since)
        by = job_claims.Claimant(executor, {"live"}, homes or ("another",), 60.0)
        return claimable(4, set(), claims, by, 100.0, unchanged, resumable=bool(homes))

    mine = look("other", ["home"], 0.5)
    assert (mine.lost, mine.waiting, mine.next_due) == ((), (2, 3), 100.0 + job_claims.HEAD_START - 0.5)
    for later in (look("other", ["home"], job_claims.HEAD_START), look("other", [], 0.0), look("home", ["other"], 0.0)):
        assert later.lost == (0,)
        assert 1 in later.waiting
    waits = look("other", ["home"], 0.0).next_due
    assert waits is not None
    assert 100.0 < waits < 110.0


def test_another_executor_becomes_quiet_for_a_suspect_within_minutes() -> None:
    """The first may never be alone, for a reason that nobody else sees; it also may have to end a long job first."""
    assert work_shares.quiet_in(0, 0.0) == 0.0
    assert 60.0 < work_shares.quiet_in(1, 0.0) < 900.0
    assert work_shares.quiet_in(1, 900.0) == 0.0

"""Priorities, limits, selectors and failure budgets, without etcd: what a claim takes, what a coordinator does."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.daemon.executor.claimer import Claimer
from distop.decide import job_claims, next_steps
from distop.errors import InvalidArgument
from distop.invariants.checker import check
from distop.protocol import actor_claims, job_transitions
from distop.protocol import operation_transitions as t
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.jobs import Claim, JobState
from distop.protocol.operation_options import AGING, MOST_URGENT, Options, Terms, allowance, fits, rank, usable_permits
from distop.protocol.permits import MAX_GONE, Permits, permits
from distop.protocol.plan import Gate
from distop.protocol.records import Node, Spec
from distop.protocol.revisioned import Seen
from distop.protocol.state_tables import JobStage
from distop.protocol.txn import MAX_OPERATIONS, Put, operations
from distop.services.claims.claim_candidates import takings
from distop.services.inspection.status import Snapshot, judge
from distop.services.submission.option_values import selector
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import request
from tests.support.world import World, open_operation, planned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.protocol.records import OperationRef


def limited(
    most: int, jobs: int = 6, *, each: int = 0, attempts: int = 3, cleans: bool = True
) -> tuple[World, OperationRef]:
    """An open operation with a number of jobs and a limit of concurrent ones; executors a and b."""
    world = World(rules=Rules(retry=Retry(attempts=attempts), cleans=cleans))
    world.join("a")
    world.join("b")
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.elect("a"))
    world.do(world.plan(ref, jobs))
    if most or each:
        world.do(world.alter(ref, Options(max_jobs=most, max_jobs_per_executor=each)))
    return world, ref


def held(world: World, ref: OperationRef) -> list[int]:
    return [p for p, seen in sorted(world.op(ref).claims.items()) if not seen.value.waiting]


# --------------------------------------------------------------------- permits


def test_L35_live_claims_stay_within_the_limit_and_a_report_frees_a_permit() -> None:
    world, ref = limited(2)
    world.do(world.claim(ref, "a", range(6)))
    assert len(held(world, ref)) == 2
    revision = world.store.revision
    world.store.apply(world.claim(ref, "b", range(6)))
    assert world.store.revision == revision, "no permit is left"
    first = held(world, ref)[0]
    world.do(world.report(ref, first, JobState.SUCCESS))
    world.do(world.claim(ref, "b", [5, 4]))
    assert len(held(world, ref)) == 2
    assert check(world.keys, world.store.history) == []


def test_L35_concurrent_claims_do_not_both_get_the_last_permit() -> None:
    world, ref = limited(1)
    one, other = world.claim(ref, "a", [0]), world.claim(ref, "b", [1])
    world.store.apply(one)
    world.store.apply(other)
    assert held(world, ref) == [0]
    world.do(world.report(ref, 0, JobState.SUCCESS))
    before = world.store.listing()
    world.store.apply(other)
    assert world.store.listing() == before, "a copy that comes late is dead, though the permit is free again (T9)"


def test_L35_a_takeover_does_not_get_a_permit_that_another_claim_took() -> None:
    """The lost job has no permit of its own: the limit was set after its claim."""
    world, ref = limited(0)
    world.do(world.claim(ref, "b", [0]))
    world.do(world.alter(ref, Options(max_jobs=1)))
    world.die("b")
    late, first = world.claim(ref, "a", [0]), world.claim(ref, "a", [1])
    world.do(first)
    before = world.store.listing()
    world.store.apply(late)
    assert world.store.listing() == before, "no permit is left"
    world.do(world.report(ref, 1, JobState.SUCCESS))
    before = world.store.listing()
    world.store.apply(late)
    assert world.store.listing() == before, "a copy that comes late is dead, though the permit is free again (T9)"
    world.do(world.claim(ref, "a", [0]))
    assert held(world, ref) == [0]
    assert check(world.keys, world.store.history) == []


def test_L35_a_lowered_limit_lets_running_jobs_finish_and_claims_nothing_until_there_are_fewer() -> None:
    world, ref = limited(4)
    late = world.claim(ref, "b", [5])
    world.do(world.claim(ref, "a", range(4)))
    world.do(world.alter(ref, Options(max_jobs=2)))
    world.store.apply(late)
    assert held(world, ref) == [0, 1, 2, 3], "what was claimed by the former limit is refused"
    for p in (0, 3, 1):
        assert world.permits(ref).free == {}
        world.do(world.report(ref, p, JobState.SUCCESS))
    world.do(world.claim(ref, "b", [4, 5]))
    assert len(held(world, ref)) == 2
    assert check(world.keys, world.store.history) == []


def test_L35_a_later_limit_counts_jobs_that_run_without_a_permit() -> None:
    world, ref = limited(0)
    world.do(world.claim(ref, "a", range(3)))
    world.do(world.alter(ref, Options(max_jobs=2)))
    assert world.permits(ref).free == {}
    for p in (0, 1):
        world.do(world.report(ref, p, JobState.SUCCESS))
    world.do(world.claim(ref, "b", [3, 4, 5]))
    assert len(held(world, ref)) == 2
    assert check(world.keys, world.store.history) == []
    world.do(world.alter(ref, Options()))
    world.do(world.claim(ref, "b", [4, 5]))
    assert len(held(world, ref)) == 4, "0 takes the limit away"


def test_L35_the_jobs_of_a_lost_executor_are_taken_over_within_a_lowered_limit() -> None:
    world, ref = limited(3)
    world.do(world.claim(ref, "b", range(3)))
    world.do(world.alter(ref, Options(max_jobs=1)))
    world.die("b")
    for p in (2, 1, 0):
        world.do(world.claim(ref, "a", [p]))
        assert sum(seen.value.incarnation == "a" for seen in world.op(ref).claims.values()) == 1
        revision = world.store.revision
        world.store.apply(world.claim(ref, "a", [one for one in range(3) if one != p]))
        assert world.store.revision == revision
        world.do(world.report(ref, p, JobState.SUCCESS))
    assert check(world.keys, world.store.history) == []


def test_a_claim_is_refused_if_an_uncounted_holder_is_live() -> None:
    world, ref = limited(2)
    world.do(world.claim(ref, "b", [0, 1]))
    world.do(world.alter(ref, Options(max_jobs=1)))
    claims = [seen.value for seen in world.op(ref).claims.values()]
    behind = permits(1, claims, {}, {"a"})  # a view that does not show b yet
    assert behind.gone == {"b"}
    want = job_transitions.Want(
        2, Claim("ex-a", "a", 1, 0, permit=0), permit_mod=world.store.mod(world.keys.permit(ref, 0))
    )
    gate = world.store.mod(world.keys.gate(ref))
    assert not world.store.apply(job_transitions.claim(world.keys, ref, gate, "a", [want], (), behind.gone)).succeeded


def test_L35_revoking_lost_claims_needs_no_permit() -> None:
    world, ref = limited(6)
    world.do(world.claim(ref, "b", range(5)))
    world.do(world.claim(ref, "a", [5]))
    world.do(world.alter(ref, Options(max_jobs=2)))
    early = world.revoke_lost(ref, "a", *range(6))
    before = world.store.listing()
    world.store.apply(early)
    assert world.store.listing() == before, "all holders live"
    world.die("b")
    assert permits(2, [seen.value for seen in world.op(ref).claims.values()], {}, {"a"}, most_gone=0).below == 0
    world.do(world.revoke_lost(ref, "a", *range(6)))
    assert held(world, ref) == [5], "the living keep theirs"
    waiting = world.claim_of(ref, 0)
    assert waiting is not None
    assert (waiting.attempt, waiting.failures, waiting.losses, waiting.permit) == (1, 1, 1, -1)
    assert [one.text for one in waiting.tried] == [job_claims.LOST]
    world.do(world.claim(ref, "a", range(5)))
    assert len(held(world, ref)) == 2
    after = world.store.listing()
    world.store.apply(early)
    assert world.store.listing() == after, "a copy that comes late is dead (T9)"
    assert check(world.keys, world.store.history) == []


def test_L35_a_lost_job_that_is_failed_gives_its_permit_back() -> None:
    world, ref = limited(1, attempts=1, cleans=False)
    world.do(world.claim(ref, "b", [0]))
    world.die("b")
    world.do(world.fail_lost(ref, "a", 0))
    assert world.job_stage(ref, 0) is JobStage.FAILED
    assert check(world.keys, world.store.history) == []
    world.do(world.claim(ref, "a", [1]))
    assert held(world, ref) == [1], "the permit is free for another job"
    assert check(world.keys, world.store.history) == []


@pytest.mark.parametrize(("lost", "attempts"), [("retry", 1), ("fail", 3)])
def test_a_lost_job_at_the_limit_may_wait_for_its_cleanup(lost: str, attempts: int) -> None:
    world, ref = limited(1, attempts=attempts)
    world.rules = replace(world.rules, lost=lost)
    world.tamper(Put(world.keys.of(ref, "spec"), replace(world.own_spec(ref), rules=world.rules).encode()))
    seen = len(check(world.keys, world.store.history))
    world.do(world.claim(ref, "b", [0]))
    world.die("b")
    world.do(world.revoke_lost(ref, "a", 0))
    waiting = world.claim_of(ref, 0)
    assert waiting is not None
    assert job_claims.only_ends(waiting, world.rules)
    claim, mod, over = job_claims.claim_for(Seen(waiting, world.fence(ref, 0)), "ex-a", "a", False, world.rules)
    assert (claim.attempt, over, job_claims.only_ends(claim, world.rules)) == (2, False, True)
    gate = world.store.mod(world.keys.gate(ref))
    want = job_transitions.Want(0, replace(claim, permit=0), mod, world.store.mod(world.keys.permit(ref, 0)))
    world.do(job_transitions.claim(world.keys, ref, gate, "a", [want]))
    assert len(check(world.keys, world.store.history)) == seen


def test_a_pause_gives_permits_back_and_the_end_deletes_them() -> None:
    world, ref = limited(1, jobs=2)
    world.do(world.claim(ref, "a", [0]))
    world.do(world.pause_now(ref))
    world.do(world.wait_again(ref, 0, failed=False))
    world.do(world.resume(ref))
    assert world.gate(ref).options == Options(max_jobs=1), "the gate says it again"
    for p in range(2):
        world.do(world.claim(ref, "b", [p]))
        world.do(world.report(ref, p, JobState.SUCCESS))
    world.do(world.finish_at_once(ref))
    world.do(world.end(ref))
    assert world.store.range(*world.keys.permits_range(ref)) == []
    assert check(world.keys, world.store.history) == []


@pytest.mark.parametrize(("attempts", "ends"), [(1, True), (3, False)])
def test_an_actor_that_takes_over_a_lost_job_gives_its_permit_back(attempts: int, ends: bool) -> None:
    """The limit was removed while the job ran. ``ends``: it was lost once too often."""
    world, ref = limited(1, attempts=attempts, cleans=False)
    world.do(world.claim(ref, "b", [0]))
    world.do(world.alter(ref, Options()))
    world.die("b")
    plan, chunks = planned(6)
    op = open_operation(ref, world.own_spec(ref), plan, chunks)
    op.reopened(world.store.mod(world.keys.gate(ref)), world.gate(ref))
    lost = Seen(world.claim_of(ref, 0), world.fence(ref, 0))
    op.again = {0: (lost, True)}
    world.do(actor_claims.own(world.keys, takings(op, "w", 1, 9.0, lambda claim, p: True)))
    assert (world.claim_of(ref, 0) is None) == ends
    world.do(world.alter(ref, Options(max_jobs=2)))
    world.do(world.claim(ref, "a", [1, 2]))
    assert len(held(world, ref)) == 2
    assert check(world.keys, world.store.history) == []


def test_the_largest_claims_with_permits_fit_into_a_transaction() -> None:
    size = job_transitions.LIMITED_CLAIMS_PER_TXN
    world, ref = limited(0, jobs=2 * size)
    old = [Claim(f"ex-{n}", f"gone-{n % MAX_GONE}", 1, 0, permit=n + size) for n in range(size)]
    wants = [
        job_transitions.Want(n, Claim("ex-a", "a", 2, 1, permit=n), seen_mod=1, permit_mod=1, former=one)
        for n, one in enumerate(old)
    ]
    dead = {one.incarnation for one in old}
    txn = job_transitions.claim(world.keys, ref, 1, "a", wants, dead, dead)
    assert operations(txn) + 3 <= MAX_OPERATIONS


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 8)), max_size=8, unique_by=lambda n: n if n is not None else object()),
    st.integers(1, 8),
)
def test_usable_permits_never_exceed_the_limit(claims: list[int | None], most: int) -> None:
    """However many of them are taken in whatever order, and whatever ends between."""
    chance = random.Random(repr((claims, most)))
    live = list(claims)
    first = len(live)
    known = []
    for _ in range(30):
        numbered = {n: 1 for n in live if n is not None}
        known.append(usable_permits(most, numbered, live.count(None)))
        below = chance.choice(known)  # some look that may be long ago
        free = [n for n in range(below) if n not in numbered]
        if free and chance.random() < 0.6:
            live.append(chance.choice(free))
            assert len(live) <= most
        elif live:
            live.remove(chance.choice(live))
    assert len(live) <= max(first, most)


def test_a_refused_alter_stays_refused_and_changes_nothing() -> None:
    world, ref = limited(1)
    stale = world.alter(ref, Options(max_jobs=9))
    world.do(world.alter(ref, Options(max_jobs=2)))
    before = world.store.listing()
    assert not world.store.apply(stale).succeeded
    world.do(world.pause(ref))
    world.do(world.resume(ref))
    assert not world.store.apply(stale).succeeded
    assert [kv.value for kv in before if kv.key.endswith(".options")] == [Options(max_jobs=2).encode()]


def test_a_plan_made_during_an_alteration_is_refused() -> None:
    world, ref = limited(0)
    second = world.next_ref()
    world.do(world.start(second))
    stale = world.plan(second, 2)
    world.do(world.alter(second, Options(max_jobs=1)))
    assert not world.store.apply(stale).succeeded
    world.do(world.plan(second, 2))
    assert world.gate(second) == Gate(2, Options(max_jobs=1))
    assert ref != second


def test_the_gate_of_a_start_contains_only_given_options() -> None:
    world = World()
    world.join("a")
    ref = world.next_ref()
    spec = Spec("r", "", "me", world.rules, where={"zone": "a"})
    options = Options(3, 2, 1, "5%")
    world.do(t.starts(world.keys, world.counters(), [t.NewOperation(ref, spec, b"{}", planned(2), options=options)]))
    assert world.gate(ref) == Gate(2, options, {"zone": "a"})
    assert Spec.decode(spec.encode()) == spec
    plain = world.next_ref()
    world.do(world.start(plain))
    assert world.store.get(world.keys.of(plain, "options")) is None
    assert Gate(2).encode() == b'{"v":1,"count":2}'


def test_lost_jobs_with_a_permit_are_claimed_before_those_without() -> None:
    """Else nothing would be claimed: the permit is that job's, and the others have none."""
    world, ref = limited(1)
    plan, chunks = planned(6)
    op = open_operation(ref, world.spec(ref), plan, chunks, world.gate(ref))
    op.permits = permits(1, [Claim("ex-b", "gone", 1, 0, permit=0)], {0: (b"4", 7)}, {"a"})
    op.again = {2: (Seen(Claim("ex-b", "", 1, 1), 5), False), 4: (Seen(Claim("ex-b", "gone", 1, 0, permit=0), 6), True)}
    assert (op.room, op.crowded, op.unknown) == (1, False, False)
    free, again = op.take(op.room)
    assert (free, [p for p, _, _ in again]) == ([], [4])
    assert op.room == 0


def test_a_claim_reads_the_free_permits_once() -> None:
    """With 20,000 of them the look for each job stopped the daemon's loop until its session was lost."""

    class Counted(dict[int, int]):
        looks = 0

        def __iter__(self) -> Iterator[int]:
            self.looks += 1
            return super().__iter__()

    world, ref = limited(500, 500)
    plan, chunks = planned(500)
    op = open_operation(ref, world.spec(ref), plan, chunks, world.gate(ref))
    free = Counted.fromkeys(reversed(range(500)), 7)
    op.permits = Permits(free, 500)
    wants = [job_transitions.Want(p, Claim("ex-a", "a", 1, 0)) for p in range(400)]
    given = Claimer._with_permits(op, wants, {})
    assert [(want.claim.permit, want.permit_mod) for want in given] == [(n, 7) for n in range(400)]
    assert (free.looks, len(free)) == (1, 100)


# ------------------------------------------------------------------ priorities


def test_L35_aging_finally_ranks_the_least_urgent_first() -> None:
    assert rank(0, 0.0) > rank(-1, AGING - 1)
    assert rank(9, 0.0) > rank(0, 8 * AGING)
    assert rank(-MOST_URGENT, 2 * MOST_URGENT * AGING + AGING) > rank(MOST_URGENT, 0.0)


# --------------------------------------------------------------- failure budget


@pytest.mark.parametrize(
    ("budget", "fail_fast", "total", "may"),
    [
        *(("", True, 100, 0), ("", False, 100, 100), ("5", True, 100, 5), ("5", False, 3, 5), ("0", False, 9, 0)),
        *(("2%", True, 100, 2), ("2%", True, 149, 2), ("0.5%", True, 1000, 5), ("33.3%", True, 10, 3)),
        *((".5%", True, 400, 2), ("100%", True, 7, 7)),
    ],
)
def test_a_failure_budget_is_a_count_or_a_share(budget: str, fail_fast: bool, total: int, may: int) -> None:
    assert allowance(budget, fail_fast, total) == may


def test_an_operation_continues_within_its_failure_budget_and_fails_at_the_end() -> None:
    world, ref = limited(0)
    world.do(world.alter(ref, Options(max_failed="1")))
    world.do(world.claim(ref, "a", range(6)))

    def step() -> object:
        return next_steps.next_step(world.keys, world.op(ref), world.leases, world.election, 0.0, 30.0)

    world.do(world.report(ref, 0, JobState.FAILED))
    assert step() is None
    world.do(world.report(ref, 1, JobState.FAILED))
    stops = step()
    assert isinstance(stops, next_steps.Commit)
    assert stops.txn.label == "fail_fast"
    assert "2 of 6 jobs failed, where 1 may" in str(stops.txn)
    world.do(world.alter(ref, Options(max_failed="50%")))
    assert step() is None
    for p in range(2, 6):
        world.do(world.report(ref, p, JobState.SUCCESS))
    ends = step()
    decision = ends.decision if hasattr(ends, "decision") else None
    assert decision is None or decision.verdict == "failed"
    assert "failed" in str(ends)


# -------------------------------------------------------------------- selectors


def test_a_selector_matches_executors_with_all_of_its_labels() -> None:
    assert fits({}, {})
    assert fits({"zone": "a"}, {"zone": "a", "disk": "ssd"})
    assert not fits({"zone": "a"}, {"zone": "b"})
    assert not fits({"zone": "a", "disk": "ssd"}, {"zone": "a"})


def test_status_reports_that_no_executor_has_the_labels() -> None:
    world, ref = limited(0)
    spec = Spec("r", "", "me", world.rules, where={"zone": "a"})
    op = world.op(ref)
    seen = Snapshot(ref, op.state, None, spec, op.plan)
    node = Node("ex-a", "host", 2, ("noop",), {"zone": "b"})
    assert judge(seen, {"a": node}, 0.0).waiting_for == "an executor that offers `noop` and has the labels zone=a"
    fitting = Node("ex-b", "host", 2, ("noop",), {"zone": "a"})
    assert judge(seen, {"a": node, "b": fitting}, 0.0).waiting_for == "free slots"
    assert judge(seen, {}, 0.0).options == {"where": {"zone": "a"}}


# ------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "wrong",
    [
        *({"priority": 101}, {"priority": "high"}, {"priority": True}, {"max_jobs": -1}, {"max_jobs": 2.5}),
        *({"max_jobs_per_executor": 1_000_000}, {"max_failed": "many"}, {"max_failed": "101%"}, {"max_failed": -1}),
        *({"max_failed": "1e1%"}, {"max_failed": "%"}, {"max_failed": 2.5}, {"max_failed": "nan%"}),
        *({"max_failed": "\u0663"}, {"max_failed": True}),
    ],
)
def test_bad_options_are_refused_in_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        StartOptions.of(wrong, "alter").checked()
    assert "\n" not in str(refused.value)
    with pytest.raises(InvalidArgument):
        request("noop", "t", b"{}", StartOptions(**wrong), "me")


@pytest.mark.parametrize(
    "wrong",
    [
        "zone=a",
        {"zone": 1},
        {"": "a"},
        {"zone": ""},
        {"z" * 201: "a"},
        {str(n): "a" for n in range(21)},
        {"\ud800": "a"},
    ],
)
def test_bad_selectors_are_refused_in_one_sentence(wrong: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        selector(wrong)
    assert "\n" not in str(refused.value)


def test_only_given_options_are_changed() -> None:
    assert StartOptions().checked() == {}
    given = StartOptions(priority=-3, max_jobs=0, max_failed=" 2 %").checked()
    assert given == {"priority": -3, "max_jobs": 0, "max_failed": "2%"}
    former = Options(max_jobs=4, max_jobs_per_executor=2)
    assert former.altered(given) == Options(-3, 0, 2, "2%")
    assert Options.decode(former.encode()) == former
    assert Terms() == Terms(Options(), 0, {})

"""The parts of low-level claims that need no etcd: tokens, arguments, patience, rate limits, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.client.async_worker import Bucket
from distop.clock import source
from distop.decide import job_claims, next_steps
from distop.decide.earlier_runs import Disposition, judge
from distop.decide.job_claims import Claimant
from distop.decide.operation_view import OperationView, SeenClaim
from distop.errors import InvalidArgument, InvalidToken
from distop.protocol import actor_claims, job_transitions
from distop.protocol.actor_claims import Token
from distop.protocol.behavior_declaration import Declaration, Retry, Rules
from distop.protocol.jobs import Claim, JobState, Outcome, Tried
from distop.protocol.json_codec import dumps
from distop.protocol.keys import Keys
from distop.protocol.operation_options import DEFAULT
from distop.protocol.plan import Gate, PartitionPlan, Plan, chunked
from distop.protocol.records import OperationRef, Spec, State
from distop.protocol.revisioned import Seen
from distop.protocol.txn import GetResult, KeyValue, TxnResult
from distop.services.claims import owned_jobs as m
from distop.services.claims.claim_candidates import takings
from distop.services.claims.types_without_code import TypeOptions
from distop.services.open_operation import OpenOperation

REF = OperationRef("t", "copy", "", 7)
CLAIM = Claim("w", "", 1, 0, actor="w", duration=10.0, grant="0123456789abcdef", since="2026-01-01T00:00:00.000Z")
TOKEN = Token(REF, 3, 42, CLAIM.grant)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(NAMES, st.one_of(st.just(""), NAMES), st.integers(1, 10**9), st.integers(0, 999_999), st.integers(1, 2**63 - 1))
def test_a_token_is_read_as_it_was_written(table: str, obj: str, instance: int, partition: int, fence: int) -> None:
    token = Token(OperationRef(table, "copy", obj, instance), partition, fence, "00ff00ff00ff00ff")
    assert Token.parse(str(token)) == token


@given(st.one_of(st.text(max_size=60), st.none(), st.integers(), st.binary(max_size=20)))
def test_an_invalid_token_is_refused_in_one_sentence(text: object) -> None:
    with pytest.raises(InvalidToken, match="is not a job token"):
        Token.parse(text)


def test_the_records_of_an_actor_survive_encoding() -> None:
    assert Claim.decode(CLAIM.encode()) == CLAIM
    assert (CLAIM.waiting, CLAIM.holder) == (False, CLAIM.grant)
    assert b"incarnation" not in CLAIM.encode()
    assert Claim.decode(dumps({"v": 1, "executor": "e"})).waiting
    outcome = Outcome("p", "w", "", 1, "", "", {"rows": 1}, grant=CLAIM.grant)
    assert Outcome.decode(outcome.encode()) == outcome
    assert outcome.holder == CLAIM.grant


def test_only_a_declaration_without_code_has_that_field() -> None:
    plain = TypeOptions().declaration("copy")
    assert Declaration.decode(plain.encode()) == plain
    assert (plain.code, plain.completes, plain.rules().code) == (False, False, False)
    assert Rules.from_json(plain.rules().to_json()) == plain.rules()
    assert "code" not in Rules().to_json()


@pytest.mark.parametrize(("duration", "margin"), [(0.1, 0.5), (5.0, 0.5), (10.0, 1.0), (60.0, 5.0), (3600.0, 5.0)])
def test_a_claim_is_left_alone_for_its_duration_and_a_margin(duration: float, margin: float) -> None:
    claim = replace(CLAIM, duration=duration)
    assert job_claims.abandoned_in(claim, 0.0) == pytest.approx(duration + margin)
    assert job_claims.abandoned_in(claim, duration + margin) <= 1e-9


def test_claims_of_actors_are_claimable_after_staying_unchanged_long_enough() -> None:
    claims = {0: Seen(CLAIM, 5), 1: Seen(replace(CLAIM, duration=2.0), 6)}
    found = job_claims.claimable(3, (), claims, Claimant("e", {"a"}, (), 60.0), 100.0, {0: 4.0, 1: 4.0})
    assert (found.free, found.waiting, found.lost) == ((2,), (), (1,))
    assert found.next_due == pytest.approx(107.0)
    claim, mod, over = job_claims.claim_for(claims[1], "e", "a", True, Rules(retry=Retry(attempts=3)))
    assert (claim.attempt, claim.failures, claim.losses, mod, over) == (2, 1, 0, 6, False)
    assert (claim.actor, claim.grant, claim.duration) == ("", "", 0.0)
    assert claim.tried[-1].text == job_claims.EXPIRED
    assert not job_claims.suspect(claims[1].value, True, Rules(retry=Retry(attempts=2))), "it killed no executor"
    assert job_claims.claim_for(claims[1], "e", "a", True, Rules(retry=Retry(attempts=1)))[2]


def test_what_is_given_a_limit_while_others_are_looked_at_is_left_to_executors() -> None:
    """The claims of actors have no permits."""
    ref, spec = OperationRef("t", "x", "", 1), Spec("request", "", "", Rules())
    chunks = chunked([PartitionPlan(n, str(n)) for n in range(4)])
    op = OpenOperation(ref, 5, spec, {}, Plan(4, "", "", 1), chunks, [0])
    op.reopened(7, Gate(4))
    op.assume_free("w", ())
    assert len(takings(op, "w", 2, 9.0, lambda claim, p: True)) == 2
    op.reopened(8, Gate(4, DEFAULT.altered({"max_jobs": 1})))
    op.assume_free("w", ())
    assert takings(op, "w", 2, 9.0, lambda claim, p: True) == []


@pytest.mark.parametrize(
    ("cleans", "code", "attempts", "taken"),
    [(True, True, 1, 0), (True, True, 2, 1), (False, True, 1, 1), (True, False, 1, 1)],
)
def test_an_actor_fails_no_lost_job_that_has_cleanup_code(cleans: bool, code: bool, attempts: int, taken: int) -> None:
    """An executor does so, after the cleanup; an attempt that is left may be an actor's."""
    rules = Rules(retry=Retry(attempts=attempts), cleans=cleans, code=code)
    ref, spec = OperationRef("t", "x", "", 1), Spec("request", "", "", rules)
    chunks = chunked([PartitionPlan(0, "0")])
    op = OpenOperation(ref, 5, spec, {}, Plan(1, "", "", 1), chunks, [0])
    op.reopened(7, Gate(1))
    op.again = {0: (Seen(Claim("e", "gone", 1, 0), 6), True)}
    assert len(takings(op, "w", 1, 9.0, lambda claim, p: True)) == taken
    assert (0 in op.again) == (not taken), "it is left to whoever cleans up"


def test_an_actor_takes_no_job_that_was_claimed_to_be_ended_and_was_released() -> None:
    """An executor claimed it from a lost actor to clean up, and gave it back."""
    ref, spec = OperationRef("t", "x", "", 1), Spec("request", "", "", Rules(lost="fail"))
    op = OpenOperation(ref, 5, spec, {}, Plan(1, "", "", 1), chunked([PartitionPlan(0, "0")]), [0])
    op.reopened(7, Gate(1))
    lost = Claim("w", "", 1, 0, actor="w", duration=1.0)
    claim, _, over = job_claims.claim_for(Seen(lost, 6), "e", "inc", True, spec.rules)
    assert over
    assert job_claims.only_ends(claim, spec.rules)
    op.again = {0: (Seen(job_claims.released(claim, "e"), 8), False)}
    assert takings(op, "v", 1, 9.0, lambda claim, p: True) == []
    again, _, over = job_claims.claim_for(op.again[0][0], "f", "inc2", False, spec.rules)
    assert not over
    assert job_claims.only_ends(again, spec.rules)


def test_a_lost_claim_that_only_ends_a_job_is_not_an_attempt() -> None:
    rules = Rules(retry=Retry(attempts=2), lost="fail")
    lost, _, over = job_claims.claim_for(Seen(Claim("e", "gone", 1, 0), 6), "f", "inc", True, rules)
    assert over
    again, _, over = job_claims.claim_for(Seen(lost, 7), "g", "inc2", True, rules)
    assert over
    assert (again.attempt, again.failures, again.tried) == (3, 2, lost.tried)
    assert not job_claims.suspect(job_claims.released(lost, "f"), False, rules), (
        "it need not run alone: it does not run"
    )


def test_as_many_claims_as_are_revoked_at_once_fit_into_a_request() -> None:
    story = tuple(Tried(n, "e" * 255, "\u20ac" * 500) for n in range(5))
    long = Claim("e" * 255, "gone", 9, 9, error="\u20ac" * 4_000, tried=story)
    assert job_transitions.CLAIMS_PER_REAP * len(job_claims.revoked(long).encode()) < 200_000


@pytest.mark.parametrize(
    ("rules", "ends"),
    [
        (Rules(retry=Retry(attempts=1)), True),
        (Rules(retry=Retry(attempts=2)), False),
        (Rules(retry=Retry(attempts=2), lost="fail"), True),
        (Rules(retry=Retry(attempts=1), cleans=False), False),
        (Rules(retry=Retry(attempts=1), code=False), False),
        (Rules(retry=Retry(attempts=1), can_fail=False), False),
    ],
)
def test_a_lost_job_ends_under_a_claim_where_there_is_something_to_clean_up(rules: Rules, ends: bool) -> None:
    actor, executor = Claim("w", "", 1, 0, actor="w", duration=1.0), Claim("e", "gone", 1, 0)
    for lost in (actor, executor):
        claim, _, _ = job_claims.claim_for(Seen(lost, 6), "f", "inc", True, rules)
        assert job_claims.only_ends(claim, rules) == ends


def test_a_view_knows_since_when_it_sees_the_claim_of_an_actor() -> None:
    op = OperationView(REF)
    op.claims = {3: SeenClaim(CLAIM.encode(), 5)}
    assert next_steps.actors_of(op, 100.0) == {3: pytest.approx(11.0)}
    assert next_steps.actors_of(op, 107.0) == {3: pytest.approx(4.0)}
    op.claims = {3: SeenClaim(CLAIM.encode(), 6)}
    assert next_steps.actors_of(op, 108.0) == {3: pytest.approx(11.0)}, "it was extended"
    op.claims = {**op.claims, 4: SeenClaim(Claim("e", "a", 1, 0).encode(), 7)}
    assert set(next_steps.actors_of(op, 108.0)) == {3}


def test_an_executors_leftovers_are_cleaned_up_after_an_actor_takes_the_job() -> None:
    assert judge(("a", 1), State.RUNNING, CLAIM, None, {"a"}, "e", "b") is Disposition.CLEANED


def answer(*found: bytes | None) -> TxnResult:
    kvs = [(KeyValue("k", value, 50),) if value is not None else () for value in found]
    return TxnResult(False, 60, tuple(GetResult(kv) for kv in kvs))


def test_a_refused_return_has_its_cause() -> None:
    other = replace(CLAIM, grant="f" * 16, executor="v", actor="v")
    outcome = Outcome("p", "w", "", 1, "", "", grant=CLAIM.grant)
    waiting = job_claims.released(CLAIM, "w")

    def refused(wanted: JobState | Claim, *found: bytes | None) -> actor_claims.RefusedReturn:
        return actor_claims.refused_return(TOKEN, answer(*found), wanted)

    assert refused(JobState.SUCCESS, CLAIM.encode(), None, None).held == (CLAIM, 50), "it was extended meanwhile"
    assert refused(JobState.SUCCESS, None, b"success", outcome.encode()).returned
    assert not refused(JobState.SUCCESS, None, b"failed", outcome.encode()).returned
    assert "already" in refused(JobState.SUCCESS, None, b"failed", outcome.encode()).text
    lost = replace(outcome, grant="", error="lost")
    assert not refused(JobState.FAILED, None, b"failed", lost.encode()).returned, "written for an actor that is gone"
    assert refused(waiting, waiting.encode(), None, None).returned
    assert "waits" in refused(JobState.SUCCESS, waiting.encode(), None, None).text
    taken = refused(JobState.SUCCESS, other.encode(), None, None)
    assert (taken.held, taken.returned, taken.gone) == (None, False, False)
    assert "granted to v" in taken.text
    assert refused(JobState.SUCCESS, None, None, None).gone


def test_a_refused_extension_has_its_cause() -> None:
    running = State.RUNNING.encode()
    assert actor_claims.refused_extension(TOKEN, answer(CLAIM.encode(), running)) == (CLAIM, 50)
    assert actor_claims.refused_extension(TOKEN, answer(CLAIM.encode(), State.CANCELLING.encode())) is None
    assert actor_claims.refused_extension(TOKEN, answer(replace(CLAIM, grant="f" * 16).encode(), running)) is None
    assert actor_claims.refused_extension(TOKEN, answer(None, None)) is None


def test_extending_needs_that_nothing_is_cancelled_and_owning_no_node_key() -> None:
    keys = Keys()
    taking = actor_claims.Taking(REF, 9, 3, CLAIM)
    (nested,) = actor_claims.own(keys, [taking]).success
    assert keys.node("a") not in {compare.key for compare in nested.compares}
    assert actor_claims.granted(taking, TxnResult(True, 77), 77) == 77
    assert actor_claims.granted(taking, answer(CLAIM.encode()), 77) == 50, "an earlier copy won"
    assert actor_claims.granted(taking, answer(replace(CLAIM, grant="f" * 16).encode()), 77) == 0


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = boottime = time

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def bits(self, count: int) -> int:
        return 1


def test_L28_a_bucket_gives_no_more_than_its_rate() -> None:
    clock = Clock()
    token = source.set(clock)
    try:
        bucket = Bucket(2.0, 4)
        assert bucket.available() == 4
        bucket.spend(4)
        assert (bucket.available(), bucket.wait()) == (0, 0.5)
        clock.now += 0.4
        assert (bucket.available(), bucket.wait()) == (0, pytest.approx(0.1))
        given_out = 0
        for _ in range(100):  # ten seconds of a greedy loop
            clock.now += 0.1
            given_out += bucket.available()
            bucket.spend(bucket.available())
        assert given_out == 20
        clock.now += 3600
        assert bucket.available() == 4
        slow = Bucket(0.1)
        slow.spend()
        assert slow.wait() == pytest.approx(10.0)
    finally:
        source.reset(token)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan"), "fast", True, None])
def test_an_invalid_rate_is_refused(rate: object) -> None:
    with pytest.raises(InvalidArgument, match="positive number"):
        Bucket(rate) if rate is not None else Bucket(1.0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["copy", 7, [], {}, ["a b"], {"copy": -1}, {"copy": True}, [None]])
def test_invalid_types_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgument):
        m.check_types(wrong)


@pytest.mark.parametrize("wrong", ["", "x" * 201, 7, None, "\ud800"])
def test_an_actor_has_a_name(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match="name"):
        m.check_actor(wrong)


def test_outcomes_are_texts_and_json() -> None:
    assert m.checked(m.Complete((1, 2))) == m.Complete([1, 2])
    assert len(m.checked(m.Retry("x" * 10_000)).error) <= 4_000
    for wrong in (m.Complete({1, 2}), m.Retry(5), m.Abort(None), "complete"):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            m.checked(wrong)

"""What a client does about tokens when answers are lost, on the model store: each write is known to be its own (T9)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import InvalidToken, MalformedRequest, OutcomeUnknown
from distop.invariants.checker import check
from distop.protocol.actor_claims import Token
from distop.protocol.jobs import Claim, JobState
from distop.protocol.txn import Put, Txn, operations
from distop.services.claims import owned_jobs as m
from distop.services.claims.job_owner import Owner
from tests.support.world import World
from tests.unit.support.modelclient import ModelClient
from tests.unit.support.virtualtime import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.protocol.records import OperationRef
    from distop.protocol.txn import TxnResult


class Play:
    """An operation with two jobs, the first owned by ``w``, and a separate client for ``w``."""

    def __init__(self) -> None:
        self.client = ModelClient()
        self.world = World(store=self.client.store)
        self.world.join("a")
        self.ref: OperationRef = self.world.next_ref()
        self.world.do(self.world.start(self.ref))
        self.world.do(self.world.elect("a"))
        self.world.do(self.world.plan(self.ref, 2))
        self.world.do(self.world.own(self.ref, "w", 0))
        claim = self.world.claim_of(self.ref, 0)
        assert claim is not None
        self.token = Token(self.ref, 0, self.world.fence(self.ref, 0), claim.grant)
        self.owner = Owner(self.client, self.world.keys)  # type: ignore[arg-type]

    def lost(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """The next commit is applied and its answer lost; it is sent again, once something has come between."""

        def fate(txn: Txn) -> TxnResult:
            self.client.store.apply(txn)
            meanwhile()
            return replace(self.client.store.apply(txn), repeated=True)

        self.client.fates.append(fate)

    def unknown(self) -> None:
        """The next commit is applied, and etcd stops answering."""

        def fate(txn: Txn) -> TxnResult:
            self.client.store.apply(txn)
            raise OutcomeUnknown("no answer")

        self.client.fates.append(fate)

    def run(self, work: Awaitable[Any]) -> Any:
        async def play() -> Any:
            return await work

        found = asyncio.run(play())
        assert not check(self.world.keys, self.client.store.history)
        return found


def test_an_extension_whose_answer_was_lost_does_not_lose_the_job() -> None:
    play = Play()
    play.unknown()
    with pytest.raises(OutcomeUnknown):
        play.run(play.owner.extend([str(play.token)], 9.0))
    assert play.world.fence(play.ref, 0) > play.token.fence
    assert play.run(play.owner.extend([str(play.token)], 7.0)) == [True]
    play.unknown()
    with pytest.raises(OutcomeUnknown):
        play.run(play.owner.extend([str(play.token)], 9.0))
    play.run(play.owner.give(str(play.token), m.Complete()))
    assert play.world.job_stage(play.ref, 0) == "success"


def test_an_extension_that_is_sent_twice_is_one() -> None:
    play = Play()
    play.lost()
    assert play.run(play.owner.extend([str(play.token)], 9.0)) == [True]
    assert play.world.claim_of(play.ref, 0).duration == 9.0


def test_an_extension_comes_too_late_for_a_job_that_was_taken() -> None:
    play = Play()
    play.lost(lambda: play.world.do(play.world.own(play.ref, "v", 0)))
    assert play.run(play.owner.extend([str(play.token)], 9.0)) == [False]
    with pytest.raises(InvalidToken, match="granted to v"):
        play.run(play.owner.give(str(play.token), m.Complete()))


@pytest.mark.parametrize(
    ("outcome", "stage"),
    [(m.Complete(1), "success"), (m.Abort("no"), "failed"), (m.Retry("broken"), "waiting"), (m.Release(), "waiting")],
)
def test_a_return_with_a_lost_answer_recognizes_its_own_write(outcome: m.OwnedOutcome, stage: str) -> None:
    play = Play()
    play.lost()
    play.run(play.owner.give(str(play.token), outcome))
    assert play.world.job_stage(play.ref, 0) == stage


@pytest.mark.parametrize("outcome", [m.Retry("broken"), m.Release()])
def test_a_job_that_was_put_back_and_claimed_before_the_answer_came_was_put_back(outcome: m.OwnedOutcome) -> None:
    play = Play()

    def claim() -> None:
        old = play.world.claim_of(play.ref, 0)
        assert old is not None
        txn = play.world.own(play.ref, "v", 0)
        (one,) = txn.success
        put = one.success[0]  # as own_jobs() writes it, with the story of the attempts
        claimed = replace(Claim.decode(put.value), tried=old.tried)
        play.world.do(Txn((), (replace(one, success=(replace(put, value=claimed.encode()),)),)))

    play.lost(claim)
    play.run(play.owner.give(str(play.token), outcome))
    assert play.world.claim_of(play.ref, 0).actor == "v"


@pytest.mark.parametrize("outcome", [m.Retry("broken"), m.Release()])
def test_a_job_that_was_taken_over_cannot_be_put_back(outcome: m.OwnedOutcome) -> None:
    play = Play()
    play.world.do(play.world.own(play.ref, "v", 0))
    with pytest.raises(InvalidToken, match="granted to v"):
        play.run(play.owner.give(str(play.token), outcome))


@pytest.mark.parametrize("outcome", [m.Complete(1), m.Abort("no")])
def test_a_return_that_is_made_again_changes_nothing(outcome: m.OwnedOutcome) -> None:
    play = Play()
    play.unknown()
    with pytest.raises(OutcomeUnknown):
        play.run(play.owner.give(str(play.token), outcome))
    revision = play.client.store.revision
    play.run(play.owner.give(str(play.token), outcome))
    assert play.client.store.revision == revision
    other = m.Abort("no") if isinstance(outcome, m.Complete) else m.Complete()
    with pytest.raises(InvalidToken, match="already returned with another outcome"):
        play.run(play.owner.give(str(play.token), other))


def test_a_return_with_a_lost_answer_and_a_deleted_operation_has_an_unknown_outcome() -> None:
    play = Play()
    play.world.do(play.world.own(play.ref, "w", 1))

    def end() -> None:
        play.world.do(play.world.give(play.ref, 1, JobState.SUCCESS))
        play.world.do(play.world.finish_at_once(play.ref))
        play.world.do(play.world.end(play.ref))

    play.lost(end)
    with pytest.raises(OutcomeUnknown, match="the operation has ended since"):
        play.run(play.owner.give(str(play.token), m.Complete()))


def test_the_end_that_was_written_for_a_worker_that_is_gone_is_not_its_own() -> None:
    """The model showed it: a worker that had been given up was told that its return had been applied."""
    play = Play()
    for _ in range(2):
        play.world.do(play.world.own(play.ref, "w", 0))
    claim = play.world.claim_of(play.ref, 0)
    assert claim is not None
    token = Token(play.ref, 0, play.world.fence(play.ref, 0), claim.grant)
    play.world.do(play.world.own(play.ref, "v", 0))  # at the limit: it fails the job
    assert play.world.job_stage(play.ref, 0) == "failed"
    with pytest.raises(InvalidToken, match="the job has ended"):
        play.run(play.owner.give(str(token), m.Abort("my own verdict")))


def test_a_return_follows_the_extensions_of_another_client() -> None:
    play = Play()
    play.world.do(play.world.extend(play.ref, 0))

    def fate(txn: Txn) -> TxnResult:
        play.world.do(play.world.extend(play.ref, 0))
        return play.client.store.apply(txn)

    play.client.fates.append(fate)
    play.run(play.owner.give(str(play.token), m.Complete()))
    assert play.world.job_stage(play.ref, 0) == "success"


def test_a_return_gives_up_on_a_job_that_is_always_extended() -> None:
    play = Play()

    def fate(txn: Txn) -> TxnResult:
        play.world.do(play.world.extend(play.ref, 0))
        return play.client.store.apply(txn)

    play.client.fates.extend([fate] * 10)
    with pytest.raises(OutcomeUnknown, match="another process keeps extending its claim"):
        play.run(play.owner.give(str(play.token), m.Complete()))


class SmallEtcd(ModelClient):
    """An etcd that accepts few operations in a transaction, and none that writes a key in ``rejected``."""

    def __init__(self) -> None:
        super().__init__()
        self.rejected: set[str] = set()

    async def commit(self, txn: Txn, **named: Any) -> TxnResult:
        nested = [op for op in txn.success if isinstance(op, Txn)]
        claimed = {put.key for one in nested for put in one.success if isinstance(put, Put)}
        if operations(txn) > 24 or claimed & self.rejected:
            raise MalformedRequest("etcdserver: too many operations in txn request")
        return await super().commit(txn, **named)


class SmallPlay:
    """An operation of 60 jobs, which ``w`` claims through an etcd that accepts few operations in a transaction."""

    def __init__(self) -> None:
        self.client = SmallEtcd()
        self.world = World(store=self.client.store)
        self.world.join("a")
        self.ref = self.world.next_ref()
        self.world.do(self.world.start(self.ref))
        self.world.do(self.world.elect("a"))
        self.world.do(self.world.plan(self.ref, 60))
        self.owner = Owner(self.client, self.world.keys)  # type: ignore[arg-type]


def test_claims_that_etcd_rejects_together_are_sent_in_smaller_groups() -> None:
    play = SmallPlay()

    async def work() -> None:
        owned = await play.owner.own("w", {"noop": None}, 60, 30.0, None)
        assert sorted(job.ordinal for job in owned) == list(range(60))
        assert await play.owner.extend([job.token for job in owned], 60.0) == [True] * 60
        await play.owner.close()

    in_virtual_time(work)


def test_a_claim_that_etcd_rejects_alone_is_raised_and_blocks_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """An actor that always gets some jobs was never told of the rejected one."""
    play = SmallPlay()
    play.client.rejected = {play.world.keys.claim(play.ref, 7)}

    async def work() -> None:
        owned = await play.owner.own("w", {"noop": None}, 60, 30.0, None)
        assert sorted(job.ordinal for job in owned) == [n for n in range(60) if n != 7]
        assert "Cannot claim some jobs; a later call tries again: " in caplog.text
        await asyncio.sleep(1.0)  # until the operation is listed again
        with pytest.raises(MalformedRequest):
            await play.owner.own("w", {"noop": None}, 60, 30.0, None)
        play.client.rejected = {play.world.keys.claim(play.ref, 9)}
        with pytest.raises(MalformedRequest):
            await play.owner.extend([job.token for job in owned], 60.0)
        claims = {job.ordinal: play.world.claim_of(play.ref, job.ordinal) for job in owned}
        assert {n for n, claim in claims.items() if claim is not None and claim.duration == 60.0} == claims.keys() - {9}
        await play.owner.close()

    in_virtual_time(work)

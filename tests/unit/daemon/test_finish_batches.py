"""Group commit of finishes, on the model of etcd; a refused finish blocks no other."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from distop.daemon.coordinator.finish_batches import Finishes
from distop.errors import ClusterChanged, MalformedRequest
from distop.invariants.checker import check
from distop.protocol import operation_finish as f
from distop.protocol.jobs import JobState
from distop.protocol.json_codec import word
from distop.protocol.size_limits import DEFAULT, Limits
from distop.protocol.state_tables import Stage
from distop.protocol.txn import Put, Txn, TxnResult
from distop.runtime import logs
from tests.support.world import TABLE, TYPE, World
from tests.unit.support.modelclient import ModelClient
from tests.unit.support.virtualtime import in_virtual_time

Reached = Callable[[int], Awaitable[None]]


class Coordinator:
    """The finishes of one election in a world where the jobs of ``count`` operations have ended."""

    def __init__(
        self, count: int, *, decided: bool = True, limits: Limits = DEFAULT, reached: Reached | None = None
    ) -> None:
        self.client = ModelClient()
        self.world = world = World(store=self.client.store)
        world.join("a")
        for first in range(0, count, 20):
            world.do(world.starts(min(20, count - first)))
        world.do(world.elect("a"))
        self.refs = sorted(world.view().operations)
        for ref in self.refs:
            world.do(world.plan(ref, 1))
            world.do(world.claim(ref, "a", [0]))
            world.do(world.report(ref, 0, JobState.SUCCESS))
            if decided:
                world.do(world.decide(ref))
        self.reached: list[int] = []
        ctx: Any = SimpleNamespace(
            keys=world.keys,
            client=self.client,
            commit=self.client.commit,
            limits=limits,
            log=logs.get("tests"),
        )
        self.finishes = Finishes(ctx, world.election, reached or self._reached)

    async def _reached(self, revision: int) -> None:
        self.reached.append(revision)

    def finals(self) -> list[f.Final]:
        return [self.world._final(ref, self.world.mod(ref, "decision")) for ref in self.refs]

    async def all(self, finals: list[f.Final] | None = None) -> list[bool]:
        return await asyncio.gather(*map(self.finishes.finish, self.finals() if finals is None else finals))

    def ended(self) -> list[int]:
        """The number of operations that each applied finish ended."""
        histories = [
            sum(change.kv.key.startswith("distOpHistory.") for change in changes)
            for _, changes in self.client.store.history
        ]
        return [count for count in histories if count]


def run(count: int, work: Callable[[Coordinator], Awaitable[Any]], **more: Any) -> Any:
    async def main() -> None:
        one = Coordinator(count, **more)
        await work(one)
        assert not one.finishes._commits.busy
        assert not check(one.world.keys, one.client.store.history)

    in_virtual_time(main)


def test_a_single_finish_is_a_read_and_a_transaction() -> None:
    async def alone(one: Coordinator) -> None:
        assert await one.all() == [True]
        assert one.client.requests == ["read", "finish"]
        assert one.reached == [one.client.store.revision]

    run(1, alone)


def test_a_single_finish_with_run_ops_read_ahead_is_a_transaction() -> None:
    async def prefetched(one: Coordinator) -> None:
        one.finishes.prefetch_run_ops(one.refs[0])
        await one.client.until(lambda: one.client.requests == ["read"])
        assert await one.all() == [True]
        assert one.client.requests == ["read", "finish"]

    run(1, prefetched)


def test_finishes_that_become_ready_meanwhile_go_together() -> None:
    async def many(one: Coordinator) -> None:
        assert await one.all() == [True] * 60
        assert one.ended() == [42, 18], "the first group waits only for its read"
        assert one.client.requests == ["read", "finish", "finish"]
        assert one.reached == [one.client.store.revision - 1, one.client.store.revision], "one wait for each group"

    run(60, many)


def test_operations_without_remaining_work_are_deleted_with_their_finish() -> None:
    async def many(one: Coordinator) -> None:
        finals = [one.world.final_and_end(ref) for ref in one.refs]
        assert await one.all(finals) == [True] * 60
        assert one.ended() == [42, 18]
        assert [one.world.stage(ref) for ref in one.refs] == [Stage.ABSENT] * 60
        assert not one.client.store.range("distOp.", "distOp/")[2:], "only the two counters are left"
        assert await one.all(finals) == [False] * 60, "a deleted operation does not end again"

    run(60, many, decided=False)


def test_an_operation_with_a_new_successor_is_not_deleted_and_blocks_no_other() -> None:
    async def waited_for(one: Coordinator) -> None:
        world, ref = one.world, one.refs[1]
        finals = [world.final_and_end(each) for each in one.refs]
        world.do(world.submit(world.next_ref(), ref))
        assert await one.all(finals) == [True, False, True]
        assert [world.stage(each) for each in one.refs] == [Stage.ABSENT, Stage.OPEN, Stage.ABSENT]

    run(3, waited_for, decided=False)


@pytest.mark.parametrize("meanwhile", ["paused and resumed", "altered", "cancelled"])
def test_a_changed_operation_is_not_deleted_and_blocks_no_other(meanwhile: str) -> None:
    async def moved(one: Coordinator) -> None:
        world, ref = one.world, one.refs[1]
        finals = [world.final_and_end(each) for each in one.refs]
        if meanwhile == "paused and resumed":
            world.do(world.pause(ref))
            world.do(world.resume(ref))
        else:
            world.do(world.alter(ref) if meanwhile == "altered" else world.cancel(ref))
        assert await one.all(finals) == [True, False, True]
        left = Stage.CANCELLING if meanwhile == "cancelled" else Stage.OPEN
        assert [world.stage(each) for each in one.refs] == [Stage.ABSENT, left, Stage.ABSENT]
        if meanwhile == "paused and resumed":
            assert await one.finishes.finish(world.final_and_end(ref)), "with its current state"

    run(3, moved, decided=False)


def test_a_partial_group_waits_as_long_as_the_last_commit_took() -> None:
    """Starts write runOps, too: an immediate next group gave them no turn, and was smaller."""

    async def waits(one: Coordinator) -> None:
        held = asyncio.Event()

        async def slow(txn: Txn) -> TxnResult:
            await held.wait()
            await asyncio.sleep(0.02)
            return one.client.store.apply(txn)

        one.client.fates.append(slow)
        finals = one.finals()
        first = asyncio.ensure_future(one.finishes.finish(finals[0]))
        await one.client.until(lambda: bool(one.client.committed))
        second = asyncio.ensure_future(one.finishes.finish(finals[1]))
        await asyncio.sleep(0)
        held.set()
        assert await first
        assert len(one.client.committed) == 1, "the second one waits"
        assert await asyncio.gather(second, one.finishes.finish(finals[2])) == [True, True]
        assert one.ended() == [1, 2]

    run(3, waits)


def test_a_full_group_does_not_wait() -> None:
    async def full(one: Coordinator) -> None:
        async def slow(txn: Txn) -> TxnResult:
            await asyncio.sleep(60.0)
            return one.client.store.apply(txn)

        one.client.fates.append(slow)
        calls = [asyncio.ensure_future(one.finishes.finish(final)) for final in one.finals()]
        assert await calls[0]
        await asyncio.sleep(0)
        assert one.client.requests.count("finish") == 2, "the next group is sent in the next iteration of the loop"
        assert await asyncio.gather(*calls) == [True] * 4

    run(4, full, limits=Limits(finishes=2))


def test_finishes_that_must_go_alone_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their groups do not grow."""
    monkeypatch.setattr("distop.daemon.coordinator.finish_batches.LONGEST_TURN", 60.0)

    async def alone(one: Coordinator) -> None:
        async def slow(txn: Txn) -> TxnResult:
            await asyncio.sleep(60.0)
            return one.client.store.apply(txn)

        def rejected(txn: Txn) -> TxnResult:
            raise MalformedRequest("request is too large")

        one.client.fates += [rejected, slow]
        async with asyncio.timeout(90.0):
            assert await one.all() == [True] * 3
        assert one.ended() == [1, 1, 1]

    run(3, alone, limits=Limits(finishes=3))


def test_finishes_wait_during_a_commit() -> None:
    async def late(one: Coordinator) -> None:
        held = asyncio.Event()

        async def hold(txn: Txn) -> TxnResult:
            await held.wait()
            return one.client.store.apply(txn)

        one.client.fates.append(hold)
        finals = one.finals()
        first = asyncio.ensure_future(one.finishes.finish(finals[0]))
        await one.client.until(lambda: bool(one.client.committed))
        others = asyncio.ensure_future(one.all(finals[1:]))
        await asyncio.sleep(0)
        held.set()
        assert await first
        assert await others == [True] * 5
        assert one.ended() == [1, 5]

    run(6, late)


def test_a_finish_with_an_outdated_state_is_refused_alone() -> None:
    async def cancelled(one: Coordinator) -> None:
        finals = one.finals()
        for n in (0, 3):
            one.world.do(one.world.cancel(one.refs[n]))
        assert await one.all(finals) == [False, True, True, False, True]
        assert one.ended() == [3]
        assert one.world.stage(one.refs[0]) is Stage.CANCELLING

    run(5, cancelled, decided=False)


def test_a_finish_with_an_outdated_decision_is_found_by_trying_each_alone() -> None:
    async def decided(one: Coordinator) -> None:
        finals = one.finals()
        one.world.do(one.world.complete_attempt(one.refs[2]))
        assert await one.all(finals) == [True, True, False, True, True]
        assert one.ended() == [1, 1, 1, 1]

    run(5, decided)


def test_concurrent_starts_cause_a_retry_and_do_not_split_the_group() -> None:
    async def started(one: Coordinator) -> None:
        def moved(txn: Txn) -> TxnResult:
            one.world.do(one.world.start(one.world.next_ref()))
            return one.client.store.apply(txn)

        one.client.fates += [moved, moved]
        assert await one.all() == [True] * 4
        assert one.ended() == [4]
        assert one.client.requests == ["read", "finish", "finish", "finish"]

    run(4, started)


def test_a_group_that_was_applied_twice_is_decided_again() -> None:
    """As with a single finish: the states have changed, so each is read again and found ended."""

    async def twice(one: Coordinator) -> None:
        def again(txn: Txn) -> TxnResult:
            assert one.client.store.apply(txn).succeeded
            return one.client.store.apply(txn)

        one.client.fates.append(again)
        assert await one.all() == [False] * 3
        assert one.ended() == [3]
        assert [one.world.stage(ref) for ref in one.refs] == [Stage.CLEANING] * 3

    run(3, twice)


def test_nothing_is_finished_under_a_lost_election() -> None:
    async def over(one: Coordinator) -> None:
        finals = one.finals()
        one.world.die("a")
        one.world.join("b")
        one.world.do(one.world.elect("b"))
        assert await one.all(finals) == [False] * 3
        assert one.ended() == []

    run(3, over)


def test_finishes_that_etcd_rejects_together_are_tried_separately() -> None:
    async def too_many(one: Coordinator) -> None:
        def refuse(txn: Txn) -> TxnResult:
            raise MalformedRequest("too many operations in txn request")

        one.client.fates.append(refuse)
        assert await one.all() == [True] * 3
        assert one.ended() == [1, 1, 1]

    run(3, too_many)


def test_a_group_is_divided_at_its_limit() -> None:
    async def divided(one: Coordinator) -> None:
        assert await one.all() == [True] * 5
        assert one.ended() == [2, 2, 1]

    run(5, divided, limits=Limits(finishes=2))


def test_finishes_that_write_the_same_key_are_sent_one_after_the_other() -> None:
    """The specs of two operations name the same id, which their finishes compare and delete."""

    async def main() -> None:
        one = Coordinator(3, decided=False)
        world = one.world
        for ref in one.refs[:2]:
            world.tamper(Put(world.keys.of(ref, "spec"), replace(world.own_spec(ref), id="x").encode()))
        world.tamper(Put(world.keys.unique(TABLE, TYPE, "x"), word(str(one.refs[0]))))
        async with asyncio.timeout(30.0):
            assert await one.all() == [True] * 3
        assert one.ended() == [1, 2]
        assert one.client.store.get(world.keys.unique(TABLE, TYPE, "x")) is None

    in_virtual_time(main)


def test_a_cancelled_caller_passes_its_turn_on() -> None:
    async def cancelled(one: Coordinator) -> None:
        one.client.fates.append(lambda _: asyncio.Event().wait())
        finals = one.finals()
        calls = [asyncio.ensure_future(one.finishes.finish(finals[0]))]
        await one.client.until(lambda: bool(one.client.committed))
        calls += [asyncio.ensure_future(one.finishes.finish(final)) for final in finals[1:]]
        await asyncio.sleep(0)
        calls[0].cancel()
        await asyncio.sleep(0)  # the first one ends, and it is the second one's turn
        calls[1].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [asyncio.CancelledError] * 2 + [bool] * 2
        assert answers[2:] == [True, True]
        assert one.ended() == [2]

    run(4, cancelled)


def test_an_error_is_raised_for_the_committing_caller_only() -> None:
    async def broken(one: Coordinator) -> None:
        def lose(txn: Txn) -> TxnResult:
            raise OSError("the connection failed")

        one.client.fates.append(lose)
        answers = await asyncio.gather(*map(one.finishes.finish, one.finals()), return_exceptions=True)
        assert isinstance(answers[0], OSError)
        assert answers[1:] == [True, True]
        assert one.ended() == [2]

    run(3, broken)


def test_finishes_one_after_another_are_a_transaction_each() -> None:
    async def in_turn(one: Coordinator) -> None:
        for final in one.finals():
            assert await one.finishes.finish(final)
        assert one.ended() == [1] * 3
        assert one.client.requests == ["read", *["finish"] * 3], "runOps is known from the last finish"

    run(3, in_turn)


def test_the_wait_of_a_group_is_bounded_for_a_slow_etcd() -> None:
    async def main() -> None:
        one = Coordinator(2)
        slow = 30.0

        async def late(txn: Txn) -> TxnResult:
            await asyncio.sleep(slow)
            return one.client.store.apply(txn)

        one.client.fates.append(late)
        first, second = one.finals()
        began = asyncio.get_running_loop().time()
        task = asyncio.ensure_future(one.finishes.finish(first))
        await one.client.until(lambda: "finish" in one.client.requests)
        assert await one.finishes.finish(second)
        assert await task
        assert asyncio.get_running_loop().time() - began < slow + 5.0

    in_virtual_time(main)


def test_no_error_is_left_unretrieved_when_the_view_fails_after_a_finish() -> None:
    """The feed reports its own failure; asyncio would log "Task exception was never retrieved" besides."""
    records: list[dict[str, Any]] = []

    async def fail(revision: int) -> None:
        raise ClusterChanged(f"the etcd went back from revision {revision}")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: records.append(context))
        one = Coordinator(1, reached=fail)
        assert await one.all() == [True]
        await asyncio.sleep(0)
        del one
        gc.collect()

    asyncio.run(main())
    assert records == []

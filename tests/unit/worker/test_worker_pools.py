"""Names of Spark's pools: one for each operation at work, and no more than that."""

from __future__ import annotations

import threading

from distop.worker.child_side.spark_jobs import Pools


def lent_elsewhere(pools: Pools, operation: str) -> str:
    """What a thread that works for the operation, and ends without a word, was lent."""
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(pools.lend(operation)))
    thread.start()
    thread.join()
    return got[0]


def test_operations_one_after_the_other_have_one_name() -> None:
    pools = Pools()
    names = set()
    for n in range(1000):
        names.add(pools.lend(f"t/sample/{n}"))
        pools.give_back()
    assert len(names) == 1


def test_operations_at_once_have_a_name_each_and_their_threads_share_it() -> None:
    pools, go, ready = Pools(), threading.Event(), threading.Barrier(5)
    got: dict[int, str] = {}

    def work(n: int) -> None:
        got[n] = pools.lend(f"t/sample/{n % 2}")
        ready.wait()
        go.wait()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    ready.wait()
    try:
        assert got[0] == got[2]
        assert got[1] == got[3]
        assert got[0] != got[1]
        assert pools.lend("t/sample/9") not in got.values()
    finally:
        go.set()
        for thread in threads:
            thread.join()


def test_a_thread_that_turns_to_another_operation_leaves_the_first() -> None:
    pools = Pools()
    assert pools.lend("a") == pools.lend("b")


def test_a_thread_that_ended_without_giving_back_holds_no_name() -> None:
    pools = Pools()
    assert {lent_elsewhere(pools, f"t/sample/{n}") for n in range(100)} == {pools.lend("a")}

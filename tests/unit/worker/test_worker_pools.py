"""Names of Spark's scheduler pools: one for each running operation, and reused."""

from __future__ import annotations

import threading

from distop.worker.child_side.spark_jobs import PoolNames


def name_in_another_thread(pools: PoolNames, operation: str) -> str:
    """The pool name of a thread that works for the operation and ends without a release."""
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(pools.acquire(operation)))
    thread.start()
    thread.join()
    return got[0]


def test_consecutive_operations_reuse_a_pool_name() -> None:
    pools = PoolNames()
    names = set()
    for n in range(1000):
        names.add(pools.acquire(f"t/sample/{n}"))
        pools.release()
    assert len(names) == 1


def test_each_concurrent_operation_has_one_pool_name_for_all_its_threads() -> None:
    pools, go, ready = PoolNames(), threading.Event(), threading.Barrier(5)
    got: dict[int, str] = {}

    def work(n: int) -> None:
        got[n] = pools.acquire(f"t/sample/{n % 2}")
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
        assert pools.acquire("t/sample/9") not in got.values()
    finally:
        go.set()
        for thread in threads:
            thread.join()


def test_a_thread_that_changes_its_operation_releases_the_first_pool_name() -> None:
    pools = PoolNames()
    assert pools.acquire("a") == pools.acquire("b")


def test_a_thread_that_has_ended_holds_no_pool_name() -> None:
    pools = PoolNames()
    assert {name_in_another_thread(pools, f"t/sample/{n}") for n in range(100)} == {pools.acquire("a")}

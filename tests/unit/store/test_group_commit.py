"""Group commit: items added during a commit go together into the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distop.store.group_commit import GroupCommit
from tests.unit.support.virtualtime import in_virtual_time


class Three:
    """A group of at most three numbers."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def add(self, item: int) -> bool:
        if self.full:
            return False
        self.items.append(item)
        return True

    @property
    def full(self) -> bool:
        return len(self.items) == 3


class Recorder:
    """Records the commits; each takes a second, or ``takes``, and leaves the items of ``again``."""

    def __init__(self, **options: Any) -> None:
        self.sent: list[tuple[float, list[int]]] = []
        self.errors: list[BaseException] = []
        self.again: set[int] = set()
        self.takes: Callable[[list[int]], float] = lambda items: 1.0
        self.commits: GroupCommit[int] = GroupCommit(self._send, Three, self.errors.append, **options)

    async def _send(self, items: list[int]) -> list[int]:
        loop = asyncio.get_running_loop()
        self.sent.append((loop.time(), items))
        await asyncio.sleep(self.takes(items))
        if 0 in items:
            raise OSError("the connection failed")
        again = [one for one in items if one in self.again]
        self.again.difference_update(again)
        return again

    @property
    def groups(self) -> list[list[int]]:
        return [items for _, items in self.sent]


def run(work: Callable[[Recorder], Any], **options: Any) -> None:
    async def main() -> None:
        recorder = Recorder(**options)
        await work(recorder)
        await recorder.commits.drained()
        assert not recorder.commits.busy

    in_virtual_time(main)


def test_items_added_at_the_same_time_go_together_and_later_ones_go_next() -> None:
    async def work(recorder: Recorder) -> None:
        recorder.commits.add([1])
        recorder.commits.add([2])
        await asyncio.sleep(0.1)
        recorder.commits.add([3])
        recorder.commits.add([4])
        await recorder.commits.drained()
        assert recorder.groups == [[1, 2], [3, 4]]

    run(work)


def test_full_groups_are_sent_concurrently_and_a_partial_one_waits() -> None:
    async def work(recorder: Recorder) -> None:
        recorder.commits.add(range(1, 12))
        await asyncio.sleep(0.1)
        assert recorder.groups == [[1, 2, 3], [4, 5, 6]], "at most two at once"
        await recorder.commits.drained()
        assert recorder.groups == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]

    run(work, most=2)


def test_items_to_send_again_come_first() -> None:
    async def work(recorder: Recorder) -> None:
        recorder.again = {2, 3}
        recorder.commits.add([1, 2, 3])
        await asyncio.sleep(0.5)
        recorder.commits.add([4, 5])
        await recorder.commits.drained()
        assert recorder.groups == [[1, 2, 3], [2, 3, 4], [5]]

    run(work)


def test_a_partial_group_rests_after_a_commit_until_it_is_full() -> None:
    async def work(recorder: Recorder) -> None:
        recorder.commits.add([1])
        await asyncio.sleep(0.5)
        recorder.commits.add([2])
        await asyncio.sleep(1.5)
        assert recorder.groups == [[1]], "it rests"
        recorder.commits.add([3, 4])
        await recorder.commits.drained()
        assert recorder.groups == [[1], [2, 3, 4]]
        times = [round(at - recorder.sent[0][0], 3) for at, _ in recorder.sent]
        assert times == [0.0, 2.0], "it is full"

    run(work, rest=lambda: 5.0)


def test_an_item_added_while_idle_is_sent_at_once() -> None:
    async def work(recorder: Recorder) -> None:
        recorder.commits.add([1])
        await asyncio.sleep(20.0)
        began = asyncio.get_running_loop().time()
        recorder.commits.add([2])
        await recorder.commits.drained()
        assert recorder.sent[1][0] == began

    run(work, rest=lambda: 5.0)


def test_an_error_is_reported_and_later_items_are_sent() -> None:
    async def work(recorder: Recorder) -> None:
        recorder.commits.add([0])
        await asyncio.sleep(0.5)
        recorder.commits.add([1])
        await recorder.commits.drained()
        assert recorder.groups == [[0], [1]]
        assert [type(error) for error in recorder.errors] == [OSError]

    run(work)


def test_a_commit_whose_items_are_all_abandoned_is_cancelled_and_later_items_are_sent() -> None:
    gone: set[int] = set()

    async def work(recorder: Recorder) -> None:
        recorder.takes = lambda items: 1e6 if 1 in items else 1.0
        recorder.commits.add([1, 2])
        await asyncio.sleep(0.5)
        recorder.commits.add([3, 4])
        gone.update([2, 3])
        recorder.commits.interrupt()
        await asyncio.sleep(0.5)
        assert recorder.groups == [[1, 2]], "somebody waits for one of them"
        gone.add(1)
        recorder.commits.interrupt()
        await recorder.commits.drained()
        assert recorder.groups == [[1, 2], [4]]
        assert recorder.errors == []

    run(work, abandoned=gone.__contains__)


def test_a_group_that_is_abandoned_before_it_is_sent_is_left_out() -> None:
    gone: set[int] = set()

    async def work(recorder: Recorder) -> None:
        recorder.commits.add([1])
        await asyncio.sleep(0.5)
        recorder.commits.add([2])
        await asyncio.sleep(5.0)
        gone.add(2)
        await recorder.commits.drained()
        assert recorder.groups == [[1]]

    run(work, rest=lambda: 10.0, abandoned=gone.__contains__)


def test_nothing_is_sent_after_close() -> None:
    async def work(recorder: Recorder) -> None:
        recorder.commits.add([1])
        await asyncio.sleep(0.5)
        recorder.commits.add([2])
        recorder.commits.close()
        recorder.commits.add([3])
        await recorder.commits.drained()
        assert recorder.groups == [[1]]

    run(work)

"""Group commit: what comes while a commit is under way goes together in the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distop.store.group_commit import GroupCommit
from tests.support.virtualtime import in_virtual_time


class Three:
    """At most three numbers."""

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


class Line:
    """Each commit takes a second, or what ``takes`` says, and leaves what ``again`` names."""

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
            raise OSError("the connection broke")
        again = [one for one in items if one in self.again]
        self.again.difference_update(again)
        return again

    @property
    def groups(self) -> list[list[int]]:
        return [items for _, items in self.sent]


def run(work: Callable[[Line], Any], **options: Any) -> None:
    async def main() -> None:
        line = Line(**options)
        await work(line)
        await line.commits.drained()
        assert not line.commits.busy

    in_virtual_time(main)


def test_what_is_queued_in_one_turn_of_the_loop_goes_together_and_the_rest_behind_it() -> None:
    async def work(line: Line) -> None:
        line.commits.add([1])
        line.commits.add([2])
        await asyncio.sleep(0.1)
        line.commits.add([3])
        line.commits.add([4])
        await line.commits.drained()
        assert line.groups == [[1, 2], [3, 4]]

    run(work)


def test_a_full_group_goes_beside_the_one_under_way_and_part_of_one_waits() -> None:
    async def work(line: Line) -> None:
        line.commits.add(range(1, 12))
        await asyncio.sleep(0.1)
        assert line.groups == [[1, 2, 3], [4, 5, 6]], "no more than two at once"
        await line.commits.drained()
        assert line.groups == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]

    run(work, most=2)


def test_what_is_to_be_sent_again_comes_first() -> None:
    async def work(line: Line) -> None:
        line.again = {2, 3}
        line.commits.add([1, 2, 3])
        await asyncio.sleep(0.5)
        line.commits.add([4, 5])
        await line.commits.drained()
        assert line.groups == [[1, 2, 3], [2, 3, 4], [5]]

    run(work)


def test_part_of_a_group_rests_behind_another_until_it_is_full() -> None:
    async def work(line: Line) -> None:
        line.commits.add([1])
        await asyncio.sleep(0.5)
        line.commits.add([2])
        await asyncio.sleep(1.5)
        assert line.groups == [[1]], "it rests"
        line.commits.add([3, 4])
        await line.commits.drained()
        assert line.groups == [[1], [2, 3, 4]]
        times = [round(at - line.sent[0][0], 3) for at, _ in line.sent]
        assert times == [0.0, 2.0], "it is full"

    run(work, rest=lambda: 5.0)


def test_one_that_finds_none_under_way_waits_for_nothing() -> None:
    async def work(line: Line) -> None:
        line.commits.add([1])
        await asyncio.sleep(20.0)
        began = asyncio.get_running_loop().time()
        line.commits.add([2])
        await line.commits.drained()
        assert line.sent[1][0] == began

    run(work, rest=lambda: 5.0)


def test_an_error_is_told_and_the_others_go_on() -> None:
    async def work(line: Line) -> None:
        line.commits.add([0])
        await asyncio.sleep(0.5)
        line.commits.add([1])
        await line.commits.drained()
        assert line.groups == [[0], [1]]
        assert [type(error) for error in line.errors] == [OSError]

    run(work)


def test_what_nobody_waits_for_is_given_up_and_the_others_go_on() -> None:
    gone: set[int] = set()

    async def work(line: Line) -> None:
        line.takes = lambda items: 1e6 if 1 in items else 1.0
        line.commits.add([1, 2])
        await asyncio.sleep(0.5)
        line.commits.add([3, 4])
        gone.update([2, 3])
        line.commits.interrupt()
        await asyncio.sleep(0.5)
        assert line.groups == [[1, 2]], "somebody waits for one of them"
        gone.add(1)
        line.commits.interrupt()
        await line.commits.drained()
        assert line.groups == [[1, 2], [4]]
        assert line.errors == []

    run(work, abandoned=gone.__contains__)


def test_a_group_that_is_abandoned_before_it_is_sent_is_left_out() -> None:
    gone: set[int] = set()

    async def work(line: Line) -> None:
        line.commits.add([1])
        await asyncio.sleep(0.5)
        line.commits.add([2])
        await asyncio.sleep(5.0)
        gone.add(2)
        await line.commits.drained()
        assert line.groups == [[1]]

    run(work, rest=lambda: 10.0, abandoned=gone.__contains__)


def test_nothing_is_sent_once_it_is_closed() -> None:
    async def work(line: Line) -> None:
        line.commits.add([1])
        await asyncio.sleep(0.5)
        line.commits.add([2])
        line.commits.close()
        line.commits.add([3])
        await line.commits.drained()
        assert line.groups == [[1]]

    run(work)

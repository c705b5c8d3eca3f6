"""What the node record tells of writes that etcd rejects as invalid: each write counts by itself."""

from __future__ import annotations

import logging

import pytest

from distop.daemon.rejected_writes import MOST_OPERATIONS, MOST_WRITES, RejectedWrites
from distop.errors import MalformedRequest
from distop.protocol.records import Node
from distop.runtime.logs import ContextLogger

OP = "t/noop/1"


class Told:
    def __init__(self) -> None:
        self.changes = 0
        self.writes = RejectedWrites(ContextLogger(logging.getLogger("tests"), {}), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def refuse(self, op: str, write: int, text: str = "too large", what: str = "reports") -> float:
        return self.writes.refused(op, what, MalformedRequest(text), write)


def test_a_write_that_is_settled_leaves_the_others_told() -> None:
    told = Told()
    told.refuse(OP, 1)
    told.refuse(OP, 2)
    assert told.writes.told == {OP: "reports: too large; and 1 more write"}
    told.writes.settled(OP, "reports", 1)
    assert told.writes.told == {OP: "reports: too large"}
    told.writes.settled(OP, "reports", 1)
    assert told.writes.told == {OP: "reports: too large"}, "it was settled before"
    told.writes.settled(OP, "reports", 2)
    assert (told.writes.told, told.changes) == ({}, 4)


def test_the_back_off_of_each_write_is_its_own() -> None:
    told = Told()
    assert max(told.refuse(OP, write) for write in range(50)) <= 2.0
    assert max(told.refuse(OP, 0) for _ in range(20)) > 4.0


def test_writes_that_are_not_named_are_counted() -> None:
    told = Told()
    for write in range(MOST_WRITES + 2):
        told.refuse(OP, write, f"key {write} is too large")
    told.refuse(OP, 0, "no", what="coordination")
    named = [f"reports: key {write} is too large" for write in range(MOST_WRITES)]
    assert told.writes.told == {OP: "; ".join([*named, "and 3 more writes"])}


def test_operations_that_are_not_named_are_counted() -> None:
    told = Told()
    for n in range(MOST_OPERATIONS + 3):
        told.refuse(f"t/noop/{n}", 0)
    assert list(told.writes.told) == [f"t/noop/{n}" for n in range(MOST_OPERATIONS)]
    assert told.writes.more == 3
    told.writes.settled("t/noop/0", "reports", 0)
    assert f"t/noop/{MOST_OPERATIONS}" in told.writes.told
    assert told.writes.more == 2


def test_one_text_is_logged_once_for_an_operation(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    for write in range(20):
        told.refuse(OP, write)
        told.refuse(OP, write)
    assert len(caplog.records) == 1
    told.refuse(OP, 3, "of another kind")
    assert len(caplog.records) == 2


def test_the_node_record_tells_how_many_operations_it_does_not_name() -> None:
    node = Node("e", "host", 1, ("noop",), refused={OP: "reports: too large"}, refused_more=4)
    assert Node.decode(node.encode()) == node
    assert b"refused_more" not in Node("e", "host", 1, ("noop",)).encode()

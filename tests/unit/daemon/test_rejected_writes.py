"""Writes that etcd rejects, in the node record: each write counts on its own."""

from __future__ import annotations

import logging

import pytest

from distop.daemon.rejected_writes import MOST_OPERATIONS, MOST_WRITES, RejectedWrites
from distop.errors import MalformedRequest
from distop.protocol.records import Node
from distop.runtime.logs import ContextLogger

OP = "t/noop/1"


class Rejections:
    def __init__(self) -> None:
        self.changes = 0
        self.writes = RejectedWrites(ContextLogger(logging.getLogger("tests"), {}), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def refuse(self, op: str, write: int, text: str = "too large", what: str = "reports") -> float:
        return self.writes.refused(op, what, MalformedRequest(text), write)


def test_a_settled_write_leaves_the_others_reported() -> None:
    one = Rejections()
    one.refuse(OP, 1)
    one.refuse(OP, 2)
    assert one.writes.published == {OP: "reports: too large; and 1 more write"}
    one.writes.settled(OP, "reports", 1)
    assert one.writes.published == {OP: "reports: too large"}
    one.writes.settled(OP, "reports", 1)
    assert one.writes.published == {OP: "reports: too large"}, "it was settled before"
    one.writes.settled(OP, "reports", 2)
    assert (one.writes.published, one.changes) == ({}, 4)


def test_each_write_has_its_own_back_off() -> None:
    one = Rejections()
    assert max(one.refuse(OP, write) for write in range(50)) <= 2.0
    assert max(one.refuse(OP, 0) for _ in range(20)) > 4.0


def test_writes_that_are_not_named_are_counted() -> None:
    one = Rejections()
    for write in range(MOST_WRITES + 2):
        one.refuse(OP, write, f"key {write} is too large")
    one.refuse(OP, 0, "no", what="coordination")
    named = [f"reports: key {write} is too large" for write in range(MOST_WRITES)]
    assert one.writes.published == {OP: "; ".join([*named, "and 3 more writes"])}


def test_operations_that_are_not_named_are_counted() -> None:
    one = Rejections()
    for n in range(MOST_OPERATIONS + 3):
        one.refuse(f"t/noop/{n}", 0)
    assert list(one.writes.published) == [f"t/noop/{n}" for n in range(MOST_OPERATIONS)]
    assert one.writes.more == 3
    one.writes.settled("t/noop/0", "reports", 0)
    assert f"t/noop/{MOST_OPERATIONS}" in one.writes.published
    assert one.writes.more == 2


def test_the_same_text_is_logged_once_for_an_operation(caplog: pytest.LogCaptureFixture) -> None:
    one = Rejections()
    for write in range(20):
        one.refuse(OP, write)
        one.refuse(OP, write)
    assert len(caplog.records) == 1
    one.refuse(OP, 3, "of another kind")
    assert len(caplog.records) == 2


def test_the_node_record_counts_the_operations_that_it_does_not_name() -> None:
    node = Node("e", "host", 1, ("noop",), refused={OP: "reports: too large"}, refused_more=4)
    assert Node.decode(node.encode()) == node
    assert b"refused_more" not in Node("e", "host", 1, ("noop",)).encode()

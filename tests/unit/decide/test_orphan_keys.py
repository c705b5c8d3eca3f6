"""Keys that belong to nothing."""

from __future__ import annotations

from distop.decide.orphan_keys import orphans
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef

KEYS = Keys("ns")
REF = OperationRef("t", "noop", "", 1)


def test_a_valid_store_has_no_orphans() -> None:
    other = OperationRef("t", "index", "a.b", 2)
    found = [
        KEYS.run_ops("t"),
        KEYS.next_instance("t", "noop"),
        KEYS.of(REF, "state"),
        KEYS.of(REF, "arg"),
        KEYS.gate(REF),
        KEYS.claim(REF, 3),
        KEYS.job(REF, 4, "outcome"),
        KEYS.of(other, "state"),
        KEYS.pending(other),
        KEYS.history(OperationRef("t", "noop", "", 9)),
        KEYS.node("x"),
    ]
    assert orphans(KEYS, found) == []


def test_orphans_are_named() -> None:
    third = OperationRef("t", "noop", "", 3)
    found = [
        KEYS.claim(REF, 3),
        KEYS.of(REF, "arg"),
        KEYS.of(third, "state"),
        "ns/distOp.t.noop.x.y.z",
        "ns/distOpNode.a.b",
    ]
    wrong = orphans(KEYS, found)
    assert wrong == [
        "t/noop/1 has claims, .arg, but no state",
        "t/noop/3 has neither a gate nor a pending key (invariant 12)",
        "the key ns/distOp.t.noop.x.y.z is not one of distop's",
        "the key ns/distOpNode.a.b is not one of distop's",
    ]
    assert orphans(KEYS, [KEYS.of(third, "state"), KEYS.gate(third), KEYS.pending(third)]) == [
        "t/noop/3 has both a gate and a pending key (invariant 12)"
    ]

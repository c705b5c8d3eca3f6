"""What operations without a gate are in: a mapping as any other, in which very many that wait cost nothing."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from distop.decide.pending_phases import Instances, Phases
from distop.protocol.records import OperationRef, Phase


@given(st.integers(0, 2**32))
def test_phases_equal_those_of_a_dict(seed: int) -> None:
    chance = random.Random(seed)
    phases, plain = Phases(), dict[OperationRef, Phase]()
    for _ in range(200):
        ref = OperationRef(
            chance.choice("tu"), "noop", chance.choice(("", "o")), chance.choice((1, 2, 1023, 1024, 10**15))
        )
        phase = chance.choice((None, Phase.WAITING, Phase.WAITING, Phase.PAUSED))
        phases.set(ref, phase)
        if phase is None:
            plain.pop(ref, None)
        else:
            plain[ref] = phase
        assert phases.get(ref) == phase
        assert phases == plain
        assert len(phases) == len(plain)
        assert bool(phases) is bool(plain)


def test_instances_come_in_order() -> None:
    numbers = Instances()
    for number in (5000, 3, 1024, 3):
        numbers.add(number)
    numbers.discard(7)
    assert list(numbers) == [3, 1024, 5000]
    assert len(numbers) == 3


def test_100000_waiting_operations_take_less_than_a_byte_each() -> None:
    tracemalloc.start()
    try:
        phases = Phases()
        for number in range(1, 100_001):
            phases.set(OperationRef("@cluster", "noop", "", number), Phase.WAITING)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(phases) == 100_000
    assert taken < 100_000

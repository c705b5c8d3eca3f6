"""Loaded objects are excluded from garbage collection; later objects are not."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING

import pytest

from distop.runtime.gc_tuning import YOUNG, freeze_loaded, tune_for_start

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def restored_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_frozen_objects_are_not_examined_again() -> None:
    there = Cycle()
    freeze_loaded()
    assert gc.get_freeze_count() > 0
    assert not any(one is there for one in gc.get_objects())
    assert gc.get_threshold()[0] == YOUNG


def test_garbage_is_collected_before_objects_are_frozen() -> None:
    gone = weakref.ref(Cycle())
    freeze_loaded()
    assert gone() is None


def test_no_collection_during_the_start_of_a_process() -> None:
    tune_for_start()
    before = [generation["collections"] for generation in gc.get_stats()]
    loaded = [Cycle() for _ in range(20 * YOUNG // 10)]
    gone = weakref.ref(Cycle())
    freeze_loaded(collect=False)
    assert [generation["collections"] for generation in gc.get_stats()] == before
    assert gc.get_freeze_count() > len(loaded)
    assert gone() is not None
    assert gc.get_threshold()[0] == YOUNG


def test_later_garbage_is_collected() -> None:
    freeze_loaded()
    gone = weakref.ref(Cycle())
    gc.collect()
    assert gone() is None


def test_freeze_loaded_can_be_called_again() -> None:
    freeze_loaded()
    before = gc.get_freeze_count()
    later = [Cycle() for _ in range(100)]
    freeze_loaded()
    assert gc.get_freeze_count() >= before + len(later)


def test_another_programs_collector_is_not_changed() -> None:
    """Such as a program in which an author tests a behavior."""
    shown = "print(gc.get_freeze_count(), gc.get_threshold())"
    programs = (
        f"import gc; {shown}",
        f"import gc; from distop.runtime.gc_tuning import freeze_loaded; freeze_loaded(); {shown}",
    )
    untouched, settled = (
        subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout
        for program in programs
    )
    assert settled == untouched

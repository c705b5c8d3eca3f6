"""What was loaded is left out of the looks for garbage; what is made later is not."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING

import pytest

from distop.runtime.gc_tuning import YOUNG, begin, settle

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_looked_at_no_more() -> None:
    there = Circle()
    settle()
    assert gc.get_freeze_count() > 0
    assert not any(one is there for one in gc.get_objects())
    assert gc.get_threshold()[0] == YOUNG


def test_garbage_from_before_is_not_kept_for_ever() -> None:
    gone = weakref.ref(Circle())
    settle()
    assert gone() is None


def test_a_process_that_begins_does_not_look_before_it_has_loaded() -> None:
    begin()
    before = [generation["collections"] for generation in gc.get_stats()]
    loaded = [Circle() for _ in range(20 * YOUNG // 10)]
    gone = weakref.ref(Circle())
    settle(look=False)
    assert [generation["collections"] for generation in gc.get_stats()] == before
    assert gc.get_freeze_count() > len(loaded)
    assert gone() is not None
    assert gc.get_threshold()[0] == YOUNG


def test_garbage_of_later_is_found() -> None:
    settle()
    gone = weakref.ref(Circle())
    gc.collect()
    assert gone() is None


def test_it_may_be_called_again() -> None:
    settle()
    before = gc.get_freeze_count()
    later = [Circle() for _ in range(100)]
    settle()
    assert gc.get_freeze_count() >= before + len(later)


def test_a_process_of_somebody_else_is_left_as_it_is() -> None:
    """Such as one in which an author tests a behavior."""
    shown = "print(gc.get_freeze_count(), gc.get_threshold())"
    programs = (f"import gc; {shown}", f"import gc; from distop.runtime.gc_tuning import settle; settle(); {shown}")
    untouched, settled = (
        subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout
        for program in programs
    )
    assert settled == untouched

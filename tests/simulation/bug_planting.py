"""Plants bugs: wraps or replaces functions of production code.

A change of production code must not turn a planted bug into another one, such as an error in the planted code. So
arguments are bound by name, a replacement must have the same parameters, and each bug names the kinds of breaches that
prove it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulator import Scenario, draw_scenario
from tests.simulator.scenes import in_scene

Patch = pytest.MonkeyPatch
Shape = Callable[[Scenario], Scenario]


class Mistake(Exception):
    """An error that is the planted bug itself. Any other error raised by planted code means that it is outdated."""


@dataclass(frozen=True)
class Planted:
    """A bug: ``plant`` plants it, and a breach of a kind in ``expected`` is its effect.

    ``focus``: the kinds of faults that it needs, if free draws would find it late. ``shape``: the scene of the search.
    ``first``: the first seed of the search, if seed 1 and its neighbours do not show the bug or take long. It only
    saves time: the search continues through all other seeds. ``drawn``: the seed of a schedule that finds the bug as
    drawn, for a bug with a focus or a shape; other bugs are only searched for in drawn schedules. A change of the draw
    or of the timing can outdate both seeds; the test then fails and says how to find the seed to record. ``slow``: its
    effect shows so late that CI does not search for it.
    """

    name: str
    plant: Callable[[Patch], None]
    expected: tuple[str, ...]
    focus: tuple[str, ...] = ()
    shape: Shape | None = None
    first: int = 1
    drawn: int = 0
    slow: bool = False

    @property
    def chosen(self) -> bool:
        """Whether the search uses scenarios that were made for it."""
        return bool(self.focus) or self.shape is not None

    @property
    def drawn_seed(self) -> int:
        """The seed of a drawn schedule that finds it."""
        return self.drawn if self.chosen else self.first

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed in which the search looks for the bug."""
        return in_scene(seed, self.shape, self.focus) if self.chosen else draw_scenario(seed)


BUGS: list[Planted] = []


def bug(
    *expected: str,
    focus: tuple[str, ...] = (),
    shape: Shape | None = None,
    first: int = 1,
    drawn: int = 0,
    slow: bool = False,
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Add a bug to ``BUGS``, with the kinds of breaches that prove it."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append(Planted(plant.__name__, plant, expected, focus, shape, first, drawn, slow))
        return plant

    return add


def wrap(patch: Patch, owner: Any, name: str, change: Callable[[Any, Any], Any]) -> None:
    """Change the result of a function: ``change(result, given)``, where ``given`` has the arguments by name."""
    former = getattr(owner, name)
    if inspect.iscoroutinefunction(former):
        raise TypeError(f"{name} is a coroutine function, which cannot be wrapped")
    signature = inspect.signature(former)

    def wrapped(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        given.apply_defaults()
        return change(former(*args, **named), SimpleNamespace(**given.arguments))

    patch.setattr(owner, name, wrapped)


def give(patch: Patch, owner: Any, name: str, **values: Any) -> None:
    """Call a function with these values, whatever its callers pass."""
    former = getattr(owner, name)
    signature = inspect.signature(former)
    if unknown := values.keys() - signature.parameters.keys():
        raise TypeError(f"{name} takes no {', '.join(sorted(unknown))}")

    def called(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        given.arguments.update(values)
        return former(*given.args, **given.kwargs)

    patch.setattr(owner, name, called)


def substitute(patch: Patch, owner: Any, name: str, other: Callable[..., Any]) -> None:
    """Replace a function by another one with the same parameters."""
    former = getattr(owner, name)
    takes, other_takes = (list(inspect.signature(one).parameters) for one in (former, other))
    if takes != other_takes or inspect.iscoroutinefunction(former) != inspect.iscoroutinefunction(other):
        raise TypeError(f"{name} takes {takes}, its replacement {other_takes}; or only one of the two is awaited")
    patch.setattr(owner, name, other)


__all__ = ["BUGS", "Mistake", "Patch", "Planted", "bug", "give", "substitute", "wrap"]

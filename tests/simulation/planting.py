"""How bugs are planted: production code is wrapped or replaced, by the names of its arguments.

A change of that code must not turn a planted bug into another one, such as an error of its own that is then taken for
a find. So arguments are bound by name, what is replaced takes the same ones, and each bug names the breaches that prove
it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulator import Scenario, scenario
from tests.simulator.scenes import plainly

Patch = pytest.MonkeyPatch
Shape = Callable[[Scenario], Scenario]


class Mistake(Exception):
    """An error that is the planted bug itself. Any other that planted code raises tells that the bug has rotted."""


@dataclass(frozen=True)
class Planted:
    """A bug: ``plant`` puts it in, and a breach of a kind in ``expected`` is its effect.

    ``focus``: the kinds of faults that it needs, where all of them would find it late; ``shape`` changes the scenarios
    in which it is looked for; ``first``: the seed with which the search starts, where seed 1 and its next neighbours do
    not show the bug, or cost much. It only saves time: the search continues through all other seeds. A change of the
    draw or of the timing can outdate it; the test then fails and prints the seed to record. ``slow``: what it does is
    seen after very long alone, so it is not looked for at every change. ``plain``: the shape starts from a plain
    cluster, as scenes do.
    """

    name: str
    plant: Callable[[Patch], None]
    expected: tuple[str, ...]
    focus: tuple[str, ...] = ()
    shape: Shape | None = None
    first: int = 1
    slow: bool = False
    plain: bool = True

    @property
    def chosen(self) -> bool:
        """It is looked for in scenarios that were made for it."""
        return bool(self.focus) or self.shape is not None

    def scenario(self, seed: int) -> Scenario:
        """The one of a seed in which it is looked for."""
        drawn = scenario(seed, focus=self.focus, scenes=self.shape is None)
        if self.shape is None:
            return drawn
        return self.shape(plainly(drawn) if self.plain else drawn)


BUGS: list[Planted] = []


def bug(
    *expected: str,
    focus: tuple[str, ...] = (),
    shape: Shape | None = None,
    first: int = 1,
    slow: bool = False,
    plain: bool = True,
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Add a bug to the list, with the kinds of breach that prove it."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append(Planted(plant.__name__, plant, expected, focus, shape, first, slow, plain))
        return plant

    return add


def wrap(patch: Patch, owner: Any, name: str, change: Callable[[Any, Any], Any]) -> None:
    """Have the result of a function changed: ``change(result, given)``, where ``given`` has its arguments by name."""
    former = getattr(owner, name)
    if inspect.iscoroutinefunction(former):
        raise TypeError(f"{name} is a coroutine function: its result is not what it returns")
    signature = inspect.signature(former)

    def wrapped(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        given.apply_defaults()
        return change(former(*args, **named), SimpleNamespace(**given.arguments))

    patch.setattr(owner, name, wrapped)


def give(patch: Patch, owner: Any, name: str, **values: Any) -> None:
    """Have a function called with these values, whatever its callers give for them."""
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
    """Have another function in the place of one that takes the same arguments."""
    former = getattr(owner, name)
    takes, other_takes = (list(inspect.signature(one).parameters) for one in (former, other))
    if takes != other_takes or inspect.iscoroutinefunction(former) != inspect.iscoroutinefunction(other):
        raise TypeError(f"{name} takes {takes}, and what is to replace it {other_takes}; or one of the two is awaited")
    patch.setattr(owner, name, other)


__all__ = ["BUGS", "Mistake", "Patch", "Planted", "bug", "give", "substitute", "wrap"]

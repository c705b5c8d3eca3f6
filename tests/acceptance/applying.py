"""The moments of one application of a certificate, which cannot be reached from outside: what is done there is hung on
the one method that begins or ends at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop_behaviors.apply.apply_loop import Applying
from tests.support.context import FakeContext

if TYPE_CHECKING:
    from collections.abc import Callable

Moment = tuple[Any, str, int, str]
"""A class, one of its methods, the number of a call, and ``before`` or ``after``."""


class Staging(FakeContext):
    """The context of one operation, whose attempts are numbered: each has a stage of its own."""


class At:
    """Does something once: before, or after, the n-th call of a method."""

    def __init__(self, owner: Any, name: str, n: int, when: str, act: Callable[[], None]) -> None:
        self.happened = False
        former = getattr(owner, name)
        calls = 0

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            mine = calls == n
            if mine and when == "before":
                self.happened = True
                act()
            result = former(*args, **kwargs)
            if mine and when == "after":
                self.happened = True
                act()
            return result

        self.wrapped = wrapped


def before_the_change(target: Any) -> list[Moment]:
    """The metadata is read, judged, swapped by this class of targets."""
    return [
        *((Applying, "load", 1, when) for when in ("before", "after")),
        *((Applying, "judge", 1, when) for when in ("before", "after")),
        (Applying, "commit", 1, "before"),
        (target, "swap", 1, "before"),
    ]


def after_the_change(target: Any) -> list[Moment]:
    """It is read again, where the swap is found, and looked at once more."""
    return [
        (target, "swap", 1, "after"),
        (Applying, "commit", 1, "after"),
        *((Applying, "load", 2, when) for when in ("before", "after")),
        (Applying, "settle", 1, "before"),
        (Applying, "load", 3, "before"),
    ]


def crashes(target: Any) -> list[tuple[tuple[Any, str], str]]:
    """A method, and whether it is before or after it that the process dies."""
    return [
        *(((Applying, name), when) for name in ("judge", "commit", "settle") for when in ("before", "after")),
        *(((target, "swap"), when) for when in ("before", "after")),
    ]

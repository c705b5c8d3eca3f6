"""Moments in the application of a certificate, at which a test can act.

A moment is the start or end of a method of ``apply``, which :class:`At` patches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop_behaviors.apply.apply_loop import Applying
from tests.support.context import FakeContext

if TYPE_CHECKING:
    from collections.abc import Callable

Moment = tuple[Any, str, int, str]
"""A class, the name of a method, the number of a call, and ``before`` or ``after``."""


class Staging(FakeContext):
    """The context of one operation, in which each attempt has its own stage."""


class At:
    """Wraps a method so that ``act`` is called once, before or after its n-th call."""

    def __init__(self, owner: Any, name: str, n: int, when: str, act: Callable[[], None]) -> None:
        self.happened = False
        original = getattr(owner, name)
        calls = 0

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            mine = calls == n
            if mine and when == "before":
                self.happened = True
                act()
            result = original(*args, **kwargs)
            if mine and when == "after":
                self.happened = True
                act()
            return result

        self.wrapped = wrapped


def before_the_change(target: Any) -> list[Moment]:
    """Moments before this class of targets commits: loading and judging the metadata, and the swap."""
    return [
        *((Applying, "load", 1, when) for when in ("before", "after")),
        *((Applying, "judge", 1, when) for when in ("before", "after")),
        (Applying, "commit", 1, "before"),
        (target, "swap", 1, "before"),
    ]


def after_the_change(target: Any) -> list[Moment]:
    """Moments after the commit: loading the metadata again, confirming the change, and the last check."""
    return [
        (target, "swap", 1, "after"),
        (Applying, "commit", 1, "after"),
        *((Applying, "load", 2, when) for when in ("before", "after")),
        (Applying, "settle", 1, "before"),
        (Applying, "load", 3, "before"),
    ]


def crashes(target: Any) -> list[tuple[tuple[Any, str], str]]:
    """Methods, and whether a process dies before or after them."""
    return [
        *(((Applying, name), when) for name in ("judge", "commit", "settle") for when in ("before", "after")),
        *(((target, "swap"), when) for when in ("before", "after")),
    ]

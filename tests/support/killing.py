"""A process that is killed at a moment of one's choice, as far as files can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pytest


class Killed(BaseException):
    """The process is gone."""


class Killer:
    """Counts the moments before and after each call of some functions; at the one of the number ``at`` the process
    dies: from then on none of the functions does anything, so that no code that runs on the way out changes a file.
    """

    def __init__(self, patch: pytest.MonkeyPatch, points: Iterable[tuple[Any, str]]) -> None:
        self.at = -1
        self.dead = False
        self._count = 0
        for owner, name in points:
            patch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._moment()
            result = function(*args, **kwargs)
            self._moment()
            return result

        return call

    def _moment(self) -> None:
        if self._count == self.at:
            self.dead = True
        if self.dead:
            raise Killed
        self._count += 1

    def strike(self, at: int, run: Callable[[], object]) -> bool:
        """Run it until the moment ``at``; whether that came."""
        self.at, self._count = at, 0
        try:
            run()
        except Killed:
            pass
        finally:
            died, self.at, self.dead = self.dead, -1, False
        return died

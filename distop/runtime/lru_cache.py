"""What was costly to make and is wanted again: by the next batch, or by the next operation."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

ASK_EVERY = 0.2
"""Seconds between two questions whether to go on with waiting."""


class Kept(Generic[T]):
    """At most ``limit`` values, by what they were made of: the one that was not asked for for longest goes first.
    Batches ask from threads of their own; two that ask for the same at once may both make it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[tuple[Any, ...], T] = OrderedDict()
        self._making: dict[tuple[Any, ...], threading.Event] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple[Any, ...], make: Callable[[], T], *, keep: bool | Callable[[T], bool] = True) -> T:
        """The value of the key; where there is none ``make`` makes it, and it is kept if it is to be. Raises what that
        raises.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        if keep(made) if callable(keep) else keep:
            self.put(key, made)
        return made

    def get_once(self, key: tuple[Any, ...], make: Callable[[], T], check: Callable[[], None]) -> T:
        """As :meth:`get`; while one thread makes the value others that ask for it wait, and make it themselves where
        that thread fails. Those that wait call ``check`` now and then, which raises where they are to stop. Raises what
        ``make`` and ``check`` raise.
        """
        made = threading.Event()
        while True:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
                other = self._making.setdefault(key, made)
            if other is made:
                break
            while not other.wait(ASK_EVERY):
                check()
        try:
            value = make()
            self.put(key, value)
            return value
        finally:
            with self._lock:
                del self._making[key]
            made.set()

    def put(self, key: tuple[Any, ...], value: T) -> None:
        """Keep a value, instead of the one that is kept."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)

"""A thread-safe LRU cache for values that are expensive to compute."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

ASK_EVERY = 0.2
"""Seconds between two checks whether to stop waiting."""


class LruCache(Generic[T]):
    """An LRU cache of at most ``limit`` values. Thread-safe; two threads may compute the same value in :meth:`get`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[tuple[Any, ...], T] = OrderedDict()
        self._making: dict[tuple[Any, ...], threading.Event] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple[Any, ...], make: Callable[[], T], *, keep: bool | Callable[[T], bool] = True) -> T:
        """The value of a key, computed with ``make`` if it is not cached. Raises the errors of ``make``.

        ``keep``: whether to cache a computed value, or a function that decides.
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
        """Like :meth:`get`, but only one thread at a time computes a value; others wait for it.

        If that thread fails, another one computes the value. Waiting threads call ``check`` regularly, which raises to
        stop the wait. Raises the errors of ``make`` and ``check``.
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
        """Cache a value, replacing the old one."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)

    def values(self) -> list[T]:
        """The cached values, the most recently used last."""
        with self._lock:
            return list(self._values.values())

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._values.clear()

"""Checks the fields of decoded records by their annotations.

Anyone who may write a key can write any JSON by hand. A decoder only returns values that the deciding functions can
handle, so these need no checks of their own. Pure.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from distop.protocol import texts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

LARGEST = 2**53
"""The largest whole number that every JSON reader represents exactly."""
LONGEST = 1e11
"""Seconds (3,000 years): the longest allowed time."""
SIGNED = frozenset({"priority", "permit", "clock"})
"""Fields that may be negative."""
_SHOWN = 60


def checked(record: T) -> T:
    """The record itself.

    Raises TypeError for a field with another type than declared, or a number out of range.
    """
    kind: Any = type(record)
    for name, wanted, fits in _shapes(kind):
        value = getattr(record, name)
        if not isinstance(value, wanted) or (fits is not None and not fits(value)):
            raise TypeError(f"{name!r} is {shown(value)}")
    return record


def shown(value: object) -> str:
    """A value of a record in a message, shortened."""
    return texts.shown(value, _SHOWN)


def within(value: int, least: int, most: int, name: str) -> int:
    """The number itself. Raises ValueError if it is out of range."""
    if not least <= value <= most:
        raise ValueError(f"{name!r} is {shown(value)}")
    return value


def _texts(values: Any) -> bool:
    return values is None or all(isinstance(one, str) for one in values)


def _named_texts(value: Any) -> bool:
    return all(isinstance(one, str) for one in value.values())


def _objects(values: Any) -> bool:
    return all(isinstance(one, dict) for one in values)


def _whole(value: Any) -> bool:
    return bool(0 <= value <= LARGEST)


def _signed(value: Any) -> bool:
    return bool(-LARGEST <= value <= LARGEST)


def _seconds(value: Any) -> bool:
    return math.isfinite(value) and bool(0 <= value <= LONGEST)


_Shape = tuple[Any, "Callable[[Any], bool] | None"]
_SHAPES: Mapping[str, _Shape] = {
    "str": (str, None),
    "int": (int, _whole),
    "float": ((int, float), _seconds),
    "Mapping[str, Any]": (dict, None),
    "Mapping[str, Any] | None": ((dict, type(None)), None),
    "Mapping[str, str]": (dict, _named_texts),
    "tuple[str, ...]": (tuple, _texts),
    "tuple[str, ...] | None": ((tuple, type(None)), _texts),
    "tuple[Mapping[str, Any], ...]": (tuple, _objects),
}


@lru_cache(maxsize=64)
def _shapes(kind: Any) -> tuple[tuple[str, Any, Callable[[Any], bool] | None], ...]:
    # Thousands of claims of one kind are read in a row.
    if not is_dataclass(kind):
        return ()
    found = []
    for field in fields(kind):
        if (shape := _SHAPES.get(str(field.type))) is not None:
            wanted, fits = shape
            found.append((field.name, wanted, _signed if fits is _whole and field.name in SIGNED else fits))
    return tuple(found)

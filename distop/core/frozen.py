"""Values that do not change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A dataclass with slots, whose fields no code of this project may set: the type checker refuses that.

    At run time it is not frozen. ``dataclass(frozen=True)`` sets each field by a call, which makes a value of six
    fields eight times as slow to build (1.9 against 0.24 µs), and thousands of them are built for each operation:
    without it, 10,000 empty jobs take 15 % less time. What behaviors and callers of distop are given, who may use no
    type checker, is frozen.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)

"""Durations in arguments: texts such as ``5d`` and ``36h``, or numbers of seconds."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TEXT = r"^[0-9]{1,12}(\.[0-9]{1,6})?[smhd]$"


def seconds_of(value: Any) -> float:
    """The seconds of a duration. Raises ValueError."""
    if isinstance(value, str) and re.match(_TEXT, value):
        return float(value[:-1]) * _UNITS[value[-1]]
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    raise ValueError("a duration must be a number of seconds, or a text such as 90s, 30m, 36h or 5d")


def text_of(seconds: float) -> str:
    """A duration as a text, in the largest unit that divides it."""
    for unit, size in reversed(_UNITS.items()):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s"


Duration = Annotated[
    float,
    BeforeValidator(seconds_of),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": _TEXT}]}),
]
"""A duration in the argument of an operation type, in seconds."""

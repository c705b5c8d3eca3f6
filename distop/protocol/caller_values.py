"""Checks values that callers and behaviors give: texts, seconds, names of partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from distop.errors import InvalidArgument
from distop.protocol.records import MAX_ARGUMENT_BYTES
from distop.protocol.texts import check_encodable, shown

LONGEST_DELAY = 100 * 365.25 * 86_400
"""Maximum seconds of a delay, an interval or a jitter."""
LONGEST_WAIT = 1e12
"""Maximum of a number of seconds. Larger whole numbers are reduced to it: not every int fits into a float."""


def text(value: Any, what: str, longest: int | None = None) -> str:
    """The value, which must be a text of at most ``longest`` characters.

    Raises InvalidArgument.
    """
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a text, not {shown(value)}")
    if longest is not None and len(value) > longest:
        raise InvalidArgument(f"{what} has {len(value)} characters; at most {longest} are allowed")
    check_encodable(value, what)
    return value


def seconds(value: Any, what: str) -> float:
    """The value, which must be a number of seconds, 0 or more. Raises InvalidArgument."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise InvalidArgument(f"{what} must be a number of seconds, 0 or more, not {shown(value)}")
    return LONGEST_WAIT if isinstance(value, int) and value > LONGEST_WAIT else value


def delay_seconds(value: Any) -> float:
    """The value, which must be a delay in seconds of at most a hundred years. Raises InvalidArgument."""
    delay = seconds(value, "the delay")
    if delay > LONGEST_DELAY:
        raise InvalidArgument(f"the delay of {delay:g} s is longer than a hundred years")
    return delay


def partition_names(partitions: Any) -> tuple[str, ...]:
    """The names of some partitions. Raises InvalidArgument."""
    if isinstance(partitions, str):
        raise InvalidArgument(f"partitions must be a list of names, such as [{shown(partitions)}]")
    if not isinstance(partitions, Iterable):
        raise InvalidArgument(f"partitions must be a list of names, not {shown(partitions)}")
    names = tuple(partitions)
    if not names:
        raise InvalidArgument(
            "the list of partitions is empty: name a partition, or leave the list out for all partitions"
        )
    if not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument("a partition's name must be a text that is not empty")
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InvalidArgument(f"the partition {shown(twice)} is named twice")
    check_encodable("".join(names), "a partition's name")
    size = sum(len(name.encode()) + 3 for name in names)
    if size > MAX_ARGUMENT_BYTES:
        raise InvalidArgument(f"the names of {len(names)} partitions take {size} bytes; at most 512 KiB are allowed")
    return names

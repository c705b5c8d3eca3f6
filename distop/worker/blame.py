"""What an error of a behavior says: whether a retry mends it, here or on another node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from distop.errors import UsageError
from distop.worker.spark import SparkUnavailable

if TYPE_CHECKING:
    import logging

    from distop.behavior import Behavior


def kind_of(error: BaseException) -> Literal["fatal", "unable"]:
    """Of an error that no retry here mends: whether another node may do what this one cannot."""
    return "unable" if isinstance(error, SparkUnavailable) else "fatal"


def is_fatal(behavior: Behavior, error: BaseException, log: logging.Logger) -> bool:
    """What the behavior says of an error; where that breaks too, the error is one that is tried again."""
    if isinstance(error, UsageError):
        return True
    try:
        return bool(behavior.is_fatal(error))
    except Exception:
        log.exception("is_fatal of %s broke", behavior.type_name)
        return False

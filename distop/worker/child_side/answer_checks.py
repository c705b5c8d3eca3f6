"""What goes into a behavior's code and comes out of it: values by its models, and its errors.

What goes into a behavior's code and comes out of it, held against the models that the behavior declares.

What an error of a behavior says: whether a retry mends it, here or on another node.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from distop.errors import InvalidArgument, UsageError
from distop.worker.child_side.error_texts import explain_misfit, headline
from distop.worker.child_side.spark_session import SparkUnavailable

if TYPE_CHECKING:
    import logging

    from pydantic import BaseModel

    from distop.behavior import Behavior


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Kept: ``json.dumps`` makes one for each value."""


def validate(behavior: Behavior, arg: Any) -> Any:
    """The argument as the behavior's Arg. Raises InvalidArgument in one sentence."""
    try:
        return type(behavior).Arg.model_validate({} if arg is None else arg)
    except ValidationError as error:
        raise InvalidArgument(explain_misfit("the argument", behavior.type_name, error)) from error


def fitted(declared: type[BaseModel] | None, value: Any, what: str) -> Any:
    """A result or report as the model declared for it. An instance of that is taken as it is, and so is anything where
    none is declared. Raises InvalidArgument in one sentence, which calls the value ``what``.
    """
    if declared is None or isinstance(value, declared):
        return value
    try:
        return declared.model_validate(value)
    except ValidationError as error:
        raise InvalidArgument(explain_misfit(what, declared.__name__, error)) from error
    except Exception as error:
        # A validator of the model that meets what it did not expect.
        raise InvalidArgument(f"{what} does not fit {declared.__name__}: {headline(error)}") from error


def plain(value: Any) -> Any:
    """A model as JSON values, by the names that its schema has; anything else as it is."""
    return value.model_dump(mode="json", by_alias=True) if hasattr(value, "model_dump") else value


def dump(value: Any) -> bytes:
    """A result as JSON. Raises TypeError or ValueError for what is none (NaN is none either)."""
    return _JSON.encode(plain(value)).encode()


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

"""Checks the values and errors of a behavior's code.

Validates arguments, results and reports with the models that the behavior declares. Classifies errors: retryable,
fatal, or only possible on another node.
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
"""Cached: ``json.dumps`` creates an encoder for each value."""


def validate_argument(behavior: Behavior, arg: Any) -> Any:
    """The argument as an instance of the behavior's Arg. Raises InvalidArgument with one sentence."""
    try:
        return type(behavior).Arg.model_validate({} if arg is None else arg)
    except ValidationError as error:
        raise InvalidArgument(explain_misfit("the argument", behavior.type_name, error)) from error


def validate_result(declared: type[BaseModel] | None, value: Any, what: str) -> Any:
    """A result or report as an instance of its declared model.

    An instance of the model, and any value without a declared model, is returned unchanged. Raises InvalidArgument with
    one sentence, which calls the value ``what``.
    """
    if declared is None or isinstance(value, declared):
        return value
    try:
        return declared.model_validate(value)
    except ValidationError as error:
        raise InvalidArgument(explain_misfit(what, declared.__name__, error)) from error
    except Exception as error:
        # An unexpected error in a validator of the model.
        raise InvalidArgument(f"{what} does not fit {declared.__name__}: {headline(error)}") from error


def to_json_value(value: Any) -> Any:
    """A model as JSON values with the names of its schema; any other value unchanged."""
    return value.model_dump(mode="json", by_alias=True) if hasattr(value, "model_dump") else value


def dump(value: Any) -> bytes:
    """A result as JSON. Raises TypeError or ValueError for values that JSON does not have, such as NaN."""
    return _JSON.encode(to_json_value(value)).encode()


def fatal_kind(error: BaseException) -> Literal["fatal", "unable"]:
    """The kind of an error that must not be retried here; ``unable``: another node may succeed."""
    return "unable" if isinstance(error, SparkUnavailable) else "fatal"


def is_fatal(behavior: Behavior, error: BaseException, log: logging.Logger) -> bool:
    """Whether an error must not be retried, as the behavior decides. If its ``is_fatal`` raises: False."""
    if isinstance(error, UsageError):
        return True
    try:
        return bool(behavior.is_fatal(error))
    except Exception:
        log.exception("is_fatal of %s raised an error; treating the job's error as retryable", behavior.type_name)
        return False

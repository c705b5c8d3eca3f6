"""Checks the arguments of queries: states, types, tables, times, limits. Each error is one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol.json_codec import from_rfc3339
from distop.protocol.records import OperationRef, State
from distop.protocol.texts import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Sequence


def states_of(value: Any, allowed: Sequence[State], what: str) -> frozenset[State] | None:
    """The states of a filter, given as one text or several; None: all. Raises InvalidArgument."""
    if value is None:
        return None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Iterable):
        raise InvalidArgument(f"the states must be a list of texts, not {shown(value)}")
    found = set()
    for name in names:
        if not isinstance(name, str) or name not in [str(state) for state in allowed]:
            raise InvalidArgument(f"{shown(name)} is not a state of {what}{did_you_mean(name, allowed, 'states')}")
        found.add(State(name))
    if not found:
        raise InvalidArgument("the list of states is empty: name a state, or leave the list out for all states")
    return frozenset(found)


def type_of(value: Any) -> str | None:
    """An operation type; None: all. Raises InvalidArgument."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidArgument(f"the operation type must be a text, not {shown(value)}")
    return K.check_type_name(value)


def table_of(value: Any) -> str | None:
    """A table's name; None: all. Raises InvalidArgument."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidArgument(f"the name of a table must be a text, not {shown(value)}")
    K.encode(value)
    return value


def ref_of(value: Any, keys: K.Keys) -> OperationRef | None:
    """An operation, given by its name or its reference; None: all. Raises InvalidArgument."""
    if value is None:
        return None
    if not isinstance(value, str | OperationRef):
        raise InvalidArgument(f"the operation must be named by a text, not {shown(value)}")
    ref = OperationRef.parse(value) if isinstance(value, str) else value
    keys.history(ref)  # raises for a name that no key has
    return ref


def request_of(value: Any) -> str | None:
    """A request id; None: all. Raises InvalidArgument."""
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f"the request id must be a text, not {shown(value)}")
    return value


def moment_of(value: Any, what: str) -> float | None:
    """Like :func:`time_of`; None stays None."""
    return None if value is None else time_of(value, what)


def time_of(value: Any, what: str, such_as: str = "2013-01-01T00:00:00Z") -> float:
    """A time in seconds since the epoch, from a number, a ``datetime`` with a zone, or RFC 3339 text with a zone.

    ``such_as``: an example for the error message. Raises InvalidArgument.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        with suppress(OverflowError):
            return float(value)
    moment = value
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
    if not isinstance(moment, datetime):
        raise InvalidArgument(f"{what} must be a time such as {such_as}, not {shown(value)}")
    if moment.tzinfo is None:
        raise InvalidArgument(f"{what} must have a time zone, such as {moment.isoformat()}Z: {value!s} has none")
    try:
        return from_rfc3339(moment.isoformat())
    except (ValueError, OverflowError):
        raise InvalidArgument(f"{what} is out of range: {value!s}") from None


def limit_of(value: Any) -> int:
    """The limit of a list. Raises InvalidArgument."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"the limit must be a whole number of at least 1, not {shown(value)}")
    return value

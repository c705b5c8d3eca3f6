"""Recurring operations (P3): when the next one of a series is due. Pure; chance and time are parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from distop.protocol.field_checks import LARGEST, LONGEST, checked, shown, within
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import parse_time, rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.records import OperationRef, State

ON: Mapping[str, frozenset[str]] = {
    "success": frozenset({"success"}),
    "failure": frozenset({"failed"}),
    "any": frozenset({"success", "failed"}),
}
"""The terminal states after which a next operation follows; after a cancel none does."""
SHORTEST = 0.1
"""Minimum seconds between two operations of a series."""


@frozen
class Series:
    """The schedule of a series of operations.

    ``interval``: seconds from the end of one operation to the begin of the next, or (``since`` "start") from begin to
    begin, on a grid that starts with the first one. ``jitter``: maximum additional seconds, drawn each time.

    A series ends at the time ``until``, after ``left`` more operations (None: never), after a terminal state other than
    ``on`` (see :data:`ON`), or by a cancel. ``due``: when this operation was due on the grid. ``first``: the first
    operation of the series.
    """

    interval: float
    jitter: float = 0.0
    since: str = "end"
    on: str = "any"
    until: str = ""
    left: int | None = None
    due: str = ""
    first: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in self.__dataclass_fields__ if getattr(self, name) not in ("", None)
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Series:
        left, on = data.get("left"), data.get("on", "any")
        if on not in ON or not SHORTEST <= float(data["interval"]) <= LONGEST:
            raise ValueError(f"a series of {shown(data)}")
        return checked(
            cls(
                float(data["interval"]),
                float(data.get("jitter", 0.0)),
                data.get("since", "end"),
                on,
                data.get("until", ""),
                within(int(left), 0, LARGEST, "left") if left is not None else None,
                data.get("due", ""),
                data.get("first", ""),
            )
        )


def next_request(ref: OperationRef) -> str:
    """The request id that starts the next operation of a series exactly once."""
    return f"{ref}#next"


@frozen
class Next:
    """The next operation of a series: its begin (RFC 3339), and its own schedule."""

    not_before: str
    series: Series


def following(series: Series, op: str, state: State, finished: float, now: float, luck: float) -> Next | None:
    """The next operation after one of a series has ended, or None.

    ``luck``: a random number in [0, 1). Missed operations are run once: if a time of the grid has passed, the next
    operation begins now, and the one after it at a future time of the grid.
    """
    if state not in ON[series.on] or series.left == 0:
        return None
    if series.since == "start":
        due = (parse_time(series.due) or finished) + series.interval
        last = min(now, parse_time(series.until)) if series.until else now
        if due < last:  # the last missed time of the grid
            due += math.floor((last - due) / series.interval) * series.interval
    else:
        due = finished + series.interval
    if series.until and due > parse_time(series.until):
        return None
    left = series.left - 1 if series.left is not None else None
    after = Series(
        series.interval,
        series.jitter,
        series.since,
        series.on,
        series.until,
        left,
        rfc3339(due),
        series.first or op,
    )
    begins = due + luck * series.jitter
    return Next(rfc3339(min(begins, parse_time(series.until)) if series.until else begins), after)

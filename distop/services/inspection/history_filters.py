"""The single list of the filters for a query of the history.

HistoryFilters defines the signatures of the clients; :data:`FILTERS` the options of the command line. To add a filter:
add it to both, to :class:`HistoryKeywords` (the type checker reads these; a test holds all of them equal), and to
:class:`Query`.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import parse_time
from distop.protocol.operation_labels import has
from distop.protocol.operation_labels import labels as check_labels
from distop.protocol.records import History, OperationRef, State
from distop.protocol.texts import shown
from distop.services.command_flags import Flag
from distop.services.inspection import filters

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import datetime

    from distop.protocol.keys import Keys

CLOCKS = 3600.0
"""Maximum seconds by which the clocks of two executors may differ.

A search ends at the first page whose records are all older than ``since`` by more than that.
"""

RecordPlace: TypeAlias = tuple[int, str]
"""A record's place in the order: its mod revision, then its key, because one transaction may write several records."""


@frozen
class Query:
    """The checked filters of a query; None: any value.

    ``since`` (inclusive) and ``until`` (exclusive) are compared with the time of the finish: seconds since the epoch,
    by the clock of the executor that finished the operation.
    """

    table: str | None = None
    type: str | None = None
    ref: OperationRef | None = None
    states: frozenset[State] | None = None
    since: float | None = None
    until: float | None = None
    labels: Mapping[str, str] | None = None
    request_id: str | None = None
    limit: int = 100
    before: RecordPlace | None = None
    alarms: bool = False
    """Only records with an alarm."""

    @property
    def by_key(self) -> bool:
        """Whether a record's key alone decides that it matches."""
        return (
            not (self.labels or self.states or self.request_id or self.alarms)
            and self.since is None
            and self.until is None
        )

    def fits(self, ref: OperationRef) -> bool:
        return self.type in (None, ref.type) and self.ref in (None, ref)

    def fits_record(self, record: History) -> bool:
        finished = parse_time(record.finished)
        return (
            (self.states is None or record.state in self.states)
            and (self.since is None or finished >= self.since)
            and (self.until is None or finished < self.until)
            and (self.request_id is None or record.request_id == self.request_id)
            and (not self.alarms or record.alarm != "")
            and has(record.labels, self.labels or {})
        )

    def long_past(self, record: History) -> bool:
        """Whether the record is older than ``since`` by more than clocks may differ."""
        return self.since is not None and parse_time(record.finished) < self.since - CLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFilters:
    """The filters of a query as a caller gives them; None: any value."""

    type: str | None = None
    op: str | OperationRef | None = None
    states: str | Collection[str] | None = None
    since: float | str | datetime | None = None
    until: float | str | datetime | None = None
    labels: Mapping[str, str] | None = None
    request_id: str | None = None
    alarms: bool = False
    after: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The filters that were given, as keywords."""
        values = {name: getattr(self, name) for name in FILTERS}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def query(self, keys: Keys, table: str | None, limit: int) -> Query:
        """The checked filters. Raises InvalidArgument."""
        wanted = Query(
            filters.table_of(table),
            filters.type_of(self.type),
            filters.ref_of(self.op, keys),
            filters.states_of(self.states, [state for state in State if state.terminal], "an operation that has ended"),
            filters.moment_of(self.since, "since"),
            filters.moment_of(self.until, "until"),
            check_labels(self.labels),
            filters.request_of(self.request_id),
            filters.limit_of(limit),
            _place(keys, self.after),
            self.alarms,
        )
        if wanted.since is not None and wanted.until is not None and wanted.since >= wanted.until:
            raise InvalidArgument("since must be before until: no operation can match")
        return wanted


FILTERS: Mapping[str, Flag] = MappingProxyType(
    {
        "type": Flag("--type", "TYPE", "Only of this type."),
        "op": Flag("--op", "OP", "Only this operation."),
        "states": Flag("--state", "S", "success, failed, cancelled (repeatable).", "texts"),
        "since": Flag("--since", "T", "Ended then or later: a time, or 36h ago.", "time"),
        "until": Flag("--until", "T", "Ended before then: a time, or 36h ago.", "time"),
        "labels": Flag("--label", "K=V", "Only with this label (repeatable).", "texts"),
        "request_id": Flag("--request-id", "ID", "Only those that this request started."),
        "alarms": Flag("--alarms", "", "Only with an alarm: prepared, never confirmed.", "switch"),
        "after": Flag("--after", "TOKEN", "The page that follows, as the last names it."),
    }
)
"""The option of the command line of each filter."""


class HistoryKeywords(TypedDict, total=False):
    """What ``history`` takes, for the type checker."""

    type: str | None
    op: str | OperationRef | None
    states: str | Collection[str] | None
    since: float | str | datetime | None
    until: float | str | datetime | None
    labels: Mapping[str, str] | None
    request_id: str | None
    alarms: bool
    after: str | None


def page_token(ref: OperationRef, mod: int) -> str:
    """The token of the page that follows this operation's record."""
    return base64.urlsafe_b64encode(json.dumps([mod, str(ref)], separators=(",", ":")).encode()).decode().rstrip("=")


def _place(keys: Keys, token: Any) -> RecordPlace | None:
    if token is None:
        return None
    try:
        mod, op = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True))
        if type(mod) is not int or mod < 1:
            raise ValueError(mod)
        return mod, keys.history(OperationRef.parse(op))
    except (ValueError, TypeError, AttributeError, RecursionError, InvalidArgument):
        raise InvalidArgument(
            f"{shown(token, 80)} is not a page token: give the value of `after` of the last page"
        ) from None

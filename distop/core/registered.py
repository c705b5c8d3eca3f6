"""Decides whether an operation's copies of tables' records are the registered ones. Pure.

The copies stand below the operation's root, where a submitter writes; the registered records do not. So a copy is not
followed before it is compared: :func:`unregistered` is the one decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.core.codec import UNREADABLE
from distop.core.model import CLUSTER_TABLE, PLANNED_OPTIONS, TableRecord
from distop.core.texts import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Copy = tuple[str, Mapping[str, Any] | None]
    """The name of a table and the copy of its record, as JSON; None: there is none."""


def copies(table: str, record: Mapping[str, Any] | None, rows: Iterable[Mapping[str, Any]] = ()) -> list[Copy]:
    """What an operation on ``table`` has copies of: its own record and, by the rows of its plan, those of tables
    beside; each once. An operation on no table has none.

    Raises what decoding raises (UNREADABLE) for rows of another form.
    """
    found: list[Copy] = [] if table == CLUSTER_TABLE and record is None else [(table, record)]
    for row in rows:
        for other in row.get("beside", ()):
            copy = (str(other["table"]["name"]), other["table"])
            if copy not in found:
                found.append(copy)
    return found


def unregistered(op: str, found: Iterable[Copy], registered: Mapping[str, TableRecord | None]) -> str:
    """Why an operation may not follow its copies: a sentence; "": each is the record that is registered now, besides
    the options that a plan may set.
    """
    for name, copy in found:
        record = registered.get(name)
        try:
            same = record is not None and copy is not None and _decides(record) == _decides(TableRecord.from_json(copy))
        except UNREADABLE:
            same = False
        if not same:
            return (
                f"the record of table {one_line(name)} is not the one with which {op} was started: the table was "
                "changed or removed since, or the copy was; start the operation again"
            )
    return ""


def _decides(record: TableRecord) -> TableRecord:
    """The record with what decides which data are reached."""
    options = {name: value for name, value in record.options.items() if name not in PLANNED_OPTIONS}
    return TableRecord(record.name, record.format, record.location, options)

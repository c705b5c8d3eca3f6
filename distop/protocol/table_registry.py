"""The registered tables, and whether an operation's copies of their records are those.

The table registry's transactions, and the ranges in which a client looks for operations.

Registering, changing and removing a table write runOps again with the value it had: its mod revision then moves, so
that a start that has read the former record is refused and reads again, and so that "the table's key is absent" is
never the only guard (a copy of the transaction that was refused once can never apply later, T9).

Decides whether an operation's copies of tables' records are the registered ones. Pure.

The copies stand below the operation's root, where a submitter writes; the registered records do not. So a copy is not
followed before it is compared: :func:`unregistered` is the one decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol import record_reading
from distop.protocol.json_codec import UNREADABLE
from distop.protocol.records import CLUSTER_TABLE, PLANNED_OPTIONS, TableRecord
from distop.protocol.texts import one_line
from distop.protocol.txn import Delete, Get, Put, Txn, unchanged
from distop.protocol.user_actions import NO_ACTIONS, recorded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.protocol.user_actions import Actions


def read_table(keys: Keys, name: str) -> tuple[Get, Get, Get]:
    """What the transactions below are built from: the table's record, its runOps, and who changed it so far."""
    return Get(keys.table(name)), Get(keys.run_ops(name)), Get(keys.table_actions(name))


def put_table(
    keys: Keys, record: TableRecord, seen: KeyValue | None, run_ops: KeyValue | None, actions: Actions = NO_ACTIONS
) -> Txn:
    """Register a table (``seen`` None) or change its record. ``actions``: with this one. runOps guards them, too: all
    that write them write it.
    """
    return Txn(
        (
            unchanged(keys.table(record.name), seen.mod_revision if seen else 0),
            unchanged(keys.run_ops(record.name), run_ops.mod_revision if run_ops else 0),
        ),
        (
            Put(keys.table(record.name), record.encode()),
            Put(keys.run_ops(record.name), run_ops.value if run_ops else b"{}"),
            *recorded(keys.table_actions(record.name), actions),
        ),
        read_table(keys, record.name),
        "put_table",
    )


def remove_table(
    keys: Keys, name: str, seen: KeyValue, run_ops: KeyValue | None, actions: Actions = NO_ACTIONS
) -> Txn:
    """Remove a table's record; the caller has seen that nothing runs on it. ``actions``: with this one; they stay."""
    return Txn(
        (
            unchanged(keys.table(name), seen.mod_revision),
            unchanged(keys.run_ops(name), run_ops.mod_revision if run_ops else 0),
        ),
        (
            Delete(keys.table(name)),
            Put(keys.run_ops(name), run_ops.value if run_ops else b"{}"),
            *recorded(keys.table_actions(name), actions),
        ),
        read_table(keys, name),
        "remove_table",
    )


def running(run_ops: KeyValue | None) -> dict[str, int]:
    """runOps as a mapping without zeros. Raises UnreadableRecord."""
    return record_reading.read(record_reading.counts, run_ops) if run_ops is not None else {}


def type_family(keys: Keys, family: str, table: str, type_name: str) -> tuple[str, str]:
    """The range of a family (gates, pending, history) for one type on one table."""
    start, _ = keys.family(family)
    return K.prefix_range(f"{start}{K.encode(table)}.{K.check_type_name(type_name)}.")


def table_family(keys: Keys, family: str, table: str | None) -> tuple[str, str]:
    """The range of a family for one table, or (None) for all."""
    start, end = keys.family(family)
    return (start, end) if table is None else K.prefix_range(f"{start}{K.encode(table)}.")


def refs(keys: Keys, found: Iterable[KeyValue]) -> list[OperationRef]:
    """The operations that these gates, pending or history keys name, each once and sorted; others are left out."""
    named: set[OperationRef] = set()
    for kv in found:
        try:
            parsed = keys.parse(kv.key)
        except (InvalidArgument, ValueError):
            continue
        if parsed.ref is not None and not parsed.name:
            named.add(parsed.ref)
    return sorted(named)


def excluded_by(type_name: str, conflicts: Iterable[str], others: Mapping[str, Iterable[str]]) -> list[str]:
    """The running types that exclude a start of ``type_name``, sorted.

    ``conflicts``: what it declares; ``others``: each running type with what that one declares (both ways).
    """
    declared = set(conflicts)
    return sorted(other for other, theirs in others.items() if other in declared or type_name in theirs)


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

"""The registered tables: their transactions, and the check of copies.

Registering, changing and removing a table writes runOps again with its former value. This changes its mod revision. So
a start that has read the former record is refused and reads again, and "the table's key is absent" is never the only
guard: a copy that was refused once can never apply later (T9).

An operation's copies of table records are below its root, where submitters write; the registered records are not. So a
copy is compared before it is used: :func:`unregistered` is the only decision. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol import record_reading
from distop.protocol.behavior_declaration import ALL_TYPES
from distop.protocol.json_codec import UNREADABLE
from distop.protocol.records import CLUSTER_TABLE, PLANNED_OPTIONS, TableRecord
from distop.protocol.texts import one_line
from distop.protocol.txn import Delete, Get, Put, Txn, unchanged
from distop.protocol.user_actions import NO_ACTIONS, recorded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Compare, KeyValue
    from distop.protocol.user_actions import Actions


def read_table(keys: Keys, name: str) -> tuple[Get, Get, Get]:
    """Reads for the transactions below: the table's record, its runOps, and its recorded actions."""
    return Get(keys.table(name)), Get(keys.run_ops(name)), Get(keys.table_actions(name))


def put_table(
    keys: Keys, record: TableRecord, seen: KeyValue | None, run_ops: KeyValue | None, actions: Actions = NO_ACTIONS
) -> Txn:
    """Register a table (``seen`` None) or change its record.

    ``actions``: the recorded actions, including this one. Guards: the record is unchanged; runOps is unchanged. runOps
    also guards the actions: all transactions that write these write it.
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


def remove_table(keys: Keys, name: str, seen: KeyValue, run_ops: KeyValue | None, actions: Actions = NO_ACTIONS) -> Txn:
    """Remove a table's record. ``actions``: including this one; they are kept.

    The caller has checked that no operation runs on it. Guards: the record is unchanged; runOps is unchanged, so
    nothing has started since.
    """
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


def removal(keys: Keys, ref: OperationRef, seen: KeyValue, run_ops: KeyValue, actions: Actions = NO_ACTIONS) -> Txn:
    """The removal of a table's record by an operation on it: a part of the transaction that writes its plan.

    The operation's own key gets the record. Its jobs and its completion use that copy, which submitters cannot write
    (:func:`unregistered`). ``actions``: including this one. The caller has checked that no other operation runs on the
    table, and that the record is the one with which the operation was started. Guards: the record is unchanged, so one
    that is registered later stays; runOps is unchanged, so nothing has started since.
    """
    return Txn(
        (
            unchanged(keys.table(ref.table), seen.mod_revision),
            unchanged(keys.run_ops(ref.table), run_ops.mod_revision),
        ),
        (
            Delete(keys.table(ref.table)),
            Put(keys.run_ops(ref.table), run_ops.value),
            Put(keys.removed_table(ref), seen.value),
            *recorded(keys.table_actions(ref.table), actions),
        ),
    )


def registration(
    keys: Keys, election: Compare, record: TableRecord, run_ops: KeyValue | None, actions: Actions = NO_ACTIONS
) -> Txn:
    """Register a table that the completion code of an operation has written.

    ``actions``: of the new table, including this one. Guards: my election; those of :func:`put_table` for a new record.
    """
    txn = put_table(keys, record, None, run_ops, actions)
    return Txn((election, *txn.compares), txn.success, txn.failure, txn.label)


def running(run_ops: KeyValue | None) -> dict[str, int]:
    """runOps as a mapping without zeros. Raises UnreadableRecord."""
    return record_reading.read(record_reading.counts, run_ops) if run_ops is not None else {}


def type_family(keys: Keys, family: str, table: str, type_name: str) -> tuple[str, str]:
    """The range of a family (gates, pending, history) for one type on one table."""
    start, _ = keys.family(family)
    return K.prefix_range(f"{start}{K.encode(table)}.{K.check_type_name(type_name)}.")


def table_family(keys: Keys, family: str, table: str | None) -> tuple[str, str]:
    """The range of a family for one table, or (None) for all tables."""
    start, end = keys.family(family)
    return (start, end) if table is None else K.prefix_range(f"{start}{K.encode(table)}.")


def refs(keys: Keys, found: Iterable[KeyValue]) -> list[OperationRef]:
    """The operations that these gate, pending or history keys name: each once, sorted. Other keys are skipped."""
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
    """The running types that conflict with a start of ``type_name``, sorted.

    ``conflicts``: the types that it declares as conflicting. ``others``: each running type with the types that it
    declares. One of the two declarations is enough.
    """
    return sorted(
        other for other, theirs in others.items() if excludes(conflicts, other) or excludes(theirs, type_name)
    )


def excludes(conflicts: Iterable[str], type_name: str) -> bool:
    """Whether these declared conflicts have a type: by its name, or all types (:data:`ALL_TYPES`)."""
    declared = tuple(conflicts)
    return type_name in declared or ALL_TYPES in declared


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Copy = tuple[str, Mapping[str, Any] | None]
    """The name of a table and the copy of its record, as JSON; None: there is none."""


def copies(table: str, record: Mapping[str, Any] | None, rows: Iterable[Mapping[str, Any]] = ()) -> list[Copy]:
    """The table records that an operation on ``table`` has copies of, each once.

    They are its own record and, in the rows of its plan, those of other tables. An operation on no table has none.
    Raises what decoding raises (UNREADABLE) for invalid rows.
    """
    found: list[Copy] = [] if table == CLUSTER_TABLE and record is None else [(table, record)]
    for row in rows:
        for other in row.get("beside", ()):
            copy = (str(other["table"]["name"]), other["table"])
            if copy not in found:
                found.append(copy)
    return found


def unregistered(op: str, found: Iterable[Copy], registered: Mapping[str, TableRecord | None]) -> str:
    """Why an operation may not use its copies of table records.

    A sentence; "": it may. Each copy must equal the registered record, except for the options that a plan may set.
    """
    for name, copy in found:
        record = registered.get(name)
        try:
            same = record is not None and copy is not None and _decides(record) == _decides(TableRecord.from_json(copy))
        except UNREADABLE:
            same = False
        if not same:
            return (
                f"the registered record of table {one_line(name)} differs from the one with which {op} was started: "
                "the table, or the operation's copy, was changed or removed; start the operation again"
            )
    return ""


def _decides(record: TableRecord) -> TableRecord:
    """The parts of the record that determine which data are reached."""
    options = {name: value for name, value in record.options.items() if name not in PLANNED_OPTIONS}
    return TableRecord(record.name, record.format, record.location, options)

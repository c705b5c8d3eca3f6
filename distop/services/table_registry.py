"""Registers, changes and removes tables (``protocol.table_registry`` has the transactions)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.errors import InvalidArgument, NotAllowed, NotFound, UnreadableRecord
from distop.protocol import table_registry
from distop.protocol.caller_values import text
from distop.protocol.json_codec import rfc3339
from distop.protocol.record_reading import read
from distop.protocol.records import CLUSTER_TABLE, TableRecord
from distop.protocol.texts import shown
from distop.protocol.user_actions import NO_ACTIONS, Action, Actions
from distop.schemas.argument_schema import encode_json
from distop.services.nearest_names import unknown_table
from distop.services.submission.start_request import acting
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue, Txn
    from distop.store.client import EtcdClient


async def add(etcd: EtcdClient, keys: Keys, record: TableRecord, *, replace: bool, check: bool) -> TableRecord:
    """Register a table; returns its record.

    See :meth:`distop.client.async_client.Client.add_table`, also for the errors.
    """
    check_record(record)
    keys.table(record.name)
    if check:
        from distop.tables import check_within_limit

        record = await check_within_limit(record)
    while True:
        seen, run_ops, before = await etcd.read(*table_registry.read_table(keys, record.name))
        there = None
        if seen.kv is not None:
            there = read(TableRecord.decode, seen.kv)
            if there == record:
                return record
            if not replace:
                raise NotAllowed(
                    f"the table {shown(record.name)} is already registered as {there.format} at {there.location}: "
                    "replace it (--replace), or choose another name"
                )
        actions = _with_action(etcd, before.kv, "add_table" if there is None else "change_table", there, record)
        if await _committed(etcd, table_registry.put_table(keys, record, seen.kv, run_ops.kv, actions)):
            return record


def check_record(record: object) -> None:
    """Raises InvalidArgument for an invalid table record, whatever its location."""
    if not isinstance(record, TableRecord):
        raise InvalidArgument(f"a table must be given as a TableRecord, not {shown(record)}")
    for value, what in (
        (record.name, "the name of a table"),
        (record.format, "the format of a table"),
        (record.location, "the location of a table"),
    ):
        text(value, what)
    if not isinstance(record.options, Mapping):
        raise InvalidArgument(f"the options of a table must be a mapping, not {shown(record.options)}")
    encode_json(record.options, "the options of a table")
    if record.name == CLUSTER_TABLE:
        raise InvalidArgument(
            f"the name {CLUSTER_TABLE} is reserved for operations without a table: choose another name"
        )


async def remove(etcd: EtcdClient, keys: Keys, name: str) -> None:
    """Remove a table.

    See :meth:`distop.client.async_client.Client.remove_table`, also for the errors.
    """
    text(name, "the name of a table")
    removed = False
    while True:
        seen, run_ops, before = await etcd.read(*table_registry.read_table(keys, name))
        if seen.kv is None:
            if removed:
                return
            raise NotFound(await unknown_table(etcd, keys, name))
        there = None
        running = table_registry.running(run_ops.kv)
        if running:
            count = sum(running.values())
            raise NotAllowed(
                f"{count} operation{'s' if count != 1 else ''} ({', '.join(sorted(running))}) "
                f"run{'s' if count == 1 else ''} on {shown(name)}: wait for their end, or cancel them first"
            )
        # A record that cannot be read can be removed.
        with contextlib.suppress(UnreadableRecord):
            there = read(TableRecord.decode, seen.kv)
        actions = _with_action(etcd, before.kv, "remove_table", there, None)
        if await _committed(etcd, table_registry.remove_table(keys, name, seen.kv, run_ops.kv, actions)):
            return
        removed = True  # by us, if an earlier copy won; by another, with the same effect


def _with_action(
    etcd: EtcdClient, seen: KeyValue | None, action: str, before: TableRecord | None, after: TableRecord | None
) -> Actions:
    """The table's actions with one more by this client."""
    actions = read(Actions.decode, seen) if seen is not None else NO_ACTIONS
    fields = _visible_fields(before), _visible_fields(after)
    return actions.and_then(Action.change(rfc3339(time.time()), action, acting(etcd), *fields))


def _visible_fields(record: TableRecord | None) -> dict[str, Any]:
    """The fields of a table's record, as ``distop table ls`` shows them."""
    if record is None:
        return {}
    return {"format": record.format, "location": record.location, "options": dict(record.options)}


async def _committed(etcd: EtcdClient, txn: Txn) -> bool:
    return (await etcd.commit(txn, deadline=WRITE_LIMIT)).succeeded

"""The registry of tables: registering, changing and removing one (``core.catalog`` has the transactions)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distop.core import catalog
from distop.core.model import CLUSTER_TABLE, TableRecord
from distop.core.records import read
from distop.core.texts import shown
from distop.errors import InvalidArgument, NotAllowed, NotFound
from distop.schema import encode_json
from distop.submission.request import text
from distop.submission.submit import WRITE_LIMIT

if TYPE_CHECKING:
    from distop.core.keys import Keys
    from distop.core.txn import Txn
    from distop.store.client import EtcdClient


async def add(etcd: EtcdClient, keys: Keys, record: TableRecord, *, replace: bool, check: bool) -> TableRecord:
    """Register a table, as :meth:`distop.client.Client.add_table` says; what stands there then. Raises as that does."""
    check_record(record)
    keys.table(record.name)
    if check:
        from distop.tables import check_within_limit

        record = await check_within_limit(record)
    while True:
        seen, run_ops = await etcd.read(*catalog.read_table(keys, record.name))
        if seen.kv is not None:
            there = read(TableRecord.decode, seen.kv)
            if there == record:
                return record
            if not replace:
                raise NotAllowed(
                    f"the table {shown(record.name)} is registered already, as {there.format} at {there.location}: "
                    "replace it on purpose (--replace), or choose another name"
                )
        if await _done(etcd, catalog.put_table(keys, record, seen.kv, run_ops.kv)):
            return record


def check_record(record: object) -> None:
    """Raises InvalidArgument for what cannot be a table record, at any location."""
    if not isinstance(record, TableRecord):
        raise InvalidArgument(f"a table is registered as a TableRecord, not {shown(record)}")
    for value, what in (
        (record.name, "the name of a table"),
        (record.format, "the format of a table"),
        (record.location, "the location of a table"),
    ):
        text(value, what)
    if not isinstance(record.options, Mapping):
        raise InvalidArgument(f"the options of a table are a mapping, not {shown(record.options)}")
    encode_json(record.options, "the options of a table")
    if record.name == CLUSTER_TABLE:
        raise InvalidArgument(f"{CLUSTER_TABLE} stands for operations without a table: choose another name")


async def remove(etcd: EtcdClient, keys: Keys, name: str) -> None:
    """Remove a table, as :meth:`distop.client.Client.remove_table` says. Raises as that does."""
    text(name, "the name of a table")
    removed = False
    while True:
        seen, run_ops = await etcd.read(*catalog.read_table(keys, name))
        if seen.kv is None:
            if removed:
                return
            raise NotFound(f"there is no table {shown(name)}")
        running = catalog.running(run_ops.kv)
        if running:
            count = sum(running.values())
            raise NotAllowed(
                f"{count} operation{'s' if count != 1 else ''} ({', '.join(sorted(running))}) "
                f"run{'s' if count == 1 else ''} on {shown(name)}: wait for the end, or cancel first"
            )
        if await _done(etcd, catalog.remove_table(keys, name, seen.kv, run_ops.kv)):
            return
        removed = True  # by us, if an earlier copy won; by another, with the same effect


async def _done(etcd: EtcdClient, txn: Txn) -> bool:
    return (await etcd.commit(txn, deadline=WRITE_LIMIT)).succeeded

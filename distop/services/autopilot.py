"""The policies with which a table keeps itself: those whose operation types are published, and fit the table's format.

They are ordinary policies: they can be shown, changed, paused and removed like others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import NotFound
from distop.protocol import keys as K
from distop.protocol.frozen import frozen
from distop.protocol.policy import PolicyState
from distop.protocol.record_reading import read
from distop.protocol.records import TableRecord
from distop.services.nearest_names import unknown_table
from distop.services.policies import PolicyStatus, definition, set_policies

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.policy import Policy
    from distop.store.client import EtcdClient


@frozen
class Rule:
    """One policy of the autopilot: its name, and the formats that its type maintains."""

    name: str
    start: str
    arg: Mapping[str, Any]
    formats: tuple[str, ...]
    every: str = ""
    on: tuple[str, ...] = ()
    when: str = ""


WITH_VERSIONS = ("iceberg", "delta")
"""The formats whose tables have versions and commits, which the operations below need."""
RULES = (
    Rule(
        "autopilot-compact",
        "compact",
        {"deletes_at_least": 1},
        WITH_VERSIONS,
        every="6h",
        on=("version",),
        when="(small_files > 50 or delete_ratio > 0.1) and hours_since.compact > 1",
    ),
    Rule(
        "autopilot-expire-snapshots",
        "expire-snapshots",
        {},
        WITH_VERSIONS,
        every="1d",
        when="snapshots > 10 and oldest_snapshot > 5d",
    ),
    Rule("autopilot-remove-orphans", "remove-orphans", {}, WITH_VERSIONS, every="7d"),
)
"""The rules. A table of fifty partitions with one small file each always has small files: so compact waits an hour.

Without ``deletes_at_least`` compact would leave a large file alone however many of its rows are deleted.

A Parquet folder gets none: it has no versions and no orphans, and nothing can replace several of its files in one step.
"""


@frozen
class Autopilot:
    """The policies of a table's autopilot. ``written``: they were made, not only listed.

    ``left_out``: the name of each policy that does not fit, with the reason.
    """

    policies: tuple[PolicyStatus, ...]
    left_out: Mapping[str, str]
    written: bool

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        made = [one.to_json() for one in self.policies]
        return {"policies": made, "left_out": dict(self.left_out), "written": self.written}


async def apply(etcd: EtcdClient, keys: Keys, table: str, *, dry_run: bool = False) -> Autopilot:
    """Make the policies for a table, all or none; ``dry_run``: only return them. Raises NotFound."""
    chosen, left_out = await _chosen(etcd, keys, table)
    if dry_run or not chosen:
        return Autopilot(
            tuple(PolicyStatus(table, n, one, PolicyState()) for n, one in chosen.items()), left_out, False
        )
    return Autopilot(tuple(await set_policies(etcd, keys, table, chosen)), left_out, True)


async def _chosen(etcd: EtcdClient, keys: Keys, table: str) -> tuple[dict[str, Policy], dict[str, str]]:
    """The policies for a table, and the names of left out ones with the reason."""
    found = await etcd.get(keys.table(table))
    if found is None:
        raise NotFound(await unknown_table(etcd, keys, table))
    record = read(TableRecord.decode, found)
    listing = await etcd.list(*keys.family(K.BEHAVIOR), keys_only=True)
    published = {keys.parse(kv.key).type for kv in listing.kvs}
    chosen: dict[str, Policy] = {}
    left_out: dict[str, str] = {}
    for rule in RULES:
        if rule.start not in published:
            left_out[rule.name] = f"no executor has published the type {rule.start}"
        elif record.format not in rule.formats:
            left_out[rule.name] = (
                f"{rule.start} needs a format with versions and commits, as {' and '.join(rule.formats)} have"
            )
        else:
            chosen[rule.name] = definition(rule.name, rule.start, rule.arg, rule.every or None, rule.on, rule.when, {})
    return chosen, left_out

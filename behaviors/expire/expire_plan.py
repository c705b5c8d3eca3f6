"""Plans the removal of old versions, and reads the parts of the metadata in its jobs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from distop.behavior import PartitionPlan, Planned
from distop.clock import time
from distop.errors import InvalidArgument, UnsafePath
from distop.storage.deletion_scope import OWN
from distop.storage.normal_uris import normal
from distop.tables import expiration_of, place_of
from distop.tables.expiration import Choice, RetentionRule
from distop.tables.reachability import TableFile, Unit, in_groups
from distop_behaviors.expire.expire_argument import SHORTEST_AGE, ExpireSnapshotsResult
from distop_behaviors.expire.file_lists import file_hash, write_expired, write_kept
from distop_behaviors.orphans.other_tables import folders_of_others
from distop_behaviors.orphans.table_folder import TablePlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distop.behavior import JobContext, TableRecord
    from distop.storage.object_store import ObjectStore
    from distop_behaviors.expire.expire_argument import ExpireSnapshotsArgument

VERSIONS = "versions-"
"""Start of the names of jobs that only hold the decision."""
ENTRIES = 500
"""Maximum entries of the decision in one job, which must fit into one value of etcd."""
GROUP_BYTES, GROUP_UNITS = 16 << 20, 20
"""Limits of a job: bytes and number of its parts of the metadata."""
_RESOLUTION = 1.0
"""The resolution in seconds of the times of some object stores."""
_VERSION, _REF = "version", "ref"
"""Stamps of entries of the decision that are no files."""
_NOW, _AGE, _OLDER, _LAST, _REFS, _WHOSE = "now", "age", "older_than", "retain_last", "refs", "whose"
_ENTRIES = "entries"
"""The parts of the metadata of a job, or of the decision, as JSON. They are not the plan's files, which are data."""


def plan(argument: ExpireSnapshotsArgument, table: TableRecord, ctx: JobContext) -> Planned:
    """The decision, and the parts of the metadata in groups. Raises InvalidArgument and TableUnavailable."""
    expiration = expiration_of(table, ctx.check_cancelled, lambda: ctx.spark)
    store = check_place(expiration.reachability.place, table, ctx).store
    rule = RetentionRule(
        time_by(store),
        argument.older_than,
        argument.retain_last,
        argument.refs == "remove_old",
        shortest=0.0 if argument.allow_recent else SHORTEST_AGE,
    )
    choice = expiration.choose(rule)
    values = {
        _NOW: repr(rule.now),
        _AGE: repr(choice.age),
        _OLDER: None if rule.older_than is None else repr(rule.older_than),
        _LAST: None if rule.retain_last is None else str(rule.retain_last),
        _REFS: argument.refs,
    }
    decision = [
        *((version, _VERSION, 0) for version in choice.versions),
        *((ref, _REF, 0) for ref in choice.refs),
        *((file.path, file.kind, file.size or 0) for file in choice.files),
    ]
    partitions: list[PartitionPlan] = []
    for at in range(0, max(1, len(decision)), ENTRIES):
        entries = json.dumps(decision[at : at + ENTRIES])
        partitions.append(
            PartitionPlan(len(partitions), f"{VERSIONS}{len(partitions):06}", values={**values, _ENTRIES: entries})
        )
    units: dict[str, list[Unit]] = {}
    for unit, whose in expiration.units(choice):
        units.setdefault(whose, []).append(unit)
    for whose, found in units.items():
        for n, group in enumerate(in_groups(found, size=GROUP_BYTES, count=GROUP_UNITS)):
            name = f"{whose}-{n:06}"
            own = {**values, _WHOSE: whose, _ENTRIES: json.dumps([unit.to_json() for unit in group])}
            partitions.append(PartitionPlan(len(partitions), name, sum(unit.size for unit in group), values=own))
    return Planned(partitions, expiration.reachability.state)


def check_place(place: str, table: TableRecord, ctx: JobContext) -> TablePlace:
    """The folder of a table, opened.

    Raises InvalidArgument if a registered table is inside the folder or around it, or for an unsuitable store.
    """
    try:
        return TablePlace(place, ctx, folders_of_others(table, ctx))
    except UnsafePath as error:
        raise InvalidArgument(str(error)) from error


def time_by(store: ObjectStore) -> float:
    """The time in seconds, never later than by the store's clock: a wrong clock of this node makes nothing older.

    A store's time may be rounded down to seconds, so an equal clock of this node is more exact.
    """
    stored = store.time(OWN)
    return min(time.time(), stored + _RESOLUTION)


def decision_of(partitions: Iterable[PartitionPlan]) -> tuple[RetentionRule, Choice]:
    """The frozen rule and decision in the plan."""
    found = [partition for partition in partitions if partition.name.startswith(VERSIONS)]
    rule, choice = rule_of(found[0])
    entries = [entry for partition in found for entry in json.loads(partition.values[_ENTRIES])]
    versions = tuple(str(text) for text, kind, _ in entries if kind == _VERSION)
    refs = tuple(str(text) for text, kind, _ in entries if kind == _REF)
    files = tuple(TableFile(path, kind, size or None) for path, kind, size in entries if kind not in (_VERSION, _REF))
    return rule, Choice(versions, refs, files, choice.age)


def rule_of(partition: PartitionPlan) -> tuple[RetentionRule, Choice]:
    """The frozen rule in the plan of a job, and the decision without its versions."""
    values = partition.values
    older, last = values[_OLDER], values[_LAST]
    rule = RetentionRule(
        float(values[_NOW]),
        None if older is None else float(older),
        None if last is None else int(last),
        values[_REFS] == "remove_old",
    )
    return rule, Choice(age=float(values[_AGE]))


def units_of(partition: PartitionPlan) -> tuple[list[Unit], str]:
    """The parts of the metadata of a job, and which versions have them."""
    units = [Unit.of_json(found) for found in json.loads(partition.values[_ENTRIES])]
    return units, str(partition.values[_WHOSE])


def named_by(partition: PartitionPlan, table: TableRecord, ctx: JobContext) -> Iterator[tuple[TableFile, bool]]:
    """The files that a job's parts name, and whether they are needed. Raises InvalidArgument and TableUnavailable."""
    expiration = expiration_of(table, ctx.check_cancelled, lambda: ctx.spark)
    rule, choice = rule_of(partition)
    units, whose = units_of(partition)
    for unit in units:
        ctx.check_cancelled()
        yield from expiration.named(unit, whose, choice, rule)


def read_units(partition: PartitionPlan, ctx: JobContext) -> ExpireSnapshotsResult:
    """Run one job: write the files that its parts name into its stage."""
    assert ctx.table is not None
    if partition.name.startswith(VERSIONS):
        return ExpireSnapshotsResult()
    place = normal(place_of(ctx.table, ctx.check_cancelled, lambda: ctx.spark))
    expired: dict[str, TableFile] = {}
    kept: set[int] = set()
    for file, needed in named_by(partition, ctx.table, ctx):
        if needed:
            kept.add(file_hash(place, file.path))
        else:
            expired.setdefault(file.path, file)
    _ = ctx.stage
    return ExpireSnapshotsResult(
        units=len(units_of(partition)[0]),
        files=len(expired),
        expired=write_expired(ctx.stage_place, expired.values()) if expired else None,
        kept=write_kept(ctx.stage_place, kept) if kept else None,
    )

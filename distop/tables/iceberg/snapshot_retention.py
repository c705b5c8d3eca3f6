"""Which snapshots of an Iceberg table remain: those that Iceberg's ``RemoveSnapshots`` keeps. Pure.

Each branch keeps its newest snapshots by its own limits, a tag keeps its snapshot, and a snapshot that no branch has
(of a transaction that was not published, or after a rollback) is kept until it is old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from distop.tables.expiration import RetentionRule

MAX_AGE, MIN_SNAPSHOTS, MAX_REF_AGE = (
    f"history.expire.{name}" for name in ("max-snapshot-age-ms", "min-snapshots-to-keep", "max-ref-age-ms")
)
"""Table properties with the defaults for branches and tags that have no limits of their own."""
GC = "gc.enabled"
_DEFAULT_AGE = 5 * 86_400_000
_MAIN = "main"
_BRANCH = "branch"


@frozen
class Expired:
    """Snapshots and refs to remove."""

    snapshots: frozenset[int]
    refs: frozenset[str]


def check_enabled(metadata: Any) -> None:
    """Raises InvalidArgument if the table's properties forbid to delete its files."""
    if str(metadata.properties.get(GC, "true")).lower() == "false":
        raise InvalidArgument(
            f"the table at {metadata.location!r} has the property {GC}=false, because other tables may use its files: "
            "nothing is deleted; set it to true if that is not so"
        )


def expired(metadata: Any, rule: RetentionRule) -> Expired:
    """The snapshots and refs that the rule removes.

    Raises InvalidArgument for an invalid property, and for a limit of the table that is shorter than the rule allows.
    """
    now = int(rule.now * 1000)
    age = _number(metadata, MAX_AGE, _DEFAULT_AGE) if rule.older_than is None else int(rule.older_than * 1000)
    least = _number(metadata, MIN_SNAPSHOTS, 1) if rule.retain_last is None else rule.retain_last
    if rule.older_than is None:
        rule.check_limit(f"the property {MAX_AGE} of the table at {metadata.location!r}", age / 1000)
    before = now - age
    known = {one.snapshot_id: one for one in metadata.snapshots}
    removed = frozenset(_old_refs(metadata, known, now)) if rule.remove_refs else frozenset[str]()
    kept: set[int] = set()
    referenced: set[int] = set()
    for name, ref in metadata.refs.items():
        if name in removed:
            continue
        kept.add(ref.snapshot_id)
        if str(ref.snapshot_ref_type.value) != _BRANCH:
            referenced.add(ref.snapshot_id)
            continue
        own_before = before
        if ref.max_snapshot_age_ms is not None:
            what = f"max-snapshot-age-ms of the branch {shown(name)} of the table at {metadata.location!r}"
            rule.check_limit(what, ref.max_snapshot_age_ms / 1000)
            own_before = now - ref.max_snapshot_age_ms
        own_least = ref.min_snapshots_to_keep or least
        going = True
        for n, snapshot in enumerate(_ancestors(known, ref.snapshot_id)):
            referenced.add(snapshot.snapshot_id)
            going = going and (n < own_least or snapshot.timestamp_ms >= own_before)
            if going:
                kept.add(snapshot.snapshot_id)
    kept |= {i for i, one in known.items() if i not in referenced and one.timestamp_ms >= before}
    return Expired(frozenset(known.keys() - kept), removed)


def _old_refs(metadata: Any, known: Mapping[int, Any], now: int) -> Iterator[str]:
    default = _number(metadata, MAX_REF_AGE, (1 << 63) - 1)
    for name, ref in metadata.refs.items():
        snapshot = known.get(ref.snapshot_id)
        limit = default if ref.max_ref_age_ms is None else ref.max_ref_age_ms
        if name != _MAIN and (snapshot is None or now - snapshot.timestamp_ms > limit):
            yield name


def _ancestors(known: Mapping[int, Any], start: int) -> Iterator[Any]:
    """A snapshot and its ancestors that still exist, the newest first."""
    seen: set[int] = set()
    current = known.get(start)
    while current is not None and current.snapshot_id not in seen:
        seen.add(current.snapshot_id)
        yield current
        current = known.get(current.parent_snapshot_id)


def _number(metadata: Any, name: str, default: int) -> int:
    text = metadata.properties.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(
            f"the table at {metadata.location!r} has the property {name} with the value {shown(text)}, which is not a "
            "whole number: correct it, or give the argument"
        ) from None


def log_without(log: Any, id_of: Any, gone: Collection[int]) -> list[Any]:
    """The log of current snapshots, from the last entry of a removed one on.

    What was before is left out: with a gap, it would show another snapshot as current at the time of the gap.
    """
    last = max((n for n, entry in enumerate(log) if id_of(entry) in gone), default=-1)
    return list(log[last + 1 :])

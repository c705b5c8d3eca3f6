"""Deletes the files that a Delta table's commits have removed: as VACUUM does, by the log alone.

A commit that removes a file states when (``deletionTimestamp``). After the retention time, no version that needs the
file is promised to be readable. The log itself is cleaned up by Delta's writers when they write checkpoints. Files that
no commit names are left to ``remove-orphans``, and change data to VACUUM.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.tables.delta.delta_reachability import DeltaReachability, named
from distop.tables.delta.log_files import LogFiles
from distop.tables.delta.metadata_commit import configuration
from distop.tables.expiration import BOTH, Choice, Expiration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from distop.tables.commits import CommitContext
    from distop.tables.delta.delta_log import DeltaSnapshot
    from distop.tables.expiration import RetentionRule
    from distop.tables.reachability import TableFile, Unit

RETENTION = "delta.deletedFileRetentionDuration"
_DEFAULT = 7 * 86400.0
_INTERVAL = re.compile(r"(?:interval\s+)?([0-9]{1,9})\s+(second|minute|hour|day|week)s?", re.IGNORECASE)
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 7 * 86400}


class DeltaExpiration(Expiration):
    """The newest version of a table."""

    reachability: DeltaReachability

    def __init__(self, snapshot: DeltaSnapshot, check: Callable[[], None]) -> None:
        self.reachability = DeltaReachability(snapshot, check)
        self._snapshot = snapshot

    def choose(self, rule: RetentionRule) -> Choice:
        """No version is removed from the log; ``age`` is the retention time.

        Raises InvalidArgument if the rule's is shorter than the table's or the table's is shorter than the rule allows,
        and for ``retain_last``, which needs versions.
        """
        least = retention(self._snapshot)
        if rule.older_than is None:
            rule.check_limit(f"the property {RETENTION} of the Delta table {self._snapshot.root!r}", least)
        age = least if rule.older_than is None else rule.older_than
        if age < least:
            raise InvalidArgument(
                f"older_than is {age / 3600:g} h, but the Delta table {self._snapshot.root!r} keeps removed files for "
                f"{least / 3600:g} h ({RETENTION}), and readers of older versions rely on it: give a longer time, or "
                "change the property first"
            )
        if (rule.retain_last or 1) > 1:
            raise InvalidArgument(
                "retain_last is for Iceberg tables: a Delta table keeps removed files by time alone; leave it out"
            )
        return Choice(age=age)

    def units(self, choice: Choice) -> Iterator[tuple[Unit, str]]:
        yield from ((unit, BOTH) for unit in self.reachability.units())

    def named(self, unit: Unit, whose: str, choice: Choice, rule: RetentionRule) -> Iterator[tuple[TableFile, bool]]:
        log = LogFiles(self.reachability.place)
        for action in self.reachability.actions(unit, log):
            removed = action.get("remove")
            if removed:
                young = not _is_old(removed, rule.now - choice.age)
                yield from ((file, young) for file in named(self.reachability.place, {"remove": removed}, log))

    def commit(self, choice: Choice, rule: RetentionRule, context: CommitContext) -> None:
        """Nothing: the log states already that the files were removed."""

    def needed(self, covered: Collection[str], rule: RetentionRule, *, data: bool) -> Iterator[str]:
        for file in self._snapshot.files.values():
            yield file.path
            if file.vector is not None and file.vector.path:
                yield file.vector.path
        choice = self.choose(rule)
        for unit, whose in self.units(choice):
            if unit.name not in covered:
                for found, young in self.named(unit, whose, choice, rule):
                    if young:
                        yield found.path
        for root in self.reachability.roots():
            yield root.path


def _is_old(removed: Mapping[str, Any], before: float) -> bool:
    """Whether a file was removed before a time. Without a time, it counts as removed just now."""
    at = removed.get("deletionTimestamp")
    return isinstance(at, int) and not isinstance(at, bool) and at / 1000 < before


def retention(snapshot: DeltaSnapshot) -> float:
    """How long the table keeps removed files, in seconds. Raises InvalidArgument for an interval of another form."""
    text = configuration(snapshot).get(RETENTION)
    if text is None:
        return _DEFAULT
    found = _INTERVAL.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(
            f"the Delta table {snapshot.root!r} has the property {RETENTION} with the value {shown(text)}: only "
            "intervals such as 'interval 7 days' are supported"
        )
    return float(found[1]) * _UNITS[found[2].lower()]

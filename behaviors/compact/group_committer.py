"""Commits staged groups in batches, one commit after the other, and settles unknown outcomes by reading the table."""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING

from distop.behavior import JobFailed
from distop.protocol.texts import plural
from distop.runtime.lru_cache import LruCache
from distop.storage.places import STAGE, operation_path
from distop.tables.commits import (
    ATTEMPTS,
    CommitUnknown,
    Conflict,
    GroupStatus,
    Marks,
    StagedFileLost,
    commit_with_retries,
)
from distop.tables.staged_files import StagedFiles, jobs_below, stages_below, stages_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.behavior import JobContext, PartitionPlan
    from distop.storage.deletion import Place
    from distop.tables.commits import FileReplacer, Head, Replacement

_RUN = "-"
"""Between the name of an attempt and that of one run."""
REASONS = {
    GroupStatus.REMOVED: "another writer has removed files of the group",
    GroupStatus.DELETED: "another writer has deleted rows of the group",
    GroupStatus.EVOLVED: "another writer has changed the table's schema",
    GroupStatus.SWAP_REVERTED: "its swap was reverted: a writer changed an old file, or a new one could not be moved",
    GroupStatus.REPLACED: "another attempt has replaced the files of the group",
    GroupStatus.ROLLED_BACK: "somebody has set the table back to a state before the commit of the group",
    GroupStatus.WITHDRAWN: "the operation had ended before the group was committed",
    GroupStatus.LOST: "a new file of the group was missing or changed before its commit",
    GroupStatus.DIVERGED: "the table was set back, or its history was removed, since the group was read",
}

DONE = (GroupStatus.COMMITTED, GroupStatus.REPLACED)
"""The statuses of replacements of groups that are committed."""
_known: LruCache[bool] = LruCache(20_000)
"""The groups that this process has found to be offered."""
_committing: set[tuple[str, ...]] = set()
"""The groups that jobs of this process are committing: another job with the same ones would only cause a conflict."""


class GroupCommitter:
    """Commits the staged groups of one operation. ``name``: the stage of the attempt, or ``completion``."""

    def __init__(self, ctx: JobContext, replacer: FileReplacer, shared: Place, folder: str, name: str) -> None:
        self._ctx = ctx
        self._replacer = replacer
        self._shared = shared
        self._folder = folder
        self._name = name

    @property
    def stages(self) -> Place:
        """The folder of the operation's stages."""
        return self._shared.below(f"{STAGE}/{operation_path(self._ctx.operation)}")

    def stage_at(self, place: Place) -> StagedFiles:
        """The staged files of the stage at a place."""
        return StagedFiles.of(place, self._shared, self._ctx.space, self._folder)

    def new_stage(self, attempt: Place) -> StagedFiles:
        """A new stage of an attempt, also if an earlier run of it was discarded.

        ``attempt``: the place of its stage, which names operation, job and attempt. A process that dies keeps its
        claim, so the next run has the same one. Raises UnsafePath and OSError.
        """
        stage = self.stage_at(attempt.parent.below(f"{attempt.name}{_RUN}{uuid.uuid4().hex}"))
        stage.begin()
        return stage

    def of_attempt(self, attempt: Place) -> list[StagedFiles]:
        """The stages of an attempt. Raises OSError."""
        found = stages_of(self.stages, attempt.parent.name)
        own = (attempt.name, f"{attempt.name}{_RUN}")
        return [self.stage_at(place) for place in found if place.name == own[0] or place.name.startswith(own[1])]

    def offered(self, group: int) -> list[tuple[StagedFiles, Replacement]]:
        """What the attempts at a group have offered. Raises OSError."""
        return self._offered(stages_of(self.stages, f"{group:06d}"))

    def uncommitted(self, plan: PartitionPlan, least: int) -> list[int]:
        """The offered groups that are neither committed nor being committed by this process. Raises OSError.

        [] if they are fewer than ``least``. ``plan``: any group. This process remembers which groups are offered, and
        committed ones are not looked at: so a job looks at few offers, instead of all jobs at all offers.
        """
        begun = {int(name) for name in jobs_below(self.stages) if name.isdigit()}
        if len(begun) < least:
            return []
        done = self._replacer.committed_versions(self._replacer.load(), plan).keys()
        rest = [group for group in sorted(begun - done) if self._key(group) not in _committing]
        found = [one for one in rest if _known.get(self._key(one), partial(self._is_offered, one), keep=bool)]
        return found if len(found) >= least else []

    def _key(self, group: int) -> tuple[str, ...]:
        return self._ctx.space, self.stages.location, str(group)

    def _is_offered(self, group: int) -> bool:
        return any(self.stage_at(place).is_offered for place in stages_of(self.stages, f"{group:06d}"))

    def all_offered(self, *, withdrawn: bool = False) -> dict[int, list[tuple[StagedFiles, Replacement]]]:
        """What all attempts have offered, by group; ``withdrawn``: also what was withdrawn since. Raises OSError."""
        found: dict[int, list[tuple[StagedFiles, Replacement]]] = {}
        for stage, replacement in self._offered(stages_below(self.stages), withdrawn=withdrawn):
            found.setdefault(replacement.group, []).append((stage, replacement))
        return found

    def _offered(self, places: Iterable[Place], *, withdrawn: bool = False) -> list[tuple[StagedFiles, Replacement]]:
        stages = [self.stage_at(place) for place in places]
        return [(stage, found) for stage in stages if (found := stage.offered(withdrawn=withdrawn)) is not None]

    def commit_batch(self, replacements: Sequence[Replacement], size: int) -> dict[int, tuple[GroupStatus, str]]:
        """Commit ``size`` of these groups, the first ones, unless fewer are pending; returns as :meth:`commit` does."""
        keys = {self._key(one.group) for one in replacements} - _committing
        _committing.update(keys)
        try:
            return self.commit(replacements, least=size, most=size)
        finally:
            _committing.difference_update(keys)

    def commit(
        self, replacements: Sequence[Replacement], *, least: int = 1, most: int | None = None
    ) -> dict[int, tuple[GroupStatus, str]]:
        """Commit all of these groups that are pending, in one commit; returns the status of each, and its version.

        At most one replacement for each group. A group that others have changed, or whose new files are not all there,
        is left out. ``least``: commit nothing if fewer are pending. ``most``: the maximum number to commit. Raises
        JobFailed if other writers always commit first, and the errors of the replacer.
        """
        ended: dict[int, tuple[GroupStatus, str]] = {}
        lost: set[int] = set()

        def attempt() -> dict[int, tuple[GroupStatus, str]] | None:
            """The status of each; None after a new file was found to be missing."""
            nonlocal ended
            head = self._replacer.load()
            statuses = self._statuses(head, replacements, lost)
            # A group that this call has committed may have been replaced again since.
            ended = {group: (status, "") for group, status in statuses.items()} | {
                group: found for group, found in ended.items() if found[0] is GroupStatus.COMMITTED
            }
            pending = [one for one in replacements if statuses[one.group] is GroupStatus.PENDING]
            if len(pending) < least:
                return ended
            pending = sorted(pending[:most], key=lambda one: one.group)
            self._ctx.status(f"committing {plural(len(pending), 'group')}")
            try:
                version = self._replacer.commit(head, pending, Marks(self._ctx.operation, self._name))
            except StagedFileLost as error:
                self._ctx.log.warning("Committing the other groups without group %s: %s", error.group, error)
                lost.add(error.group)
                return None
            return ended | {one.group: (GroupStatus.COMMITTED, version) for one in pending}

        try:
            while (found := commit_with_retries(attempt, self._ctx)) is None:
                pass
        except (Conflict, CommitUnknown) as error:
            raise JobFailed(
                f"other writers committed first in {ATTEMPTS} attempts: compact again when fewer jobs write to the "
                "table"
            ) from error
        return found

    def _statuses(self, head: Head, replacements: Sequence[Replacement], lost: set[int]) -> dict[int, GroupStatus]:
        """The status of each group in a state of the table. ``lost``: groups whose new files are missing."""
        statuses = dict(
            zip([one.group for one in replacements], self._replacer.statuses(head, replacements), strict=True)
        )
        # The offers are looked for after the table was loaded: see StagedFiles.
        statuses |= {
            one.group: GroupStatus.WITHDRAWN
            for one in replacements
            if statuses[one.group] is GroupStatus.PENDING and not one.stage.is_offered
        }
        return statuses | {group: GroupStatus.LOST for group in lost if statuses[group] is GroupStatus.PENDING}

"""Commits staged groups in batches, one commit after the other, and settles unknown outcomes by reading the table."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from distop.behavior import JobFailed
from distop.storage.places import STAGE, operation_path
from distop.tables.commits import CommitUnknown, Conflict, Fate, Marks, StagedFileLost
from distop.tables.staged_files import StagedFiles, stages_below, stages_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.behavior import JobContext
    from distop.storage.deletion import Place
    from distop.tables.commits import FileReplacer, Replacement

_RUN = "-"
"""Between the name of an attempt and that of one run."""
ROUNDS = 50
"""Maximum number of attempts at one commit, if other writers commit first."""
REASONS = {
    Fate.REMOVED: "another writer has removed files of the group",
    Fate.DELETED: "another writer has deleted rows of the group",
    Fate.EVOLVED: "another writer has changed the table's schema",
    Fate.UNDONE: "it was taken back, because a writer changed an old file, or a new one could not be moved",
    Fate.REPLACED: "another attempt has replaced the files of the group",
    Fate.ROLLED_BACK: "somebody has set the table back to a state before the commit of the group",
    Fate.WITHDRAWN: "the operation had ended before the group was committed",
    Fate.LOST: "a new file of the group was missing or changed before its commit",
    Fate.DIVERGED: "the table was set back, or its history was removed, since the group was read",
}

DONE = (Fate.COMMITTED, Fate.REPLACED)
"""The fates of replacements of groups that are committed."""


class Publication:
    """The staged groups of one operation. ``fence``: of the claim or election under which it commits."""

    def __init__(self, ctx: JobContext, replacer: FileReplacer, shared: Place, folder: str, fence: str) -> None:
        self._ctx = ctx
        self._replacer = replacer
        self._shared = shared
        self._folder = folder
        self._fence = fence

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

    def all_offered(self, *, withdrawn: bool = False) -> dict[int, list[tuple[StagedFiles, Replacement]]]:
        """What all attempts have offered, by group; ``withdrawn``: also what was withdrawn since. Raises OSError."""
        found: dict[int, list[tuple[StagedFiles, Replacement]]] = {}
        for stage, replacement in self._offered(stages_below(self.stages), withdrawn=withdrawn):
            found.setdefault(replacement.group, []).append((stage, replacement))
        return found

    def _offered(self, places: Iterable[Place], *, withdrawn: bool = False) -> list[tuple[StagedFiles, Replacement]]:
        stages = [self.stage_at(place) for place in places]
        return [(stage, found) for stage in stages if (found := stage.offered(withdrawn=withdrawn)) is not None]

    def commit(self, replacements: Sequence[Replacement]) -> dict[int, tuple[Fate, str]]:
        """Commit all of these groups that are pending, in one commit; returns what became of each, and its version.

        At most one replacement for each group. A group that others have changed, or whose new files are not all there,
        is left out. Raises JobFailed if other writers always commit first, and the errors of the replacer.
        """
        ended: dict[int, tuple[Fate, str]] = {}
        lost: set[int] = set()
        conflicts = 0
        while conflicts < ROUNDS:
            self._ctx.check_cancelled()
            head = self._replacer.load()
            fates = dict(
                zip([one.group for one in replacements], self._replacer.fates(head, replacements), strict=True)
            )
            # The offers are looked for after the table was loaded: see StagedFiles.
            fates |= {
                one.group: Fate.WITHDRAWN
                for one in replacements
                if fates[one.group] is Fate.PENDING and not one.stage.is_offered
            }
            fates |= {group: Fate.LOST for group in lost if fates[group] is Fate.PENDING}
            pending = [one for one in replacements if fates[one.group] is Fate.PENDING]
            # A group that this call has committed may have been replaced again since.
            ended = {group: (fate, "") for group, fate in fates.items()} | {
                group: found for group, found in ended.items() if found[0] is Fate.COMMITTED
            }
            if not pending:
                return ended
            marks = Marks(self._ctx.operation, self._fence)
            self._ctx.status(f"committing {len(pending)} groups")
            try:
                version = self._replacer.commit(head, pending, marks)
            except (Conflict, CommitUnknown) as error:
                self._ctx.log.info("Could not commit new files; loading the table again: %s", error)
                conflicts += 1
                continue
            except StagedFileLost as error:
                self._ctx.log.warning("Committing the other groups without group %s: %s", error.group, error)
                lost.add(error.group)
                continue
            return ended | {one.group: (Fate.COMMITTED, version) for one in pending}
        raise JobFailed(
            f"other writers committed first in {ROUNDS} attempts: compact again when fewer jobs write to the table"
        )

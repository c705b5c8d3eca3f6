"""The files of a table without metadata: those that a listing of its folders finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.tables.reachability import DATA, Reachability, ReadableVersion, TableFile, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from distop.tables.reading.file_facts import PlannedFile


class FolderReachability(Reachability):
    """The data files of folders, one unit for each folder.

    ``folders``: each folder with its files; called for a listing. Hidden files are not part of the table.
    """

    source = ""

    def __init__(self, place: str, folders: Callable[[], Iterator[tuple[str, Sequence[PlannedFile]]]]) -> None:
        self.place = place
        self._folders = folders
        self._listed: dict[str, Sequence[PlannedFile]] | None = None

    def versions(self) -> Sequence[ReadableVersion]:
        return ()

    def roots(self) -> Iterator[TableFile]:
        return iter(())

    def named(self, versions: Collection[str] | None = None) -> Iterator[TableFile]:
        return iter(())

    def units(self, versions: Collection[str] | None = None) -> Iterator[Unit]:
        for folder, files in self._listing().items():
            yield Unit(folder, DATA, sum(size for _, size, _ in files))

    def files(self, unit: Unit, *, removed: bool = False) -> Iterator[TableFile]:
        for path, size, _ in self._listing().get(unit.name, ()):
            yield TableFile(path, DATA, size)

    def _listing(self) -> dict[str, Sequence[PlannedFile]]:
        if self._listed is None:
            self._listed = dict(self._folders())
        return self._listed

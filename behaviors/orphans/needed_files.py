"""The files that a table needs, in a form that a listing of its folder can be compared with. Pure.

A listed file is needed if some reader may take it for a file that the metadata name: if both have the same spelling
below the table's folder, or the same name while the metadata name a file elsewhere. The folder may be known under
several paths (a link, a mount, another name of the bucket), and then only the names of files tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import shown
from distop.storage.normal_uris import LOCAL, NormalUri, normal, spelling

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

NEEDED, ALIKE, ELSEWHERE = "needed", "spelled like a needed file", "named like a needed file elsewhere"
"""Why a listed file is needed."""


class NeededFiles:
    """The files that metadata name.

    ``places``: the table's own folder, in all known spellings. ``resolve``: a local folder without links.
    ``keep_unknown``: accept files of other stores; otherwise :meth:`add` raises. ``only``: remember only files with
    these spellings (``normal_uris.spelling``) of their keys or names.
    """

    def __init__(
        self,
        places: Iterable[NormalUri],
        resolve: Callable[[str], str] = lambda folder: folder,
        *,
        keep_unknown: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        self._places = tuple(places)
        self._resolve = resolve
        self._resolved: dict[str, str] = {}
        self._keep_unknown = keep_unknown
        self._only = only
        self._keys: set[str] = set()
        self._spellings: set[str] = set()
        self._names: set[str] = set()
        self._folders: list[str] = []
        self.below = 0
        """The number of added files in the table's folder."""
        self.elsewhere = 0

    def add(self, path: str) -> str:
        """Add a file; returns its key, "" if it is elsewhere.

        Raises InvalidArgument for a file whose place cannot be compared with the table's folder.
        """
        key = self.key_of(path)
        if key:
            self.below += 1
            return self._remember(key)
        found, place = normal(path), self._places[0]
        if found.prefix != place.prefix and not self._keep_unknown:
            raise InvalidArgument(
                f"the table's metadata name the file {shown(path)} at {found.prefix}, but its folder is at "
                f"{place.prefix}: both may be one place, so no file is known to be an orphan. If they are not, use "
                "'prefix_mismatch': 'keep'"
            )
        self.elsewhere += 1
        name = spelling(found.path.rpartition("/")[2])
        if self._only is None or name in self._only:
            self._names.add(name)
        return ""

    def key_of(self, path: str) -> str:
        """The key of a file in the table's folder, "" if it is elsewhere. Raises InvalidArgument."""
        try:
            found = normal(path)
        except UnsafePath as error:
            raise InvalidArgument(f"{error}, so no file is known to be an orphan") from None
        return self._below(found) or self._below(self._without_links(found))

    def add_folder(self, folder: str) -> None:
        """Add all files below a folder of the table. Raises the errors of :meth:`key_of`."""
        self._folders.append(f"{spelling(self.key_of(folder))}/")

    def why(self, key: str) -> str:
        """Why a listed file is needed; "" if it is not."""
        if key in self._keys:
            return NEEDED
        form = spelling(key)
        if any(form.startswith(folder) for folder in self._folders):
            return NEEDED
        if form in self._spellings:
            return ALIKE
        return ELSEWHERE if form.rpartition("/")[2] in self._names else ""

    def _below(self, found: NormalUri) -> str:
        return next((found.below(place) for place in self._places if place.has(found)), "")

    def _remember(self, key: str) -> str:
        form = spelling(key)
        if self._only is None or form in self._only:
            self._keys.add(key)
            self._spellings.add(form)
        return key

    def _without_links(self, found: NormalUri) -> NormalUri:
        if found.scheme != LOCAL:
            return found
        folder, _, name = found.path.rpartition("/")
        if folder not in self._resolved:
            self._resolved[folder] = self._resolve(folder or "/").rstrip("/")
        return NormalUri(LOCAL, "", f"{self._resolved[folder]}/{name}")

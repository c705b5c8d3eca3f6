"""How the schema of a table is changed, of a format whose tables have one: what such a format offers to ``apply``.

A schema is changed by a swap of the table's metadata. Who performs it, a new file in the table's own folder or a commit
to its catalog, is what :class:`Changes` tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.frozen import frozen

if TYPE_CHECKING:
    from distop.tables.catalogs import Catalog


@frozen
class Changes:
    """``catalog``: the one that the table was registered with; None: its folder is all there is."""

    catalog: Catalog | None

    @property
    def by_catalog(self) -> bool:
        """Commits are made to the catalog; otherwise they are files in the table's folder, the first of which wins.
        Raises TableUnavailable where the catalog is not configured here.
        """
        return self.catalog is not None and self.catalog.warehouse() is None

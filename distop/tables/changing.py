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
    """``catalog``: commits are made to it; None: they are files in the table's folder, of which the next one wins that
    is made first.
    """

    catalog: Catalog | None

"""Checks that distop can read a Delta table, by the reader features of its protocol.

A reader must refuse a table with a feature that it does not know, because it would return wrong rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMN_MAPPING = "columnMapping"
DELETION_VECTORS = "deletionVectors"
KNOWN = frozenset(
    {
        *(COLUMN_MAPPING, DELETION_VECTORS, "timestampNtz", "typeWidening", "typeWidening-preview"),
        *("v2Checkpoint", "vacuumProtocolCheck", "variantType", "variantType-preview"),
    }
)
"""The reader features that distop and the tested release of Delta support. Features only for writers do not matter."""
_BY_FEATURES = 3
"""The reader version from which a protocol lists features."""
_MAPPED = 2
"""The reader version that has column mapping without listing it."""
_SHOWN = 5


def reader_features(protocol: Mapping[str, Any], location: str) -> frozenset[str]:
    """The reader features of a table's protocol. Raises InvalidArgument for an unknown version or feature."""
    version = protocol.get("minReaderVersion")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= _BY_FEATURES:
        raise InvalidArgument(
            f"the Delta table {location!r} needs reader version {shown(version)}, but versions 1 to "
            f"{_BY_FEATURES} are supported: use a later release of distop"
        )
    if version < _BY_FEATURES:
        return frozenset({COLUMN_MAPPING} if version == _MAPPED else ())
    listed = protocol.get("readerFeatures")
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise InvalidArgument(f"the protocol of the Delta table {location!r} has no list of reader features")
    unknown = sorted(set(listed) - KNOWN)
    if unknown:
        names = ", ".join(shown(name) for name in unknown[:_SHOWN])
        feature = "feature" if len(unknown) == 1 else "features"
        raise InvalidArgument(
            f"the Delta table {location!r} uses the reader {feature} {names}, which distop does not support: remove it "
            "with ALTER TABLE … DROP FEATURE, or use a later release of distop"
        )
    return frozenset(listed)

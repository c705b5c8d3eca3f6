"""Computes commits that change only the protocol and the metadata of a Delta table: no files, and so no rows.

Writers that began before such a commit fail, by Delta's own rules: they compare protocol and metadata. A table with a
writer feature that is not known is refused, because its commits may need more than is written here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distop.tables.delta.delta_log import DeltaSnapshot

CONSTRAINT = "delta.constraints."
"""The prefix of the properties with check constraints, before a constraint's name in lower case."""
INVARIANTS, CHECK_CONSTRAINTS = "invariants", "checkConstraints"
"""The writer features for columns without NULL, and for check constraints."""
KNOWN = frozenset(
    {
        *(INVARIANTS, CHECK_CONSTRAINTS, "appendOnly", "changeDataFeed", "generatedColumns", "identityColumns"),
        *("columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint"),
        *("vacuumProtocolCheck", "variantType", "variantType-preview", "allowColumnDefaults"),
        *("domainMetadata", "clustering", "rowTracking"),
    }
)
"""The writer features that ask nothing of a commit without files, except to keep what the metadata has."""
_BY_FEATURES = 7
"""The writer version from which a protocol lists features."""
_LEGACY = {INVARIANTS: 2, CHECK_CONSTRAINTS: 3}
"""The writer versions from which a protocol has these features without listing them."""
_SHOWN = 5


def check_writable(snapshot: DeltaSnapshot) -> None:
    """Raises InvalidArgument if a table needs an unknown writer version or writer feature."""
    version = snapshot.protocol.get("minWriterVersion")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= _BY_FEATURES:
        raise InvalidArgument(
            f"the Delta table {snapshot.root!r} needs writer version {shown(version)}: versions 1 to {_BY_FEATURES} "
            "are supported"
        )
    unknown = sorted(set(_features(snapshot)) - KNOWN) if version == _BY_FEATURES else []
    if unknown:
        names = ", ".join(shown(name) for name in unknown[:_SHOWN])
        feature = "feature" if len(unknown) == 1 else "features"
        raise InvalidArgument(
            f"the Delta table {snapshot.root!r} uses the writer {feature} {names}, which distop does not support: "
            "nothing was changed; change its schema with Delta's ALTER TABLE"
        )


def _features(snapshot: DeltaSnapshot) -> Sequence[str]:
    found = snapshot.protocol.get("writerFeatures")
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise InvalidArgument(f"the protocol of the Delta table {snapshot.root!r} has no list of writer features")
    return found


def with_features(snapshot: DeltaSnapshot, needed: Collection[str]) -> Mapping[str, Any] | None:
    """The protocol with these writer features; None if the table has them already. Raises InvalidArgument."""
    check_writable(snapshot)
    protocol = snapshot.protocol
    version = int(protocol["minWriterVersion"])
    if version < _BY_FEATURES:
        wanted = max((_LEGACY[name] for name in needed), default=0)
        return {**protocol, "minWriterVersion": wanted} if version < wanted else None
    present = _features(snapshot)
    missing = sorted(set(needed) - set(present))
    return {**protocol, "writerFeatures": [*present, *missing]} if missing else None


def with_nullability(
    snapshot: DeltaSnapshot, nullable: Mapping[str, bool], properties: Mapping[str, str | None]
) -> Mapping[str, Any]:
    """The metadata with this nullability of top-level columns, and these properties set or (None) removed."""
    schema = json.loads(snapshot.schema.text)
    for field in schema["fields"]:
        if field["name"] in nullable:
            field["nullable"] = nullable[field["name"]]
    changed = {**configuration(snapshot), **properties}
    return {
        **snapshot.metadata,
        "schemaString": json.dumps(schema, separators=(",", ":"), ensure_ascii=False),
        "configuration": {name: value for name, value in changed.items() if value is not None},
    }


def configuration(snapshot: DeltaSnapshot) -> dict[str, str]:
    """The table's properties. Raises InvalidArgument if they are not texts."""
    found = snapshot.metadata.get("configuration") or {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InvalidArgument(f"the metadata of the Delta table {snapshot.root!r} has invalid properties")
    return dict(found)


def commit_text(info: Mapping[str, Any], protocol: Mapping[str, Any] | None, metadata: Mapping[str, Any]) -> bytes:
    """The commit file with this information about the commit, which comes first."""
    actions: list[dict[str, Any]] = [{"commitInfo": info}]
    if protocol is not None:
        actions.append({"protocol": _given(protocol)})
    actions.append({"metaData": _given(metadata)})
    return "".join(json.dumps(action, separators=(",", ":"), ensure_ascii=False) + "\n" for action in actions).encode()


def _given(action: Mapping[str, Any]) -> dict[str, Any]:
    """An action without the fields that a checkpoint has as NULL."""
    return {name: value for name, value in action.items() if value is not None}

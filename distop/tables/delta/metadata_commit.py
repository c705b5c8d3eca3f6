"""Computes commits that change only the protocol and the metadata of a Delta table: no files, and so no rows.

Writers that began before such a commit fail, by Delta's own rules: they compare protocol and metadata. A table with a
writer feature that is not known is refused, because its commits may need more than is written here.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.tables.delta.deletion_vectors import vector_id
from distop.tables.delta.delta_schema import TYPE_CHANGES, delta_type
from distop.tables.reading.file_facts import decimal_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distop.tables.delta.delta_log import AddedFile, DeltaSnapshot

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
TYPE_WIDENING = "typeWidening"
_WIDENING_ENABLED = "delta.enableTypeWidening"
_NTZ = "timestampNtz"
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_OTHERS = (("float", "double"), ("date", "timestamp_ntz"))
_DERIVED = frozenset({"delta.generationExpression", "delta.invariants"})
"""The metadata of a column with expressions of other columns."""
_BY_FEATURES = 7
"""The writer version from which a protocol lists features."""
_LEGACY = {INVARIANTS: 2, CHECK_CONSTRAINTS: 3}
"""The writer versions from which a protocol has these features without listing them."""
_SHOWN = 5


def check_writable(
    snapshot: DeltaSnapshot,
    known: Collection[str] = KNOWN,
    advice: str = "change its schema with Delta's ALTER TABLE",
) -> None:
    """Raises InvalidArgument if a table needs an unknown writer version or writer feature.

    ``known``: the features that do not matter for the caller's change; ``advice``: for the error, what to do instead.
    """
    version = snapshot.protocol.get("minWriterVersion")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= _BY_FEATURES:
        raise InvalidArgument(
            f"the Delta table {snapshot.root!r} needs writer version {shown(version)}, but versions 1 to "
            f"{_BY_FEATURES} are supported: nothing was changed; use a later release of distop"
        )
    unknown = sorted(set(_features(snapshot)) - set(known)) if version == _BY_FEATURES else []
    if unknown:
        names = ", ".join(shown(name) for name in unknown[:_SHOWN])
        feature = "feature" if len(unknown) == 1 else "features"
        raise InvalidArgument(
            f"the Delta table {snapshot.root!r} uses the writer {feature} {names}, which distop does not support: "
            f"nothing was changed; {advice}"
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


def check_widening(snapshot: DeltaSnapshot, column: str, wide: str) -> None:
    """Raises InvalidArgument if a top-level column cannot get this type of Spark without a rewrite."""
    narrow, configured = snapshot.schema.columns[column], configuration(snapshot)
    if not isinstance(narrow, str) or not may_widen(narrow, wide):
        raise InvalidArgument(
            f"the column {column!r} of a Delta table cannot get the type {wide} without a rewrite, because Delta does "
            f"not widen {narrow} to it: rewrite the table with the new type, and remove the check"
        )
    if TYPE_WIDENING not in snapshot.features or configured.get(_WIDENING_ENABLED) != "true":
        raise InvalidArgument(
            f"type widening is off in the Delta table, so the column {column!r} cannot get the type {wide}: set the "
            f"property {_WIDENING_ENABLED} to true first"
        )
    if wide == "timestamp_ntz" and _NTZ not in snapshot.features:
        raise InvalidArgument(
            f"the Delta table does not allow columns of the type {wide}: set its property delta.feature.{_NTZ} to "
            "supported first"
        )
    metadata = [field.get("metadata") or {} for field in json.loads(snapshot.schema.text)["fields"]]
    texts = [value for name, value in configured.items() if name.startswith(CONSTRAINT)]
    texts += [str(own[key]) for own in metadata for key in _DERIVED & own.keys()]
    # Whole words in any case: one in a text or a comment counts as well.
    word = re.compile(rf"(?<!\w){re.escape(column)}(?!\w)", re.IGNORECASE)
    if column in snapshot.schema.partition_columns or any(word.search(text) for text in texts):
        raise InvalidArgument(
            f"the column {column!r} cannot be widened, because it partitions the table, or a constraint or a generated "
            "column uses it: drop the constraint or the generated column, or rewrite the table with the new type"
        )


def may_widen(narrow: str, wide: str) -> bool:
    """Whether Delta allows to change one type of Spark to another without a rewrite, by its protocol."""
    if wide.startswith("decimal"):
        precision, scale = decimal_of(wide)
        if narrow in _WHOLE:
            return precision - scale >= (20 if narrow == "bigint" else 10)
        if not narrow.startswith("decimal"):
            return False
        less, fewer = decimal_of(narrow)
        return narrow != wide and precision - less >= scale - fewer >= 0
    if narrow in _WHOLE and wide in _WHOLE:
        return _WHOLE.index(narrow) < _WHOLE.index(wide)
    return (narrow in _WHOLE[:3] and wide == "double") or (narrow, wide) in _OTHERS


def changed_metadata(
    snapshot: DeltaSnapshot,
    nullable: Mapping[str, bool],
    widened: Mapping[str, str],
    properties: Mapping[str, str | None],
) -> Mapping[str, Any]:
    """The metadata with changed top-level columns and changed properties.

    ``nullable``: column → whether it may be NULL. ``widened``: column → its new Spark type. ``properties``: property →
    its new value, or None to remove it.
    """
    schema = json.loads(snapshot.schema.text)
    for field in schema["fields"]:
        if field["name"] in nullable:
            field["nullable"] = nullable[field["name"]]
        if field["name"] in widened:
            kind = delta_type(widened[field["name"]])
            own = field["metadata"] = dict(field.get("metadata") or {})
            own[TYPE_CHANGES] = [*own.get(TYPE_CHANGES, ()), {"fromType": field["type"], "toType": kind}]
            field["type"] = kind
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
    actions: list[dict[str, Any]] = []
    if protocol is not None:
        actions.append({"protocol": _given(protocol)})
    actions.append({"metaData": _given(metadata)})
    return actions_text(info, actions)


def actions_text(info: Mapping[str, Any], actions: Iterable[Mapping[str, Any]]) -> bytes:
    """The commit file with this information and these actions."""
    every = [{"commitInfo": info}, *actions]
    return "".join(json.dumps(action, separators=(",", ":"), ensure_ascii=False) + "\n" for action in every).encode()


def remove_action(file: AddedFile, now: int, *, data_change: bool) -> dict[str, Any]:
    """The ``remove`` of a file. ``now``: in ms; ``data_change``: whether rows are gone. Raises InvalidArgument."""
    found: dict[str, Any] = {
        "path": file.key[0],
        "deletionTimestamp": now,
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": dict(file.values),
        "size": file.size,
    }
    if file.vector is not None:
        vector = file.vector
        given: dict[str, Any] = {
            "storageType": "u" if vector.path else "i",
            "pathOrInlineDv": vector.text,
            **({"offset": vector.offset} if vector.path else {}),
            "sizeInBytes": vector.size,
            "cardinality": vector.rows,
        }
        if vector_id(given) != file.key[1]:
            raise InvalidArgument(f"the deletion vector of {file.path} is not written as expected: nothing is removed")
        found["deletionVector"] = given
    return found


def _given(action: Mapping[str, Any]) -> dict[str, Any]:
    """An action without the fields that a checkpoint has as NULL."""
    return {name: value for name, value in action.items() if value is not None}

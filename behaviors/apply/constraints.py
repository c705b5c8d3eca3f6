"""What a certified check becomes in the schema of an Iceberg table. Pure but for pydantic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.core.frozen import frozen
from distop.errors import InvalidArgument
from distop_behaviors.reading.facts import quote, split_path
from distop_behaviors.validate.argument import Check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop_behaviors.validate.certificate import Certificate

PREFIX = "distop.constraint."
"""Of the table property that a check becomes, before its name."""

_REFUSED = {
    "fits": "Iceberg narrows no column in place, and rewriting the table is not available yet: leave the check out, or "
    "add a column of the narrower type and fill it",
    "unique": "Iceberg knows no unique columns, and its identifier fields are enforced by nobody: leave the check out",
    "references": "Iceberg knows no references between tables: leave the check out",
}
_KEPT = ("check", "range", "in_set", "length", "matches")


@frozen
class Wanted:
    """What is to stand in the schema: columns that are to be required, by the names of their checks, and properties."""

    required: dict[str, str]
    """The check's name → the column, as the check has it."""
    properties: dict[str, str]


def wanted(certificate: Certificate) -> Wanted:
    """What the checks of a certificate become. Raises InvalidArgument for one that can become nothing: all or none."""
    required: dict[str, str] = {}
    properties: dict[str, str] = {}
    for certified in certificate.checks:
        check = Check.model_validate({**certified.check, "name": certified.name})
        if check.not_null is not None:
            if certificate.where is not None:
                raise InvalidArgument(
                    f"{certified.name}: a column is required for all rows, and {certificate.operation} looked at those "
                    f"where {certificate.where} alone: validate without where"
                )
            required[certified.name] = check.not_null
        elif check.kind in _KEPT:
            properties[PREFIX + certified.name] = _property(check, certificate)
        else:
            why = _REFUSED.get(check.kind, "it is no constraint of a table")
            raise InvalidArgument(f"{certified.name} cannot be applied: {why}")
    return Wanted(required, properties)


def _property(check: Check, certificate: Certificate) -> str:
    sql = condition(check, certificate.null_is)
    told: dict[str, Any] = {"check": check.as_given()}
    if check.kind == "check":
        told["null_is"] = certificate.null_is
    if certificate.where is not None:
        told["where"] = certificate.where
        sql = f"(({certificate.where}) IS NOT TRUE) OR ({sql})"
    ids = {name: column.id for name, column in certificate.columns.items()}
    return json.dumps({**told, "sql": sql, "field_ids": ids}, ensure_ascii=False, sort_keys=True)


def condition(check: Check, null_is: str) -> str:
    """The check as Spark SQL, for people and engines: what is not FALSE of it holds."""
    if check.check is not None:
        return check.check if null_is == "pass" else f"({check.check}) IS TRUE"
    column = ".".join(map(quote, split_path(check.column)))
    if check.range is not None:
        return _between(column, check.range.min, check.range.max)
    if check.length is not None:
        return _between(f"char_length({column})", check.length.min, check.length.max)
    if check.in_set is not None:
        return f"{column} IN ({', '.join(map(_literal, check.in_set.values))})"
    assert check.matches is not None
    return f"{column} RLIKE {_literal(check.matches.pattern)}"


def _between(what: str, low: Any, high: Any) -> str:
    bounds: Sequence[tuple[str, Any]] = ((">=", low), ("<=", high))
    return " AND ".join(f"{what} {sign} {_literal(bound)}" for sign, bound in bounds if bound is not None)


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)

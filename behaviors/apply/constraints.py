"""Converts certified checks to changes of an Iceberg or a Delta table's schema.

Pure except for pydantic.
"""

from __future__ import annotations

import json
from dataclasses import field
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import did_you_mean
from distop.tables.delta.metadata_commit import CONSTRAINT
from distop.tables.reading.file_facts import Ambiguous, decimal_of, match, quote, split_path
from distop_behaviors.validate.certificate import columns_in_expression
from distop_behaviors.validate.typed_bounds import canonical
from distop_behaviors.validate.validate_argument import Check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop_behaviors.validate.certificate import Certificate

PREFIX = "distop.constraint."
"""The prefix of the table property for a check, before the check's name."""

_COMMENT = "--"
_KEPT = ("check", "range", "in_set", "length", "matches")
_ICEBERG = {
    **{name: name for name in ("boolean", "int", "float", "double", "string", "binary", "date")},
    "bigint": "long",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
}
"""Iceberg's types by Spark's type names, without decimals."""


@frozen
class Narrowed:
    """A column to be narrowed by a rewrite.

    ``name`` and ``id``: of the certificate. ``type``: its new Iceberg type; ``spark``: the same type in Spark, for a
    cast.
    """

    check: str
    name: str
    id: int
    type: str
    spark: str


@frozen
class Widened:
    """A column to be widened without a rewrite. ``name`` and ``id``: of the certificate; ``type``: Spark's."""

    check: str
    name: str
    id: int
    type: str


@frozen
class SchemaChanges:
    """The wanted changes of the schema: required, narrowed and widened columns, and table properties."""

    required: dict[str, str]
    """The name of the check → the column, as the check names it."""
    properties: dict[str, str]
    narrowed: tuple[Narrowed, ...] = ()
    checks: dict[str, str] = field(default_factory=dict)
    """The name of the property → the name of its check."""
    widened: tuple[Widened, ...] = ()


@frozen
class ConstraintRules:
    """How a format keeps certified checks: as properties of the table, or as types of columns.

    ``property_name`` and ``property_value``: the property for a check. ``widens``: a column gets its type by widening,
    without a rewrite. ``refused``: kinds of checks that the format cannot keep, with the reason.
    """

    format: str
    property_name: Callable[[str], str]
    property_value: Callable[[Check, Certificate], str]
    widens: bool
    refused: Mapping[str, str]


def iceberg_type(spark: str) -> str | None:
    """Iceberg's name of a Spark type, or None if Iceberg does not have the type."""
    if spark.startswith("decimal("):
        precision, scale = decimal_of(spark)
        return f"decimal({precision}, {scale})"
    return _ICEBERG.get(spark)


def column_of(check: str, text: str, certificate: Certificate) -> str:
    """The name of a column in the certificate. Raises InvalidArgument if the certificate lacks it."""
    columns = certificate.columns
    try:
        name = match(text, columns) or match(".".join(split_path(text)), columns)
    except Ambiguous as error:
        raise InvalidArgument(f"{check}: {error}") from error
    if name is None:
        raise InvalidArgument(f"{check}: the certificate has no column {text!r}{did_you_mean(text, columns)}")
    return name


def _narrowed(check: Check, certificate: Certificate) -> Narrowed:
    assert check.fits is not None
    assert check.name is not None
    if certificate.where is not None:
        raise InvalidArgument(
            f"{check.name}: all rows must fit the new type of a column, but {certificate.operation} has only validated "
            f"rows where {certificate.where}: validate without 'where'"
        )
    spark = canonical(check.fits.type)
    kind = iceberg_type(spark)
    if kind is None:
        hint = "use a length check instead" if "char" in spark else "its smallest whole number is int"
        raise InvalidArgument(f"{check.name} cannot be applied: Iceberg has no type {spark} ({hint})")
    name = column_of(check.name, check.fits.column, certificate)
    return Narrowed(check.name, name, certificate.columns[name].id, kind, spark)


def _check_together(narrowed: Sequence[Narrowed], certificate: Certificate) -> None:
    """Raises InvalidArgument if checks contradict each other.

    A column cannot get two types, and a constraint must not change its meaning when its column gets another type.
    """
    seen: dict[int, Narrowed] = {}
    for one in narrowed:
        other = seen.setdefault(one.id, one)
        if other.type != one.type:
            raise InvalidArgument(f"{other.check} and {one.check}: the column {one.name!r} cannot have both types")
        if "string" not in (one.type, certificate.columns[one.name].type) or one.type == "string":
            continue
        for certified in certificate.checks:
            check = Check.model_validate({**certified.check, "name": certified.name})
            looks = check.check is not None and columns_in_expression(check.check, [one.name])
            if looks or (check.kind in _KEPT and check.column and match(check.column, [one.name])):
                raise InvalidArgument(
                    f"{certified.name} checks {one.name!r} as text, but {one.check} changes its type to {one.type}: "
                    "validate and apply them one after the other"
                )


def _described(check: Check, certificate: Certificate) -> str:
    """The check as JSON with its condition. Iceberg does not enforce it; ``apply`` and other readers show it."""
    sql = condition(check, certificate.null_is)
    content: dict[str, Any] = {"check": check.as_given()}
    if check.kind == "check":
        content["null_is"] = certificate.null_is
    if certificate.where is not None:
        content["where"] = certificate.where
        sql = f"({_bracketed(certificate.where)} IS NOT TRUE) OR {_bracketed(sql)}"
    ids = {name: column.id for name, column in certificate.columns.items()}
    return json.dumps({**content, "sql": sql, "field_ids": ids}, ensure_ascii=False, sort_keys=True)


def _enforced(check: Check, certificate: Certificate) -> str:
    """The check as the condition of a Delta constraint, which must be TRUE for each row: NULL is refused as well."""
    sql = condition(check, certificate.null_is)
    if certificate.where is not None:
        sql = f"({_bracketed(certificate.where)} IS NOT TRUE) OR {_bracketed(sql)}"
    return f"{_bracketed(sql)} IS NOT FALSE"


ICEBERG = ConstraintRules(
    "Iceberg",
    lambda name: PREFIX + name,
    _described,
    widens=False,
    refused={
        "unique": "Iceberg has no unique columns, and no engine enforces its identifier fields: leave the check out",
        "references": "Iceberg has no foreign keys: leave the check out",
    },
)
DELTA = ConstraintRules(
    "Delta",
    lambda name: CONSTRAINT + name.lower(),
    _enforced,
    widens=True,
    refused={
        "unique": "Delta has no unique columns: leave the check out",
        "references": "Delta has no foreign keys: leave the check out",
    },
)


def schema_changes(certificate: Certificate, rules: ConstraintRules) -> SchemaChanges:
    """The schema changes for all checks of a certificate, by the rules of the table's format.

    Raises InvalidArgument if a check has none.
    """
    required: dict[str, str] = {}
    properties: dict[str, str] = {}
    narrowed: list[Narrowed] = []
    checks: dict[str, str] = {}
    widened: list[Widened] = []
    for certified in certificate.checks:
        check = Check.model_validate({**certified.check, "name": certified.name})
        if check.not_null is not None:
            if certificate.where is not None:
                raise InvalidArgument(
                    f"{certified.name}: a required column must not be NULL in any row, but {certificate.operation} has "
                    f"only validated rows where {certificate.where}: validate without 'where'"
                )
            required[certified.name] = check.not_null
        elif check.fits is not None and rules.widens:
            name = column_of(certified.name, check.fits.column, certificate)
            widened.append(Widened(certified.name, name, certificate.columns[name].id, canonical(check.fits.type)))
        elif check.fits is not None:
            narrowed.append(_narrowed(check, certificate))
        elif check.kind in _KEPT:
            name = rules.property_name(certified.name)
            if name in properties:
                raise InvalidArgument(
                    f"{checks[name]} and {certified.name}: {rules.format}'s constraints do not distinguish these "
                    "names: validate them under other names"
                )
            properties[name] = rules.property_value(check, certificate)
            checks[name] = certified.name
        else:
            why = rules.refused.get(check.kind, f"a table has no constraint for {check.kind!r}")
            raise InvalidArgument(f"{certified.name} cannot be applied: {why}")
    _check_together(narrowed, certificate)
    if widened and (required or properties):
        raise InvalidArgument(
            f"{widened[0].check} changes a type, which cannot be reverted if another check is violated later: validate "
            "and apply it by itself"
        )
    return SchemaChanges(required, properties, tuple(narrowed), checks, tuple(widened))


def condition(check: Check, null_is: str) -> str:
    """The check in Spark SQL, for people and engines: a row passes unless the condition is FALSE."""
    if check.check is not None:
        if null_is == "pass":
            # In brackets if it may end in a comment: an engine may append text to it.
            return _bracketed(check.check) if _COMMENT in check.check else check.check
        return f"{_bracketed(check.check)} IS TRUE"
    column = ".".join(map(quote, split_path(check.column)))
    if check.range is not None:
        return _between(column, check.range.min, check.range.max)
    if check.length is not None:
        return _between(f"char_length({column})", check.length.min, check.length.max)
    if check.in_set is not None:
        return f"{column} IN ({', '.join(map(_literal, check.in_set.values))})"
    assert check.matches is not None
    return f"{column} RLIKE {_literal(check.matches.pattern)}"


def _bracketed(text: str) -> str:
    """The condition in brackets, with two line ends if it may end in a comment.

    A comment ends at the end of its line, or of the next line if a backslash ends the first.
    """
    return f"({text}\n\n)" if _COMMENT in text else f"({text})"


def _between(what: str, low: Any, high: Any) -> str:
    bounds: Sequence[tuple[str, Any]] = ((">=", low), ("<=", high))
    return " AND ".join(f"{what} {sign} {_literal(bound)}" for sign, bound in bounds if bound is not None)


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)

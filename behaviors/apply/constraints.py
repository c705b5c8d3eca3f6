"""What a certified check becomes in the schema of an Iceberg table. Pure but for pydantic."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import Ambiguous, decimal_of, match, quote, split_path
from distop_behaviors.validate.certificate import named_in
from distop_behaviors.validate.typed_bounds import canonical
from distop_behaviors.validate.validate_argument import Check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop_behaviors.validate.certificate import Certificate

PREFIX = "distop.constraint."
"""Of the table property that a check becomes, before its name."""

_REFUSED = {
    "unique": "Iceberg knows no unique columns, and its identifier fields are enforced by nobody: leave the check out",
    "references": "Iceberg knows no references between tables: leave the check out",
}
_COMMENT = "--"
_KEPT = ("check", "range", "in_set", "length", "matches")
_ICEBERG = {
    **{name: name for name in ("boolean", "int", "float", "double", "string", "binary", "date")},
    "bigint": "long",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
}
"""Iceberg's types by Spark's names, but for decimals."""


@frozen
class Narrowed:
    """A column whose rows are to be written anew. ``name`` and ``id``: of the certificate; ``type``: what Iceberg is to
    have, and ``spark`` the same for a cast.
    """

    check: str
    name: str
    id: int
    type: str
    spark: str


@frozen
class Wanted:
    """What is to stand in the schema: columns that are to be required, and that are to have another type, by the names
    of their checks, and properties.
    """

    required: dict[str, str]
    """The check's name → the column, as the check has it."""
    properties: dict[str, str]
    narrowed: tuple[Narrowed, ...] = ()


def wanted(certificate: Certificate) -> Wanted:
    """What the checks of a certificate become. Raises InvalidArgument for one that can become nothing: all or none."""
    required: dict[str, str] = {}
    properties: dict[str, str] = {}
    narrowed: list[Narrowed] = []
    for certified in certificate.checks:
        check = Check.model_validate({**certified.check, "name": certified.name})
        if check.not_null is not None:
            if certificate.where is not None:
                raise InvalidArgument(
                    f"{certified.name}: a column is required for all rows, and {certificate.operation} looked at those "
                    f"where {certificate.where} alone: validate without where"
                )
            required[certified.name] = check.not_null
        elif check.fits is not None:
            narrowed.append(_narrowed(check, certificate))
        elif check.kind in _KEPT:
            properties[PREFIX + certified.name] = _property(check, certificate)
        else:
            why = _REFUSED.get(check.kind, "it is no constraint of a table")
            raise InvalidArgument(f"{certified.name} cannot be applied: {why}")
    _check_together(narrowed, certificate)
    return Wanted(required, properties, tuple(narrowed))


def iceberg_type(spark: str) -> str | None:
    """Iceberg's name of a type that Spark calls so; None: it has no such type."""
    if spark.startswith("decimal("):
        precision, scale = decimal_of(spark)
        return f"decimal({precision}, {scale})"
    return _ICEBERG.get(spark)


def column_of(check: str, text: str, certificate: Certificate) -> str:
    """The name of a column in the certificate. Raises InvalidArgument where it is none."""
    columns = certificate.columns
    try:
        name = match(text, columns) or match(".".join(split_path(text)), columns)
    except Ambiguous as error:
        raise InvalidArgument(f"{check}: {error}") from error
    if name is None:
        raise InvalidArgument(f"{check}: the certificate says nothing of a column {text!r}")
    return name


def _narrowed(check: Check, certificate: Certificate) -> Narrowed:
    assert check.fits is not None
    assert check.name is not None
    if certificate.where is not None:
        raise InvalidArgument(
            f"{check.name}: a column has one type in all rows, and {certificate.operation} looked at those where "
            f"{certificate.where} alone: validate without where"
        )
    spark = canonical(check.fits.type)
    kind = iceberg_type(spark)
    if kind is None:
        hint = "a check of its length can be kept" if "char" in spark else "int is the narrowest whole number"
        raise InvalidArgument(f"{check.name} cannot be applied: Iceberg has no type {spark} ({hint})")
    name = column_of(check.name, check.fits.column, certificate)
    return Narrowed(check.name, name, certificate.columns[name].id, kind, spark)


def _check_together(narrowed: Sequence[Narrowed], certificate: Certificate) -> None:
    """Raises InvalidArgument for a column that is to have two types, and for a constraint that would mean something
    else of a column once it has the other type.
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
            looks = check.check is not None and named_in(check.check, [one.name])
            if looks or (check.kind in _KEPT and check.column and match(check.column, [one.name])):
                raise InvalidArgument(
                    f"{certified.name} looks at {one.name!r} as the text that it is, and {one.check} makes it "
                    f"{one.type}: apply them one after the other"
                )


def _property(check: Check, certificate: Certificate) -> str:
    sql = condition(check, certificate.null_is)
    told: dict[str, Any] = {"check": check.as_given()}
    if check.kind == "check":
        told["null_is"] = certificate.null_is
    if certificate.where is not None:
        told["where"] = certificate.where
        sql = f"({_bracketed(certificate.where)} IS NOT TRUE) OR {_bracketed(sql)}"
    ids = {name: column.id for name, column in certificate.columns.items()}
    return json.dumps({**told, "sql": sql, "field_ids": ids}, ensure_ascii=False, sort_keys=True)


def condition(check: Check, null_is: str) -> str:
    """The check as Spark SQL, for people and engines: what is not FALSE of it holds."""
    if check.check is not None:
        if null_is == "pass":
            # In brackets also where a comment may be open: others may put it in front of more.
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
    """The condition in brackets. A comment at its end lasts to the end of its line, or of the next one where a
    backslash ends the line.
    """
    return f"({text}\n\n)" if _COMMENT in text else f"({text})"


def _between(what: str, low: Any, high: Any) -> str:
    bounds: Sequence[tuple[str, Any]] = ((">=", low), ("<=", high))
    return " AND ".join(f"{what} {sign} {_literal(bound)}" for sign, bound in bounds if bound is not None)


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)

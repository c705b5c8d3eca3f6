"""The argument of ``validate`` (a contract): pydantic models, and the JSON Schema that clients check against.

A client reports one error, so the schema is written to name the invalid property. The models check the same rules for
callers that do not use a client.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from distop.behavior import out_of_order
from distop.protocol.texts import did_you_mean
from distop_behaviors.reading.row_functions import ROW_FUNCTIONS

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

WIDE_KINDS = ("unique", "references")
"""Checks that one job decides for the whole table."""
KINDS = ("not_null", "range", "fits", "check", "in_set", "length", "matches", *WIDE_KINDS)
MAX_KEY = 32
"""Columns of a key."""
MAX_CHECKS = 200
MAX_SAMPLE = 1_000

ColumnName = Annotated[str, Field(min_length=1)]
# The schema refuses at submission what it can detect. Other mistakes give only this check the verdict `error`.
Expression = Annotated[str, Field(min_length=1, json_schema_extra={"x-row-expression": sorted(ROW_FUNCTIONS)})]


def _whole(value: Any) -> Any:
    """2.0 as 2: JSON has one kind of number, and the published schema accepts 2.0 as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Whole = BeforeValidator(_whole)
Number = Annotated[StrictInt | Annotated[StrictFloat, Field(allow_inf_nan=False)] | StrictStr, Field()]
"""A number, or text: a date, a time, a decimal, or a plain string."""
Value = Annotated[
    StrictInt | Annotated[StrictFloat, Field(allow_inf_nan=False)] | StrictStr | Annotated[bool, Field(strict=True)],
    Field(),
]

_PLAIN = (
    *("boolean", "tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long", "float", "real", "double"),
    *("string", "binary", "date", "timestamp", "timestamp_ntz", "timestamp_ltz"),
)


def _any_case(*words: str) -> str:
    """A pattern for one of the words in upper or lower case. JSON Schema has no flags for patterns."""
    return "|".join("".join(f"[{c.upper()}{c}]" if c.isalpha() else c for c in word) for word in words)


_DIGITS = "[1-9]|[12][0-9]|3[0-8]"
_WITH_PLACES = rf"(\(\s*({_DIGITS})\s*(,\s*(0|{_DIGITS})\s*)?\))?"
TYPE_PATTERN = (
    rf"^\s*({_any_case(*_PLAIN)}|({_any_case('varchar', 'char')})\(\s*[1-9][0-9]{{0,8}}\s*\)"
    rf"|({_any_case('decimal', 'dec', 'numeric')}){_WITH_PLACES})\s*$"
)
_TYPE = re.compile(TYPE_PATTERN)


def _up_to(places: int) -> str:
    """A pattern for the numbers from 0 to ``places``, below 40."""
    tens, ones = divmod(places, 10)
    return f"{('', '[0-9]|1', '1?[0-9]|2', '[12]?[0-9]|3')[tens]}[0-{ones}]"


_SIZES = "|".join(rf"{digits}\s*(,\s*({_up_to(digits)})\s*)?" for digits in range(1, 39))
SCHEMA_PATTERN = TYPE_PATTERN.replace(_WITH_PLACES, rf"(\(\s*({_SIZES})\))?")
"""The pattern in the schema: it also refuses a decimal with more decimal places than digits.

Each number of digits has its own alternative, because a pattern that is matched in linear time cannot look ahead.
"""
_TYPE_IS = "a Spark SQL type of a single value, such as smallint, decimal(9,2) or varchar(20)"


def _wrong(text: str) -> PydanticCustomError:
    """An error of the argument, shown as it is worded here (pydantic prefixes a ValueError)."""
    return PydanticCustomError("argument", "{text}", {"text": text})


def _without_null(schema: Any) -> None:
    """Remove null from optional fields of the schema. A caller leaves a field out instead."""
    for field in schema.get("properties", {}).values():
        if field.get("default", 0) is None:
            field.pop("default")
            options = [o for o in field.get("anyOf", ()) if o != {"type": "null"}]
            if len(options) == 1:
                field.pop("anyOf")
                field.update(options[0])
            elif options:
                types = [o["type"] for o in options]
                if all(set(o) == {"type"} for o in options):
                    field.pop("anyOf")
                    field["type"] = types
                else:
                    field["anyOf"] = options


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_without_null)


class _Bounded(_Model):
    @model_validator(mode="after")
    def _has_bounds_in_order(self) -> _Bounded:
        if getattr(self, "min", None) is None and getattr(self, "max", None) is None:
            raise _wrong("give min, max, or both")
        low, high = getattr(self, "min", None), getattr(self, "max", None)
        # No value is between the two, whatever the column's type. The order of other texts depends on that type.
        if out_of_order(low, high):
            raise _wrong(f"min ({json.dumps(low)}) is greater than max ({json.dumps(high)})")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        schema["minProperties"] = 2
        schema["x-ordered"] = ["min", "max"]  # so that the start is refused, before planning
        return schema


class Range(_Bounded):
    """Inclusive bounds; NULL passes, NaN is above every bound."""

    column: ColumnName
    min: Number | None = None
    max: Number | None = None


class Fits(_Model):
    """A cast to the type and back gives an equal value, so the column can be narrowed to it."""

    column: ColumnName
    type: Annotated[str, Field(description=_TYPE_IS, json_schema_extra={"pattern": SCHEMA_PATTERN})]

    @model_validator(mode="after")
    def _is_a_type(self) -> Fits:
        if not _TYPE.fullmatch(self.type):
            raise _wrong(f"{self.type!r} is not {_TYPE_IS}")
        # In a decimal: the precision, then the scale.
        digits = [int(d) for d in re.findall(r"[0-9]+", self.type)]
        if len(digits) == 2 and digits[1] > digits[0]:
            raise _wrong(f"{self.type!r} has more decimal places than digits")
        return self


class InSet(_Model):
    """The value is one of these."""

    column: ColumnName
    values: Annotated[list[Value], Field(min_length=1, max_length=10_000)]


class Length(_Bounded):
    """The number of characters, inclusive."""

    column: ColumnName
    min: Annotated[StrictInt, Field(ge=0), _Whole] | None = None
    max: Annotated[StrictInt, Field(ge=0), _Whole] | None = None


class Matches(_Model):
    """The pattern is found in the text (RLIKE: a Java regular expression, not anchored)."""

    column: ColumnName
    pattern: str


Columns = Annotated[list[ColumnName], Field(min_length=1, max_length=MAX_KEY, json_schema_extra={"uniqueItems": True})]


def _no_column_twice(columns: list[str]) -> None:
    twice = next((c for n, c in enumerate(columns) if c in columns[:n]), None)
    if twice is not None:
        raise _wrong(f"the column {twice!r} is named twice")


class References(_Model):
    """The values of ``column`` are in the column ``to`` of another registered table (a foreign key).

    For a key of several columns: the values of ``columns`` together are in one row of the columns ``to`` there.
    """

    table: Annotated[str, Field(min_length=1)]
    column: ColumnName | None = None
    columns: Columns | None = None
    to: ColumnName | Annotated[list[ColumnName], Field(min_length=1, max_length=MAX_KEY)]

    @model_validator(mode="after")
    def _pairs(self) -> References:
        if (self.column is None) == (self.columns is None):
            raise _wrong("references needs either 'column' or 'columns'")
        if (self.column is not None) != isinstance(self.to, str):
            raise _wrong("references needs one column name in 'to' with 'column', and a list in 'to' with 'columns'")
        if len(self.own()) != len(self.theirs()):
            raise _wrong(f"references has {len(self.own())} 'columns' but {len(self.theirs())} in 'to': give as many")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        # So that the start is refused, before planning.
        schema |= {"minProperties": 3, "maxProperties": 3, "x-same-length": ["columns", "to"]}
        schema["dependentSchemas"] = {
            "column": {"properties": {"to": {"type": "string"}}},
            "columns": {"properties": {"to": {"type": "array"}}},
        }
        return schema

    def own(self) -> list[str]:
        """The columns of this table."""
        return [self.column] if self.column is not None else list(self.columns or ())

    def theirs(self) -> list[str]:
        """The columns of the other table, in the same order."""
        return [self.to] if isinstance(self.to, str) else list(self.to)


class Check(_Model):
    """One check: exactly one of the kinds, with an optional name."""

    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    not_null: ColumnName | None = None
    range: Range | None = None
    fits: Fits | None = None
    check: Expression | None = None
    in_set: InSet | None = None
    length: Length | None = None
    matches: Matches | None = None
    unique: ColumnName | Columns | None = None
    references: References | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, data: Any) -> Any:
        if isinstance(data, dict):
            unknown = [k for k in data if k not in KINDS and k != "name"]
            if unknown:
                hint = did_you_mean(unknown[0], KINDS, "known")
                raise _wrong(f"{unknown[0]!r} is not a check{hint}")
            given = [k for k in data if k in KINDS and data[k] is not None]
            if len(given) != 1:
                found = " and ".join(given) or "none"
                raise _wrong(f"a check must be exactly one of {', '.join(KINDS)}, but has {found}")
        return data

    @model_validator(mode="after")
    def _key_has_each_column_once(self) -> Check:
        _no_column_twice(self.key)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        schema["if"] = {"required": ["name"]}
        schema["then"] = {"minProperties": 2, "maxProperties": 2}
        schema["else"] = {"minProperties": 1, "maxProperties": 1}
        return schema

    @cached_property
    def kind(self) -> str:
        """Its kind, one of :data:`KINDS`."""
        return next(k for k in KINDS if getattr(self, k) is not None)

    @property
    def wide(self) -> bool:
        """Whether it is about the whole table, so that no partition alone can decide it."""
        return self.kind in WIDE_KINDS

    @cached_property
    def key(self) -> list[str]:
        """The columns of the key of a ``wide`` check; empty for the others."""
        if self.references is not None:
            return self.references.own()
        return [self.unique] if isinstance(self.unique, str) else list(self.unique or ())

    @cached_property
    def column(self) -> str:
        """The checked column; "" for a :attr:`wide` check, and for ``check``, whose expression names its columns."""
        if self.wide:
            return ""
        spec = getattr(self, self.kind)
        if isinstance(spec, str):
            return spec if self.kind == "not_null" else ""
        return str(spec.column)

    def default_name(self) -> str:
        """``tailnum_not_null``, ``flight_fits_smallint``, ``check``."""
        if self.kind == "check":
            return "check"
        if self.fits is not None:
            return f"{self.column}_fits_{re.sub(r'[^0-9A-Za-z]+', '_', self.fits.type.strip()).strip('_')}"
        if self.references is not None:
            return f"{'_'.join(self.key)}_references_{self.references.table}"
        return f"{'_'.join(self.key) if self.wide else self.column}_{self.kind}"

    def as_given(self) -> dict[str, Any]:
        """The check as JSON, without its name."""
        return self.model_dump(mode="json", exclude_none=True, exclude={"name"})


_SINCE = "an earlier validation, such as table/validate/7: only files that are newer than its certificate are validated"


class Argument(_Model):
    """The checks, the rows to check, and how many violations to report."""

    checks: Annotated[list[Check], Field(min_length=1, max_length=MAX_CHECKS)]
    where: Expression | None = None
    null_is: Literal["pass", "fail"] = "pass"
    statistics: Literal["auto", "only", "never"] = "auto"
    max_violations: Annotated[StrictInt, Field(ge=1), _Whole] | None = None
    sample: Annotated[StrictInt, Field(ge=0, le=MAX_SAMPLE), _Whole] = 20
    since: Annotated[str, Field(min_length=1, description=_SINCE)] | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> Argument:
        names = [c.name for c in self.checks if c.name is not None]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise _wrong(f"two checks are named {twice!r}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        schema["properties"]["checks"]["x-unique-by"] = "name"  # so that the start is refused, before planning
        # The contract's own example has ``"max_violations": null``.
        schema["properties"]["max_violations"] = {
            "type": ["integer", "null"],
            "minimum": 1,
            "default": None,
            "description": "stop counting the violations of a check at this number",
        }
        schema["properties"]["where"]["type"] = ["string", "null"]
        return schema

    def names(self) -> list[str]:
        """The names of the checks in order: the given ones, and default names that a number makes unique."""
        taken = {c.name for c in self.checks if c.name is not None}
        names: list[str] = []
        for check in self.checks:
            name = check.name
            if name is None:
                base, n = check.default_name(), 1
                name = base
                while name in taken:
                    n += 1
                    name = f"{base}_{n}"
                taken.add(name)
            names.append(name)
        return names

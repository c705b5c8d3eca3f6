"""Each check as a Spark column: true for rows that violate it, false or null for all others."""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

from distop.runtime.lru_cache import LruCache
from distop.tables.reading.file_facts import ddl, decimal_of, quote
from distop_behaviors.reading.spark_expressions import ExpressionNotAllowed, java_class, parse_expression
from distop_behaviors.validate.spark_errors import is_unexpected, message_of
from distop_behaviors.validate.typed_bounds import Bound, Unfit, bound_for, canonical, family, limits, set_member

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from distop.tables.reading.file_facts import SparkType
    from distop_behaviors.validate.validate_argument import Check

CACHED_CONDITIONS = 256
_COMPACT_DIGITS = 18

_conditions: LruCache[Column] = LruCache(CACHED_CONDITIONS)


def check_applicable(check: Check, kind: SparkType) -> None:
    """Raises Unfit if the check does not apply to a column of this type. Does not load Spark."""
    if check.kind in ("not_null", "check") or kind == "void":
        return
    if not isinstance(kind, str):
        raise Unfit(f"{check.kind} applies to columns of single values, but {check.column!r} is {ddl(kind)}")
    if check.range is not None:
        for bound in (check.range.min, check.range.max):
            if bound is not None:
                bound_for(bound, kind, up=True)
    elif check.in_set is not None:
        for value in check.in_set.values:
            set_member(value, kind)
    elif check.kind in ("length", "matches") and kind != "string":
        raise Unfit(f"{check.kind} applies to text columns, but {check.column!r} is {kind}")


def violation_condition(
    session: SparkSession, check: Check, column: Column | None, kind: SparkType, null_is: str
) -> Column:
    """The condition that a row violates the check. Raises Unfit like :func:`check_applicable`.

    ``column``: the checked column, and ``kind`` its type. A ``check`` expression uses neither.
    """
    from pyspark.sql import functions as F

    if check.check is not None:
        return ~F.coalesce(parse_expression(session, check.check).column, F.lit(null_is == "pass"))
    assert column is not None
    check_applicable(check, kind)
    if check.not_null is not None:
        return column.isNull()
    if kind == "void":
        return F.lit(False)
    if check.range is not None:
        return _outside(column, kind, check.range.min, check.range.max)
    if check.fits is not None:
        return _misfit(column, kind, canonical(check.fits.type))
    if check.in_set is not None:
        members = [b for b in (set_member(v, kind) for v in check.in_set.values) if b is not None and _holds(b, kind)]
        if not members:
            return column.isNotNull()
        return ~column.isin([_literal(b, kind) for b in members])
    if check.length is not None:
        return _length(column, check.length.min, check.length.max)
    assert check.matches is not None
    return ~column.rlike(check.matches.pattern)


def violation_at(session: SparkSession, check: Check, path: tuple[str, ...], kind: SparkType, null_is: str) -> Column:
    """:func:`violation_condition` for the column at a path (empty: no file has the column), cached. Raises Unfit.

    Each condition takes dozens of calls into the JVM, and later batches and operations need the same ones.
    """
    from pyspark.sql import functions as F

    key = (session, check.model_dump_json(), path, kind, null_is)
    return _conditions.get(
        key, lambda: violation_condition(session, check, column_at(path) if path else F.lit(None), kind, null_is)
    )


def where_condition(session: SparkSession, text: str) -> Column:
    """The condition ``where``, cached. It is cast to boolean: it has no type if its columns are missing."""
    return _conditions.get((session, text), lambda: parse_expression(session, text).column.cast("boolean"))


def where_true(frame: DataFrame, condition: Column) -> DataFrame:
    """The rows of the frame for which the condition is true.

    A condition on floats or timestamps is not pushed down to the file reader. A pushed-down filter would wrongly skip
    rows: bounds leave out NaN, dictionaries distinguish -0.0 from 0.0, and a literal loses its microseconds if the file
    has milliseconds.
    """
    skips = any(_may_skip_too_many(field.dataType) for field in frame.schema)
    if skips:
        used = _columns_of(frame, condition)
        skips = any(_may_skip_too_many(field.dataType) for field in frame.schema if field.name in used)
    return frame.where(not_pushed_down(condition) if skips else condition)


def _columns_of(frame: DataFrame, condition: Column) -> frozenset[str]:
    """The columns of the frame that a condition names; all of them if Spark has changed the filter's form."""
    plan = frame.where(condition)._jdf.queryExecution().analyzed()
    if str(plan.nodeName()) != "Filter":
        return frozenset(frame.columns)
    found = plan.condition().references().toSeq()
    return frozenset(str(found.apply(n).name()) for n in range(found.size()))


def not_pushed_down(*conditions: Column) -> Column:
    """Whether one of the conditions is true, in a form that Spark does not push down to the file reader."""
    from pyspark.sql import functions as F

    return F.coalesce(*(F.when(condition, True) for condition in conditions), F.lit(False))


def _may_skip_too_many(kind: DataType) -> bool:
    from pyspark.sql.types import DoubleType, FloatType, StructType, TimestampNTZType, TimestampType

    if isinstance(kind, StructType):
        return any(_may_skip_too_many(field.dataType) for field in kind)
    # Spark pushes down no filter on lists and maps.
    return isinstance(kind, DoubleType | FloatType | TimestampType | TimestampNTZType)


def any_of(columns: list[Column]) -> Column:
    """Whether one of the columns is true. At least one column must be given."""
    return reduce(lambda a, b: a | b, columns)


def column_at(path: tuple[str, ...]) -> Column:
    """The column, or the field of a struct, at this path."""
    from pyspark.sql import functions as F

    return F.col(".".join(quote(part) for part in path))


def _outside(column: Column, kind: str, low: Any, high: Any) -> Column:
    sides = []
    if low is not None:
        bound = bound_for(low, kind, up=True)
        if not _below_all(bound, kind):
            if not _holds(bound, kind):
                return column.isNotNull()
            sides.append(column < _literal(bound, kind))
    if high is not None:
        bound = bound_for(high, kind, up=False)
        if not _above_all(bound, kind):
            if not _holds(bound, kind):
                return column.isNotNull()
            sides.append(column > _literal(bound, kind))
    from pyspark.sql import functions as F

    return any_of(sides) if sides else F.lit(False)


def _below_all(bound: Bound, kind: str) -> bool:
    ends = limits(kind)
    return ends is not None and bound.value <= ends[0]


def _above_all(bound: Bound, kind: str) -> bool:
    ends = limits(kind)
    return ends is not None and bound.value >= ends[1]


def _holds(bound: Bound, kind: str) -> bool:
    ends = limits(kind)
    return ends is None or ends[0] <= bound.value <= ends[1]


def _literal(bound: Bound, kind: str) -> Column:
    """A constant of the column's own type, so that Spark does not cast the column."""
    from pyspark.sql import functions as F

    group = family(kind)
    if group == "decimal":
        return _decimal(bound, *decimal_of(kind))
    if group == "whole":
        return F.lit(bound.value).cast(kind)
    if group == "date":
        return F.expr(f"date_from_unix_date({bound.value})")
    if group == "timestamp":
        return F.expr(f"timestamp_micros({bound.value}L)").cast(kind)
    return F.lit(bound.value)


def _decimal(bound: Bound, precision: int, scale: int) -> Column:
    from decimal import Decimal

    from pyspark.sql import functions as F

    if precision <= _COMPACT_DIGITS:
        # A decimal from text is backed by a BigDecimal, which makes comparisons several times slower.
        return _internal("MakeDecimal", F.lit(bound.value).cast("bigint"), precision, scale)
    exact = Decimal(f"{bound.value}E{-bound.scale}")  # scaleb would round to 28 digits
    return F.lit(str(exact)).cast(f"decimal({precision},{scale})")


def _misfit(column: Column, kind: str, target: str) -> Column:
    from pyspark.sql import functions as F

    if target.startswith(("varchar(", "char(")):
        # Spark ignores the length in a cast to these types, so the length itself is checked.
        limit = int(target.partition("(")[2].rstrip(")"))
        return F.char_length(column.cast("string")) > limit
    back = column.try_cast(target).try_cast(kind)
    differs = ~back.eqNullSafe(column)
    if target == "bigint" and family(kind) == "float":
        # Spark casts 2^63 to the greatest bigint, and casts that back to 2^63.
        differs |= column >= 2.0**63
    elif family(kind) == "decimal":
        # Spark reads values with more digits than the file declares, and optimizes away a cast to the declared type.
        (low, high), (precision, scale) = limits(kind) or (0, 0), decimal_of(kind)
        differs |= (column < _decimal(Bound(low, scale), precision, scale)) | (
            column > _decimal(Bound(high, scale), precision, scale)
        )
    elif kind == "bigint" and family(target) == "float":
        differs |= column == limits(kind)[1]  # type: ignore[index]
    return column.isNotNull() & differs


def _length(column: Column, low: int | None, high: int | None) -> Column:
    from pyspark.sql import functions as F

    length = F.char_length(column)
    sides = ([length < low] if low is not None else []) + ([length > high] if high is not None else [])
    return any_of(sides)


def column_references(session: SparkSession, text: str) -> tuple[str, ...]:
    """The first parts of an expression's column names (of ``a.b``: ``a``), in order.

    Raises Unfit if the expression does not parse, or if it is not allowed.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        return parse_expression(session, text).names
    except ExpressionNotAllowed as e:
        raise Unfit(str(e)) from e
    except (PySparkException, Py4JJavaError) as e:
        if is_unexpected(e):
            raise
        raise Unfit(f"cannot parse the expression: {message_of(e)}") from e


@lru_cache(maxsize=CACHED_CONDITIONS)
def pattern_error(session: SparkSession, pattern: str) -> str | None:
    """The error if Java cannot compile the regular expression; None if it can."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import IllegalArgumentException

    try:
        java_class(session.sparkContext._jvm, "java.util.regex.Pattern").compile(pattern)
    except (IllegalArgumentException, Py4JJavaError) as e:
        reason = message_of(e)
        return f"the pattern {pattern!r} is not a valid regular expression: {reason}"
    return None


def try_eval(column: Column) -> Column:
    """A struct with the value in the field ``v``, or null if evaluating ``column`` throws.

    It uses the Spark expression behind the ``try_`` functions, which SQL does not offer for arbitrary expressions.
    """
    from pyspark.sql import functions as F

    return _internal("TryEval", F.struct(column.alias("v")))


def _internal(name: str, column: Column, *more: Any) -> Column:
    """An internal Spark expression without a name in SQL, applied to a column."""
    from pyspark import SparkContext

    jvm: Any = SparkContext._active_spark_context._jvm  # type: ignore[union-attr]
    utils = java_class(jvm, "org.apache.spark.sql.classic.ExpressionUtils")
    expression = java_class(jvm, f"org.apache.spark.sql.catalyst.expressions.{name}")
    made: Column = type(column)(utils.column(expression(utils.expression(column._jc), *more)))
    return made

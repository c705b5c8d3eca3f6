"""A condition on partition columns, which chooses partitions: ``day >= '2026-01-01' and country = 'DE'``.

The language is the one of Iceberg's row filters, which is a part of Spark's SQL: comparisons of a column with a value,
``in``, ``between``, ``like 'a%'``, ``is null``, ``and``, ``or``, ``not`` and parentheses. A comparison with NULL is
neither true nor false, as in SQL. A condition is data: it is parsed, and never executed as code.
"""

from __future__ import annotations

import math
import operator
import re
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import did_you_mean, shown
from distop.tables.reading.file_facts import Ambiguous, match

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Test = Callable[[Mapping[str, Any]], bool | None]
    """Whether a condition holds for typed values; None: neither true nor false."""

LONGEST = 2_000
"""Maximum characters of a condition."""
DEEPEST = 20
"""Maximum depth of parentheses, since the parser's time grows with it."""

_WHOLE = ("tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "EqualTo": operator.eq,
    "NotEqualTo": operator.ne,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
}
_NO_COLUMN = "where needs a condition on partition columns, such as day >= '2026-01-01'"


class PartitionCondition:
    """A condition on the partition columns of one table."""

    def __init__(self, text: str, columns: Mapping[str, str], table: str) -> None:
        """``columns``: the partition columns with their types in Spark. ``table``: its name, for errors.

        Raises InvalidArgument for a text that cannot be read, another column, and a value of another type.
        """
        self._columns = columns
        self._table = table
        self._test = self._of(_parsed(text))

    def holds(self, values: Mapping[str, str | None]) -> bool:
        """Whether it holds for a partition, by the texts of its values.

        None: NULL. A column that does not partition these files is missing: a condition on it does not hold.
        """
        known = {name: text for name, text in values.items() if name in self._columns}
        typed = {name: None if text is None else _typed(text, self._columns[name]) for name, text in known.items()}
        return self._test(typed) is True

    def _of(self, node: Any) -> Test:
        kind = type(node).__name__
        if kind in ("And", "Or"):
            left, right = self._of(node.left), self._of(node.right)
            return _both(left, right) if kind == "And" else _negated(_both(_negated(left), _negated(right)))
        if kind == "Not":
            return _negated(self._of(node.child))
        if not hasattr(node, "term"):
            raise InvalidArgument(_NO_COLUMN)
        name = self._name(str(node.term.name))
        if kind in ("IsNull", "NotNull"):
            wanted = kind == "IsNull"
            return lambda values: (values[name] is None) is wanted if name in values else None
        if kind in ("IsNaN", "NotNaN"):
            return _on(name, lambda value: (isinstance(value, float) and math.isnan(value)) is (kind == "IsNaN"))
        if kind in ("In", "NotIn"):
            some = {self._value(one.value, name) for one in node.literals}
            return _on(name, lambda value: (value in some) is (kind == "In"))
        value = self._value(node.literal.value, name)
        if kind in ("StartsWith", "NotStartsWith"):
            if not isinstance(value, str):
                raise InvalidArgument(f"where uses like on {name!r}, which is not text, but {self._columns[name]}")
            return _on(name, lambda found: found.startswith(value) is (kind == "StartsWith"))
        compare = _COMPARE[kind]
        return _on(name, lambda found: compare(found, value))

    def _name(self, name: str) -> str:
        try:
            found = match(name, self._columns)
        except Ambiguous as error:
            raise InvalidArgument(f"where: {error}") from None
        if found is None:
            known = tuple(self._columns)
            raise InvalidArgument(
                f"where names {shown(name)}, which is not a partition column of the table {self._table!r}"
                f"{did_you_mean(name, known)} (its partition columns: {', '.join(known) or 'none'})"
            )
        return found

    def _value(self, value: Any, name: str) -> Any:
        """A value of the condition, in the column's type."""
        kind = self._columns[name].lower()
        wrong = InvalidArgument(f"where compares {name!r}, whose type is {kind}, with {value!r}")
        if kind == "string":
            if not isinstance(value, str):
                raise InvalidArgument(f"{wrong}: write a text in single quotes")
            return value
        if isinstance(value, bool) or kind == "boolean":
            if not isinstance(value, bool) or kind != "boolean":
                raise wrong
            return value
        if isinstance(value, int | Decimal):
            if kind not in _WHOLE and not kind.startswith(("float", "double", "decimal")):
                raise wrong
            return value
        found = _typed(str(value), kind)
        if found is None:
            raise wrong
        return found


def _parsed(text: str) -> Any:
    from pyiceberg.expressions.parser import parse
    from pyparsing import ParseBaseException

    if len(text) > LONGEST:
        raise InvalidArgument(f"where has {len(text)} characters: at most {LONGEST} are allowed")
    depth = deepest = 0
    for sign in re.sub(r"'[^']*'|\"[^\"]*\"", "", text):
        depth += (sign == "(") - (sign == ")")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise InvalidArgument(f"where is nested more than {DEEPEST} times: simplify it")
    try:
        return parse(text)
    except ParseBaseException as error:
        rest = text[error.loc :].strip()
        raise InvalidArgument(
            f"where cannot be read at {shown(rest[:20]) if rest else 'its end'}: write comparisons such as "
            "day >= '2026-01-01' with and, or, not, in and parentheses"
        ) from None
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise InvalidArgument(f"where cannot be read: {error}") from None


def _typed(text: str, kind: str) -> Any:
    """The value of a partition; None if the text is not of the column's type: Spark reads NULL then."""
    kind = kind.lower()
    try:
        if kind in _WHOLE:
            return int(text)
        if kind in ("float", "double"):
            return float(text)
        if kind.startswith("decimal"):
            return Decimal(text)
        if kind == "boolean":
            return {"true": True, "false": False}.get(text.strip().lower())
        if kind == "date":
            return date.fromisoformat(text.strip())
        if kind.startswith("timestamp"):
            found = datetime.fromisoformat(text.strip())
            return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except (ValueError, InvalidOperation):
        return None
    return text


def _on(name: str, test: Callable[[Any], bool]) -> Test:
    return lambda values: test(values[name]) if values.get(name) is not None else None


def _negated(test: Test) -> Test:
    def negated(values: Mapping[str, Any]) -> bool | None:
        found = test(values)
        return None if found is None else not found

    return negated


def _both(left: Test, right: Test) -> Test:
    def both(values: Mapping[str, Any]) -> bool | None:
        found = (left(values), right(values))
        return False if False in found else None if None in found else True

    return both

"""Converts a submitted text to a Spark expression. No other module does this.

The text is parsed once, and each node of the parsed tree must be on the list of allowed nodes. The column is created
from this tree, so that no other parser with other settings reads the text again.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from distop.protocol.frozen import frozen
from distop.runtime.java import active
from distop.schemas.row_expressions import clock_text, construct, refusal, text_alone, unlisted
from distop.tables.reading.file_facts import folded
from distop_behaviors.reading.row_functions import BOUNDED, ROW_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, SparkSession

CACHED_EXPRESSIONS = 256

_CATALYST = "org.apache.spark.sql.catalyst"
_FUNCTION = f"{_CATALYST}.analysis.UnresolvedFunction"
_COLUMN = f"{_CATALYST}.analysis.UnresolvedAttribute"
_LITERAL = f"{_CATALYST}.expressions.Literal"
_VARIABLE = f"{_CATALYST}.expressions.UnresolvedNamedLambdaVariable"
_ANALYSIS = "UnresolvedAttribute UnresolvedExtractValue UnresolvedFunction"
_EXPRESSIONS = """
Add And BitwiseAnd BitwiseNot BitwiseOr BitwiseXor CaseWhen Cast Collate Concat CreateNamedStruct Divide EqualNullSafe
EqualTo GreaterThan GreaterThanOrEqual ILike In IntegralDivide IsNotNull IsNotUnknown$$anon$2 IsNull IsUnknown$$anon$1
LambdaFunction LessThan LessThanOrEqual Like LikeAll LikeAny Literal Lower Multiply NamePlaceholder$ Not NotLikeAll
NotLikeAny Or Overlay RLike Remainder ShiftLeft ShiftRight ShiftRightUnsigned StringLocate StringTrim StringTrimLeft
StringTrimRight Substring Subtract TimestampAdd TimestampDiff UnaryMinus UnaryPositive UnresolvedCollation
UnresolvedNamedLambdaVariable
"""
_NODES = frozenset(
    {f"{_CATALYST}.analysis.{name}" for name in _ANALYSIS.split()}
    | {f"{_CATALYST}.expressions.{name}" for name in _EXPRESSIONS.split()}
)
"""The classes of allowed nodes. None of them holds a plan or hides an expression outside its children."""
_CONSTRUCTS = {
    **dict.fromkeys(("ScalarSubquery", "Exists", "InSubquery", "ListQuery", "LateralSubquery"), "a subquery"),
    **dict.fromkeys(("FunctionTableSubqueryArgumentExpression",), "a table"),
    **dict.fromkeys(("WindowExpression", "UnresolvedWindowExpression"), "a window"),
    "AggregateExpression": "an aggregate function",
    "Alias": "a name given with AS, or a path with ':'",
    "SortOrder": "WITHIN GROUP",
    "ExpressionWithUnresolvedIdentifier": "IDENTIFIER",
    "NamedArgumentExpression": "a named argument",
    "NamedParameter": "a parameter marker",
    "PosParameter": "a parameter marker",
}
"""The names of refused nodes in error messages, if their class name does not explain itself."""
_OF_SESSION = frozenset(
    {
        *("current_catalog", "current_database", "current_date", "current_schema", "current_time"),
        *("current_timestamp", "current_user", "localtimestamp", "session_user"),
    }
)
"""Functions that Spark also calls without parentheses, if no column has the name. ``user`` is not among them: many
tables have such a column, and a column that no file has is NULL here.
"""


class ExpressionNotAllowed(Exception):
    """The expression is not allowed; the text has the reason."""


@frozen
class RowExpression:
    """A parsed expression. ``names``: the first parts of its column names (of ``a.b``: ``a``), in order."""

    column: Column
    names: tuple[str, ...]


@lru_cache(maxsize=CACHED_EXPRESSIONS)
def parse_expression(session: SparkSession, text: str) -> RowExpression:
    """The expression of a submitted text.

    Raises ExpressionNotAllowed, Spark's ParseException, and Py4JJavaError if the parser itself fails on the text, such
    as on a number of over 38 digits.
    """
    why = refusal(text, ROW_FUNCTIONS)
    if why is not None:
        raise ExpressionNotAllowed(why)
    tree = _tree(session, text)
    nodes = _nodes(session._jvm)
    for name in str(tree.map(nodes.classes).distinct().mkString("\n")).replace("class ", "").split("\n"):
        if name not in _NODES:
            raise ExpressionNotAllowed(_named(name.rpartition(".")[2]))
    for function in _parts(tree.map(nodes.functions).distinct()):
        name = ".".join(function)
        # A function of another schema or catalog is user code.
        if len(function) > 1 or not name.isascii() or name.lower() not in ROW_FUNCTIONS:
            raise ExpressionNotAllowed(unlisted(name, ROW_FUNCTIONS))
        if name.lower() in BOUNDED:
            _check_bounded(tree.map(nodes.calls).distinct())
    between = str(uuid4())
    for literal in str(tree.map(nodes.literals).distinct().mkString(between)).split(between):
        if why := clock_text(literal):
            raise ExpressionNotAllowed(why)
    columns = list(_parts(tree.map(nodes.columns).distinct()))
    if not columns and (why := text_alone(text)):
        raise ExpressionNotAllowed(why)
    # In the body of a lambda, Spark resolves a name that is not an argument only later: to a column or such a function.
    variables = list(_parts(tree.map(nodes.variables).distinct()))
    for column in variables:
        if folded(column[0]) == "user":
            raise ExpressionNotAllowed(unlisted(column[0], ROW_FUNCTIONS))
    for column in columns + variables:
        if len(column) == 1 and folded(column[0]) in _OF_SESSION:
            raise ExpressionNotAllowed(unlisted(column[0], ROW_FUNCTIONS))
    return RowExpression(_column(session, tree), tuple(dict.fromkeys(column[0] for column in columns)))


def _named(node: str) -> str:
    if "Star" in node:
        return "the expression uses '*' instead of columns: name the columns"
    return construct(_CONSTRUCTS.get(node, node))


def _tree(session: SparkSession, text: str) -> Any:
    """The parsed tree. The parser reads its settings, such as ANSI mode, from the thread's active session."""
    with active(session):
        return session._jsparkSession.sessionState().sqlParser().parseExpression(text)


def _column(session: SparkSession, tree: Any) -> Column:
    from pyspark.sql import functions as F

    utils = java_class(session._jvm, "org.apache.spark.sql.classic.ExpressionUtils")
    made: Column = type(F.lit(True))(utils.column(tree))
    return made


@lru_cache(maxsize=32)
def java_class(jvm: Any, name: str) -> Any:
    """A class of the JVM by its full name, cached. A lookup takes a call into the JVM for each package."""
    found = jvm
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _check_bounded(calls: Any) -> None:
    """Raises ExpressionNotAllowed if a call of a function in :data:`BOUNDED` may create too large a value."""
    for i in range(calls.size()):
        call = calls.apply(i)
        name = str(call.nameParts().head()).lower() if call is not None else ""
        if name not in BOUNDED or call.arguments().size() < 2:
            continue
        if not re.fullmatch(f"-?[0-9]{{1,{BOUNDED[name]}}}", str(call.arguments().apply(1).toString())):
            raise ExpressionNotAllowed(
                f"the expression uses {name!r}, whose second argument must be a number with at most "
                f"{BOUNDED[name]} digits"
            )


def _parts(names: Any) -> Iterator[tuple[str, ...]]:
    """The parts of each name in a Scala sequence. Null elements, which are other nodes, are skipped."""
    between = str(uuid4())
    for i in range(names.size()):
        parts = names.apply(i)
        if parts is not None:
            yield tuple(str(parts.mkString(between)).split(between))


@frozen
class _Nodes:
    """Scala functions that read all nodes of a tree in one call into the JVM.

    One call for each node would take longer than Spark's parser. ``classes``: the class of a node. ``functions``,
    ``columns`` and ``variables`` (names in the body of a lambda): the parts of the name. ``calls``: the node of a
    function. ``literals``: the value. All but ``classes`` return null for other nodes.
    """

    classes: Any
    functions: Any
    columns: Any
    variables: Any
    calls: Any
    literals: Any


@lru_cache(maxsize=2)
def _nodes(jvm: Any) -> _Nodes:
    invoke, lang = jvm.java.lang.invoke, jvm.java.lang
    handles, methods = invoke.MethodHandles, invoke.MethodType
    loader = lang.Thread.currentThread().getContextClassLoader()

    def of(name: str) -> Any:
        return lang.Class.forName(name, True, loader)

    lookup, anything = handles.publicLookup(), of("java.lang.Object")
    to_anything = methods.methodType(anything, anything)
    nothing = handles.dropArguments(handles.constant(anything, None), 0, to_anything.parameterList())
    is_instance = lookup.findVirtual(
        of("java.lang.Class"), "isInstance", methods.methodType(lang.Boolean.TYPE, anything)
    )

    def function(handle: Any) -> Any:
        return invoke.MethodHandleProxies.asInterfaceInstance(of("scala.Function1"), handle.asType(to_anything))

    def only(kind: str, handle: Any) -> Any:
        return function(handles.guardWithTest(is_instance.bindTo(of(kind)), handle.asType(to_anything), nothing))

    def name_parts(kind: str) -> Any:
        found = lookup.findVirtual(of(kind), "nameParts", methods.methodType(of("scala.collection.immutable.Seq")))
        return only(kind, found)

    classes = lookup.findVirtual(anything, "getClass", methods.methodType(of("java.lang.Class")))
    return _Nodes(
        function(classes),
        name_parts(_FUNCTION),
        name_parts(_COLUMN),
        name_parts(_VARIABLE),
        only(_FUNCTION, handles.identity(anything)),
        only(_LITERAL, lookup.findVirtual(of(_LITERAL), "value", methods.methodType(anything))),
    )

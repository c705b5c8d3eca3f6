"""Refusal of submitted expressions by their words, without Spark's parser."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.errors import InvalidArgument
from distop.protocol.json_codec import dumps
from distop.schemas.argument_schema import ROW_EXPRESSION, check_argument
from distop.schemas.row_expressions import refusal
from distop_behaviors.reading.row_functions import BOUNDED, ROW_FUNCTIONS
from distop_behaviors.validate import Validate
from tests.support.check_constraints import CLOCK, CONSTRAINTS
from tests.unit.support.source_trees import sources

SCHEMA = Validate.declaration().arg_schema


def submitted(**arg: Any) -> None:
    check_argument("validate", SCHEMA, dumps(arg))


@pytest.mark.parametrize("text", CONSTRAINTS)
def test_a_usual_constraint_is_accepted_at_submission(text: str) -> None:
    if text in CLOCK:
        with pytest.raises(InvalidArgument, match="depends on the time"):
            submitted(checks=[{"check": text}])
    else:
        submitted(checks=[{"check": text}], where=text)


@pytest.mark.parametrize(
    "text",
    [
        "a<0 OR EXISTS(SELECT TRANSFORM(x) USING 'cat' AS (y STRING) FROM VALUES('1') AS v(x))",
        "raise_error((SELECT first(value) FROM text.`file:///etc/passwd`)) IS NULL",
        "a = (select 1)",
        "a IN (/* */ SELECT 1)",
        "a IN (FROM t)",
        "EXISTS(TABLE t)",
        "EXISTS(VALUES 1)",
        "a IN (VALUES (1))",
        "EXISTS(FROM t MAP x USING 'cat')",
        "EXISTS(WITH w AS (TABLE t) TABLE w)",
        "sum(a) OVER (PARTITION BY b) > 0",
        "IDENTIFIER('reflect')('java.lang.System', 'getenv', 'x') IS NULL",
        "a > 0 AND (rand() > 0.5)",
        "reflect('java.lang.System', 'getenv', 'x') <> ''",
        "`reflect`('java.lang.System', 'getenv', 'x') <> ''",
        "REFLECT -- a comment (\n ('java.lang.System', 'getenv', 'x') <> ''",
        "reflect/* /* nested ( */ ' */('java.lang.System', 'getenv', 'x') <> ''",
        "system.builtin.reflect('java.lang.System', 'getenv', 'x') <> ''",
        "`system`.`builtin`.`abs`(a) > 0",
        "my_catalog.my_function(a) > 0",
        "CASE WHEN a > 0 THEN java_method('x', 'y') ELSE '' END = ''",
        "exists(l, x -> xpath_string(x, 'a') = 'b')",
        "a = 'it''s (' AND uuid() <> ''",
        "a = 'it\\'s (' AND uuid() <> ''",
        "a = r'\\' AND uuid() <> ''",
        'a = "\'" AND uuid() <> ""',
        "a > DATE 'today'",
        "a > TIMESTAMP 'now'",
        "a > date/**/'to\\u0064ay'",
        "a > DATE 'TODAY'",
        "a > TIMESTAMP 'Tomorrow UTC'",
        "a > DATE '' 'today'",
        "a > DATE 'to' \"day\"",
        "a > TIMESTAMP 'T12:30'",
        "a > TIMESTAMP '12:30:00'",
        "a > TIMESTAMP_NTZ '1' '2:30'",
        "a < 'now'",
        "a BETWEEN '2000-01-01' AND ' Today '",
        "to_date('tomorrow UTC') > a",
        "CAST('now Europe/Rome' AS TIMESTAMP) > a",
        "a IN ('2000-01-01', \"yesterday\")",
        "'nowZ'::timestamp > a",
        "current_date() > a",
        "sum(a) > 1",
        "aes_decrypt(a, 'k') = 'x'",
        "from_xml(a, 'b INT', map('rowValidationXSDPath', '/etc/passwd')) IS NULL",
        "repeat(a, 1000000000) <> ''",
        "size(sequence(1, 2147483647)) > 0",
        "any(a)",
        "ſum(a) > 1",
    ],
)
def test_an_expression_that_is_not_allowed_is_refused_at_submission(text: str) -> None:
    for arg in ({"checks": [{"check": text}]}, {"checks": [{"not_null": "a"}], "where": text}):
        with pytest.raises(InvalidArgument) as caught:
            submitted(**arg)
        assert "\n" not in str(caught.value).replace(text, "")


@pytest.mark.parametrize("text", ['"COL" IS NOT NULL', 'length("COL") > 3', '"A" IN (\'x\') AND NOT ("B" IS NULL)'])
def test_an_expression_with_texts_instead_of_columns_is_refused(text: str) -> None:
    """Most databases quote columns so. In Spark they are texts, so the check held for any rows."""
    reason = "names no column, and '\"(COL|A)\"' is a text: write names of columns in back quotes"
    for arg in ({"checks": [{"check": text}]}, {"checks": [{"not_null": "a"}], "where": text}):
        with pytest.raises(InvalidArgument, match=reason):
            submitted(**arg)


@pytest.mark.parametrize("text", ['a = "x"', '`a` = "x"', "1 = 1", 'concat(a, "x") = "ax"', "'x' IS NULL"])
def test_an_expression_with_texts_and_columns_is_accepted(text: str) -> None:
    submitted(checks=[{"check": text}], where=text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a <= getdate()", "the expression uses 'getdate', which depends on the time: write the date with digits"),
        (
            "a = ANY (l)",
            "the expression has a comparison with ANY (use IN (…) for a list of values, array_contains, exists or "
            "forall for an array), which is not allowed: it must read one row with listed functions only",
        ),
        (
            "a IN (SELECT 1)",
            "the expression has a subquery, which is not allowed: it must read one row with listed functions only",
        ),
    ],
)
def test_a_refusal_names_the_reason_and_an_alternative(text: str, reason: str) -> None:
    assert refusal(text, ROW_FUNCTIONS) == reason


def test_the_error_names_the_place_the_function_and_the_list() -> None:
    with pytest.raises(InvalidArgument) as caught:
        submitted(checks=[{"not_null": "a"}, {"check": "lenght(a) > 0"}])
    assert str(caught.value) == (
        "the argument of validate is invalid: at checks[1].check: the expression uses 'lenght', which is not on the "
        "list of allowed functions (did you mean 'length'?): distop behaviors validate --json"
    )


@pytest.mark.parametrize(
    "text",
    [
        "s.select > 0 AND `select` > 0",
        "exists (l, (x) -> (x > 1) AND NOT (x IN (1, 2)))",
        "a LIKE ANY ('x', 'y') OR a LIKE ALL ('z')",
        "cast(a AS varchar(3)) = '' AND try_cast(a AS dec(3, 1)) > 0 AND cast(a AS time(6)) IS NULL",
        "a = 'reflect(' AND b = \"uuid()\" AND `sum(` > 0 -- rand()",
        "over > 0 AND using = 1 AND values + 1 > 2 AND (values IS NULL) AND (table > 1) AND (map IN (1, 2))",
        "a > INTERVAL (1) DAY OR a IS DISTINCT FROM (b)",
        "date '2020-01-01' < a AND a IN ('epoch', 'nowhere', 'now or never', '12:30') AND b RLIKE '^now$'",
        "a = 'unterminated uuid()",
        "a > 0 /* unterminated uuid()",
        "a = $$uuid()$$",
    ],
)
def test_expressions_that_need_a_parser_are_left_to_the_executor(text: str) -> None:
    submitted(checks=[{"check": text}])


def test_the_list_is_published_for_both_expressions() -> None:
    for found in (SCHEMA["properties"]["where"], SCHEMA["$defs"]["Check"]["properties"]["check"]):
        assert found[ROW_EXPRESSION] == sorted(ROW_FUNCTIONS)
    assert ROW_FUNCTIONS.issuperset(BOUNDED)


@given(st.text(max_size=60) | st.text(alphabet="'\"`\\$/*- \n(.)selctab1", max_size=60))
def test_any_text_is_accepted_or_refused_without_an_error(text: str) -> None:
    why = refusal(text, ROW_FUNCTIONS)
    assert why is None or why.startswith("the expression ")


PARSES = {
    *("expr", "selectExpr", "sql", "parseExpression", "parsePlan", "parseQuery", "call_function", "call_udf"),
    *(f"create{how}{what}TempView" for how in ("", "OrReplace") for what in ("", "Global")),
}
"""Functions with which Spark parses a text as an expression or a statement."""
PARSING = {
    "behaviors/reading/spark_expressions.py": "the only module that parses submitted texts",
    "behaviors/validate/violation_columns.py": "a bound from a file's statistics, which is a number",
    "behaviors/validate/key_queries.py": "aggregates of distop's own",
    "behaviors/index/key_lookup.py": "types and quoted names of columns",
    "behaviors/index/row_lookup.py": "a filter of Arrow's, which parses nothing",
    "distop/tables/delta/delta_rows.py": "a comparison of a column with a number",
}


def parses(tree: ast.Module) -> list[int]:
    """The lines that may have Spark parse a text. Conditions that are constants are distop's own."""
    # ``org.apache.spark.sql.X`` is the name of a Java class.
    packages = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in PARSES]
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and may_take_a_text(node)]
    return sorted(node.lineno for node in (*called, *texts) if id(node) not in packages)


def may_take_a_text(call: ast.Call) -> bool:
    """Whether it is ``where`` or ``filter`` with neither a constant nor a column, ``agg`` with names, or a filter of
    pyiceberg's. NumPy's ``where`` takes no text.
    """
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "np":
        return False
    if any(given.arg == "row_filter" for given in call.keywords):
        return True
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name == "agg":
        return any(isinstance(arg, ast.Dict) for arg in given)
    return name in ("where", "filter") and not all(map(is_column, given))


def is_column(condition: ast.expr) -> bool:
    if isinstance(condition, ast.Attribute):
        return condition.attr == "column" and isinstance(condition.value, ast.Call)
    called = condition.func if isinstance(condition, ast.Call) else None
    makes_text = isinstance(called, ast.Attribute) and called.attr in ("format", "join", "replace", "strip", "get")
    return isinstance(condition, ast.Constant) or (called is not None and not makes_text)


@pytest.mark.parametrize(
    "line",
    [
        *("F.expr(x)", "frame.selectExpr(x)", "spark.sql(x)", "f = F.expr", "F.call_udf(x)"),
        *("frame.where(f'{x} > 1')", "frame.where(arg.where)", "frame.filter(text)", "frame.where('a > ' + arg)"),
        *("frame.where('{}'.format(arg))", "frame.where(condition=text)", "frame.where(texts[0])"),
        *("frame.groupBy().agg({x: y})", "frame.createOrReplaceTempView(x)", "table.scan(row_filter=x)"),
    ],
)
def test_lines_in_which_spark_may_parse_a_text_are_found(line: str) -> None:
    assert parses(ast.parse(line))


@pytest.mark.parametrize(
    "line", ["frame.where('a > 1')", "frame.where(unpushed(x))", "frame.where(parsed(s, t).column)", "f.agg(F.max(x))"]
)
def test_lines_that_parse_no_submitted_text_are_not_found(line: str) -> None:
    assert not parses(ast.parse(line))


def test_hole_1_a_submitted_text_is_parsed_in_one_module() -> None:
    """So the list of functions also applies to new behaviors."""
    found = {name: parses(tree) for name, tree in sources()}
    assert {name: lines for name, lines in found.items() if lines and name not in PARSING} == {}
    assert [name for name in PARSING if not found[name]] == [], "exceptions that are not needed any more"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "text",
    [
        "'now" + " " * 400_000 + "x'",
        "'" + " " * 400_000 + "nowx'",
        "'now" + "A" * 400_000 + "\n x'",
        "'nowA" + "/A" * 200_000 + " x'",
        "'now+" + "1:" * 200_000 + "x'",
        "(" * 200_000,
        "a" * 400_000 + "(",
        "/*" * 200_000,
        "`" + "``" * 200_000,
        "-" * 400_000,
        "'" + "''" * 200_000,
        "r'" + "\\'" * 200_000,
        "1" + "e1" * 200_000,
        "'' " * 130_000,
        "date '2020-01-01' " * 20_000,
    ],
    ids=lambda text: text[:6] if isinstance(text, str) else None,
)
def test_hole_7_an_expression_is_checked_in_linear_time(text: str) -> None:
    """A coordinator checks it, too, and its event loop was blocked for minutes."""
    refusal(text, ["abs"])

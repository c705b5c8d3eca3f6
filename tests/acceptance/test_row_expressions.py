"""Submitted expressions run no command, read no file and reveal no secret: the parsed tree is checked by a list."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import ParseException

from distop_behaviors.reading.check_session import session_of
from distop_behaviors.reading.row_functions import BOUNDED, ROW_FUNCTIONS
from distop_behaviors.reading.spark_expressions import ExpressionNotAllowed, java_class, parse_expression
from tests.support.check_constraints import CLOCK, COLUMNS, CONSTRAINTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.acceptance.checked import Table

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]


def why_refused(spark: SparkSession, text: str) -> str | None:
    """The reason for which the check of the parsed tree refuses the expression; None if it is accepted."""
    try:
        parse_expression.__wrapped__(session_of(spark), text)
    except ExpressionNotAllowed as e:
        return str(e)
    except ParseException:
        return "no expression"
    return None


@pytest.fixture
def only_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the check of the text, so that only the check of the parsed tree can refuse an expression."""
    monkeypatch.setattr("distop_behaviors.reading.spark_expressions.refusal", lambda text, functions: None)


def test_hole_1_a_check_runs_no_shell_command(table: Table, tmp_path: Path, only_the_tree: None) -> None:
    table.add("a.parquet", {"a": [1, 2]})
    made = tmp_path / "made by a check"
    command = f'id > "{made}"; cat'
    text = f"a<0 OR EXISTS(SELECT TRANSFORM(x) USING '{command}' AS (y STRING) FROM VALUES('1') AS v(x))"
    ran = table.run({"check": text}, {"check": "a > 0"})
    assert [c["verdict"] for c in ran.report["checks"]] == ["error", "valid"]
    assert ran.report["checks"][0]["error"].startswith("the expression has a subquery, which is not allowed")
    where = table.run({"not_null": "a"}, where=text)
    assert where.message.startswith("where: the expression has a subquery")
    wide = table.run({"unique": "a"}, where=text)
    assert wide.report["checks"][0]["error"].startswith("where: the expression has a subquery")
    assert not made.exists()


@pytest.mark.parametrize("kind", ["text", "csv", "binaryFile", "parquet"])
def test_hole_1_a_check_reads_no_file(table: Table, tmp_path: Path, kind: str, only_the_tree: None) -> None:
    table.add("a.parquet", {"a": [1, 2]})
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    if kind == "parquet":
        secret = table.add("../secret.parquet", {"value": ["the secret"]})
    column = {"csv": "_c0", "binaryFile": "decode(content, 'UTF-8')"}.get(kind, "value")
    read = f"(SELECT first({column}) FROM {kind}.`file://{secret}`)"
    for text in (f"raise_error({read})", f"cast({read} AS int) > 0", f"a > 0 AND {read} <> ''"):
        ran = table.run({"check": text}, statistics="never")
        assert ran.report["checks"][0]["error"].startswith("the expression has a subquery")
        assert "the secret" not in str(ran.report) + ran.message + str(ran.by_name)


@pytest.mark.parametrize(
    "text",
    [
        "reflect('java.lang.System', 'getenv', 'HOME') <> ''",
        "java_method('java.lang.System', 'getenv', 'HOME') <> ''",
        "try_reflect('java.lang.System', 'getenv', 'HOME') <> ''",
        "input_file_name() <> ''",
        "current_user() <> ''",
        "version() <> ''",
        "from_xml(s, 'b INT', map('rowValidationXSDPath', '/etc/passwd')) IS NULL",
        "raise_error(s)",
    ],
)
def test_a_check_cannot_read_settings_of_the_executor(table: Table, text: str) -> None:
    table.add("a.parquet", {"s": ["1"]})
    ran = table.run({"check": text}, statistics="never")
    name = text.partition("(")[0]
    assert ran.report["checks"][0]["error"] == (
        f"the expression uses {name!r}, which is not on the list of allowed functions: distop behaviors validate --json"
    )


def test_variables_in_texts_are_not_replaced_by_values_of_the_executor(table: Table) -> None:
    """Spark's parser once replaced them in texts, and a failing cast put an environment variable into the report."""
    names = ["${env:PATH}", "${system:user.dir}", "${spark.app.id}", "${hiveconf:spark.app.name}"]
    table.add("a.parquet", {"s": names})
    text = ", ".join(f"'{name}'" for name in names)
    for statistics in ("auto", "never"):
        ran = table.run({"check": f"s IN ({text})"}, statistics=statistics, where=f"s IN ({text})")
        assert (ran.report["verdict"], ran.report["checks"][0]["error"]) == ("valid", None)
        ran = table.run({"check": "s = '${env:PATH}'"}, statistics=statistics)
        assert ran.report["checks"][0]["violations"] == 3


def test_two_spellings_of_a_missing_column_fail_no_other_check(table: Table) -> None:
    table.add("a.parquet", {"s": ["1"]})
    checks = [{"check": text} for text in ("user IS NULL", "USER IS NULL", "u\u017fer IS NULL", "s = '1'", "s = '2'")]
    ran = table.run(*checks, statistics="never")
    assert [(check["verdict"], check["error"]) for check in ran.report["checks"][-2:]] == [
        ("valid", None),
        ("violated", None),
    ]
    nowhere = ["user", "USER", "u\u017fer"]
    assert [check["error"] for check in ran.report["checks"][:3]] == [
        f"none of the table's files has the column {name!r}" for name in nowhere
    ]


GRAMMAR = frozenset("! + - ~ not case".split())
"""Operators that SHOW FUNCTIONS lists, and that take an expression in parentheses."""
DISGUISED = {
    "exists(array(0), x -> current_user LIKE 's%')": "'current_user'",
    "exists(array(0), x -> user = 'spark')": "'user'",
    "exists(array(0), x -> current_timestamp > TIMESTAMP '2026-01-01 00:00:00')": "'current_timestamp'",
    "from_json(s, '{}') IS NULL": "'from_json'",
    "`reflect`('java.lang.Math', 'abs', a) > 0": "'reflect'",
    "`ReFlect`/* ( */('java.lang.Math', 'abs', a) > 0": "'ReFlect'",
    "system.builtin.reflect('java.lang.Math', 'abs', a) > 0": "'system.builtin.reflect'",
    "`system.builtin`.abs(a) > 0": "'system.builtin.abs'",
    "builtin.abs(a) > 0": "'builtin.abs'",
    "spark_catalog.default.f(a) > 0": "'spark_catalog.default.f'",
    "`abs(a) OR reflect`(a) > 0": "'abs(a) OR reflect'",
    "CASE WHEN a > 0 THEN uuid() ELSE '' END = ''": "'uuid'",
    "CASE uuid() WHEN '' THEN true END": "'uuid'",
    "CASE WHEN a > 0 THEN '' ELSE uuid() END = ''": "'uuid'",
    "exists(l, x -> reflect('java.lang.Math', 'abs', x) > 0)": "'reflect'",
    "aggregate(l, 0, (x, y) -> x + y, z -> rand() > z)": "'rand'",
    "transform(l, x -> (SELECT 1))[0] = 1": "a subquery",
    "trim(BOTH uuid() FROM s) = ''": "'uuid'",
    "s LIKE uuid()": "'uuid'",
    "a IN (1, rand())": "'rand'",
    "l[rand()] = 1": "'rand'",
    "struct(uuid()).col1 = ''": "'uuid'",
    "struct(*) IS NULL": "'*'",
    "count(*) > 0": "'count'",
    "* ": "'*'",
    "a = (SELECT max(id) FROM range(3))": "a subquery",
    "EXISTS (SELECT /*+ BROADCAST(v) */ 1 FROM VALUES (1) AS v(x))": "a subquery",
    "EXISTS (VALUES (1))": "a subquery",
    "EXISTS (FROM VALUES ('1') AS v(x) MAP x USING 'cat')": "a subquery",
    "a IN (SELECT 1)": "a subquery",
    "(a, a) IN (SELECT 1, 2)": "a subquery",
    "EXISTS (SELECT 1 FROM VALUES (1) AS v(x), LATERAL (SELECT v.x))": "a subquery",
    "EXISTS (TABLE t)": "a subquery",
    "EXISTS (SELECT * FROM text.`file:///etc/passwd`)": "a subquery",
    "f(TABLE(SELECT 1)) > 0": "a subquery",
    "abs(TABLE(t)) > 0": "'TABLE'",
    "IDENTIFIER('reflect')('java.lang.Math', 'abs', a) > 0": "IDENTIFIER",
    "IDENTIFIER('a') > 0": "IDENTIFIER",
    "a > :p": "a parameter marker",
    "a > ?": "a parameter marker",
    "sum(a) OVER () > 0": "a window",
    "row_number() OVER (ORDER BY a) > 0": "a window",
    "sum(a) FILTER (WHERE a > 0) > 0": "'sum'",
    "count(DISTINCT a) > 0": "'count'",
    "any_value(a) > 0": "an aggregate function",
    "first(a) IGNORE NULLS > 0": "'first'",
    "percentile_cont(0.5) WITHIN GROUP (ORDER BY a) > 0": "WITHIN GROUP",
    "mask(s, upperChar => reflect('java.lang.Math', 'abs', a)) > ''": "a named argument",
    "explode(l) > 0": "'explode'",
    "stack(1, a) > 0": "'stack'",
    "a > 0 AS b": "AS",
    "current_date > d": "'current_date'",
    "current_user = s": "'current_user'",
    "round(a, 100000000) > 0": "at most 2 digits",
    "round(a, s) > 0": "at most 2 digits",
    "ceil(a, -1000) > 0": "at most 2 digits",
    "lpad(s, 2147483647, 'x') = s": "at most 4 digits",
    "`+`(a, 1) > 0": "'+'",
    "ab\u017f(a) > 0": "'abſ'",
    "array_insert(l, 1000000000, 1) IS NULL": "'array_insert'",
    "format_string('%1000000000d', a) = ''": "'format_string'",
    "cast(reflect('java.lang.Math', 'abs', a) AS map<string,array<interval day>>) IS NULL": "'reflect'",
    "reflect('java.lang.Math', 'abs', a)::int > 0": "'reflect'",
    "s COLLATE UTF8_LCASE = uuid()": "'uuid'",
    "interval '1' day > make_dt_interval(rand())": "'rand'",
}


@pytest.mark.parametrize("text", DISGUISED)
def test_hole_1_a_forbidden_expression_in_disguise_is_found_in_the_tree(
    spark: SparkSession, text: str, only_the_tree: None
) -> None:
    why = why_refused(spark, text)
    assert why is not None
    assert DISGUISED[text] in why or why == "no expression"


def test_modifiers_of_aggregates_are_errors_of_row_functions(table: Table) -> None:
    table.add("a.parquet", {"a": [1]})
    texts = ("abs(DISTINCT a) > 0", "abs(a) FILTER (WHERE a > 0) > 0", "abs(a) IGNORE NULLS > 0")
    ran = table.run(*({"check": text} for text in texts))
    assert [c["verdict"] for c in ran.report["checks"]] == ["error"] * len(texts)


def test_a_literal_for_the_current_time_is_refused(table: Table) -> None:
    table.add("a.parquet", {"a": [1]})
    for text in ("date'today' > date'2020-01-01'", "TIMESTAMP 'now' IS NULL", "timestamp_ntz 'tod\\u0061y' IS NULL"):
        ran = table.run({"check": text})
        assert "which depends on the time: write the date with digits" in ran.report["checks"][0]["error"]
    for text in ("date('to\\u0064ay') > date'2020-01-01'", "a < 'no' 'w'", "coalesce(a, '\\ttomorrow') IS NULL"):
        ran = table.run({"check": text})
        assert "takes for the time beside a date" in ran.report["checks"][0]["error"], text


@pytest.mark.parametrize(
    "text", ['EXTRACT(DAY FROM "a") = 1', "\"a\" LIKE 'x%' ESCAPE '!'", 'CASE WHEN "a" > 0 THEN TRUE END']
)
def test_a_text_in_double_quotes_is_reported_as_no_column(table: Table, text: str) -> None:
    table.add("a.parquet", {"a": [1]})
    ran = table.run({"check": text})
    assert "names no column, and '\"a\"' is a text" in ran.report["checks"][0]["error"]


def test_hole_1_each_function_is_on_the_list_or_refused(spark: SparkSession, only_the_tree: None) -> None:
    """This covers calls with and without arguments, and quoted names. Some names are words of the grammar (NOT)."""
    names = [row[0] for row in session_of(spark).sql("SHOW FUNCTIONS").collect()]
    assert len(names) > 400
    for name in names:
        listed = name in ROW_FUNCTIONS
        quoted = why_refused(spark, f"`{name}`(a, 1)")
        assert (quoted is None) == listed, (name, quoted)
        for given in ("", "a", "a, 1", "a, 'x', 1"):
            why = why_refused(spark, f"{name}({given})")
            if listed:
                assert why in (None, "no expression") or name in BOUNDED, (name, given, why)
            elif why is None:
                assert name in GRAMMAR, (name, given)


CATALYST = "org.apache.spark.sql.catalyst.expressions"
KINDS = (
    *("Nondeterministic", "Unevaluable", "Generator", "aggregate.AggregateFunction", "WindowFunction"),
    "UserDefinedExpression",
)
"""Forbidden kinds of Spark's expressions: their result depends on more than their arguments, or on several rows."""
FORBIDDEN_CLASSES = frozenset(
    """
    CurrentDate CurrentTime CurrentTimestamp LocalTimestamp Now UnixTimestamp ConvertTimezone
    SparkVersion CallMethodViaReflection TryReflect
    ArrayInsert ArrayRepeat FormatString Sequence StringRepeat StringSpace
    CsvToStructs FromAvro FromProtobuf JsonToStructs XmlToStructs
    """.split()
)
"""Forbidden classes of other kinds: they depend on time or place, call code, make results of any size, or parse types.
"""
BUILDERS = frozenset(
    """
    Ceil Collate Contains DatePart EndsWith Floor Hour LPad MakeTimestamp MakeTimestampLTZ MakeTimestampNTZ Mask Minute
    ParseJson ParseToTimestampLTZ ParseToTimestampNTZ RPad Second StartsWith TryMakeTimestamp TryMakeTimestampLTZ
    TryMakeTimestampNTZ TryParseJson TryToDate TryToTime TryToTimestamp
    """.split()
)
"""Builder classes, which hide the kind of their function; these were reviewed."""


def why_unfit(spark: SparkSession, function: str) -> list[str]:
    """The reasons against listing this function, from its class in Spark."""
    description = session_of(spark).sql(f"DESCRIBE FUNCTION `{function}`").collect()
    (name,) = [row[0].removeprefix("Class: ") for row in description if row[0].startswith("Class: ")]
    simple, jvm = name.rpartition(".")[2], spark._jvm
    assert jvm is not None
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    names = (name, *(f"{CATALYST}.{kind}" for kind in KINDS))
    own, *kinds = (jvm.java.lang.Class.forName(one, False, loader) for one in names)
    found = [kind for kind, java in zip(KINDS, kinds, strict=True) if java.isAssignableFrom(own)]
    reviewed = {"ToCharacterBuilder", *(f"{one}ExpressionBuilder" for one in BUILDERS)}
    if simple.endswith("Builder") and simple not in reviewed:
        found.append("built by a class that was not reviewed")
    return found + [simple] * (simple in FORBIDDEN_CLASSES)


def test_hole_1_no_listed_function_depends_on_more_than_its_arguments(spark: SparkSession) -> None:
    assert {name: why for name in ROW_FUNCTIONS if (why := why_unfit(spark, name))} == {}


UNFIT = """
array_repeat count current_catalog current_database current_date current_timezone current_user explode from_json
input_file_block_length input_file_block_start input_file_name java_method localtimestamp monotonically_increasing_id
now rand randn randstr reflect row_number sequence session_user spark_partition_id sum try_reflect unix_timestamp user
uuid variant_get version
"""


@pytest.mark.parametrize("function", UNFIT.split())
def test_an_unfit_function_has_a_reason(spark: SparkSession, function: str) -> None:
    assert why_unfit(spark, function)


def expressions_in_the_docs() -> dict[str, str]:
    """Expression in the docs → the file that has it."""
    found = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*"))):
        text = path.read_text() if path.suffix in (".md", ".py", ".json", ".toml", ".sh") else ""
        found |= {json.loads(one): path.name for one in re.findall(r'"(?:check|where)": ("(?:[^"\\]|\\.)+")', text)}
    page = (ROOT / "docs/reference/validate.md").read_text()
    _, _, table = page.partition("| written | in Spark | write |\n|---|---|---|\n")
    for line in table.partition("\n\n")[0].splitlines():
        quoted = line.split(" | ")[-1].rstrip("| ")
        advised = quoted[3:-3] if quoted.startswith("`` ") else quoted.strip("`")
        found[f"a {advised}" if advised.startswith("RLIKE") else advised] = "validate.md"
    return found


def test_expressions_in_the_docs_are_accepted(spark: SparkSession) -> None:
    shown = {text: file for text, file in expressions_in_the_docs().items() if not text.startswith(("r'", "\\"))}
    assert len(shown) >= 8
    assert {(file, text, why) for text, file in shown.items() if (why := why_refused(spark, text)) is not None} == set()


def test_each_operator_is_a_node_on_the_list(spark: SparkSession) -> None:
    for operator in "+ - * / % & | ^ << >> >>> = == < > <= >= <=> || <> != AND OR DIV LIKE ILIKE RLIKE REGEXP".split():
        assert why_refused(spark, f"a {operator} b") is None, operator
    for text in ("!a", "NOT a", "-a", "+a", "~a", "a IS UNKNOWN", "a IS NOT UNKNOWN", "a IN (b)", "a NOT IN (b)"):
        assert why_refused(spark, text) is None, text
    for quantified in ("LIKE ALL", "NOT LIKE ALL", "LIKE ANY", "NOT LIKE ANY", "ILIKE ANY", "NOT ILIKE ALL"):
        assert why_refused(spark, f"a {quantified} ('x', 'y')") is None, quantified


def test_each_listed_function_exists(spark: SparkSession) -> None:
    known = {row[0] for row in session_of(spark).sql("SHOW FUNCTIONS").collect()}
    assert known >= ROW_FUNCTIONS


def test_usual_constraints_are_accepted_and_deterministic(spark: SparkSession) -> None:
    """They are analysed on a table with their columns."""
    session = session_of(spark)
    frame = session.createDataFrame([], COLUMNS)
    accepted, refused = [], []
    for text in CONSTRAINTS:
        try:
            accepted.append(parse_expression(session, text).column)
        except ExpressionNotAllowed:
            refused.append(text)
    assert tuple(refused) == CLOCK
    assert len(accepted) >= 0.95 * len(CONSTRAINTS)
    types = frame.select(*accepted)
    assert {field.dataType.typeName() for field in types.schema} == {"boolean"}
    assert types._jdf.queryExecution().analyzed().deterministic()


def test_a_column_with_the_name_of_a_function_is_a_column(table: Table) -> None:
    table.add("a.parquet", {"user": ["a", "b"], "select": [1, 2], "a, b": [1, 2], "filter": [1, 1]})
    checks = [{"check": c} for c in ("user <> 'b'", "`select` > 1", "`a, b` > 1", "filter + 0 > 1")]
    assert table.agrees(*checks) == [("violated", 1), ("violated", 1), ("violated", 1), ("violated", 2)]


def test_the_checked_tree_is_the_one_that_runs(spark: SparkSession, only_the_tree: None) -> None:
    """With settings of the active session, the same text could be another expression."""
    session = session_of(spark)
    text = r'''"\" > 0 OR uuid() = " <> s OR s <> "-- \""'''
    frame = session.sql("SELECT 'x' AS s")
    setting = "spark.sql.ansi.doubleQuotedIdentifiers"
    spark.conf.set(setting, "true")
    java_class(spark._jvm, "org.apache.spark.sql.classic.SparkSession").setActiveSession(spark._jsparkSession)
    try:
        found = parse_expression(session, text)
        assert found.names == ("s",)
        assert frame.where(found.column)._jdf.queryExecution().analyzed().deterministic()
    finally:
        spark.conf.unset(setting)

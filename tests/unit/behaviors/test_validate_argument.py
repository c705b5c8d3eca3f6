"""The argument of validate: the models, and the schema that clients check with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
from jsonschema.exceptions import best_match
from pydantic import ValidationError

from distop.errors import InvalidArgument
from distop.schemas.argument_schema import check_argument
from distop_behaviors.validate import Validate
from distop_behaviors.validate.validate_argument import Argument

CONTRACT: dict[str, Any] = {
    "checks": [
        {"not_null": "tailnum"},
        {"range": {"column": "distance", "min": 0, "max": 6000}},
        {"fits": {"column": "flight", "type": "smallint"}},
        {"check": "dep_delay IS NULL OR dep_delay > -120", "name": "sane_delay"},
        {"in_set": {"column": "origin", "values": ["EWR", "JFK", "LGA"]}},
        {"length": {"column": "carrier", "min": 2, "max": 2}},
        {"matches": {"column": "tailnum", "pattern": "^N[0-9A-Z]+$"}},
    ],
    "where": "month = 1",
    "null_is": "pass",
    "statistics": "auto",
    "max_violations": None,
    "sample": 20,
}
SCHEMA = Validate.declaration().arg_schema


def refusal(arg: Any) -> str:
    found = best_match(jsonschema.Draft202012Validator(SCHEMA).iter_errors(arg))
    assert found is not None, arg
    return f"{found.json_path}: {found.message}"


def test_the_example_of_the_contract_is_valid() -> None:
    jsonschema.validate(CONTRACT, SCHEMA)
    argument = Argument.model_validate(CONTRACT)
    assert argument.names() == [
        *["tailnum_not_null", "distance_range", "flight_fits_smallint", "sane_delay", "origin_in_set"],
        *["carrier_length", "tailnum_matches"],
    ]
    assert [c.as_given() for c in argument.checks] == [
        {k: v for k, v in c.items() if k != "name"} for c in CONTRACT["checks"]
    ]


def test_the_columns_of_references_are_paired_at_the_start() -> None:
    good = {"references": {"table": "t", "columns": ["a", "b"], "to": ["c", "d"]}}
    argument = Argument.model_validate(check_argument("validate", SCHEMA, json.dumps({"checks": [good]}).encode()))
    assert argument.names() == ["a_b_references_t"]
    for wrong, words in (
        ({**good["references"], "to": ["c"]}, "columns has 2 items and to has 1"),
        ({"table": "t", "column": "a"}, "'to' is missing"),
        ({"table": "t", "to": "a"}, "exactly one of column, columns must be given"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            check_argument("validate", SCHEMA, json.dumps({"checks": [{"references": wrong}]}).encode())
        with pytest.raises(ValidationError):
            Argument.model_validate({"checks": [{"references": wrong}]})


def test_default_names_are_unique() -> None:
    checks = [
        {"not_null": "a"},
        {"check": "a > 1"},
        {"not_null": "a"},
        {"check": "a > 2"},
        {"check": "1", "name": "check_2"},
    ]
    names = Argument.model_validate({"checks": checks}).names()
    assert names == ["a_not_null", "check", "a_not_null_2", "check_3", "check_2"]


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ({"not_nul": "x"}, "'not_nul'"),
        ({"not_null": 3}, "$.checks[0].not_null: 3"),
        ({"not_null": "a", "check": "b"}, "too many properties"),
        ({"name": "q"}, "enough properties"),
        ({"unique": []}, "checks[0].unique: []"),
        ({"unique": ["a", "a"]}, "checks[0].unique: ['a', 'a']"),
        ({"references": {"table": "t", "column": "c"}}, "enough properties"),
        ({"references": {"table": "t", "column": "c", "columns": ["c"], "to": "k"}}, "too many properties"),
        ({"references": {"table": "t", "column": "c", "to": ["k"]}}, "references.to: ['k']"),
        ({"references": {"table": "t", "columns": ["c"], "to": "k"}}, "references.to: 'k'"),
        ({"range": {"column": "a"}}, "range: {'column': 'a'} does not have enough properties"),
        ({"range": {"column": "a", "min": True}}, "range.min: True"),
        ({"range": {"colum": "a", "min": 1}}, "'colum'"),
        ({"in_set": {"column": "a", "values": []}}, "in_set.values"),
        ({"length": {"column": "a", "min": -1}}, "length.min: -1"),
        ("tailnum", "$.checks[0]: 'tailnum'"),
    ],
)
def test_the_error_names_the_invalid_check(check: Any, words: str) -> None:
    assert words in refusal({"checks": [check]})
    with pytest.raises(ValidationError):
        Argument.model_validate({"checks": [check]})


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ({}, "'checks' is a required property"),
        ({"checks": []}, "$.checks"),
        ({"checks": [{"not_null": "a"}], "sampel": 1}, "'sampel'"),
        ({"checks": [{"not_null": "a"}], "sample": -1}, "$.sample: -1"),
        ({"checks": [{"not_null": "a"}], "statistics": "x"}, "'auto', 'only', 'never'"),
        ({"checks": [{"not_null": "a"}], "since": {}}, "$.since: {} is not of type 'string'"),
        ({"checks": [{"not_null": "a"}], "max_violations": 0}, "$.max_violations: 0"),
    ],
)
def test_the_error_names_the_invalid_option(arg: Any, words: str) -> None:
    assert words in refusal(arg)
    with pytest.raises(ValidationError):
        Argument.model_validate(arg)


@pytest.mark.parametrize(
    "kind",
    [
        *["blob", "foo", "struct<a:int>", "int; drop", "int foo", "", "char", "varchar(0)"],
        *["decimal(39,2)", "decimal(0)", "numeric(5,05)", "dec(38,39)", "decimal(9,2", "int(3)"],
    ],
)
def test_fits_needs_a_type_of_single_values(kind: str) -> None:
    arg = {"checks": [{"fits": {"column": "a", "type": kind}}]}
    assert refusal(arg).startswith(f"$.checks[0].fits.type: {kind!r} does not match")
    with pytest.raises(ValidationError, match="is not a Spark SQL type of a single value, such as smallint"):
        Argument.model_validate(arg)


def test_a_decimal_has_no_more_places_than_digits() -> None:
    with pytest.raises(ValidationError, match="'decimal\\(5,10\\)' has more decimal places than digits"):
        Argument.model_validate({"checks": [{"fits": {"column": "a", "type": "decimal(5,10)"}}]})


@pytest.mark.parametrize(
    "kind",
    [
        *["smallint", "BIGINT", "Timestamp_NTZ", " int ", "decimal", "numeric(9)", "DECIMAL(9,2)", "dec( 38 , 38 )"],
        *["decimal(10,10)", "decimal(20,19)", "decimal(9,9)", "varchar(20)", "CHAR( 1 )"],
    ],
)
def test_fits_accepts_the_spellings_of_spark(kind: str) -> None:
    arg = {"checks": [{"fits": {"column": "a", "type": kind}}]}
    jsonschema.validate(arg, SCHEMA)
    Argument.model_validate(arg)


def test_a_decimal_of_more_places_than_digits_is_refused_when_the_operation_is_submitted() -> None:
    """By the schema alone, for each pair of numbers."""
    pattern = re.compile(SCHEMA["$defs"]["Fits"]["properties"]["type"]["pattern"])
    for digits in range(1, 39):
        for places in range(39):
            for kind in (f"decimal({digits},{places})", f" DEC( {digits} , {places} ) "):
                assert bool(pattern.search(kind)) == (places <= digits), kind
    arg = {"checks": [{"fits": {"column": "a", "type": "decimal(2,5)"}}]}
    with pytest.raises(InvalidArgument, match=r"at checks\[0\].fits.type: .*decimal\(2,5\).* is not a Spark SQL type"):
        check_argument("validate", SCHEMA, json.dumps(arg).encode())


def test_two_checks_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError) as refused:
        Argument.model_validate({"checks": [{"not_null": "a", "name": "n"}, {"not_null": "b", "name": "n"}]})
    assert [e["msg"] for e in refused.value.errors()] == ["two checks are named 'n'"]


def test_two_checks_of_one_name_are_refused_when_the_operation_is_submitted() -> None:
    def submitted(*checks: dict[str, str]) -> None:
        check_argument("validate", SCHEMA, json.dumps({"checks": checks}).encode())

    submitted({"not_null": "a"}, {"not_null": "a"}, {"not_null": "a", "name": "n"})
    with pytest.raises(InvalidArgument, match='at checks: two items have the name "n"'):
        submitted({"not_null": "a", "name": "n"}, {"not_null": "b", "name": "n"})


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"sample": 2.0}, True),
        ({"sample": 2.5}, False),
        ({"sample": True}, False),
        ({"sample": "2"}, False),
        ({"sample": -1.0}, False),
        ({"max_violations": 3.0}, True),
        ({"max_violations": 0.0}, False),
        ({"max_violations": None}, True),
        ({"checks": [{"length": {"column": "a", "min": 2.0}}]}, True),
        ({"checks": [{"length": {"column": "a", "min": 2.5}}]}, False),
        ({"checks": [{"length": {"column": "a", "max": False}}]}, False),
        ({"checks": [{"range": {"column": "a", "min": 1, "max": 2.5}}]}, True),
        *(
            ({"checks": [{kind: {"column": "a", "min": low, "max": high}}]}, fits)
            for kind, low, high, fits in (
                ("range", 2, 1, False),
                ("range", 2.5, 2, False),
                ("range", 2, 2.0, True),
                ("range", "2013-02-01", "2013-01-31", False),
                ("range", "2013-01-31", "2013-01-31", True),
                ("range", "2", "10", True),
                ("range", "0.5", "0.05", True),
                ("range", "b", "a", True),
                ("range", 2, "1", True),
                ("length", 3, 2, False),
                ("length", 3.0, 2, False),
                ("length", 2, 2, True),
            )
        ),
    ],
)
def test_arguments_accepted_at_submission_are_accepted_by_the_jobs(change: dict[str, Any], *, fits: bool) -> None:
    """JSON has one kind of number: 2.0 is a whole number."""
    arg = {"checks": [{"not_null": "a"}], **change}
    refused = []
    for look in (
        lambda: check_argument("validate", SCHEMA, json.dumps(arg).encode()),
        lambda: Argument.model_validate(arg),
    ):
        try:
            look()
        except (InvalidArgument, ValidationError) as error:
            refused.append(str(error))
    assert len(refused) == (0 if fits else 2), refused


def test_the_declaration_of_validate() -> None:
    declared = Validate.declaration()
    assert (declared.type_name, declared.failure_policy, declared.batch, declared.completes, declared.can_fail) == (
        "validate",
        "collect_all",
        True,
        True,
        True,
    )


def test_importing_the_behavior_loads_no_data_library() -> None:
    code = "import sys, distop_behaviors.validate\nassert not {'pyspark', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

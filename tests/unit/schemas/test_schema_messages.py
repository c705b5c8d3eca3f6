"""Errors of an argument that does not match the schema of its behavior."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from distop.errors import InvalidArgument
from distop.protocol.json_codec import dumps
from distop.schemas.argument_schema import NOT_YET, ORDERED, UNIQUE_BY, check_argument, encode_argument


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Bounds(Strict):
    column: str
    low: int | float | str | None = None


class Range(Strict):
    range: Bounds


class NotNull(Strict):
    not_null: str


class Choice(Strict):
    """One of two fields, with an optional name; a third field is not available yet."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "properties": {
                "name": {"type": "string"},
                "left": {"type": "string"},
                "right": {"type": "string", "pattern": "^r", "description": "a word with r"},
                "middle": {"enum": [NOT_YET]},
            },
            "if": {"required": ["name"]},
            "then": {"minProperties": 2, "maxProperties": 2},
            "else": {"minProperties": 1, "maxProperties": 1},
        },
    )


class Arg(Strict):
    choice: Choice | None = None
    few: list[int] = Field([], max_length=2)
    checks: list[NotNull | Range] = Field(min_length=1)
    mode: Literal["auto", "never"] = "auto"
    sample: int = Field(20, ge=0, le=1000)


SCHEMA = Arg.model_json_schema()


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ({}, "'checks' is missing"),
        ({"checks": []}, "at checks: at least 1 item must be given"),
        ({"checks": "x"}, 'at checks: "x" is not of type array'),
        ({"checks": [{"not_null": 5}]}, "at checks[0].not_null: 5 is not of type string"),
        ({"checks": [{"not_null": None}]}, "at checks[0].not_null: null is not of type string"),
        ({"checks": [{"not_null": "a"}, {"range": {"low": 1}}]}, "at checks[1].range: 'column' is missing"),
        (
            {"checks": [{"range": {"column": "a", "lo": 1}}]},
            "checks[0].range: unknown field 'lo' (did you mean 'low'? ",
        ),
        ({"checks": [{"no_null": "a"}]}, 'checks[0]: {"no_null": "a"} matches none'),
        ({"checks": [7]}, "at checks[0]: 7 matches none of the allowed forms (NotNull, Range)"),
        ({"checks": [{"not_null": "a"}], "mode": "on"}, 'at mode: "on" is none of "auto", "never"'),
        ({"checks": [{"not_null": "a"}], "sample": -1}, "at sample: -1 is less than the minimum of 0"),
        ({"checks": [{"not_null": "a"}], "smaple": 1}, "'smaple' (did you mean 'sample'? known: choice, few"),
        ({"checks": [{"not_null": "a"}], "few": [1, 2, 3]}, "at few: at most 2 items may be given, not 3"),
        ([], "[] is not of type object"),
    ],
)
def test_the_error_names_the_place_and_the_problem(arg: Any, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_argument("sample", SCHEMA, dumps(arg))
    text = str(caught.value)
    assert text.startswith("the argument of sample is invalid: ")
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({}, "at choice: exactly one of left, right must be given (here: none)"),
        ({"name": "n"}, "at choice: exactly one of left, right must be given (here: none)"),
        ({"left": "l", "right": "r"}, "exactly one of left, right must be given (here: 'left' and 'right')"),
        ({"name": "n", "left": "l", "right": "r"}, "(here: 'left' and 'right')"),
        ({"middle": 1}, "at choice: 'middle' is not available yet"),
        ({"up": 1}, "at choice: unknown field 'up' (known: name, left, right)"),
        ({"right": "wrong"}, 'at choice.right: "wrong" is not a word with r'),
    ],
)
def test_the_error_of_a_choice_names_its_fields(choice: Any, words: str) -> None:
    schema = {"type": "object", "properties": {"choice": {"$ref": "#/$defs/Choice"}}, "$defs": SCHEMA["$defs"]}
    with pytest.raises(InvalidArgument) as caught:
        check_argument("sample", schema, dumps({"choice": choice}))
    assert words in str(caught.value)


def test_a_valid_argument_is_returned() -> None:
    arg = {"checks": [{"not_null": "a"}, {"range": {"column": "b", "low": "2013-01-01"}}]}
    assert check_argument("sample", SCHEMA, dumps(arg)) == arg
    nullable = {"checks": [{"range": {"column": "b", "low": None}}], "choice": None}
    assert check_argument("sample", SCHEMA, dumps(nullable)) == nullable
    assert check_argument("sample", {}, b"5") == 5


def test_arguments_are_encoded_as_json() -> None:
    assert encode_argument(None) == b"{}"
    assert encode_argument(Arg(checks=[NotNull(not_null="ü")])) == '{"checks":[{"not_null":"ü"}]}'.encode()
    for wrong in ({1, 2}, {"a": float("nan")}, {"a": float("inf")}):
        with pytest.raises(InvalidArgument):
            encode_argument(wrong)
    with pytest.raises(InvalidArgument, match="512 KiB"):
        encode_argument("x" * 530_000)
    encode_argument({"NaN": "Infinity"})


def test_two_items_with_the_same_name_are_refused() -> None:
    schema = {"properties": {"parts": {"type": "array", UNIQUE_BY: "name"}}}
    for parts in (
        [],
        [{"name": "a"}, {"name": "b"}],
        [{}, {}],
        [{"name": None}, {"name": None}],
        ["a", "a"],
        "no list",
    ):
        check_argument("t", {"properties": {"parts": {UNIQUE_BY: "name"}}}, dumps({"parts": parts}))
    twice = dumps({"parts": [{"name": "a"}, {}, {"name": "é"}, {"name": "é"}]})
    with pytest.raises(InvalidArgument) as caught:
        check_argument("t", schema, twice)
    assert str(caught.value) == 'the argument of t is invalid: at parts: two items have the name "é"'


@pytest.mark.parametrize(
    ("between", "words"),
    [
        ({"low": 2, "high": 1}, "low (2) is greater than high (1)"),
        ({"low": 9007199254740993, "high": 9007199254740992.0}, "is greater than"),
        ({"low": "2013-02-01", "high": "2013-01-31"}, 'low ("2013-02-01") is greater than high ("2013-01-31")'),
        ({"low": 1, "high": 1.0}, ""),
        ({"low": 2}, ""),
        ({"low": None, "high": 1}, ""),
        ({"low": True, "high": False}, ""),
        ({"low": "2", "high": "10"}, ""),  # a number to one column, a text to another
        ({"low": "2013-02-01 00:00", "high": "2013-01-31"}, ""),
        ({"low": 2, "high": "1"}, ""),
        ([2, 1], ""),
    ],
)
def test_ordered_fields_in_the_wrong_order_are_refused(between: Any, words: str) -> None:
    schema = {"properties": {"between": {ORDERED: ["low", "high"]}}}
    if not words:
        check_argument("t", schema, dumps({"between": between}))
        return
    with pytest.raises(InvalidArgument) as caught:
        check_argument("t", schema, dumps({"between": between}))
    assert str(caught.value).startswith("the argument of t is invalid: at between: ")
    assert words in str(caught.value)

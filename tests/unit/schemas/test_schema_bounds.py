"""Schemas are data (SECURITY.md): evaluating one fetches nothing, and takes bounded time and memory."""

from __future__ import annotations

import http.server
import threading
from typing import Any

import pytest
from pydantic import BaseModel, Field

from distop.behavior import Behavior
from distop.errors import InvalidArgument, UnreadableRecord
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.json_codec import dumps
from distop.schemas.argument_schema import check_argument
from distop.schemas.parameters import parameters
from distop.schemas.schema_bounds import DIALECT, MAX_BYTES, MAX_DEPTH
from distop.services.claims.types_without_code import TypeOptions

NESTED: dict[str, Any] = {}
for _ in range(MAX_DEPTH):
    NESTED = {"properties": {"a": NESTED}}

WRONG = [
    ({"$ref": "http://127.0.0.1:9/schema.json"}, "leads out of the schema"),
    ({"$ref": "file:///etc/passwd"}, "leads out of the schema"),
    ({"properties": {"a": {"$ref": "other.json#/x"}}}, "leads out of the schema"),
    ({"properties": {"a": {"$dynamicRef": "http://127.0.0.1:9/#x"}}}, "leads out of the schema"),
    # A reference makes a schema of a plain value.
    ({"$ref": "#/default", "default": {"$ref": "http://127.0.0.1:9/"}}, "leads out of the schema"),
    ({"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#"}}}, "is not https://json-schema.org"),
    ({"$schema": "http://json-schema.org/draft-07/schema#"}, "is not https://json-schema.org"),
    ({"properties": {"a": {"pattern": "(?=a)a"}}}, "not supported by RE2"),
    ({"properties": {"a": {"pattern": r"(a)\1"}}}, "not supported by RE2"),
    ({"patternProperties": {"(": {}}}, "not supported by RE2"),
    ({"pattern": "((a{1000}){10}){10}"}, "not supported by RE2"),
    ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "combines patternProperties with"),
    ({"description": "x" * MAX_BYTES}, "at most 131072 are allowed"),
    (NESTED, "levels deep"),
    ({"type": "nothing"}, "nothing"),
    ({"x-ordered": ["a"]}, "names no fields"),
    ({"x-row-expression": "abs"}, "names no functions"),
]


@pytest.mark.parametrize(("schema", "why"), WRONG, ids=[why + str(n) for n, (_, why) in enumerate(WRONG)])
def test_hole_7_an_unsafe_schema_is_refused_when_the_type_is_declared(schema: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        declared(schema)
    with pytest.raises(InvalidArgument, match=why):
        declared({}, schema)


@pytest.mark.parametrize(("schema", "why"), WRONG, ids=[why + str(n) for n, (_, why) in enumerate(WRONG)])
def test_hole_7_a_published_schema_is_checked_again_at_submission(schema: Any, why: str) -> None:
    """A user with write access to etcd can publish it without register_type."""
    with pytest.raises(UnreadableRecord, match=f"the published schema of greedy cannot be used: .*{why}"):
        check_argument("greedy", schema, dumps({"a": "b"}))


def declared(arg: Any, result: Any = None) -> Declaration:
    return TypeOptions(result_schema=result).declaration("greedy", arg)


def test_hole_7_a_behavior_is_not_published_with_a_pattern_that_may_take_exponential_time() -> None:
    class Arg(BaseModel):
        a: str = Field(json_schema_extra={"pattern": "(?=a)a"})

    class Greedy(Behavior):
        type_name = "greedy"

        def start_or_resume_job(self, arg: Any, partition: Any, ctx: Any) -> None:
            pass

    Greedy.Arg = Arg
    with pytest.raises(InvalidArgument, match="behavior greedy: the JSON schema of Arg cannot be published: .*RE2"):
        Greedy.declaration()


def test_hole_7_no_reference_is_fetched() -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        schema = {"properties": {"a": {"$ref": f"http://127.0.0.1:{server.server_port}/schema.json"}}}
        with pytest.raises(UnreadableRecord):
            check_argument("greedy", schema, dumps({"a": 1}))
        server.shutdown()
    assert asked == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"pattern": "^(a+)+$"}}},
        {"patternProperties": {"^(a+)+$": False}, "propertyNames": {"pattern": "^(a+)+$"}},
        {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
        # By its dialect the library would choose a class with Python's patterns.
        {
            "$schema": DIALECT,
            "properties": {"a": {"pattern": "^(a+)+$"}, "b": {"$ref": "#"}},
            "additionalProperties": False,
        },
    ],
)
def test_hole_7_patterns_take_linear_time(schema: Any) -> None:
    long = "a" * 40_000 + "!"
    with pytest.raises(InvalidArgument, match="is invalid"):
        check_argument("greedy", schema, dumps({"a": long, long: 1, "b": {"a": long}}))


def chained(levels: int) -> Any:
    """A schema in which each level refers to the next one twice."""
    steps = {f"s{n}": {"allOf": [{"$ref": f"#/$defs/s{n + 1}"}] * 2} for n in range(levels)}
    return {"$ref": "#/$defs/s0", "$defs": {**steps, f"s{levels}": {"type": "object"}}}


@pytest.mark.parametrize(
    "schema", [chained(60), {"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}]
)
def test_hole_7_references_that_multiply_are_refused(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few = 1_000  # the real limit takes ten seconds
    monkeypatch.setattr("distop.schemas.argument_schema.MAX_STEPS", few)
    with pytest.raises(InvalidArgument, match="takes too long to check"):
        check_argument("greedy", schema, dumps({}), steps=few)


def test_a_reference_to_a_missing_definition_is_reported() -> None:
    with pytest.raises(UnreadableRecord, match="has a reference to a missing definition"):
        check_argument("greedy", {"$ref": "#/$defs/a"}, dumps({}))


def test_formats_are_not_checked() -> None:
    schema = {"properties": {"a": {"format": "regex"}, "b": {"format": "date"}}}
    check_argument("greedy", schema, dumps({"a": "(", "b": "never"}))
    declared({"properties": {"a": {"format": "regex", "pattern": "^a"}}})


@pytest.mark.timeout(20)
def test_unique_items_are_checked_in_linear_time() -> None:
    schema = {"type": "array", "uniqueItems": True}
    items: list[Any] = [[n, str(n)] if n % 2 else {"n": n} for n in range(20_000)]
    check_argument("t", schema, dumps([*items, 1, True]))
    with pytest.raises(InvalidArgument, match="it has two equal items"):
        check_argument("t", schema, dumps([*items, 1, 1.0]))


def test_properties_may_have_the_names_of_keywords() -> None:
    names = ("$ref", "$schema", "pattern", "patternProperties", "x-unique-by", "x-ordered")
    schema = {"properties": {name: {"type": "string"} for name in names}, "additionalProperties": False}
    declared(schema)
    check_argument("t", schema, dumps(dict.fromkeys(names, "x")))
    with pytest.raises(InvalidArgument, match="unknown field 'other'"):
        check_argument("t", schema, dumps({"other": "x"}))


def test_a_pattern_may_meet_a_lone_surrogate() -> None:
    check_argument("t", {"properties": {"a": {"pattern": "^a"}}}, rb'{"a": "a\ud800"}')


@pytest.mark.timeout(20)
def test_hole_7_parameters_of_a_hostile_schema_are_read_in_bounded_time() -> None:
    both = {f"s{n}": {"type": "string", "anyOf": [{"$ref": f"#/$defs/s{n + 1}"}] * 2} for n in range(60)}
    schema = {"properties": {"a": {"$ref": "#/$defs/s0"}}, "$defs": {**both, "s60": {"type": "string", "enum": []}}}
    assert [one.name for one in parameters(schema)] == ["a"]
    loop = {
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"type": "string", "anyOf": [{"$ref": "#/$defs/a"}]}},
    }
    assert [one.name for one in parameters(loop)] == ["a"]
    for wrong in ({"properties": []}, {"properties": {"a": {"$ref": "http://127.0.0.1:9/"}}}):
        assert parameters(wrong) == ()


def test_hole_7_errors_of_nested_alternatives_take_bounded_memory() -> None:
    depth, names = 14, [f"a{n}" for n in range(15)]
    defs: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{names[n + 1]}"}] * 2} for n, name in enumerate(names[:depth])
    }
    defs[names[depth]] = {"type": "null"}
    schema = {"$defs": defs, "properties": {"a": {"$ref": "#/$defs/a0"}}}
    with pytest.raises(InvalidArgument, match="takes too long to check"):
        check_argument("t", schema, dumps({"a": "x" * 50_000}))

"""Ids and rules of combination, as pure functions of what a behavior publishes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from distop.behavior import Behavior
from distop.errors import InvalidArgument
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.identity import RULES, combined, computed_id, differing
from distop.protocol.json_codec import dumps, loads
from distop.protocol.keys import Keys

SCHEMA = {
    "properties": {
        "path": {"type": "string"},
        "depth": {"type": "integer", "default": 1},
        "files": {"type": "array", "default": []},
        "note": {"type": "string"},
    }
}


def declaration(*fields: str, **rules: str) -> Declaration:
    return Declaration("purge", SCHEMA, id_fields=fields, combine=rules)


def id_of(arg: Any, *fields: str, table: str = "t") -> str | None:
    return computed_id(declaration(*fields), table, dumps(arg))


def test_P16_an_id_depends_on_type_table_and_field_values() -> None:
    one = id_of({"path": "a", "note": "x"}, "path")
    assert one == id_of({"note": "y", "path": "a"}, "path"), "other fields, and their order, do not matter"
    assert one != id_of({"path": "b"}, "path")
    assert one != id_of({"path": "a"}, "path", table="u")
    assert one != computed_id(Declaration("drop", SCHEMA, id_fields=("path",)), "t", b'{"path":"a"}')
    assert id_of({"path": "a"}, "path", "depth") == id_of({"path": "a", "depth": 1.0}, "depth", "path"), (
        "the published default, 1.0 as 1, and the order in which the fields are named"
    )
    assert id_of({"depth": True}, "depth") != id_of({"depth": 1}, "depth")
    assert id_of({"path": "a"}) == id_of({"path": "b"}) == id_of([]), "the type alone"
    assert computed_id(Declaration("purge", SCHEMA), "t", b"{}") is None
    assert id_of({"path": "a,b", "note": "c"}, "path", "note") != id_of({"path": "a", "note": "b,c"}, "path", "note")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(json_values, json_values)
def test_equal_values_have_equal_ids(a: Any, b: Any) -> None:
    first, second = id_of({"path": a}, "path"), id_of({"path": b}, "path")
    assert first is not None
    assert (first == second) is (differing(declaration("path"), dumps({"path": a}), dumps({"path": b})) == [])
    assert first == id_of(loads(dumps({"path": a})), "path")
    keys = Keys("prod")
    assert keys.parse(keys.unique("t", "purge", first)).id == first


def test_differing_fields_are_named() -> None:
    assert differing(declaration("path"), b'{"path":"a","note":"x"}', b'{"path":"a"}') == []
    own = Declaration("purge", SCHEMA)
    assert differing(own, b'{"note":"x","depth":1}', b'{"path":"a","note":"x"}') == ["path"]
    assert differing(own, b"[1]", b"[2]") == [""]
    assert differing(own, b"[1]", b"[1.0]") == []


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "union": st.lists(st.integers(0, 3) | st.text("ab", max_size=2), max_size=4),
    "concat": st.lists(st.integers(), max_size=3),
    "max": st.integers(),
    "min": st.text(max_size=3),
    "sum": st.integers(),
    "last": json_values,
    "first": json_values,
}


def together(rule: str, *values: Any) -> Any:
    """The values of one field, combined from left to right; "absent": left out."""
    declared = Declaration("purge", combine={"f": rule})
    arg = dumps({})
    for n, value in enumerate(values):
        new = dumps({} if value == "absent" else {"f": value})
        arg = combined(declared, arg, new) if n else new
    return loads(arg).get("f", "absent")


@pytest.mark.parametrize("rule", RULES)
@given(st.data())
def test_every_rule_is_associative(rule: str, data: st.DataObject) -> None:
    a, b, c = (data.draw(VALUES[rule] | st.just("absent")) for _ in range(3))
    left = together(rule, a, b)
    assert together(rule, left, c) == together(rule, a, together(rule, b, c))
    assert together(rule, a, "absent") == a == together(rule, "absent", a)


@pytest.mark.parametrize("rule", ["max", "min", "sum"])
@given(st.integers(), st.integers())
def test_commutative_rules_do_not_depend_on_the_order(rule: str, a: int, b: int) -> None:
    assert together(rule, a, b) == together(rule, b, a)


@given(VALUES["union"], VALUES["union"])
def test_a_union_keeps_each_item_once_in_order(a: list[Any], b: list[Any]) -> None:
    assert together("union", a, b) == list(dict.fromkeys([*a, *b]))
    assert together("union", together("union", a, b), b) == together("union", a, b)


def test_rules_by_example() -> None:
    assert together("max", 3, None, 5) == 5
    assert together("concat", "ab", "c") == "abc"
    assert together("last", 1, None) is None
    assert together("first", None, 1) is None
    for rule, a, b in (("sum", "a", 1), ("union", [1], 2), ("max", 1, "a"), ("sum", True, 1)):
        with pytest.raises(InvalidArgument, match=f"'f' cannot be combined by the rule '{rule}'"):
            together(rule, a, b)


def test_a_field_without_a_rule_must_be_equal() -> None:
    declared = declaration("path", files="union")
    stored = b'{"path":"a","files":[1]}'
    assert loads(combined(declared, stored, b'{"depth":1.0,"path":"a","files":[2]}')) == {
        "path": "a",
        "depth": 1,
        "files": [1, 2],
    }
    assert combined(declared, stored, b'{"path":"a","files":[1.0]}') is stored, "it adds nothing"
    with pytest.raises(InvalidArgument, match="'depth' differs, and purge has no rule to combine it"):
        combined(declared, stored, b'{"path":"a","depth":2}')
    with pytest.raises(InvalidArgument, match="both must be objects with fields"):
        combined(declared, b"[]", b"[]")


# ---------------------------------------------------------------- declarations


class PurgeArg(BaseModel):
    path: str = ""
    files: list[str] = Field(default_factory=list)
    other: str = Field("", alias="else")


class Purge(Behavior):
    """Purges."""

    type_name = "purge"
    Arg = PurgeArg
    id_fields: ClassVar[Any] = ("path",)
    combine: ClassVar[Any] = {"files": "union"}

    def start_or_resume_job(self, arg: Any, partition: Any, ctx: Any) -> None: ...


def test_P10_id_fields_and_rules_are_published() -> None:
    published = Declaration.decode(Purge.declaration().encode())
    assert published.id_fields == ("path",)
    assert published.combine == {"files": "union"}
    assert Declaration.decode(Declaration("noop").encode()).id_fields is None
    assert Declaration.decode(Declaration("noop", id_fields=()).encode()).id_fields == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id_fields": "path"}, "id_fields must be a list of fields"),
        ({"id_fields": ("colour",)}, "id_fields names 'colour', which is not a field"),
        ({"id_fields": ("other",)}, "id_fields names 'other', which is not a field"),
        ({"id_fields": ("files",)}, "which has a default_factory"),
        ({"combine": {"colour": "union"}}, "combine names 'colour', which is not a field"),
        ({"combine": {"path": "last"}}, "combine names 'path', which is in id_fields"),
        (
            {"combine": {"files": "merge"}},
            "combine has the rule 'merge' for 'files', but it must be one of union, concat",
        ),
        ({"combine": ["files"]}, "combine must map fields to rules"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        type("Wrong", (Purge,), fields).declaration()  # type: ignore[attr-defined]

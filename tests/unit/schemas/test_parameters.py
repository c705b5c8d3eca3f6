"""Parameters of an operation type, read from the JSON Schema of its argument."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, Field

from distop.schemas.parameters import Parameter, parameters
from distop_behaviors.noop import NoopArg
from distop_behaviors.validate.validate_argument import Argument


class Inner(BaseModel):
    """A nested model."""

    n: int = 1


class Colour(Enum):
    RED = "red"


class Arg(BaseModel):
    needed: str
    maybe: int | None = None
    either: int | str = 5
    many: list[Inner] = Field(default_factory=list)
    one: Inner = Inner()
    word: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    anything: Any = None
    nested: dict[str, list[int]] = Field({}, description="Lists\nby name.")


def test_C33_name_type_nullable_and_default_of_each_parameter() -> None:
    found = {one.name: one for one in parameters(Arg.model_json_schema())}
    assert list(found) == list(Arg.model_fields)
    assert found["needed"] == Parameter("needed", "string", nullable=False, required=True)
    assert found["maybe"] == Parameter("maybe", "integer", nullable=True, required=False)
    assert (found["either"].type, found["either"].default) == ("integer or string", 5)
    assert (found["many"].type, found["one"].type) == ("array of Inner", "Inner")
    assert (found["word"].type, found["word"].default) == ('"a" or "b"', "a")
    assert (found["colour"].type, found["colour"].default) == ('"red"', "red")
    assert (found["anything"].type, found["anything"].nullable) == ("any", True)
    assert (found["nested"].type, found["nested"].description) == ("object", "Lists")


def test_C33_parameters_of_the_types_that_come_with_distop() -> None:
    assert [(p.name, p.type, p.nullable, p.default) for p in parameters(NoopArg.model_json_schema())] == [
        ("jobs", "integer", False, 1),
        ("sleep", "number", False, 0),
        ("fail", "array of string", False, None),
    ]
    checks = next(p for p in parameters(Argument.model_json_schema()) if p.name == "checks")
    assert checks.type.startswith("array of ")
    assert not checks.nullable


def test_schemas_of_any_form_are_read_without_an_error() -> None:
    assert parameters({}) == ()
    assert parameters({"type": "array"}) == ()
    assert parameters({"$ref": "#/$defs/Gone"}) == ()
    loop = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert parameters(loop) == ()
    assert parameters({"properties": {"a": True, "b": {"type": ["integer", "null"]}}}) == (
        Parameter("a", "any", nullable=True, required=False),
        Parameter("b", "integer", nullable=True, required=False),
    )

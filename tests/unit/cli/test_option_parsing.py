"""Option values are read without typer's parser, which is slow to load, where possible."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distop.cli.option_parsing import _read_plainly


class Parameter(SimpleNamespace):
    """An option of the form that typer creates."""

    def process_value(self, ctx: Any, value: Any) -> Any:
        return "as typer reads it"


def read(value: Any, **descriptor: Any) -> Any:
    one = Parameter(default="", required=False, callback=None, type_descriptor=SimpleNamespace(**descriptor))
    _read_plainly([one])
    return one.process_value(None, value)


def test_texts_and_values_with_a_parser_are_read_without_typer() -> None:
    plain, by_length = SimpleNamespace(parser=None), SimpleNamespace(parser=len)
    assert read("a", annotation=str, parameter_info=plain) == "a"
    assert read(["a", "b"], annotation=list[str], parameter_info=plain) == ["a", "b"]
    assert read("abc", annotation=int, parameter_info=by_length) == 3
    assert read("", annotation=float, parameter_info=plain) == "", "a missing value stays the default"


def test_other_values_are_read_by_typer() -> None:
    assert read("1.5", annotation=float, parameter_info=SimpleNamespace(parser=None)) == "as typer reads it"


@pytest.mark.parametrize("descriptor", [{}, {"annotation": str}, {"annotation": str, "parameter_info": object()}])
def test_a_release_of_typer_without_descriptors_reads_the_values_itself(descriptor: dict[str, Any]) -> None:
    assert read("a", **descriptor) == "as typer reads it"
    older = Parameter(default="")
    _read_plainly([older])
    assert older.process_value(None, "a") == "as typer reads it"

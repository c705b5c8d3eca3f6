"""The common type in which keys are compared. No Spark."""

from __future__ import annotations

from typing import Any

import pytest

from distop_behaviors.validate.key_queries import common_type
from distop_behaviors.validate.typed_bounds import Unfit


@pytest.mark.parametrize(
    ("mine", "theirs", "both"),
    [
        ("int", "bigint", "bigint"),
        ("int", "decimal(5,2)", "decimal(12,2)"),
        ("float", "double", "double"),
        ("void", "date", "date"),
        (("array", "int"), ("array", "int"), ("array", "int")),
    ],
)
def test_numbers_are_compared_in_a_type_that_holds_both(mine: Any, theirs: Any, both: Any) -> None:
    assert common_type("a", mine, "b", theirs) == common_type("b", theirs, "a", mine) == both


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("int", "string"),
        ("date", "timestamp"),
        # Spark would cast these by the places of their fields.
        (("struct", (("a", "int"), ("b", "int"))), ("struct", (("b", "int"), ("a", "int")))),
        (("struct", (("a", "int"),)), ("struct", (("a", "bigint"),))),
    ],
)
def test_types_without_a_lossless_common_type_are_refused(mine: Any, theirs: Any) -> None:
    with pytest.raises(Unfit, match="cannot be compared"):
        common_type("a", mine, "b", theirs)

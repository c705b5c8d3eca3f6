"""Values of ``frozen`` behave as those of a dataclass with ``eq``, ``repr`` and a hash, which it makes otherwise."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.protocol.frozen import frozen


@frozen
class Point:
    x: int
    y: str = "y"
    note: str = field(default="", compare=False)
    secret: str = field(default="", repr=False)


@dataclass(slots=True, unsafe_hash=True)
class Plain:
    x: int
    y: str = "y"
    note: str = field(default="", compare=False)
    secret: str = field(default="", repr=False)


@frozen
class Nothing:
    pass


@frozen
class One:
    value: object


@frozen
class Further(Point):
    z: int = 0


@frozen
class Own:
    x: int

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "own"


NEAR = st.tuples(*(st.sampled_from(options) for options in ((1, 2), "ab", "ab", "ab")))


@given(NEAR, NEAR)
def test_values_are_compared_hashed_and_printed_like_a_dataclass(
    one: tuple[int, str, str, str], other: tuple[int, str, str, str]
) -> None:
    assert (Point(*one) == Point(*other)) is (Plain(*one) == Plain(*other))
    assert (hash(Point(*one)) == hash(Point(*other))) is (hash(Plain(*one)) == hash(Plain(*other)))
    assert repr(Point(*one)) == repr(Plain(*one)).replace("Plain", "Point")


def test_values_with_one_field_or_none() -> None:
    assert (Nothing(), hash(Nothing()), repr(Nothing())) == (Nothing(), hash(()), "Nothing()")
    not_itself = float("nan")
    assert One(not_itself) == One(not_itself)  # as a tuple that holds it
    assert One(1) != One(2)
    assert hash(One(1)) == hash((1,))
    with pytest.raises(TypeError, match="unhashable"):
        hash(One([]))


def test_values_of_different_classes_are_not_equal() -> None:
    assert Point(1) != Plain(1)
    assert Plain(1) != Point(1)
    assert Point(1) != Further(1)
    assert Further(1, z=1) != Further(1, z=2)
    assert {Further(1, z=1): "z"}[Further(1, note="not compared", z=1)] == "z"
    assert repr(Further(1, z=3)) == "Further(x=1, y='y', note='', z=3)"


def test_methods_defined_by_a_class_are_kept() -> None:
    assert (Own(1) == Own(2), hash(Own(1)), repr(Own(1))) == (True, 7, "own")


def test_values_have_slots_and_are_copied_pickled_and_replaced() -> None:
    point = Point(1, "b", secret="s")
    assert not hasattr(point, "__dict__")
    assert copy.deepcopy(point) == pickle.loads(pickle.dumps(point)) == replace(point) == point
    assert replace(point, x=2) == Point(2, "b", secret="s")
    assert [one.name for one in fields(point)] == list(Point.__match_args__) == ["x", "y", "note", "secret"]

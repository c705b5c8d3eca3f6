"""Labels as callers give them."""

from __future__ import annotations

from typing import Any

import pytest

from distop.errors import InvalidArgument
from distop.protocol.behavior_declaration import Rules
from distop.protocol.operation_labels import MAX_KEY, MAX_LABELS, MAX_VALUE, has, labels
from distop.protocol.records import History, Spec, State
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import request


def test_labels_are_sorted_by_key() -> None:
    assert list(labels({"b": "", "a": "1", "x.y/z-0_": "ü"}).items()) == [("a", "1"), ("b", ""), ("x.y/z-0_", "ü")]
    assert labels(None) == labels({}) == {}
    assert len(labels({f"k{n}": "v" * MAX_VALUE for n in range(MAX_LABELS)})) == MAX_LABELS
    assert labels({"k" * MAX_KEY: "v"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["a=b"], "labels are a mapping"),
        ("a=b", "labels are a mapping"),
        ({f"k{n}": "" for n in range(MAX_LABELS + 1)}, "at most 32 labels, not 33"),
        ({"": "x"}, "the label key '' must have"),
        ({"-a": "x"}, "begin with a letter or digit"),
        ({"a b": "x"}, "the label key 'a b'"),
        ({"a\n": "x"}, "the label key 'a\\n'"),
        ({"k" * (MAX_KEY + 1): "x"}, "1 to 63"),
        ({5: "x"}, "the label key 5"),
        ({"a": 5}, "the label a must be a text, not 5"),
        ({"a": "v" * (MAX_VALUE + 1)}, "has 256 characters"),
        ({"a": "one\ntwo"}, "printable text on one line"),
        ({"a": "\udc80"}, "printable"),
        ({"a": "\x1b[2J"}, "printable"),
    ],
)
def test_invalid_labels_are_refused_in_one_sentence(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        labels(value)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(InvalidArgument, match="label"):
        request("noop", "t", b"{}", StartOptions(labels=value), "me")


def test_all_wanted_labels_must_match() -> None:
    found = {"team": "x", "ticket": "42"}
    assert has(found, {})
    assert has(found, {"team": "x"})
    assert not has(found, {"team": "y"})
    assert not has(found, {"team": "x", "other": ""})


def test_spec_and_history_keep_labels_and_records_without_labels_are_unchanged() -> None:
    spec = Spec("r", "", "me", Rules(), labels={"team": "x"})
    assert Spec.decode(spec.encode()) == spec
    record = History("t/noop/1", State.SUCCESS, "", "", 0, 0, 0, labels={"team": "x"})
    assert History.decode(record.encode()) == record
    assert b"labels" not in Spec("r", "", "me", Rules()).encode()
    assert b"labels" not in History("t/noop/1", State.SUCCESS, "", "", 0, 0, 0).encode()

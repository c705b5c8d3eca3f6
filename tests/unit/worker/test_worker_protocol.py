"""Frames of the worker protocol: decoding of any chunks, and rejection of invalid frames."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.worker import child_messages
from distop.worker.child_messages import Decoder, ProtocolError, encode, frame

MESSAGES = st.lists(
    st.fixed_dictionaries({"t": st.just("status"), "run": st.integers(), "partition": st.integers(), "text": st.text()})
)


@given(MESSAGES, st.lists(st.integers(1, 50)))
def test_messages_are_decoded_from_any_chunks(messages: list[Any], cuts: list[int]) -> None:
    data = b"".join(encode(message) for message in messages)
    decoder, got = Decoder(), []
    for cut in [*cuts, len(data)]:
        got += list(decoder.feed(data[:cut]))
        data = data[cut:]
    assert got == messages


def test_messages_are_decoded_byte_by_byte() -> None:
    decoder = Decoder()
    data = encode(child_messages.StopMessage(t="stop")) + encode(child_messages.DoneMessage(t="done", run=3))
    got = [message for i in range(len(data)) for message in decoder.feed(data[i : i + 1])]
    assert got == [{"t": "stop"}, {"t": "done", "run": 3}]


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="a frame has"):
        frame(b"x" * (child_messages.MAX_FRAME + 1))


def test_a_frame_that_is_too_large_is_rejected_before_it_arrives() -> None:
    with pytest.raises(ProtocolError, match="a frame has"):
        list(Decoder().feed(struct.pack(">I", child_messages.MAX_FRAME + 1)))


@pytest.mark.parametrize("payload", [b"{", b"[]", b"1", b'{"t":1}', b"{}", b"\xff"])
def test_an_invalid_frame_is_rejected(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Decoder().feed(frame(payload)))


def test_messages_before_an_invalid_frame_are_delivered_once() -> None:
    decoder = Decoder()
    messages = decoder.feed(encode(child_messages.StopMessage(t="stop")) + frame(b"[]"))
    assert next(messages) == {"t": "stop"}
    with pytest.raises(ProtocolError):
        next(messages)
    assert list(decoder.feed(b"")) == []


@given(st.lists(st.text(max_size=40)), st.integers(1, 200))
def test_pages_of_items_are_decoded_as_messages(rows: list[str], limit: int) -> None:
    message = child_messages.CleanupMessage(
        t="cleanup", call=1, op="o", type="ty", arg={"a": "ä"}, table=None, items=[], incarnation="i", more=False
    )
    got = list(Decoder().feed(b"".join(child_messages.encode_paged(message, map(child_messages.row, rows), limit))))
    for m in got:
        assert len(m["items"]) <= 1 or sum(len(child_messages.row(row)) for row in m["items"]) <= limit
    assert [row for m in got for row in m.pop("items")] == rows
    assert [m.pop("more") for m in got] == [True] * (len(got) - 1) + [False]
    rest = {k: v for k, v in message.items() if k not in ("items", "more")}
    assert all(m == rest for m in got)


def test_a_lone_surrogate_is_decoded_unchanged() -> None:
    # File names that are not UTF-8 contain them.
    message = {"t": "status", "run": 1, "partition": 0, "text": "a\udcffb"}
    assert list(Decoder().feed(encode(message))) == [message]  # type: ignore[arg-type]
    (paged,) = child_messages.encode_paged(message, [child_messages.row("\udcff")])  # type: ignore[arg-type]
    assert list(Decoder().feed(paged)) == [{**message, "items": ["\udcff"], "more": False}]

"""The position of a watch after each response (W2–W9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from distop.protocol.revisioned import Change
from distop.protocol.txn import KeyValue
from distop.store.watch_position import Batch, Relist, Reopen, Response, WatchPosition

if TYPE_CHECKING:
    from collections.abc import Iterator


def change(revision: int, key: str = "k") -> Change:
    return Change(KeyValue(key, b"", revision))


def test_a_watch_resumes_after_the_last_event_not_after_the_header() -> None:  # W2
    position = WatchPosition(10)
    assert position.feed(Response(500, (change(11), change(12)))) == Batch(12, (change(11), change(12)))
    assert position.next_revision == 13


def test_a_progress_response_moves_the_position() -> None:  # W3
    position = WatchPosition(10)
    assert position.feed(Response(20)) == Batch(20, ())
    assert position.next_revision == 21
    assert position.feed(Response(15)) is None
    assert position.next_revision == 21


def test_a_created_response_does_not_move_the_position() -> None:  # W3
    position = WatchPosition(10)
    assert position.feed(Response(20, created=True)) is None
    assert position.next_revision == 11


def test_fragments_are_applied_together() -> None:  # W5
    position = WatchPosition(10)
    assert position.feed(Response(11, (change(11, "a"),), fragment=True)) is None
    assert position.next_revision == 11
    batch = position.feed(Response(11, (change(11, "b"),)))
    assert batch == Batch(11, (change(11, "a"), change(11, "b")))


def test_a_new_stream_discards_fragments() -> None:  # W5
    position = WatchPosition(10)
    position.feed(Response(11, (change(11, "a"),), fragment=True))
    position.opened()
    assert position.feed(Response(11, (change(11, "a"), change(11, "b")))) == Batch(
        11, (change(11, "a"), change(11, "b"))
    )


def test_old_events_are_dropped() -> None:  # W9
    position = WatchPosition(10)
    assert position.feed(Response(11, (change(9), change(10)))) is None
    assert position.feed(Response(11, (change(10), change(11)))) == Batch(11, (change(11),))


def test_a_compaction_requires_a_listing() -> None:  # W6
    position = WatchPosition(10)
    assert isinstance(position.feed(Response(50, cancelled=True, compact_revision=40)), Relist)
    assert position.next_revision == 11
    position.listed(60)
    assert position.next_revision == 61


def test_a_rejected_watch_reports_the_reason() -> None:  # W7
    step = WatchPosition(10).feed(Response(50, created=True, cancelled=True, reason="permission denied"))
    assert step == Reopen("permission denied", refused=True)


def test_a_cancelled_watch_is_opened_again() -> None:
    assert isinstance(WatchPosition(10).feed(Response(50, cancelled=True)), Reopen)


@st.composite
def histories(draw: st.DrawFn) -> list[list[Change]]:
    """Revisions 1…n with the events of the watched range in each (possibly none)."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=30))
    return [[change(revision, f"k{number}") for number in range(size)] for revision, size in enumerate(sizes, 1)]


def served(draw: st.DrawFn, history: list[list[Change]], start: int) -> Iterator[Response]:
    """Responses that a server may send to a watch from ``start``: resent events, headers ahead, fragments, progress."""
    now = len(history)
    yield Response(now, created=True)
    at = max(start - draw(st.integers(0, 3)), 1)
    while at <= now:
        upto = draw(st.integers(at, now))
        events = [event for revision in history[at - 1 : upto] for event in revision]
        header = draw(st.integers(upto, now))
        while events and draw(st.booleans()):
            cut = draw(st.integers(1, len(events)))
            if cut == len(events):
                break
            yield Response(header, tuple(events[:cut]), fragment=True)
            events = events[cut:]
        if events:
            yield Response(header, tuple(events))
        elif draw(st.booleans()):
            yield Response(upto)
        at = upto + 1


@given(histories(), st.data())
def test_every_revision_is_applied_once_and_completely(history: list[list[Change]], data: st.DataObject) -> None:
    position = WatchPosition(0)
    applied: list[Change] = []
    for broken in (True, True, True, False):
        position.opened()
        responses = list(served(data.draw, history, position.next_revision))
        if broken:
            responses = responses[: data.draw(st.integers(0, len(responses)))]
        for response in responses:
            before = position.next_revision
            step = position.feed(response)
            if isinstance(step, Batch):
                applied.extend(step.events)
                assert step.revision == position.revision >= before - 1
    assert applied == [event for revision in history for event in revision]

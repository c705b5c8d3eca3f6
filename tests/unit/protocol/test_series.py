"""When the next operation of a series is due (P3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.errors import InvalidArgument
from distop.protocol.json_codec import from_rfc3339, rfc3339
from distop.protocol.records import State
from distop.protocol.schedule import Series, following
from distop.services.submission.option_values import Every
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import request

NOW = 1_700_000_000.0


def due(series: Series, finished: float, now: float, luck: float = 0.0) -> float | None:
    found = following(series, "t/noop/1", State.SUCCESS, finished, now, luck)
    return from_rfc3339(found.not_before) if found is not None else None


def test_the_next_operation_is_due_an_interval_and_the_jitter_after_the_end() -> None:
    assert due(Series(60, jitter=10), NOW, NOW + 1) == NOW + 60
    assert due(Series(60, jitter=10), NOW, NOW + 1, luck=0.5) == NOW + 65


def test_P3_missed_operations_run_once() -> None:
    grid = Series(60, since="start", due=rfc3339(NOW))
    assert due(grid, NOW + 5, NOW + 5) == NOW + 60
    assert due(grid, NOW + 200, NOW + 200) == NOW + 180, "of 60, 120 and 180 the last, which is at once"


@given(st.floats(0.1, 1e6), st.floats(0, 1e7), st.integers(1, 50))
def test_a_grid_is_kept_and_skips_the_past(interval: float, late: float, steps: int) -> None:
    series: Series | None = Series(interval, since="start", due=rfc3339(NOW))
    now = NOW + late
    for _ in range(steps):
        assert series is not None
        found = following(series, "t/noop/1", State.SUCCESS, now, now, 0.0)
        assert found is not None
        at = from_rfc3339(found.not_before)
        assert at > now - interval - 0.002 * steps
        off = (at - NOW) / interval
        assert abs(off - round(off)) * interval < 0.002 * steps, "times are kept in milliseconds"
        series, now = found.series, max(now, at) + interval / 3


def test_a_series_ends_by_count_time_state_or_cancel() -> None:
    def after(series: Series, state: State) -> bool:
        return following(series, "t/noop/1", state, NOW, NOW, 0.0) is not None

    assert not after(Series(60, left=0), State.SUCCESS)
    assert following(Series(60, left=2), "t/noop/1", State.SUCCESS, NOW, NOW, 0.0).series.left == 1
    assert not after(Series(60, until=rfc3339(NOW + 59)), State.SUCCESS)
    assert after(Series(60, until=rfc3339(NOW + 61)), State.SUCCESS)
    assert [after(Series(60, on=on), State.FAILED) for on in ("success", "failure", "any")] == [False, True, True]
    assert not any(after(Series(60, on=on), State.CANCELLED) for on in ("success", "failure", "any"))


def test_a_series_round_trips() -> None:
    series = Series(60.5, 1.5, "start", "success", rfc3339(NOW), 3, rfc3339(NOW), "t/noop/1")
    assert Series.from_json(series.to_json()) == series
    assert Series.from_json(Series(1).to_json()) == Series(1)


@pytest.mark.parametrize(
    ("every", "sentence"),
    [
        (0, "interval of a series must be from 0.1 s to a hundred years"),
        (1e11, r"to a hundred years \(3155760000 s\), not 1e\+11 s"),
        (Every(5, jitter=1e11), r"jitter of a series must be from 0 s to a hundred years"),
        ("daily", "a number of seconds"),
        (Every(60, jitter=-1), "jitter"),
        (Every(60, since="middle"), "since must be one of end, start, not 'middle'"),
        (Every(60, on="luck"), "on must be one of success, failure, any, not 'luck'"),
        (Every(60, times=0), "whole number of at least 1"),
        (Every(60, until="2020-01-01T00:00:00Z"), "its end 2020-01-01T00:00:00Z has passed"),
        (Every(60, until="2030-01-01T00:00:00"), "has no time zone"),
    ],
    ids=str,
)
def test_invalid_series_are_refused(every: object, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        request("noop", "t", b"{}", StartOptions(every=every), "me")  # type: ignore[arg-type]


def test_operations_missed_before_the_last_time_run_and_none_begins_after_it() -> None:
    grid = Series(60, jitter=100, since="start", due=rfc3339(NOW), until=rfc3339(NOW + 130))
    assert due(grid, NOW + 500, NOW + 500) == NOW + 120
    assert due(grid, NOW + 70, NOW + 70, luck=0.9) == NOW + 130


def test_an_interval_out_of_range_is_unreadable() -> None:
    """By hand, a spec asked for a next operation without a pause, for ever."""
    with pytest.raises(ValueError, match="a series of"):
        Series.from_json({"interval": 1e-9})

"""The map, the timeline, and the stream of a page: what changed is sent once, also after a reconnect."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.errors import DistopError, EtcdUnavailable, LimitExceeded, PermissionDenied, ServiceUnavailable
from distop.protocol.jobs import Claim, Outcome, Tried
from distop.protocol.json_codec import rfc3339
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef
from distop.protocol.txn import KeyValue
from distop.server.page import live_events, partition_grid
from distop.server.page.executor_timeline import BINS, MOST_BARS, timeline
from distop.server.page.live_events import Cursor, PageStream
from distop.server.page.partition_grid import MOST_CELLS, cell_size, grid
from distop.server.page.partition_reader import OperationPartitions
from distop.server.page.partition_states import PartitionStage, PartitionStates

if TYPE_CHECKING:
    from collections.abc import Mapping

REF = OperationRef("t", "noop", "", 1)
KEYS = Keys()
BEGIN = 1_000_000.0


def ended(
    n: int,
    revision: int,
    *,
    failed: bool = False,
    executor: str = "a",
    attempt: int = 1,
    at: float = 0.0,
    seconds: float = 1.0,
    rows: int | None = None,
) -> list[KeyValue]:
    """The keys of an ended job."""
    result = None if rows is None else {"rows": rows}
    times = rfc3339(BEGIN + at), rfc3339(BEGIN + at + seconds)
    outcome = Outcome(f"p{n}", executor, "i", attempt, *times, result)
    state = b"failed" if failed else b"success"
    return [
        KeyValue(KEYS.job(REF, n, "outcome"), outcome.encode(), revision),
        KeyValue(KEYS.job(REF, n, "state"), state, revision),
    ]


def claim(n: int, revision: int, record: Claim) -> KeyValue:
    return KeyValue(KEYS.claim(REF, n), record.encode(), revision)


# -------------------------------------------------------------------- states


def test_an_ended_job_stays_ended() -> None:
    states = PartitionStates(2)
    states.add_claim(claim(0, 5, Claim("a", "i", 1, 0)), BEGIN)
    assert states.totals()[PartitionStage.RUNNING] == 1
    states.add_jobs(ended(0, 7))
    states.add_claim(claim(0, 6, Claim("b", "j", 2, 1)), BEGIN)
    states.remove_claim(KEYS.claim(REF, 0), 7)
    states.keep_claims(set(), 8)
    assert (PartitionStage(states.stage[0]), states.executors[states.executor[0]]) == (PartitionStage.SUCCESS, "a")


def test_a_released_claim_leaves_its_job_open() -> None:
    states = PartitionStates(3)
    for n in range(3):
        states.add_claim(claim(n, 5, Claim("a", "i", 1, 0)), BEGIN)
    states.remove_claim(KEYS.claim(REF, 0), 6)
    states.keep_claims({1}, 7)
    assert [PartitionStage(one) for one in states.stage] == [
        PartitionStage.OPEN,
        PartitionStage.RUNNING,
        PartitionStage.OPEN,
    ]
    assert list(states.changed) == [6, 5, 7]


@pytest.mark.parametrize("value", [b"", b"[]", b"{", b"\xff", b'{"attempt": "x"}', b"null"])
def test_records_of_an_unknown_form_are_left_out(value: bytes) -> None:
    states = PartitionStates(1)
    states.add_jobs([KeyValue(KEYS.job(REF, 0, "outcome"), value, 3)])
    states.add_claim(KeyValue(KEYS.claim(REF, 0), value, 3), BEGIN)
    states.add_jobs([KeyValue(KEYS.job(REF, 5, "state"), b"success", 3)])
    assert states.count == 1


# ---------------------------------------------------------------------- map


def test_a_hundred_thousand_partitions_are_a_bounded_picture() -> None:
    states = PartitionStates(100_000)
    found = grid(states)
    assert found["cells"] <= MOST_CELLS
    assert len(json.dumps(found)) < 150_000
    assert sum(sum(cell[1:6]) for cell in found["changed"]) == 100_000


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 39), st.booleans(), st.integers(1, 3), st.integers(0, 9)), max_size=60),
    st.data(),
)
def test_changed_cells_and_the_cells_before_are_all_cells(
    count: int, jobs: list[tuple[int, bool, int, int]], data: st.DataObject
) -> None:
    cells = data.draw(st.integers(1, 12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_grid, "MOST_CELLS", cells)
        states, shown, cursor = PartitionStates(count), dict[int, Any](), -1
        for revision, (n, failed, attempt, rows) in enumerate(jobs, 2):
            if data.draw(st.booleans()):
                changed = grid(states, cursor)["changed"]
                shown |= {cell[0]: cell for cell in changed}
                cursor = max(cursor, revision - 1)
            states.add_jobs(ended(n % count, revision, failed=failed, attempt=attempt, rows=rows))
        shown |= {cell[0]: cell for cell in grid(states, cursor)["changed"]}
        whole = {cell[0]: cell for cell in grid(states)["changed"]}
        assert shown == whole
        assert len(whole) <= cells
        for number, cell in whole.items():
            mine = slice(number * cell_size(count), (number + 1) * cell_size(count))
            assert cell[1:6] == [int((states.stage[mine] == stage).sum()) for stage in PartitionStage]
            assert cell[8] == states.attempt[mine].max()


def test_unknown_rows_and_durations_are_not_zero() -> None:
    states = PartitionStates(2)
    states.add_jobs(ended(0, 2, rows=7, seconds=2.5))
    first, second = grid(states)["changed"]
    assert (first[6], first[7]) == (2.5, 7)
    assert (second[6], second[7]) == (-1.0, -1)


# ------------------------------------------------------------------- timeline


def test_bars_of_one_executor_do_not_cover_each_other() -> None:
    states = PartitionStates(4)
    for n, (at, seconds) in enumerate([(0, 5), (1, 1), (2, 9), (6, 1)]):
        states.add_jobs(ended(n, 2 + n, at=at, seconds=seconds))
    (row,) = timeline(states, BEGIN + 20)["rows"]
    assert row["lanes"] == 2
    for lane in range(2):
        bars = sorted(bar[1:3] for bar in row["bars"] if bar[3] == lane)
        assert all(first[1] <= second[0] for first, second in pairwise(bars))


def test_takeovers_and_retries_are_marked_and_a_returned_job_is_not() -> None:
    states = PartitionStates(4)
    lost, wrong = Tried(1, "a", "the executor was lost while it ran the job"), Tried(1, "b", "no such file\nmore")
    states.add_claim(claim(0, 3, Claim("b", "j", 2, 1, losses=1, tried=(lost,))), BEGIN + 4)
    states.add_claim(claim(1, 3, Claim("a", "i", 2, 1, tried=(wrong,))), BEGIN + 6)
    states.add_claim(claim(2, 3, Claim("a", "i", 2, 0)), BEGIN + 6)
    states.add_jobs(ended(3, 4, failed=True, at=2))
    marks = {one["kind"]: one for one in timeline(states, BEGIN + 9)["marks"]}
    assert set(marks) == {"takeover", "retry", "failed"}
    assert marks["takeover"]["text"] == f"partition 0: attempt 1 on a ended with: {lost.text}"
    assert marks["retry"]["text"].endswith("no such file")
    assert (marks["failed"]["at"], marks["takeover"]["at"]) == (1.0, 2.0)


def test_many_jobs_are_drawn_as_how_many_run_at_a_time() -> None:
    states = PartitionStates(2 * MOST_BARS)
    for n in range(2 * MOST_BARS):
        states.add_jobs(ended(n, 2 + n, executor="ab"[n % 2], at=n // 20, seconds=1))
    found = timeline(states, BEGIN + 1_000)
    assert [row["jobs"] for row in found["rows"]] == [MOST_BARS, MOST_BARS]
    width = found["seconds"] / BINS
    for row in found["rows"]:
        assert len(row["busy"]) == BINS
        assert sum(row["busy"]) * width == pytest.approx(MOST_BARS, rel=0.02)
        assert max(row["busy"]) == pytest.approx(10, rel=0.05)


def test_there_is_no_timeline_before_the_first_job() -> None:
    assert timeline(PartitionStates(3), BEGIN)["rows"] == []


# --------------------------------------------------------------------- stream


@given(st.integers(-1, 2**62), st.dictionaries(st.sampled_from(["head", "open", "timeline"]), st.just("0a1b2c3d4e")))
def test_a_cursor_is_its_text(revision: int, digests: dict[str, str]) -> None:
    cursor = Cursor()
    cursor.revision, cursor.digests = revision, digests
    again = Cursor(str(cursor))
    assert (again.revision, again.digests) == (revision, digests)
    assert "\n" not in str(cursor)


@pytest.mark.parametrize("text", ["x", "~~~", "9" * 30, "5~a", "5~é.0", "5~a.\n", "x" * 3_000])
def test_a_wrong_cursor_shows_everything(text: str) -> None:
    found = Cursor(text)
    assert found.digests == {}


class Followed(OperationPartitions):
    """Partitions that a test changes."""

    def __init__(self, count: int) -> None:
        super().__init__(None, KEYS, REF)  # type: ignore[arg-type]
        self.states = PartitionStates(count)
        self.complete = True

    def end_job(self, n: int, **given: Any) -> None:
        assert self.states is not None
        self.revision += 1
        self.states.add_jobs(ended(n, self.revision, **given))
        self._bump()


class Shown:
    """What a browser shows, from the events that it got."""

    def __init__(self) -> None:
        self.cursor = ""
        self.parts: dict[str, str] = {}
        self.cells: dict[int, Any] = {}
        self.received: list[tuple[str, str]] = []
        self.ended = False

    def take(self, text: bytes) -> None:
        fields = dict(line.split(": ", 1) for line in text.decode().strip().split("\n") if not line.startswith(":"))
        if "event" not in fields:
            return
        self.cursor = fields.get("id", self.cursor)
        data = json.loads(fields["data"])
        self.received.append((fields["event"], fields["data"]))
        if fields["event"] == "part":
            self.parts[data["name"]] = data["html"]
        elif fields["event"] == "map":
            self.cells |= {cell[0]: cell for cell in data["changed"]}
        self.ended = self.ended or fields["event"] == "end"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between looks; a template is its own text."""
    for name in ("FASTEST", "EVERY"):
        monkeypatch.setattr(live_events, name, 0.001)
    monkeypatch.setattr(live_events, "LOAD_SHARE", 0.0)
    monkeypatch.setattr(live_events, "render", lambda template, content: f"{template}: {content[template]}")


async def test_after_each_reconnect_nothing_is_missed_and_nothing_comes_twice(quick: None) -> None:
    """The stream is cut after each number of events, on another instance each time; the last one sees the end."""
    for cut in range(1, 12):
        partitions = Followed(8)
        content: dict[str, Any] = {"one": 0, "two": 0, "ended": False}
        shown, stopped = Shown(), asyncio.Event()

        async def look(content: dict[str, Any] = content) -> Mapping[str, Any]:
            return dict(content)

        for n in range(8):
            partitions.end_job(n, failed=n == 3)
            content["one"] = n
            stream = PageStream(look, {"one": "one", "two": "two"}, Cursor(shown.cursor), stopped, partitions)
            events = stream.events()
            taken = 0
            async with asyncio.timeout(5):
                async for event in events:
                    shown.take(event)
                    taken += event.startswith(b"id")
                    if taken >= cut or (shown.parts.get("one") == f"one: {n}" and len(shown.cells) == 8):
                        break
            await events.aclose()
        content["ended"] = partitions.ended = True
        rest = PageStream(look, {"one": "one", "two": "two"}, Cursor(shown.cursor), stopped, partitions)
        async with asyncio.timeout(5):
            async for event in rest.events():
                shown.take(event)
        assert partitions.states is not None
        assert shown.parts == {"one": "one: 7", "two": "two: 0"}
        assert shown.cells == {cell[0]: cell for cell in grid(partitions.states)["changed"]}
        assert shown.ended
        named = [pair for pair in shown.received if pair[0] == "part"]
        assert len(named) == len(set(named)), "a part came twice"


async def test_a_resumed_stream_sends_only_what_has_changed(quick: None) -> None:
    partitions, stopped, shown = Followed(4), asyncio.Event(), Shown()
    partitions.end_job(0)
    partitions.ended = True

    async def look() -> Mapping[str, Any]:
        return {"one": 1, "ended": True}

    async def follow() -> list[tuple[str, str]]:
        before = len(shown.received)
        async with asyncio.timeout(5):
            async for event in PageStream(look, {"one": "one"}, Cursor(shown.cursor), stopped, partitions).events():
                shown.take(event)
        return shown.received[before:]

    assert [kind for kind, _ in await follow()] == ["map", "timeline", "part", "end"]
    assert [kind for kind, _ in await follow()] == ["end"]
    partitions.end_job(2)
    changed = await follow()
    assert [kind for kind, _ in changed] == ["map", "timeline", "end"]
    assert [cell[0] for cell in json.loads(changed[0][1])["changed"]] == [2]


async def test_a_stream_ends_when_its_caller_may_not_see_it_any_more(quick: None) -> None:
    shown = Shown()

    async def refuse() -> Mapping[str, Any]:
        raise PermissionDenied("no grant")

    async with asyncio.timeout(5):
        async for event in PageStream(refuse, {}, Cursor(), asyncio.Event()).events():
            shown.take(event)
    assert shown.received == [("error-text", '{"text":"no grant"}')]

    def check() -> None:
        raise PermissionDenied("the grant is gone")

    shown = Shown()
    async with asyncio.timeout(5):
        stream = PageStream(refuse, {}, Cursor(), asyncio.Event(), Followed(1), check)
        async for event in stream.events():
            shown.take(event)
    assert shown.received == [("error-text", '{"text":"the grant is gone"}')]


@pytest.mark.parametrize("error", [EtcdUnavailable("later"), ServiceUnavailable("later"), LimitExceeded("later")])
async def test_a_stream_continues_when_calls_are_answered_again(quick: None, error: DistopError) -> None:
    failing = [error, None]

    async def look() -> Mapping[str, Any]:
        error: DistopError | None = failing.pop(0)
        if error is not None:
            raise error
        return {"one": 1, "ended": True}

    shown = Shown()
    async with asyncio.timeout(5):
        async for event in PageStream(look, {"one": "one"}, Cursor(), asyncio.Event()).events():
            shown.take(event)
    assert [kind for kind, _ in shown.received] == ["delayed", "part", "end"]


async def test_a_stream_ends_with_the_service(quick: None) -> None:
    stopped = asyncio.Event()

    async def look() -> Mapping[str, Any]:
        stopped.set()
        return {"one": 1}

    async with asyncio.timeout(5):
        assert [one async for one in PageStream(look, {"one": "one"}, Cursor(), stopped).events()]

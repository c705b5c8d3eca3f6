"""Every step of every protocol, with the process killed, frozen, cut off or stopped at it, or its child killed: the
list is generated.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distop.store import transport
from tests.conftest import FIGURES
from tests.simulation.planted_losses import clean_up_before_the_claim
from tests.simulator.crash_points import ACTIONS, Course, discover
from tests.simulator.reference_runs import Reference, references
from tests.simulator.scenario import Wish, plain
from tests.simulator.sim_worker import SimWorker
from tests.simulator.strikes import Strike, Struck, checked, one_strike, strikes, tell

DISTOP = Path(__file__).resolve().parents[2] / "distop"
BUILDERS = {"Txn": 3, "Guarded": 2, "replace": 3}
"""What a transaction, or a write that is to be part of one, is made by, or of another one: its label has its name, or
is the argument at this place."""


PARTS = {"broken_edge", "forget_request", "give_back", "release_id"}
"""They are sent as parts of others alone, which are struck."""

STORY = """
import hashlib
from tests.simulator.crash_points import discover
from tests.simulator.reference_runs import references
for name, reference in references().items():
    print(name, hashlib.sha256(repr(discover(reference).points).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def courses() -> dict[str, Course]:
    return {name: discover(reference) for name, reference in references().items()}


def labels_of(source: str) -> Iterator[str]:
    """The labels that the code can give to transactions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILDERS:
            place = BUILDERS[node.func.id]
            named = [keyword.value for keyword in node.keywords if keyword.arg == "label"]
            given = named or node.args[place : place + 1]
            for part in (part for expression in given for part in ast.walk(expression)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value:
                    yield part.value


def all_labels() -> set[str]:
    sources = (path for path in DISTOP.rglob("*.py") if "testing" not in path.parts)
    return {label for path in sources for label in labels_of(path.read_text())}


def test_labels_are_found_wherever_they_stand() -> None:
    source = """
Txn((a,), (b,), (), "one")
Txn((), (Txn((a,), (b,), ()),), (), label="two" if late else "three")
Guarded(a, (b,), "four", proof=told)
Txn((), ops, (), writes[0].label if writes else "")
replace(txn, success=(), label="five")
"""
    assert sorted(labels_of(source)) == ["five", "four", "one", "three", "two"]
    assert all_labels() > {"claim", "take_over", "report", "elect", "node", "publish", "put_table"}


def test_every_transition_is_in_a_reference_run(courses: dict[str, Course]) -> None:
    """A new one is missed here until a run goes through it; so is a run that does not any more."""
    gone_through = {point.label for course in courses.values() for point in course.points}
    # A stray key is written by hand, and the id of a namespace by the process around the daemon.
    assert all_labels() - gone_through == PARTS | {"stray", "space"}


def test_every_request_for_a_lease_is_in_a_reference_run(courses: dict[str, Course]) -> None:
    gone_through = {point.what for course in courses.values() for point in course.points}
    paths = {value.path for value in vars(transport).values() if isinstance(value, transport.Method)}
    leases = {path.rpartition("/")[2] for path in paths if path.startswith("/etcdserverpb.Lease/")}
    assert leases - gone_through == {"LeaseTimeToLive"}, "asked for only where a grant is repeated"


@pytest.mark.parametrize("name", references())
def test_a_reference_run_goes_through_what_it_is_there_for(name: str, courses: dict[str, Course]) -> None:
    reference, course = references()[name], courses[name]
    assert (course.opened >= 0) == (reference.opening is not None)
    followed = iter(point.what for point in course.points[course.opened + 1 :])
    assert [step for step in reference.through if not any(what.startswith(step) for what in followed)] == []


def test_a_run_is_repeated_up_to_the_point(courses: dict[str, Course]) -> None:
    """What is struck in a run is what was listed for it."""
    name = "take over of jobs"
    for point in courses[name].points[::10]:
        _, lines = tell(Strike(name, point.number, "kill", "before"))
        assert lines[0] == f"kill {point}, before:"


@pytest.mark.slow  # at each change: that of schedules, in test_schedules.py
def test_a_reference_run_is_the_same_whatever_the_hashes() -> None:
    """Two interpreters, whose strings hash differently: a point has one number in all of them."""
    stories = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", STORY],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=DISTOP.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert len(stories[0]) == len(references())


def test_a_strike_that_breaches_tells_its_story_and_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nobody kills the child of a daemon that is dead, and its job is still at work when it is taken over."""
    arg = {"seed": 5, "partitions": 2, "pace": 20.0, "calls": 0.05, "chunk": 200}
    wish = Wish(0, 0.3, "check", "a", arg, None, None, ())
    slow = Reference(plain(5, 2, [wish], ttl=2, poll=2.0, calm=8.0))
    monkeypatch.setattr("tests.simulator.strikes.references", lambda: {"slow jobs": slow})
    point = next(point for point in discover(slow).points if point.what == "child: start a job")
    struck = Strike("slow jobs", point.number, "kill", "done")
    assert one_strike(struck).stories == ()
    monkeypatch.setattr(SimWorker, "killed_by_guardian", lambda self, reason: None)
    (story,) = one_strike(struck).stories
    assert "stopped too late" in story
    assert "distOpClaim" in story
    assert story.endswith(f"  replay: scripts/simulate --strike 'slow jobs' {point.number} kill done")


def test_a_holder_that_is_overtaken_changes_nothing_after_the_cleanup(
    courses: dict[str, Course], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor wakes up while another one cleans up after it, and what it had sent arrives."""
    name = "lost jobs fail"
    ends = ("report", "retry", "child: hand over an end")
    points = [point for point in courses[name].points if point.what.startswith(ends)]
    overtaken = [Strike(name, point.number, "overtake", "before") for point in points]
    assert [story for strike in overtaken for story in one_strike(strike).stories] == []
    clean_up_before_the_claim(monkeypatch)
    found = "".join(story for strike in overtaken for story in one_strike(strike).stories)
    assert "is reported as a success, and its output had been cleaned up" in found


def test_nobody_goes_on_from_what_was_removed_after_a_verdict(
    courses: dict[str, Course], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor is killed after the cleanup, before its report of the verdict has come through."""
    name = "verdicts after checkpoints"
    points = [point for point in courses[name].points if point.label == "report"]
    killed = [Strike(name, point.number, action, "before") for point in points for action in ("kill", "freeze")]
    assert [story for strike in killed for story in one_strike(strike).stories] == []

    async def careless(self: SimWorker, *args: Any) -> bool:
        return True

    monkeypatch.setattr(SimWorker, "_give_up", careless)
    points = [point for point in discover(references()[name]).points if point.label == "report"]
    killed = [Strike(name, point.number, "freeze", "before") for point in points]
    found = "".join(story for strike in killed for story in one_strike(strike).stories)
    assert "what that speaks of had been cleaned up" in found


def test_a_strike_that_nobody_meets_is_told() -> None:
    assert "no such point" in one_strike(Strike("cancel", 100_000, "kill", "done")).stories[0]


@pytest.mark.parametrize(
    "given", [("nothing", "1", "kill", "done"), ("cancel", "x", "kill", "done"), ("cancel", "1", "hit", "done")]
)
def test_a_strike_that_does_not_exist_is_refused(given: tuple[str, str, str, str]) -> None:
    with pytest.raises(ValueError, match=r"is none of|is no number"):
        checked(*given)


def run(chosen: list[Strike]) -> list[Struck]:
    with multiprocessing.get_context("spawn").Pool(min(2, os.cpu_count() or 1)) as pool:
        return list(pool.imap_unordered(one_strike, chosen, chunksize=16))


@pytest.mark.timeout(600)
def test_no_strike_at_any_step_breaches_anything(
    courses: dict[str, Course], record_property: Callable[[str, object], None]
) -> None:
    """Each step of each role, in a recovery and outside: one strike at it, of any action at any moment."""
    listed = strikes(courses)
    outcomes = run(listed.some())
    record_property(FIGURES, "\n".join(listed.figures(outcomes)))
    assert [story for struck in outcomes for story in struck.stories] == []
    steps = {(kind.role, kind.what, kind.opened) for kind in listed.kinds}
    assert len(outcomes) == len(steps)
    assert {struck.strike.action for struck in outcomes} == set(ACTIONS)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_no_strike_at_any_point_breaches_anything(record_property: Callable[[str, object], None]) -> None:
    """All of them."""
    listed = strikes()
    outcomes = run(listed.all())
    record_property(FIGURES, "\n".join(listed.figures(outcomes)))
    assert [story for struck in outcomes for story in struck.stories] == []

"""Crash points: the process is killed, frozen, cut off or stopped at each step of each protocol, or its child killed.

The list of steps is generated.
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
from tests.simulator.crash_points import ACTIONS, ReferenceRun, discover
from tests.simulator.reference_runs import Reference, references
from tests.simulator.scenario import Submission, plain
from tests.simulator.sim_worker import SimWorker
from tests.simulator.strikes import Strike, StrikeResult, describe_strike, parse_strike, run_strike, strikes

DISTOP = Path(__file__).resolve().parents[2] / "distop"
BUILDERS = {"Txn": 3, "Guarded": 2, "replace": 3}
"""Functions that build transactions or their parts → the position of the argument ``label``."""


PARTS = {"broken_edge", "forget_request", "give_back", "release_id"}
"""Labels of transactions that are only sent nested in others."""

RUN = """
import hashlib
from tests.simulator.crash_points import discover
from tests.simulator.reference_runs import references
for name, reference in references().items():
    print(name, hashlib.sha256(repr(discover(reference).points).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def runs() -> dict[str, ReferenceRun]:
    return {name: discover(reference) for name, reference in references().items()}


def labels_of(source: str) -> Iterator[str]:
    """The labels that this code can give to transactions."""
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


def test_labels_are_found_in_all_forms() -> None:
    source = """
Txn((a,), (b,), (), "one")
Txn((), (Txn((a,), (b,), ()),), (), label="two" if late else "three")
Guarded(a, (b,), "four", proof=told)
Txn((), ops, (), writes[0].label if writes else "")
replace(txn, success=(), label="five")
"""
    assert sorted(labels_of(source)) == ["five", "four", "one", "three", "two"]
    assert all_labels() > {"claim", "take_over", "report", "elect", "node", "publish", "put_table"}


def test_every_transition_is_in_a_reference_run(runs: dict[str, ReferenceRun]) -> None:
    """Fails for a new transition that no run takes, and for a run that no longer takes its transition."""
    gone_through = {point.label for run in runs.values() for point in run.points}
    # A stray key is written by hand, and a namespace's id outside of the daemon.
    assert all_labels() - gone_through == PARTS | {"stray", "space"}


def test_every_request_for_a_lease_is_in_a_reference_run(runs: dict[str, ReferenceRun]) -> None:
    gone_through = {point.what for run in runs.values() for point in run.points}
    paths = {value.path for value in vars(transport).values() if isinstance(value, transport.Method)}
    leases = {path.rpartition("/")[2] for path in paths if path.startswith("/etcdserverpb.Lease/")}
    assert leases - gone_through == {"LeaseTimeToLive"}, "sent only after a repeated grant"


@pytest.mark.parametrize("name", references())
def test_a_reference_run_takes_its_listed_steps(name: str, runs: dict[str, ReferenceRun]) -> None:
    reference, run = references()[name], runs[name]
    assert (run.opened >= 0) == (reference.opening is not None)
    followed = iter(point.what for point in run.points[run.opened + 1 :])
    assert [step for step in reference.through if not any(what.startswith(step) for what in followed)] == []


def test_a_run_is_repeated_up_to_the_point(runs: dict[str, ReferenceRun]) -> None:
    """The struck point is the listed one."""
    name = "take over of jobs"
    for point in runs[name].points[::10]:
        _, lines = describe_strike(Strike(name, point.number, "kill", "before"))
        assert lines[0] == f"kill {point}, before:"


@pytest.mark.slow  # CI runs the same test on schedules, in test_schedules.py
def test_reference_runs_do_not_depend_on_string_hashes() -> None:
    """In two interpreters with different string hashes, each point has the same number."""
    runs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", RUN],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=DISTOP.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == len(references())


def test_a_strike_with_a_breach_has_a_timeline_and_a_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the child of a dead daemon is not killed, so its job still runs when it is taken over."""
    arg = {"seed": 5, "partitions": 2, "pace": 20.0, "calls": 0.05, "chunk": 200}
    submission = Submission(0, 0.3, "check", "a", arg, None, None, ())
    slow = Reference(plain(5, 2, [submission], ttl=2, poll=2.0, calm=8.0))
    monkeypatch.setattr("tests.simulator.strikes.references", lambda: {"slow jobs": slow})
    point = next(point for point in discover(slow).points if point.what == "child: start a job")
    struck = Strike("slow jobs", point.number, "kill", "done")
    assert run_strike(struck).timelines == ()
    monkeypatch.setattr(SimWorker, "killed_by_guardian", lambda self, reason: None)
    (timeline,) = run_strike(struck).timelines
    assert "stopped too late" in timeline
    assert "distOpClaim" in timeline
    assert timeline.endswith(f"  replay: scripts/simulate --strike 'slow jobs' {point.number} kill done")


def test_a_holder_that_is_overtaken_changes_nothing_after_the_cleanup(
    runs: dict[str, ReferenceRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen executor wakes up while another one cleans up after it, and its delayed requests arrive."""
    name = "lost jobs fail"
    ends = ("report", "retry", "child: report an end")
    points = [point for point in runs[name].points if point.what.startswith(ends)]
    overtaken = [Strike(name, point.number, "overtake", "before") for point in points]
    assert [text for strike in overtaken for text in run_strike(strike).timelines] == []
    clean_up_before_the_claim(monkeypatch)
    found = "".join(text for strike in overtaken for text in run_strike(strike).timelines)
    assert "is reported as a success, but its output had been cleaned up" in found


def test_no_job_resumes_from_output_that_was_removed_after_a_verdict(
    runs: dict[str, ReferenceRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor is killed after the cleanup, before its report of the verdict is applied."""
    name = "verdicts after checkpoints"
    points = [point for point in runs[name].points if point.label == "report"]
    killed = [Strike(name, point.number, action, "before") for point in points for action in ("kill", "freeze")]
    assert [text for strike in killed for text in run_strike(strike).timelines] == []

    async def careless(self: SimWorker, *args: Any) -> bool:
        return True

    monkeypatch.setattr(SimWorker, "_abandon_checkpoint", careless)
    points = [point for point in discover(references()[name]).points if point.label == "report"]
    killed = [Strike(name, point.number, "freeze", "before") for point in points]
    found = "".join(text for strike in killed for text in run_strike(strike).timelines)
    assert "the output of that checkpoint had been cleaned up" in found


def test_a_strike_whose_point_is_not_reached_is_reported() -> None:
    assert "no such point" in run_strike(Strike("cancel", 100_000, "kill", "done")).timelines[0]


@pytest.mark.parametrize(
    "given", [("nothing", "1", "kill", "done"), ("cancel", "x", "kill", "done"), ("cancel", "1", "hit", "done")]
)
def test_an_invalid_strike_is_refused(given: tuple[str, str, str, str]) -> None:
    with pytest.raises(ValueError, match=r"is none of|is no number"):
        parse_strike(*given)


def run(chosen: list[Strike]) -> list[StrikeResult]:
    with multiprocessing.get_context("spawn").Pool(min(2, os.cpu_count() or 1)) as pool:
        return list(pool.imap_unordered(run_strike, chosen, chunksize=16))


@pytest.mark.timeout(600)
def test_no_strike_at_any_step_breaches_anything(
    runs: dict[str, ReferenceRun], record_property: Callable[[str, object], None]
) -> None:
    """One strike at each step of each role, both within a recovery and outside, with one action and moment."""
    listed = strikes(runs)
    outcomes = run(listed.some())
    record_property(FIGURES, "\n".join(listed.figures(outcomes)))
    assert [text for struck in outcomes for text in struck.timelines] == []
    steps = {(kind.role, kind.what, kind.opened) for kind in listed.kinds}
    assert len(outcomes) == len(steps)
    assert {struck.strike.action for struck in outcomes} == set(ACTIONS)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_no_strike_at_any_point_breaches_anything(record_property: Callable[[str, object], None]) -> None:
    """All strikes."""
    listed = strikes()
    outcomes = run(listed.all())
    record_property(FIGURES, "\n".join(listed.figures(outcomes)))
    assert [text for struck in outcomes for text in struck.timelines] == []

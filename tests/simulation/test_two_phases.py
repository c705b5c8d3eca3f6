"""Prepared operations in the simulator, with all actions of senders, all answers of verifiers, and crashes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distop.protocol.behavior_declaration import Rules
from distop.protocol.keys import Keys
from distop.protocol.prepared_operations import PreparedTerms, hold_id
from distop.protocol.records import History, OperationRef, Spec
from distop.protocol.revisioned import Change
from distop.protocol.txn import KeyValue
from tests.simulator import Simulation, draw_scenario
from tests.simulator.prepared_starts import PreparedStarts
from tests.simulator.run import without_logs
from tests.simulator.scenario import Fault, Submission, plain

KEYS = Keys()
REF = OperationRef("a", "check", "", 1)


def submission(prepared: str, verifier: str) -> Submission:
    arg = {"seed": 5, "partitions": 2, "pace": 0.1, "trouble": 0.0, "chunk": 100_000, "calls": 0.05, "name": "x"}
    return Submission(0, 0.3, "check", "a", arg, None, "collect_all", (), prepared=prepared, verifier=verifier)


def run(seed: int, submission: Submission, *faults: Fault) -> tuple[str, str, list[str]]:
    """Run a scenario: (state, alarm, breaches)."""
    sim = Simulation(plain(seed, 3, [submission], *faults, poll=5.0))
    with without_logs():
        breaches = list(map(str, sim.run().breaches))
    kv = sim.etcd.store.get(KEYS.history(REF))
    assert kv is not None
    ended = History.decode(kv.value)
    return str(ended.state), ended.alarm, breaches


@pytest.mark.parametrize(
    ("prepared", "verifier", "runs", "alarm"),
    [
        ("confirms", "no", True, ""),
        ("dies", "yes", True, ""),
        ("dies", "no", False, "no reports that its sender's transaction was not completed"),
        ("dies", "nothing", False, "asked 3 times, did not answer"),
        ("late", "yes", True, ""),
        ("late", "no", False, "no reports that its sender's transaction was not completed"),
        ("abandons", "yes", False, ""),
    ],
)
def test_C14_the_sender_or_the_verifier_decides_whether_a_prepared_operation_runs(
    prepared: str, verifier: str, runs: bool, alarm: str
) -> None:
    state, found, breaches = run(7, submission(prepared, verifier))
    assert breaches == []
    assert state == ("success" if runs else "cancelled")
    assert (alarm in found) if alarm else found == ""


@pytest.mark.parametrize("seed", range(8))
def test_C14_a_crash_during_verification_does_not_change_the_end(seed: int) -> None:
    crashes = [Fault("crash", 2.4 + 0.15 * n, 3.0, ((seed + n) % 3 / 3, 0.5, 0.5, 0.1 * n)) for n in range(3)]
    for verifier, expected in (("yes", "success"), ("no", "cancelled")):
        state, alarm, breaches = run(seed, submission("dies", verifier), *crashes)
        assert breaches == []
        assert state == expected
        assert bool(alarm) is (expected == "cancelled")


def test_C14_seeds_draw_prepared_operations() -> None:
    drawn = [one for seed in range(300) for one in draw_scenario(seed).submissions if one.prepared]
    assert {one.prepared for one in drawn} == {"confirms", "late", "dies", "abandons"}
    assert {one.verifier for one in drawn} == {"yes", "no", "nothing"}


# ------------------------------------------------------------------ the checks

TERMS = PreparedTerms("x", str(REF), "", "no")


def follow(*values: tuple[str, bytes]) -> PreparedStarts:
    prepared = PreparedStarts()
    spec = Spec("r", "2026-01-01T00:00:00.000Z", "me", Rules(), hold=hold_id("x"))
    hold = KEYS.hold(hold_id("x"))
    for key, value in ((hold, TERMS.hold().encode()), (KEYS.of(REF, "spec"), spec.encode()), *values):
        prepared.step([(KEYS.parse(key), Change(KeyValue(key, value, 5)))])
    return prepared


BEGINS = (KEYS.of(REF, "state"), b"running")
ALARM = (
    KEYS.history(REF),
    replace(History.decode(b'{"op":"a/check/1","state":"cancelled"}'), alarm="it never ran").encode(),
)


@pytest.mark.parametrize(
    ("values", "answer", "ended", "text"),
    [
        ((BEGINS,), "", "success", "started without a confirmation"),
        ((BEGINS,), "refused", "success", "was told that it never would"),
        ((ALARM,), "confirmed", "cancelled", "was told that it was confirmed"),
        ((BEGINS, ALARM), "confirming", "cancelled", "the alarm of an operation that never started"),
        ((ALARM,), "", "success", "has an alarm, but ended as success"),
        ((BEGINS,), "confirming", "success", ""),
        ((ALARM,), "refused", "cancelled", ""),
    ],
)
def test_wrong_ends_of_prepared_operations_are_reported(
    values: tuple[tuple[str, bytes], ...], answer: str, ended: str, text: str
) -> None:
    found = list(follow(*values).breaches({str(REF): answer} if answer else {}, {str(REF): ended}))
    assert len(found) == bool(text)
    assert all(text in description for _, description in found)

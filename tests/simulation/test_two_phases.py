"""Prepared operations in the simulator: senders that confirm, are late, die or abandon; verifiers that say yes, no or
nothing; executors that crash meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from distop.protocol.behavior_declaration import Rules
from distop.protocol.keys import Keys
from distop.protocol.prepared_operations import Terms, hold_id
from distop.protocol.records import History, OperationRef, Spec
from distop.protocol.revisioned import Change
from distop.protocol.txn import KeyValue
from tests.simulator import Simulation, scenario
from tests.simulator.prepared_starts import Prepared
from tests.simulator.run import quietly
from tests.simulator.scenario import Fault, Wish, plain

KEYS = Keys()
REF = OperationRef("a", "check", "", 1)


def wish(prepared: str, verifier: str) -> Wish:
    arg = {"seed": 5, "partitions": 2, "pace": 0.1, "trouble": 0.0, "chunk": 100_000, "calls": 0.05, "name": "x"}
    return Wish(0, 0.3, "check", "a", arg, None, "collect_all", (), prepared=prepared, verifier=verifier)


def run(seed: int, wanted: Wish, *faults: Fault) -> tuple[str, str, list[str]]:
    """(state, alarm, breaches)."""
    sim = Simulation(plain(seed, 3, [wanted], *faults, poll=5.0))
    with quietly():
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
def test_C14_a_prepared_operation_runs_as_its_sender_or_its_verifier_says(
    prepared: str, verifier: str, runs: bool, alarm: str
) -> None:
    state, told, breaches = run(7, wish(prepared, verifier))
    assert breaches == []
    assert state == ("success" if runs else "cancelled")
    assert (alarm in told) if alarm else told == ""


@pytest.mark.parametrize("seed", range(8))
def test_C14_it_ends_as_its_verifier_says_whichever_executor_crashes_while_it_asks(seed: int) -> None:
    crashes = [Fault("crash", 2.4 + 0.15 * n, 3.0, ((seed + n) % 3 / 3, 0.5, 0.5, 0.1 * n)) for n in range(3)]
    for verifier, expected in (("yes", "success"), ("no", "cancelled")):
        state, alarm, breaches = run(seed, wish("dies", verifier), *crashes)
        assert breaches == []
        assert state == expected
        assert bool(alarm) is (expected == "cancelled")


def test_C14_seeds_submit_in_two_phases() -> None:
    drawn = [one for seed in range(300) for one in scenario(seed).wishes if one.prepared]
    assert {one.prepared for one in drawn} == {"confirms", "late", "dies", "abandons"}
    assert {one.verifier for one in drawn} == {"yes", "no", "nothing"}


# ------------------------------------------------------------------- the judge

TERMS = Terms("x", str(REF), "", "no")


def follow(*values: tuple[str, bytes]) -> Prepared:
    judge = Prepared()
    spec = Spec("r", "2026-01-01T00:00:00.000Z", "me", Rules(), hold=hold_id("x"))
    hold = KEYS.hold(hold_id("x"))
    for key, value in ((hold, TERMS.hold().encode()), (KEYS.of(REF, "spec"), spec.encode()), *values):
        judge.step([(KEYS.parse(key), Change(KeyValue(key, value, 5)))])
    return judge


BEGINS = (KEYS.of(REF, "state"), b"running")
ALARM = (
    KEYS.history(REF),
    replace(History.decode(b'{"op":"a/check/1","state":"cancelled"}'), alarm="it never ran").encode(),
)


@pytest.mark.parametrize(
    ("values", "said", "ended", "text"),
    [
        ((BEGINS,), "", "success", "nobody confirmed it"),
        ((BEGINS,), "refused", "success", "was told that it never does"),
        ((ALARM,), "confirmed", "cancelled", "was told that it is confirmed"),
        ((BEGINS, ALARM), "confirming", "cancelled", "the alarm of one that never does"),
        ((ALARM,), "", "success", "has an alarm, and ended as success"),
        ((BEGINS,), "confirming", "success", ""),
        ((ALARM,), "refused", "cancelled", ""),
    ],
)
def test_what_must_not_become_of_one_is_found(
    values: tuple[tuple[str, bytes], ...], said: str, ended: str, text: str
) -> None:
    found = list(follow(*values).broken({str(REF): said} if said else {}, {str(REF): ended}))
    assert len(found) == bool(text)
    assert all(text in told for _, told in found)

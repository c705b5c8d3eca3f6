"""Generated mutants of transactions and sources change exactly the place that they name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mutate import decisive_nowhere, half, judged, kind
from mutating import child_processes, source_mutants
from mutating.catalogue import Catalogue, Place, imports
from mutating.child_processes import Steps, in_children
from mutating.held_requests import Requests, hold
from mutating.hooks import Observed, observing, plant
from mutating.late_copies import labelling
from mutating.search import Verdict
from mutating.started_processes import report_from
from mutating.transaction_mutants import (
    FIRST,
    GUARD,
    GUARD_FIRST,
    GUARD_LAST,
    LAST,
    WRITE,
    Mutant,
    all_mutants,
    decisive,
    kind_of_key,
    without,
)

from distop.protocol import job_transitions, pending_operations
from distop.protocol import operation_finish as f
from distop.protocol.age_watermarks import Watermark
from distop.protocol.dependencies import Hold
from distop.protocol.jobs import Claim, JobState
from distop.protocol.keys import Keys
from distop.protocol.records import OperationRef
from distop.protocol.size_limits import DEFAULT, Limits
from distop.protocol.txn import Compare, Delete, Put, Txn, absent, unchanged, value_is
from distop.testing.model_store import ModelStore
from distop.worker import guardian
from distop.worker.child_side import outbox
from tests.simulator import Simulation, draw_scenario, simulated_behaviors
from tests.simulator.run import without_logs
from tests.simulator.scenario import Submission, plain
from tests.simulator.simulated_behaviors import Script
from tests.support.world import World, outcome

KEYS = Keys("prod")
REF = OperationRef("t", "noop", "", 7)


@pytest.mark.parametrize(
    ("key", "range_end", "kind"),
    [
        (KEYS.claim(REF, 3), "", "claim"),
        (*KEYS.claims_range(REF), "claim range"),
        (KEYS.gate(REF), "", "open"),
        (KEYS.of(REF, "state"), "", "state"),
        (KEYS.job(REF, 3, "state"), "", "job state"),
        (KEYS.chunk(REF, 0), "", "chunk"),
        (KEYS.edge(REF, "next", "0" * 20), "", "next"),
        (*KEYS.edges_range(REF, "next"), "next range"),
        (KEYS.run_ops("t"), "", "runOps"),
        (KEYS.history(REF), "", "history"),
        (KEYS.node("a"), "", "node"),
        (KEYS.unique("t", "noop", "12"), "", "unique"),
        ("mine", "", "a caller's key"),
    ],
)
def test_a_key_is_named_by_its_kind(key: str, range_end: str, kind: str) -> None:
    assert kind_of_key(key, range_end) == kind


def test_each_guard_and_each_write_of_a_transaction_has_a_mutant() -> None:
    world = World()
    world.join("a")
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.elect("a"))
    world.do(world.plan(ref, 2))
    txn = world.claim(ref, "a", [0, 1])
    assert {str(mutant) for mutant in all_mutants(txn)} == {
        "claim: guard open is unchanged",
        "claim: guard node exists",
        "claim > each: guard claim is absent",
        "claim > each: guard job state is absent",
        "claim > each: write put claim",
        "claim > each: first of several",
        "claim > each: last of several",
    }


def test_a_mutant_omits_only_the_compare_or_write_that_it_names() -> None:
    first, second = (Txn((absent(key), value_is("x", b"1")), (Put(key, b""),)) for key in ("a", "b"))
    txn = Txn((unchanged("x", 3),), (first, second), (), "both")
    guard = without(txn, Mutant("both > each", GUARD, "a caller's key is absent"))
    assert [op.compares for op in guard.success if isinstance(op, Txn)] == [(value_is("x", b"1"),)] * 2
    assert guard.compares == txn.compares
    last = without(txn, Mutant("both > each", LAST, "of several"))
    assert last.success[0] == first
    assert without(txn, Mutant("both > each", FIRST, "of several")).success[1] == second
    assert ModelStore().apply(last).succeeded is False
    written = without(txn, Mutant("both > each", WRITE, "put a caller's key"))
    store = ModelStore()
    store.apply(Txn((), written.success))
    assert store.listing() == ()
    assert without(txn, Mutant("another", GUARD, "a caller's key is unchanged")) == txn


def test_the_first_or_the_last_of_several_compares_or_writes_is_omitted() -> None:
    a, b, c = compares = (absent("a"), absent("b"), absent("c"))
    one, two, three = (Put(key, b"") for key in "abc")
    txn = Txn((*compares, value_is("x", b"1")), (one, two, three, Delete("x")), (), "some")
    absences, puts = "a caller's key is absent", "put a caller's key"
    assert {str(mutant) for mutant in all_mutants(txn)} == {
        "some: guard a caller's key is absent",
        "some: guard-first a caller's key is absent",
        "some: guard-last a caller's key is absent",
        "some: guard a caller's key has this value",
        "some: write put a caller's key",
        "some: first put a caller's key",
        "some: last put a caller's key",
        "some: write delete a caller's key",
    }
    assert without(txn, Mutant("some", GUARD_FIRST, absences)).compares == (b, c, value_is("x", b"1"))
    assert without(txn, Mutant("some", GUARD_LAST, absences)).compares == (a, b, value_is("x", b"1"))
    assert [op for op in without(txn, Mutant("some", FIRST, puts)).success if isinstance(op, Put)] == [two, three]
    assert [op for op in without(txn, Mutant("some", LAST, puts)).success if isinstance(op, Put)] == [one, two]
    single = Mutant("some", GUARD_FIRST, "a caller's key has this value")
    assert without(txn, single) == txn, "the mutant without all of them covers this"


def test_the_first_or_the_last_compare_is_decisive_if_it_alone_fails() -> None:
    txn = Txn((*map(absent, "abc"), value_is("x", b"1")), (Delete("a"), Delete("b")), (), "some")
    absences, value = "a caller's key is absent", "a caller's key has this value"

    def refuse(*keys: str) -> set[Mutant]:
        return {one for one in decisive(txn, lambda compare: compare.key not in keys) if one.mode.startswith(GUARD)}

    guard = Mutant("some", GUARD, absences)
    first, last = Mutant("some", GUARD_FIRST, absences), Mutant("some", GUARD_LAST, absences)
    assert [refuse(*keys) for keys in ("a", "b", "c", "ac")] == [{guard, first}, {guard}, {guard, last}, {guard}]
    pair = f"{value} + {absences}"
    assert refuse("a", "x") == {Mutant("some", GUARD, pair), Mutant("some", GUARD_FIRST, pair)}
    assert refuse("b", "x") == {Mutant("some", GUARD, pair)}
    both = Mutant("some", GUARD_FIRST, pair)
    assert [one.key for one in without(txn, both).compares] == ["b", "c"]
    built = set(all_mutants(txn))
    assert [half(both, kind, built) for kind in both.kinds] == [Mutant("some", GUARD, value), first]
    deletions = {one.mode for one in decisive(txn, lambda compare: compare.key != "a" or compare == absent("a"))}
    assert deletions == {WRITE, LAST}, "the first key is absent: its deletion does nothing"


def test_a_guard_is_decisive_if_it_alone_refuses() -> None:
    keys = World().keys
    txn = job_transitions.group(
        [job_transitions.report(keys, REF, 0, 5, JobState.SUCCESS, outcome(0, Claim("e", "a", 1, 0)))]
    )
    guard = Mutant("report", GUARD, "claim is unchanged")
    assert guard in set(decisive(txn, lambda compare: False))
    assert guard not in set(decisive(txn, lambda compare: True)), "it refuses nothing"
    ended = f.end(keys, REF, absent(keys.coordinator("t", "noop")), 5)

    def fails(*kinds: str) -> set[Mutant]:
        def holds(compare: Compare) -> bool:
            return kind_of_key(compare.key, compare.range_end) not in kinds

        return set(decisive(ended, holds))

    assert fails("state") == {Mutant("end", GUARD, "state is unchanged")}
    pair = fails("state", "coordinator")
    assert pair == {Mutant("end", GUARD, "coordinator is absent + state is unchanged")}, "they back each other"
    assert fails("state", "coordinator", "pending") == set()
    kept = [kind_of_key(compare.key, compare.range_end) for compare in without(ended, pair.pop()).compares]
    assert kept == ["pending", "next range"]


def test_a_deletion_is_decisive_if_something_is_deleted() -> None:
    store = ModelStore()
    store.apply(Txn((), (Put("a", b""), Put("d", b""))))
    found = [
        {mutant.mode for mutant in decisive(Txn((), (one,), (), "label"), store._holds)}
        for one in (Delete("a"), Delete("b"), Delete("c", "e"), Delete("e", "f"))
    ]
    assert found == [{WRITE}, set(), {WRITE}, set()]


def test_nested_transactions_count_if_they_are_reached() -> None:
    world = World()
    forget = f.forget(world.keys, [(REF, 4, "")], Watermark(0, 5))
    of_record = unchanged(world.keys.history(REF), 4)
    assert Mutant("forget > each", GUARD, "history is unchanged") in set(decisive(forget, lambda one: one != of_record))
    hold = pending_operations.hold(world.keys, "h", Hold("graph"), 0)
    inner = Txn((absent("never"),), (hold,), (), "outer")
    assert {mutant.place for mutant in decisive(inner, lambda compare: False)} == {"outer"}


@pytest.mark.parametrize("mode", source_mutants.MODES)
def test_every_source_mutant_changes_one_live_function(mode: str) -> None:
    mutants = [mutant for mutant in source_mutants.sites() if mutant.mode == mode]
    assert mutants
    for mutant in mutants:
        source_mutants.changed(mutant)


@pytest.mark.parametrize(
    "mutant",
    [
        "distop.daemon.upkeep.history_pruning: now LOOK_EVERY",
        "distop.daemon.upkeep.abandoned_holds.HoldKeeper.look: age age > GRAPH_LIMIT",
        "distop.daemon.incarnation.Incarnation._poll: step await self._release_unknown_claims()",
        "distop.daemon.coordinator.finish_batches.Finishes._commit: slice group[count:]",
        "distop.daemon.coordinator.finish_batches.Finishes._commit: slice-first group[count:]",
        "distop.store.session.Session.start: task loop.create_task(self._guard(), name='distop-session-guard')",
        "distop.daemon.coordinator.label_routing.Placing._look_soon: "
        "task asyncio.get_running_loop().call_later(pause, self._look)",
        "distop.daemon.coordinator.pending_starts.Waiters._end_some: slice islice(self._ending, self._ctx.limits.ends)",
        "distop.services.submission.awaited_operations.standings: slice answers[1::2]",
        "distop.daemon.job_reports.Reporter._write: step applied = await self._applied(writes)",
        "distop.daemon.incarnation.Incarnation._live: task self.executor.run()",
        "distop.worker.daemon_side.child_launch.ChildProcess._ping_regularly: step self.kill('frozen')",
        "distop.worker.child_side.child.Child._track: step work.track()",
        "distop.worker.guardian: never TICK",
    ],
)
def test_times_polls_slices_and_tasks_of_the_source_have_mutants(mutant: str) -> None:
    assert mutant in {str(one) for one in source_mutants.sites()}


def test_the_constant_bounds_of_texts_and_digests_have_no_mutants() -> None:
    slices = [one for one in source_mutants.sites() if one.mode in source_mutants.SLICES]
    assert not [str(one) for one in slices if "hexdigest" in one.what or one.what == "text[:40]"]


def test_a_mutant_of_the_worker_is_planted_in_started_processes() -> None:
    """In a separate process, so that the code and the environment of this one stay unchanged."""
    child = "from distop.worker.child_side import outbox; print(outbox.FLUSH_SECONDS, outbox.ANSWER_SECONDS)"

    def do(work: Mutant, steps: Steps) -> Any:
        steps.begin(str(work))
        plant(work)
        started = subprocess.run([sys.executable, "-P", "-c", child], capture_output=True, check=True, text=True)
        text = Path(guardian.__file__).read_text()
        return [started.stdout, "\nTICK = 0.0\n" in text, "reap()" not in text]

    flush = Mutant("distop.worker.child_side.outbox", source_mutants.NOW, "FLUSH_SECONDS")
    tick = Mutant("distop.worker.guardian", source_mutants.NOW, "TICK")
    reap = Mutant("distop.worker.guardian.kill_session", source_mutants.STEP, "reap()")
    source_mutants.sites()  # once for all
    found = {one.work: one.answer for one in in_children([flush, tick, reap], 1, do)}
    unchanged = f"{outbox.FLUSH_SECONDS} {outbox.ANSWER_SECONDS}\n"
    assert found == {
        flush: [f"0.0 {outbox.ANSWER_SECONDS}\n", False, False],
        tick: [unchanged, True, False],
        reap: [unchanged, False, True],
    }


def test_statements_that_started_processes_reach_are_reported_once() -> None:
    def do(work: str, steps: Steps) -> Any:
        steps.begin(work)
        numbers = report_from({"distop.worker.child_side.outbox": "for n in (3, 4, 3): tell(n)"}, "tell")
        for _ in range(2):
            subprocess.run([sys.executable, "-P", "-c", "import distop.worker.child_side.outbox"], check=True)
        return [sorted(numbers()), sorted(numbers())]

    (ended,) = in_children(["reports"], 1, do)
    assert ended.answer == [[3, 4], []]


def test_a_schedule_is_observed_and_a_mutant_breaches_it() -> None:
    """In separate processes, so that the code of this one stays unchanged."""

    def do(work: str, steps: Steps) -> Any:
        steps.begin(work)
        if work == "mutant":
            plant(Mutant("finish", WRITE, "put history"))
            with without_logs():
                return [breach.kind for breach in Simulation(draw_scenario(1)).run().breaches]
        observed = Observed()
        with observing(observed, statements=work == "observed"), without_logs():
            Simulation(draw_scenario(1)).run()
        return sorted({mutant.place for mutant in observed.decisive})

    found = {one.work: one.answer for one in in_children(["observed", "labels alone", "mutant"], 1, do)}
    assert {"start", "elect", "claim", "report", "finish"} <= set(found["observed"])
    assert any(place.startswith("distop.daemon.coordinator.") for place in found["observed"])
    assert found["labels alone"] == [place for place in found["observed"] if not place.startswith("distop.")]
    assert found["mutant"]
    with without_logs():
        assert Simulation(draw_scenario(1)).run().breaches == []


def test_a_job_that_starts_again_after_a_held_report_breaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executor is killed minutes after the last fault of the scenario, when the job is nearly done."""
    monkeypatch.setattr(simulated_behaviors, "script", lambda *_: Script(100.0, 1, "success"))
    arg = {"seed": 5, "partitions": 1, "pace": 0.1, "trouble": 0.0, "chunk": 100_000, "calls": 0.05, "name": "x"}
    scenario = plain(11, 2, [Submission(0, 0.3, "check", "a", arg, None, "collect_all", ())])
    with labelling(None) as observed, without_logs():
        requests, sim = Requests(observed), Simulation(scenario)
        requests.watch(sim)
        assert sim.run().breaches == []
        (report,) = requests.labels["report"]
        sim = Simulation(scenario)
        hold(sim, observed, (report, 7.0, True))
        assert sim.run().breaches == []
    assert sim.loop.now > 200, "the job did not start again"


def test_a_hanging_child_is_reported_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "COMPUTES", 0.2)

    def do(work: str, steps: Steps) -> Any:
        steps.begin(work)
        while work == "loops":
            pass
        raise ValueError(work)

    ended = {one.work: one for one in in_children(["loops", "fails"], 2, do)}
    assert (ended["loops"].hung, ended["loops"].step) == (True, "loops")
    assert (ended["fails"].hung, ended["fails"].error) == (False, "ValueError: fails")


def test_one_survivor_without_a_reason_is_reported_however_many_are_killed() -> None:
    killed = [Verdict(f"claim: guard {n}", layer="unit") for n in range(198)]
    backed, listed = Verdict("end: guard a", backed="guard b"), Verdict("end: guard c")
    assert judged([*killed, backed, listed], {"end: guard c"}) == (1.0, [])
    share, left = judged([*killed, backed, listed, Verdict("end: guard d")], {"end: guard c", "claim: guard 1"})
    assert left == ["end: guard d"]
    assert share == pytest.approx(0.995)


def test_a_reason_for_a_guard_covers_the_first_and_the_last_of_it() -> None:
    rows = {"end: guard state is unchanged", "end: write delete unique", "end: last put a"}
    survivors = [Verdict(f"end: {mode} state is unchanged") for mode in ("guard-first", "guard-last")]
    survivors += [Verdict(f"end: {mode} delete unique") for mode in ("first", "last")]
    assert judged(survivors, rows) == (1.0, [])
    others = ["end: first put a", "end: first state is unchanged", "join: guard-first state is unchanged"]
    assert judged([Verdict(one) for one in others], rows) == (0.0, others)


def test_a_sample_reports_mutants_of_its_labels_that_are_decisive_nowhere() -> None:
    """No sample contains such a mutant, so its survival would show only before a release."""
    needed, backed, listed = (Mutant("end", GUARD, f"{key} is unchanged") for key in ("state", "hold", "open"))
    nested, other = Mutant("end > each", WRITE, "delete unique"), Mutant("claim", GUARD, "open is unchanged")
    source = Mutant("end", source_mutants.NOW, "pause")
    place = [(Place("tests/unit/test_x.py::test_a"), 1)]
    found = Catalogue({needed: place, Mutant("end", GUARD, "hold is unchanged + next is absent"): place})
    mutants = [needed, backed, listed, nested, other, source]
    assert decisive_nowhere(found, mutants, {"end"}, {str(listed)}) == [str(nested)]
    assert decisive_nowhere(found, mutants, {"end", "claim"}, ()) == sorted(map(str, (listed, nested, other)))


def test_a_mutant_whose_source_has_a_colon_is_counted_with_its_kind() -> None:
    assert (
        kind("distop.services.claims.claim_candidates.Candidates._look: slice sorted(due, key=lambda ref: ref)[:LOOKS]")
        == "slice"
    )
    assert kind("claim > each: guard-first claim is absent") == "guard-first"


def test_times_that_share_an_assignment_and_limits_have_mutants() -> None:
    listed = {str(one) for one in source_mutants.sites()}
    times = ("distop.daemon.capability: {} LONGEST_PAUSE", "distop.store.transport: {} PING_EVERY",
             "distop.protocol.size_limits: {} history_kept", "distop.client.operation_end: {} _POLL")  # fmt: skip
    assert {name.format(mode) for name in times for mode in ("never", "now")} <= listed
    assert "distop.runtime.backoff.Backoff.pause: age whole < self.longest" in listed
    assert not {name for name in listed if "distop.protocol.json_codec" in name}, "its numbers are the bounds of text"


def test_a_changed_limit_is_the_default_wherever_it_is_not_given() -> None:
    """In a separate process, so that the limits of this one stay unchanged."""

    def do(work: str, steps: Steps) -> Any:
        steps.begin(work)
        plant(Mutant(source_mutants.LIMITS, source_mutants.NOW, "history_kept"))
        made = Limits(prune_every=7.0)
        return [
            DEFAULT.history_kept,
            made.history_kept,
            made.prune_every,
            made.pruned,
            draw_scenario(1).limits.history_kept,
        ]

    (ended,) = in_children(["limits"], 1, do)
    assert ended.answer == [0.0, 0.0, 7.0, DEFAULT.pruned, 0.0]
    assert DEFAULT.history_kept == Limits().history_kept == 3600.0


def test_documented_source_mutants_exist() -> None:
    text = (Path(__file__).parents[3] / "docs/internals/mutants.md").read_text()
    listed = re.findall(r"^\| `(distop\.[^`]+: [^`]+)` \|", text, re.MULTILINE)
    assert listed
    assert set(listed) <= {str(mutant) for mutant in source_mutants.sites()}


def test_tests_that_import_the_module_of_a_mutant_come_first() -> None:
    assert imports("tests/unit/protocol/test_texts.py", "distop.protocol.texts.shown")
    assert not imports("tests/unit/protocol/test_texts.py", "distop.protocol.keys")
    assert not imports("tests/unit/protocol/test_texts.py", "claim"), "the label of a transaction"
    mutant = Mutant("distop.protocol.texts.shown", "slice", "text[:limit]")
    quick, own = (
        Place("tests/unit/protocol/test_keys.py::test_a", seconds=0.1),
        Place("tests/unit/protocol/test_texts.py::test_b", seconds=9),
    )
    found = Catalogue({mutant: [(quick, 1), (own, 1)]})
    assert found.places(mutant, "unit") == [own, quick]


def test_a_catalogue_is_restored_from_the_cache() -> None:
    mutant, other = Mutant("claim", GUARD, "node exists"), Mutant("end", WRITE, "delete pending")
    found = Catalogue(mutants={mutant, other}, simulated={other}, schedules=5, statements=True)
    found.decisive[mutant] += [(Place("tests/unit/test_x.py::test_slow", 0, 9.0), 1), (Place("", 4, 0.5), 2)]
    found.decisive[mutant].append((Place("tests/unit/test_x.py::test_fast", 0, 0.1), 1))
    found.decisive[mutant].append((Place("tests/unit/test_y.py::test_slowest", 0, 9.5), 1))
    found.decisive[mutant].append((Place("", 4, 0.5, (17, 120)), 1))
    found.sent["claim"].append((4, 9))
    kept = Catalogue.from_json(found.as_json())
    assert kept.as_json() == found.as_json()
    assert kept.statements
    assert [place.test for place in kept.places(mutant, "unit")] == [
        "tests/unit/test_x.py::test_fast",
        "tests/unit/test_y.py::test_slowest",
        "tests/unit/test_x.py::test_slow",
    ]
    assert list(map(str, kept.places(mutant, "schedules"))) == ["seed 4"]
    assert list(map(str, kept.places(mutant, "late copies"))) == ["seed 4, copy of 17 at 120"]
    held = kept.requests(1)
    assert str(held[0]) == "seed 4, request 9 held for 0.4 s"
    assert str(held[-1]) == "seed 4, request 9 held for 2 s after its sender was killed"
    assert [Place.parse(str(place)) for place in held] == held

"""The soak test: actions drawn from a seed, and the checks of its results."""

from __future__ import annotations

import json
import logging
import random
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from soaking import follower, memory, operation_checks, tables, workflow_checks, workflows
from soaking.actor import Returned
from soaking.clients import WorkflowAnswers
from soaking.cluster import NAMES, SPARK, STEADY, leftovers, rejected
from soaking.executors import ExecutorFaults
from soaking.follower import Counted, Follower
from soaking.members import MemberFaults
from soaking.operations import KINDS as KINDS_OF
from soaking.operations import OBJECTS, draw, kind_of
from soaking.plan import FIRST, plan
from soaking.repairs import Repairs
from soaking.suspensions import MOMENT, Suspension, Suspensions

from distop.daemon.rejected_writes import RejectedWrites
from distop.errors import MalformedRequest
from distop.protocol.jobs import Claim
from distop.protocol.json_codec import rfc3339
from distop.protocol.keys import Keys
from distop.protocol.records import Attempts, Decision, OperationRef, State
from distop.protocol.revisioned import Change
from distop.protocol.txn import KeyValue
from distop.runtime.logs import ContextLogger
from distop.services.audit import Audit
from distop.store.history import CaughtUp, HistoryStart, Revision
from distop.worker.guardian import boottime
from tests.support.coordinator_behaviors import NO_PLAN, NO_REPORT
from tests.support.writing import Journal, note

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = tuple("abcdefg")
MINUTES = 20


# ---------------------------------------------------------------------- tables


def report(**verdicts: tuple[str, int]) -> dict[str, object]:
    found = {"present": ("valid", 0), "no sevens": ("violated", 20), "positive": ("valid", 0)} | verdicts
    return {"checks": [{"name": n, "verdict": verdict, "violations": v} for n, (verdict, v) in found.items()]}


def test_reports_of_validate_are_judged() -> None:
    assert tables.misjudged(report()) == []
    assert tables.misjudged(None) == []
    assert tables.misjudged(report(**{"no sevens": ("violated", 5)})) == [], "of some partitions"
    assert tables.misjudged(report(**{"no sevens": ("valid", 0)})) == ["no sevens is reported as valid"]
    assert tables.misjudged(report(positive=("violated", 1))) == ["positive is reported as violated 1 times, of 0"]
    assert tables.misjudged(report(**{"no sevens": ("violated", 21)})) != []
    assert tables.decided(report())
    assert not tables.decided(report(positive=("unknown", 0)))
    assert not tables.decided(None)


# ------------------------------------------------------------------------ plan


def test_the_plan_depends_only_on_the_seed() -> None:
    planned = plan(3, 600, KINDS, {"c"})
    assert planned == plan(3, 600, KINDS, {"c"})
    assert planned != plan(4, 600, KINDS, {"c"})
    assert [fault.number for fault in planned] == list(range(1, len(planned) + 1))
    assert planned[0].at == FIRST
    assert planned[-1].at < 600
    assert planned[5].chance().random() == planned[5].chance().random()
    assert planned[5].chance().random() != planned[6].chance().random()


def test_each_kind_of_fault_is_equally_frequent_and_rough_ones_come_early() -> None:
    planned = plan(3, 600, KINDS, {"c"})
    rough = [fault.kind for fault in planned if not fault.gentle]
    for start in range(0, len(rough) - len(KINDS), len(KINDS)):
        assert set(rough[start : start + len(KINDS)]) == set(KINDS)
    gentle = [fault for fault in planned if fault.gentle]
    assert {fault.kind for fault in gentle} == set(KINDS) - {"c"}
    assert min(fault.at for fault in gentle) > 300


@pytest.mark.parametrize("lane", KINDS_OF)
def test_each_operation_depends_only_on_the_seed_and_its_number(lane: str, tmp_path: Path) -> None:
    def drawn(seed: int) -> list[tuple[object, ...]]:
        submissions = [draw(seed, lane, number, tmp_path) for number in range(40)]
        return [
            (submission.name, submission.kind, submission.type, submission.arg, submission.actions)
            for submission in submissions
        ]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    kinds = KINDS_OF[lane]
    assert sorted(kind_of(3, lane, number) for number in range(len(kinds))) == sorted(kinds)
    actions = {what for number in range(200) for _, what in draw(3, lane, number, tmp_path).actions}
    assert actions == {"cancel", "pause", "pause now", "resume"}


def test_operations_for_each_feature_are_drawn(tmp_path: Path) -> None:
    """The features: cleanup, checkpoints, failure policies, objects and follow-ups."""
    drawn = [draw(3, lane, number, tmp_path) for lane in ("plain", "lone") for number in range(200)]
    for kind in ("step", "step fails", "step breaks", "lone", "lone fails", "error"):
        assert {submission.policy for submission in drawn if submission.kind == kind} == {"fail_fast", "collect_all"}, (
            kind
        )
    assert {submission.arg["object"] for submission in drawn if submission.type == "lone"} == set(OBJECTS)
    assert any(submission.then and submission.arg["then"] == submission.name for submission in drawn)


@pytest.mark.parametrize("lane", workflows.KINDS)
def test_each_workflow_depends_only_on_the_seed_and_its_number(lane: str, tmp_path: Path) -> None:
    def drawn(seed: int) -> list[workflows.Workflow]:
        return [workflows.draw(seed, lane, number, tmp_path) for number in range(40)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    kinds = workflows.KINDS[lane]
    assert sorted(one.kind for one in drawn(3)[: len(kinds)]) == sorted(kinds)
    for one in drawn(3):
        for part in one.parts:
            json.dumps(part.arg)


def test_workflows_for_each_feature_are_drawn(tmp_path: Path) -> None:
    """The features: several failures at once, all policies, changed limits and compares, and series of each end."""

    def drawn(lane: str) -> list[workflows.Workflow]:
        return [workflows.draw(3, lane, number, tmp_path) for number in range(100)]

    def failing(one: workflows.Workflow) -> int:
        return one.copies * sum(part.table == "@cluster" and "fail" in part.arg for part in one.parts)

    graphs = drawn("graph")
    assert max(map(failing, graphs)) >= 4
    assert {one.kind for one in graphs if any("fail" in part.arg for part in one.parts)} == {
        *("chord fails", "chord fails at once", "chord wide", "chain fails", "after fails", "after end")
    }
    assert any(one.steps for one in graphs)
    mixed = [one for one in drawn("id") if one.kind == "mixed"]
    assert {part.options["on_duplicate"] for one in mixed for part in one.parts} == set(workflows.POLICIES)
    limits = [[step for _, step in one.steps] for one in drawn("limit") if one.kind == "limit removed"]
    assert any(steps[0] == "limit 0" and steps[1] != "limit 0" for steps in limits)
    assert all(one.steps for one in drawn("transaction") if one.kind.startswith("turns"))
    series = [one.parts[0].options["every"] for one in drawn("series")]
    assert {(every["since"], every["on"]) for every in series} >= {("start", "any"), ("end", "any"), ("end", "success")}


# ------------------------------------------------------------------- workflows


class Ran:
    """A workflow of a kind with its operations, and the answers to its clients."""

    def __init__(self, lane: str, kind: str) -> None:
        draws = (workflows.draw(3, lane, number, Path("/nowhere")) for number in range(200))
        self.workflow = next(one for one in draws if one.kind == kind and (lane != "graph" or not one.steps))
        self.answers = WorkflowAnswers(self.workflow)
        self.specs: dict[OperationRef, dict[str, Any]] = {}
        self.args: dict[OperationRef, Any] = {}
        self.records: dict[OperationRef, dict[str, Any]] = {}
        self.outcomes: dict[OperationRef, dict[int, list[str]]] = {}
        self.written: dict[str, tuple[str, int]] = {}
        self.returned: list[Returned] = []

    def op(self, request: str, state: str = "success", **cancel: str) -> str:
        """Add an operation that a request started, with its end; its client knows both."""
        ref = OperationRef("t", "noop", "", len(self.specs) + 1)
        self.specs[ref] = {"request_id": request}
        self.args[ref] = {"files": ["file-0"]}
        self.records[ref] = {"state": state, **({"cancel": cancel} if cancel else {})}
        self.answers.starts[request] = str(ref)
        self.answers.ends[str(ref)] = state
        return str(ref)

    def graph(self, last: str = "success", **cancel: str) -> str:
        """Add one copy of the graph: its parts end as they should, the last one in this state."""
        *parts, _ = self.workflow.parts
        states = list[str]()
        for n, part in enumerate(parts):
            before = workflow_checks.predecessors(self.workflow.kind, n, len(parts) + 1)
            aborted = any(states[m] != "success" for m in before)
            states.append("cancelled" if aborted else "failed" if "fail" in part.arg else "success")
            self.op(f"{self.workflow.request}0#{n}", states[-1], **({"reason": "aborted"} if aborted else {}))
        return self.op(f"{self.workflow.request}0#last", last, **cancel)

    def problems(self) -> list[str]:
        history = workflow_checks.History(self.specs, self.args, self.records, self.outcomes, self.written)
        return workflow_checks.check([self.answers], history, self.returned)


def test_a_request_starts_one_operation_and_its_client_knows_it() -> None:
    ran = Ran("limit", "limited")
    ref = ran.op("r")
    assert ran.problems() == []
    ran.answers.starts["r"] = None
    assert "its client was told a refusal" in ran.problems()[0]
    ran.op("r")
    assert "the request r started t/noop/1 and t/noop/2" in ran.problems()[0]
    ran = Ran("limit", "limited")
    ran.answers.starts["s"] = ref
    assert "started nothing" in ran.problems()[0]
    ran.answers.joined.add("s")
    assert "which never existed" in ran.problems()[0]
    ran = Ran("limit", "limited")
    ran.answers.ends[ran.op("r")] = "failed"
    assert "told that t/noop/1 ended as failed" in ran.problems()[0]
    ran = Ran("limit", "limited")
    del ran.records[OperationRef.parse(ran.op("r"))]
    assert ran.problems()[0] == "t/noop/1 does not end"


@pytest.mark.parametrize("kind", workflows.KINDS["graph"])
def test_only_operations_that_wait_for_a_failure_are_aborted(kind: str) -> None:
    aborts = kind not in ("chord", "chain", "after", "after end")
    ran = Ran("graph", kind)
    ran.graph("cancelled", reason="aborted")
    assert len(ran.problems()) == (not aborts)
    ran = Ran("graph", kind)
    ran.graph()
    assert len(ran.problems()) == aborts


def test_an_operation_replaces_another_only_by_its_policy() -> None:
    for kind, files, wrong in (("replace", [], 0), ("combine", ["file-0", "file-1"], 0), ("combine", [], 1)):
        ran = Ran("id", kind)
        by = OperationRef("t", "noop", "", 2)
        ran.op(f"{ran.workflow.request}0", "cancelled", reason="aborted", replaced_by=str(by))
        ran.op(f"{ran.workflow.request}5")
        ran.args[by] = {"files": [*files, "file-5"]}
        assert len(ran.problems()) == wrong, (kind, files)
        ran.specs[by] = {"request_id": "another"}
        assert any("although no start may replace it" in text for text in ran.problems())


@pytest.mark.parametrize(
    ("kind", "committed", "started", "written", "wrong"),
    [
        ("turns", [True, True], True, ("success", 1), 0),
        ("turns", [False, False], False, ("failure", 1), 0),
        ("turns", [True, True], True, ("success", 2), 1),
        ("turns", [True, True], False, ("failure", 1), 2),
        ("turns", [False, True], True, ("success", 1), 1),
        ("turns and reads", [False, True], True, ("success", 1), 0),
        ("turns and reads", [True, False], True, ("success", 1), 3),
        ("turns and reads", [False, False], False, None, 0),
        ("holds", [False, False], False, ("failure", 1), 1),
        ("fails", [False, False], False, ("failure", 1), 0),
    ],
)
def test_one_branch_of_a_transaction_is_applied_once_and_reported_to_its_client(
    kind: str, committed: list[bool], started: bool, written: tuple[str, int] | None, wrong: int
) -> None:
    ran = Ran("transaction", kind)
    if started:
        ran.op(f"{ran.workflow.request}0")
    if written:
        ran.written[workflow_checks.branch_key(ran.workflow.name)] = written
    ran.answers.committed = committed
    assert len(ran.problems()) == wrong


def test_a_series_has_the_expected_number_of_operations() -> None:
    for kind, states, wrong in (
        ("series", ["success"] * 3, 0),
        ("series", ["success"] * 2, 1),
        ("series", ["success"] * 4, 1),
        ("series fails", ["failed"] * 3, 0),
        ("series ended", ["success", "cancelled"], 0),
        ("series ended", ["cancelled", "cancelled"], 1),
    ):
        ran = Ran("series", kind)
        first = previous = ran.op("first", states[0])
        for state in states[1:]:
            previous = ran.op(f"{previous}#next", state)
        ran.answers.starts = {"first": first}
        assert len(ran.problems()) == wrong, (kind, states)


def test_the_answer_to_an_actor_matches_the_outcome_of_the_job() -> None:
    ran = Ran("limit", "by hand")
    ref = OperationRef.parse(ran.op("r"))
    for by, void, wrong in (("a", False, 0), ("b", False, 1), ("a", True, 1), ("b", True, 0)):
        ran.outcomes[ref] = {0: [json.dumps({"result": {"by": by}})]}
        ran.returned = [Returned(str(ref), 0, "a", void)]
        assert len(ran.problems()) == wrong, (by, void)


# ----------------------------------------------------------------- operation checks

REF = OperationRef("t", "stepwriting", "", 1)


class Job:
    """An operation with one job, which wrote four rows in two segments."""

    def __init__(self, folder: Path) -> None:
        submission = next(w for number in range(60) if (w := draw(3, "plain", number, folder)).kind == "followed")
        self.submission = replace(submission, rows=4)
        Path(submission.arg["held"]).mkdir()
        self.files = [folder / "1-abc" / "rows-0.txt", folder / "2-def" / "rows-2.txt"]
        for file, rows in zip(self.files, ("p=0 0\np=0 1\np=0 2\n", "p=0 2\np=0 3\n"), strict=True):
            file.parent.mkdir()
            file.write_text(rows)
        result = {"segments": [[str(self.files[0]), 2], [str(self.files[1]), 2]]}
        self.outcome: dict[str, Any] = {"name": "p=0", "incarnation": "def", "result": result}

    def problems(self, followers: int = 1, state: str = "success", copies: int = 1) -> list[str]:
        outcomes = {0: [json.dumps(self.outcome)] * copies}
        return operation_checks.compare(REF, self.submission, {"state": state}, outcomes, [REF] * followers)


def test_rows_written_in_segments_are_compared(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.problems() == []
    (problem,) = job.problems(copies=2)
    assert "job 0 has 2 outcomes" in problem
    job.outcome["incarnation"] = "abc"
    (problem,) = job.problems()
    assert "the output of another attempt" in problem
    job.outcome["incarnation"] = "def"
    for rows in ("p=0 2\n", "p=0 1\np=0 2\n", "p=0 3\np=0 2\n", "p=1 2\np=1 3\n"):
        job.files[1].write_text(rows)
        assert job.problems() != [], rows


def test_a_success_is_followed_by_one_operation(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for followers, state in ((0, "success"), (2, "success"), (2, "failed")):
        (problem,) = job.problems(followers, state)
        assert f"it has {followers} follow-up operations" in problem
    assert job.problems(0, "failed") == []


def test_an_attempt_must_resume_from_a_saved_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for attempt, what in ((1, "from 0"), (1, "saved 1"), (1, "saved 2"), (2, "from 2"), (2, "saved 3")):
        note(str(journal.path), 0, attempt, what)
    assert (journal.resumed(), journal.lost_checkpoints()) == (1, [])
    note(str(journal.path), 1, 1, "from 0")
    note(str(journal.path), 0, 3, "from 2")
    assert journal.lost_checkpoints() == ["partition 0: 3 started from 2, but 3 rows were saved"]


def test_a_checkpoint_of_a_later_attempt_does_not_count_for_an_earlier_one(tmp_path: Path) -> None:
    """An attempt on a suspended machine notes its begin after others have resumed from its checkpoint."""
    journal = Journal(tmp_path / "journal.jsonl")
    for attempt, what in ((1, "from 0"), (1, "saved 1"), (3, "from 1"), (3, "saved 2"), (2, "from 1"), (1, "saved 1")):
        note(str(journal.path), 0, attempt, what)
    assert journal.lost_checkpoints() == []
    note(str(journal.path), 0, 2, "from 0")
    assert journal.lost_checkpoints() == ["partition 0: 2 started from 0, but 1 rows were saved"]


# ----------------------------------------------- suspended machines

SINCE, WOKE = 100.0, 110.0
HELD = {(0, 1): "bob", (0, 2): "cyd"}


def stood(executor: str = "bob", since: float = SINCE, woke: float = WOKE) -> Suspensions:
    found = Suspensions()
    found._all.append(Suspension(executor, since, woke))
    return found


@pytest.mark.parametrize(
    ("late", "began", "suspensions", "wrong"),
    [
        pytest.param(WOKE + 0.5, 107.0, stood(), 0, id="in the moment after it woke up"),
        pytest.param(WOKE + 0.5, WOKE + 0.2, stood(), 0, id="both in that moment"),
        pytest.param(WOKE + MOMENT + 0.1, 107.0, stood(), 1, id="after that moment"),
        pytest.param(109.0, 107.0, stood(), 1, id="while it stood still"),
        pytest.param(WOKE + 0.5, 99.5, stood(), 1, id="overtaken before it stood still"),
        pytest.param(WOKE + 0.5, 107.0, stood("cyd"), 1, id="another machine woke up"),
        pytest.param(WOKE + 0.5, 107.0, stood(woke=float("inf")), 1, id="it never woke up"),
        pytest.param(WOKE + 0.5, 107.0, Suspensions(), 1, id="nothing stood still"),
    ],
)
def test_an_overtaken_attempt_may_write_only_in_the_moment_after_its_machine_woke_up(
    tmp_path: Path, late: float, began: float, suspensions: Suspensions, wrong: int
) -> None:
    job = Job(tmp_path)
    assert job.submission.journal is not None
    lines = [(1, 99.0), (2, began), (2, WOKE + 3), (1, late)]
    with job.submission.journal.path.open("a") as out:
        out.writelines(json.dumps([0, attempt, "row", when]) + "\n" for attempt, when in lines)
    outcomes = {0: [json.dumps(job.outcome)]}

    def problems(held: dict[tuple[int, int], str]) -> list[str]:
        allowed = suspensions.of(held)
        return operation_checks.compare(REF, job.submission, {"state": "success"}, outcomes, [REF], allowed=allowed)

    assert len(problems(HELD)) == wrong
    assert len(problems({(0, 2): "cyd"})) == 1, "its holder is unknown"
    assert len(job.problems()) == 1


def test_the_holders_of_a_job_are_read_from_the_history() -> None:
    reader = Follower.__new__(Follower)
    reader.held = defaultdict(dict)
    claims = Claim("bob", "i1", 1, 0), Claim("bob", "", 1, 1, retry_at=rfc3339(5.0)), Claim("cyd", "i2", 2, 1)
    for claim in claims:
        key = "distOpClaim.t.stepwriting.1.000003"
        reader._note(Change(KeyValue(key, claim.encode(), 7, 7, 1), deleted=False))
    assert reader.held == {REF: {(3, 1): "bob", (3, 2): "cyd"}}


def test_files_left_in_the_moment_after_a_machine_woke_up_are_allowed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    left = Path(job.submission.arg["held"]) / "p=3"
    left.touch()
    now = boottime() - (time.time() - left.stat().st_mtime)
    for executor, woke, wrong in (("bob", now - 0.5, 0), ("bob", now - MOMENT - 1, 1), ("bob", now + 1, 1)):
        allowed = stood(executor, SINCE, woke).of({(3, 1): "bob", (4, 1): "cyd"})
        assert len(operation_checks.uncleaned(REF, job.submission, [], allowed)[0]) == wrong, woke
    assert (
        len(operation_checks.uncleaned(REF, job.submission, [], stood("cyd", SINCE, now - 0.5).of({(3, 1): "bob"}))[0])
        == 1
    )


class Machine:
    """A fake machine of a daemon."""

    def __init__(self, name: str, answers: list[str]) -> None:
        self.name = name
        self.process = SimpleNamespace(poll=lambda: None)
        self._answers = answers

    def suspend(self) -> list[int]:
        self._answers.append(f"{self.name} stands still")
        return [1, 2, 3]

    def wake(self, order: Callable[[list[int]], object]) -> None:
        pids = [1, 2, 3]
        order(pids)
        assert sorted(pids) == [1, 2, 3]
        self._answers.append(f"{self.name} goes on")


class Machines:
    """Four fake machines, and the faults that hit them."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.suspensions = Suspensions()
        daemons = {name: Machine(name, self.answers) for name in NAMES}
        cluster: Any = SimpleNamespace(ttl=6, daemons=daemons, proxies=[], suspensions=self.suspensions)
        self.repairs = Repairs(self.answers.append)
        self._faults = ExecutorFaults(cluster, self.repairs, self.answers.append)

    def suspend(self, seed: object, *, gentle: bool = False) -> str | None:
        return self._faults.strikes["suspend a machine"](random.Random(f"{seed}"), gentle)


class Members:
    """Three members of etcd; one ended by itself with this log. Each can be restarted."""

    def __init__(self, folder: Path, version: str, text: str) -> None:
        self.answers: list[str] = []
        log = folder / "etcd.log"
        log.write_text(text)
        self.all = [SimpleNamespace(running=number != 1, log_file=log, restart=self.restart) for number in range(3)]
        cluster: Any = SimpleNamespace(version=version, etcd=SimpleNamespace(members=self.all, replace=self.replace))
        cluster.etcdctl = None
        self.repairs = Repairs(self.answers.append)
        self.faults = MemberFaults(cluster, self.repairs, self.answers.append)

    def restart(self) -> None:
        self.all[1].running = True
        self.answers.append("started again")

    def replace(self, number: int, etcdctl: object) -> bool:
        self.all[number].running = True
        self.answers.append(f"{number} replaced")
        return True


PANIC = '{"level":"panic","msg":"unexpected error during txn","error":"context canceled"}'


@pytest.mark.parametrize(("version", "how"), [("3.5.1", "1 replaced"), ("3.5.4", "started again")])
def test_a_member_that_ended_by_a_known_defect_is_restarted_or_replaced(tmp_path: Path, version: str, how: str) -> None:
    members = Members(tmp_path, version, PANIC)
    members.faults.step()
    members.faults.step()
    assert members.faults.ended == 1, "its repair has begun already"
    assert members.repairs.heal() == []
    assert members.answers[-1] == how
    members.repairs._busy.clear()
    members.faults.step()
    assert (members.faults.ended, members.faults.problems) == (1, [])


@pytest.mark.parametrize(("version", "text"), [("3.5.5", PANIC), ("3.5.1", "out of memory")])
def test_a_member_that_ended_for_another_reason_is_a_problem(tmp_path: Path, version: str, text: str) -> None:
    members = Members(tmp_path, version, text)
    members.faults.step()
    (problem,) = members.faults.problems
    assert problem == f"member 1 of etcd crashed: {text}"


def test_a_member_that_a_fault_has_stopped_is_left_to_that_fault(tmp_path: Path) -> None:
    members = Members(tmp_path, "3.5.1", PANIC)
    members.repairs.later(60, lambda: None, "etcd")
    members.faults.step()
    assert members.faults.ended == 0


def test_the_choice_of_the_suspended_machine_depends_only_on_the_seed() -> None:
    drawn = [Machines().suspend(seed) for seed in range(60)]
    assert drawn == [Machines().suspend(seed) for seed in range(60)]
    assert {str(fault).split()[0] for fault in drawn} == set(NAMES)
    seconds = [float(str(fault).split()[2]) for fault in drawn]
    assert min(seconds) < 6 < max(seconds), "for less and for more than the time to live"
    gently = {str(Machines().suspend(seed, gentle=True)).split()[0] for seed in range(60)}
    assert gently == set(NAMES) - {STEADY, SPARK}


def test_a_machine_is_suspended_once_at_a_time_and_wakes_up_in_the_end() -> None:
    machines = Machines()
    struck = [fault.split()[0] for seed in range(60) if (fault := machines.suspend(seed))]
    assert sorted(struck) == sorted(NAMES)
    assert not any(machines.repairs.free(name) for name in NAMES)
    assert [machines.suspend(seed) for seed in range(20)] == [None] * 20
    assert machines.repairs.heal() == []
    for name in NAMES:
        (stood,) = [one for one in machines.suspensions._all if one.executor == name]
        assert stood.since <= stood.woke <= boottime()
        answers = [line for line in machines.answers if line.startswith(name)]
        assert answers == [f"{name} stands still", f"{name} goes on"]
    machines.repairs._busy.clear()
    assert [machines.suspend(seed) for seed in range(20)] == [None] * 20, "overtaken attempts may not have ended yet"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("the worker process died (killed by signal 9)", 0),
        ("executor ann was lost while it ran attempt 1 (1 failures)", 0),
        ("ValueError: too bad", 1),
    ],
)
def test_operations_without_a_planned_failure_fail_only_by_injected_faults(
    tmp_path: Path, text: str, wrong: int
) -> None:
    job = Job(tmp_path)
    job.outcome["errors"] = [{"attempt": 1, "executor": "ann", "text": text}]
    assert len(job.problems()) == wrong, "an attempt"
    job.outcome |= {"error": text, "result": None, "errors": []}
    assert len(job.problems(0, "failed")) == wrong, "the job"
    record = {"state": "failed", "errors": [{"partition": None, "text": f"planning failed: {text}"}]}
    assert len(operation_checks.compare(REF, job.submission, record, {}, [])) == wrong, "the operation"


# --------------------------------------------------- planning and completion that fail


class Tripped:
    """An operation whose planning or completion raises, and its attempts as recorded in etcd."""

    def __init__(self, kind: str) -> None:
        draws = (draw(3, "plain", number, Path("/nowhere")) for number in range(100))
        self.submission = next(submission for submission in draws if submission.kind == kind)
        self.counted: list[Counted] = []

    def fail(self, stage: str, *seconds: float, error: str = NO_PLAN, last: bool = False) -> Tripped:
        """Add failed attempts; each number is the time of the next attempt."""
        for number, due in enumerate(seconds, 1):
            over = last and number == len(seconds)
            self.counted.append(Counted(stage, number, f"{stage} failed: {error}", "" if over else rfc3339(due)))
        return self

    def problems(self, state: str, why: str = "", outcomes: int = 0, failed: int = 0) -> list[str]:
        record = {
            "state": state,
            "errors": [{"partition": None, "text": why}] if why else [],
            "jobs": {"failed": failed},
        }
        found = {partition: ["{}"] for partition in range(outcomes)}
        return operation_checks.compare(REF, self.submission, record, found, (), self.counted)


def test_an_operation_that_fails_on_every_node_uses_all_its_attempts() -> None:
    planning = Tripped("plan fails").fail("planning", 100.0, 101.0, 103.0)
    assert planning.problems("failed", "planning failed: no listing today") == []
    assert planning.problems("cancelled") == []
    (problem,) = planning.problems("success")
    assert "fails on all nodes" in problem
    (problem,) = planning.problems("failed", "planning failed: no listing today", outcomes=1)
    assert "was never planned" in problem
    completion = Tripped("complete fails").fail("completion", 100.0, 101.0, 103.0, 104.0, last=True)
    assert completion.problems("failed", "completion failed: no report today", outcomes=1) == []


@pytest.mark.parametrize("kind", ["plan fails", "plan elsewhere"])
def test_a_failure_that_is_too_early_or_without_a_reason_is_a_problem(kind: str) -> None:
    early = Tripped(kind).fail("planning", 100.0, 101.0)
    (problem,) = early.problems("failed", "planning failed: no listing today")
    assert "after 2 failed attempts" in problem
    (problem,) = early.problems("failed", "completion failed: no report today")
    assert "after 2 failed attempts" in problem
    (problem,) = early.problems("failed")
    assert "it failed with ''" in problem
    (problem,) = early.problems("cancelled", failed=1)
    assert "cannot fail" in problem


def test_attempts_are_counted_one_by_one_and_wait_for_each_other() -> None:
    twice = Tripped("plan elsewhere").fail("planning", 100.0).fail("planning", 101.0)
    (problem,) = twice.problems("success")
    assert "counted as [1, 1]" in problem
    (problem,) = Tripped("plan elsewhere").fail("planning", 100.0, 100.3).problems("success")
    assert "attempt 2 at planning did not wait" in problem


def test_a_success_on_another_node_counts_as_recovery() -> None:
    for kind, stage, error in (
        ("plan elsewhere", "planning", NO_PLAN),
        ("complete elsewhere", "completion", NO_REPORT),
    ):
        tripped = Tripped(kind).fail(stage, 100.0, error=error)
        assert tripped.problems("success") == []
        assert operation_checks.recovered({"state": "success"}, tripped.counted)
        assert not operation_checks.recovered({"state": "failed"}, tripped.counted)
        assert not operation_checks.recovered(
            {"state": "success"}, Tripped(kind).fail(stage, 100.0, error="killed").counted
        )


def test_failed_attempts_are_read_from_the_history() -> None:
    def put(name: str, value: bytes) -> Change:
        return Change(KeyValue(f"distOp.t.tripping.1.{name}", value, 7, 7, 1), deleted=False)

    reader = Follower.__new__(Follower)
    reader.counted = defaultdict(list)
    reader._note(put("planning", Attempts(2, "planning failed: it failed", rfc3339(5.0)).encode()))
    reader._note(put("decision", Decision(State.SUCCESS, 1, 1, 0).encode()))
    reader._note(put("decision", Decision(State.SUCCESS, 1, 1, 0, attempts=1, error="no").encode()))
    planning, completion = reader.counted[OperationRef("t", "tripping", "", 1)]
    assert (planning.stage, planning.attempts, planning.retry_at) == ("planning", 2, rfc3339(5.0))
    assert (completion.stage, completion.attempts, completion.error) == ("completion", 1, "no")


def test_files_left_by_a_cleanup_are_a_problem_unless_a_log_reports_the_failure(tmp_path: Path) -> None:
    job, log = Job(tmp_path), tmp_path / "ann.log"
    log.write_text("the cleanup of 2 jobs of t/stepwriting/12 failed: the worker is being stopped\n")
    assert operation_checks.uncleaned(REF, job.submission, [log]) == ([], False)
    (Path(job.submission.arg["held"]) / "p=3").touch()
    (problem,), logged = operation_checks.uncleaned(REF, job.submission, [log])
    assert ("its cleanup left p=3" in problem, logged) == (True, False), "the log is of another operation"
    log.write_text("WARNING cleanup of lost jobs failed: it failed  [operation=t/stepwriting/1]\n")
    assert operation_checks.uncleaned(REF, job.submission, [log]) == ([], True)


def test_files_left_in_a_work_directory_are_reported(tmp_path: Path) -> None:
    assert leftovers(tmp_path) == []
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "abc-1.json").touch()
    (tmp_path / "ops" / "t" / "stepwriting" / "1").mkdir(parents=True)
    run, directory = leftovers(tmp_path)
    assert "abc-1.json" in run
    assert directory.endswith(str(REF))


def test_a_write_that_etcd_rejects_as_invalid_is_a_problem(tmp_path: Path) -> None:
    log, logger = tmp_path / "ann.log", logging.Logger("ann")
    logger.addHandler(logging.FileHandler(log))
    logger.info("Connected to etcd again")
    assert rejected(log) == []
    RejectedWrites(ContextLogger(logger, {}), lambda: None).refused(str(REF), "end", MalformedRequest("a key twice"))
    (problem,) = rejected(log)
    assert "a key twice" in problem


# ---------------------------------------------------------------------- memory


def life(per_minute: float, *, noise: float = 0.5, step: float = 0.0, minutes: float = MINUTES) -> memory.Life:
    """A process that loads for half a minute, then grows by ``per_minute``; by ``step`` once, near the end."""
    chance = random.Random(7)
    points = []
    for n in range(int(minutes * 30)):
        seconds = n * 2.0
        size = min(60.0, seconds * 2) + per_minute * seconds / 60 + chance.uniform(-noise, noise)
        points.append((seconds, size + (step if seconds > 0.8 * minutes * 60 else 0.0)))
    return points


def judged(points: memory.Life, limit: float | None = None, warm: float = memory.WARM) -> memory.Judged:
    return memory.judge("ann, daemon", points, 1, max(size for _, size in points), limit, warm)


@pytest.mark.parametrize("points", [life(0.0), life(0.0, noise=3.0), life(0.0, step=3.0), life(-1.0), life(0.3)])
def test_flat_memory_is_no_problem(points: memory.Life) -> None:
    assert judged(points).problem == ""
    assert judged(points).text.endswith("flat")


@pytest.mark.parametrize("points", [life(0.7), life(0.9, noise=2.0), life(5.0, minutes=7)])
def test_memory_that_grows_is_a_problem(points: memory.Life) -> None:
    assert "the memory of ann, daemon grows by" in judged(points).problem


def test_a_short_life_is_not_judged() -> None:
    assert judged(life(5.0, minutes=4)).problem == ""
    assert "too short to be judged" in judged(life(5.0, minutes=4)).text


def test_initial_allocations_do_not_count_as_growth() -> None:
    """In a life of about six minutes; the same slope over a longer life is a problem."""
    short = judged(life(0.9, minutes=6))
    assert short.problem == ""
    assert not short.certain
    assert short.text.endswith(" MB/min: too short to be judged")
    assert judged(life(0.9, minutes=10)).problem


def test_growth_while_the_caches_of_a_daemon_fill_is_not_judged() -> None:
    filling = [(seconds, min(size, 75.0)) for seconds, size in life(1.0, minutes=30)]
    assert judged(filling[:450]).problem, "in another process it is a problem"
    short = judged(filling[:480], warm=memory.CACHES)
    assert (short.problem, short.certain) == ("", False)
    assert judged(filling, warm=memory.CACHES).text.endswith("flat")
    assert judged(life(1.0, minutes=30), warm=memory.CACHES).problem, "lasting growth is found"


def test_a_long_soak_has_to_judge_a_daemon() -> None:
    def of(role: str, minutes: float) -> memory.Judged:
        return replace(judged(life(0.0, minutes=minutes)), role=role)

    assert memory.unjudged([of("daemon", 20), of("child", 4)], 1800) == []
    assert memory.unjudged([of("daemon", 4)], 300) == [], "a short soak need not"
    for found in ([], [of("daemon", 4)], [of("child", 20)]):
        assert memory.unjudged(found, 1500) == ["no daemon lived long enough for its memory to be judged"]


def test_a_jvm_is_judged_by_its_size() -> None:
    assert judged(life(5.0), limit=300.0).problem == ""
    assert "of 100" in judged(life(5.0), limit=100.0).problem


# ----------------------------------------------------------------------- audit


def change(revision: int) -> Change:
    return Change(KeyValue("distOpTable.t", b"{}", revision, revision, 1), deleted=False)


def test_an_audit_that_saw_all_revisions_has_no_problem() -> None:
    audit = Audit(Keys())
    audit.take(CaughtUp(1))
    audit.take(Revision(7, (change(7),)))
    assert follower.judge(audit, None, 7) == []


def test_an_audit_that_stood_still_lost_history_or_ended_is_a_problem() -> None:
    audit = Audit(Keys())
    audit.take(HistoryStart(5, 2, ()))
    audit.take(Revision(7, (change(7),)))
    assert follower.judge(audit, ValueError("broken"), 8) == [
        "the audit failed: ValueError('broken')",
        "the audit stopped at revision 7 of 8",
        "revisions 2 to 5 were compacted before the audit read them",
    ]


def test_a_violation_is_the_reported_problem() -> None:
    audit = Audit(Keys())
    key = "distOp.t.noop.1.state"
    audit.take(Revision(7, (Change(KeyValue(key, b"nonsense", 7, 7, 1), deleted=False),)))
    (problem,) = follower.judge(audit, None, 9)
    assert key in problem

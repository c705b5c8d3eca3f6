"""Small runs that together take every step of every protocol. Crash points are taken from them.

Some runs start with a strike of their own, the *opening*, at the first point with a given name. So the steps of
take-overs, restarts and orderly stops are crash points too. ``through`` lists the steps that a run exists for; a test
checks them, because a change elsewhere can make a run take another path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distop.protocol.frozen import frozen
from distop.protocol.records import CLUSTER_TABLE
from distop.protocol.size_limits import DEFAULT, Limits
from tests.simulator.policies import PolicyAction, SimPolicy
from tests.simulator.scenario import Action, DrainAction, Scenario, Submission, plain

SMALL = Limits(
    plan_bytes=100, plan_chunks=1, claims=2, reports=1, reaped=1, cleaned=3, outcomes=3, pruned=2, prune_every=0.5
)
RESTART = 0.3
"""Seconds until a killed or stopped daemon is started again."""
LONG = 6.0
"""Seconds until a daemon is started again whose session shall end meanwhile."""
_OPENS = "delete chunk, delete distOpPending, delete planning"
SMALL_PLAN = f"plan: {_OPENS}, put chunk, put distOpOpen, put plan"
PLAN_OF_CHUNKS = f"plan: {_OPENS}, put distOpOpen, put plan"
"""The two ways to write a plan: with its chunks, and after them."""


@frozen
class Opening:
    """The first strike of a run, at the first point whose name starts with ``step``.

    ``moment``: before or after the step. ``away``: seconds until the daemon is started again.
    """

    step: str
    action: str = "kill"
    moment: str = "done"
    away: float = LONG


@frozen
class Reference:
    """One run. ``through``: prefixes of the names of points that it reaches after its opening, in order."""

    scenario: Scenario
    opening: Opening | None = None
    through: tuple[str, ...] = ()

    def having(self, **fields: Any) -> Reference:
        """This reference with changed fields of its scenario."""
        return replace(self, scenario=replace(self.scenario, **fields))

    def opened(self, opening: Opening, *through: str) -> Reference:
        """This reference with an opening strike, and the steps after it."""
        return replace(self, opening=opening, through=through)


def references() -> dict[str, Reference]:
    """All references, by name."""
    return {**_undisturbed(), **_pending(), **_policies(), **_taken_over(), **_restarted()}


def _policies() -> dict[str, Reference]:
    """Policies: evaluations with and without a start, events, users' commands, and elections of evaluators."""
    one = _reference("quick", None, partitions=1, seed=1)
    arg = {"seed": 1, "partitions": 1, "pace": 0.05, "calls": 0.05, "trouble": 0.0}
    actions = (
        PolicyAction(0.6, "pause"),
        PolicyAction(0.1, "emit"),
        PolicyAction(0.1, "resume"),
        PolicyAction(0.8, "set"),
        PolicyAction(1.0, "remove"),
    )
    policy = SimPolicy(
        "nightly",
        "a",
        "check",
        arg,
        on=("version", "event:loaded"),
        when="small_files > 15",
        after=0.3,
        actions=actions,
        commits=(1.2,),
    )
    return {
        "policies": replace(
            one.having(policies=(policy,), calm=3.0),
            through=("elect_evaluator", "child: statistics", "evaluate_policy", "start_by_policy", "resign_evaluator"),
        ),
    }


def _undisturbed() -> dict[str, Reference]:
    """Start, plan, claim, report, retry, pause, resume, cancel, fail fast, finish, rerun, follow-up operations,
    cleanup, drain, election, renewal.
    """
    rough: dict[str, Any] = {"trouble": 1.0}
    slow = _reference("index", None, partitions=2, seed=11, name="x", pace=0.2)
    cannot = _reference("quick", None, partitions=3, seed=1)
    able, unable = cannot.scenario.hosts
    alone = _reference("quick", None, partitions=1, seed=1)
    some_fail = _reference("check", "collect_all", partitions=2, seed=35, **rough)
    return {
        "jobs and completion fail": _reference("check", "collect_all", partitions=4, seed=1, **rough),
        "planning fails": _reference("check", "collect_all", partitions=4, seed=17, **rough),
        "planning fails for good": _reference("check", "collect_all", partitions=4, seed=16, **rough),
        "fail fast": _reference("index", "fail_fast", partitions=8, seed=8, name="x", pace=0.2, **rough),
        "plan removes the table": replace(
            _reference("drop", None, partitions=2, seed=1), through=("plan", "claim", "report", "finish", "end")
        ),
        "fail fast in batches": _reference("purge", "fail_fast", partitions=8, seed=14, **rough),
        "pause and resume": _reference(
            "index", None, Action(0.35, "pause"), Action(0.6, "resume"), partitions=5, seed=11, name="x", pace=0.2
        ),
        "lost jobs fail": replace(
            _reference("lone", "collect_all", partitions=4, seed=2, pace=0.4, **rough),
            through=("progress", "retry", "report", "finish"),
        ),
        "verdicts after checkpoints": replace(
            _reference("index", "collect_all", partitions=3, seed=3, name="x", pace=0.4, **rough),
            through=("child: abandon a checkpoint", "progress", "report", "finish"),
        ),
        "cancel": _reference("lone", None, Action(0.5, "cancel"), partitions=5, seed=11, pace=0.2),
        "without completion": replace(
            _reference("quick", None, partitions=8, seed=1), through=(SMALL_PLAN, "claim", "report", "finish")
        ),
        "a report before the decision": replace(
            _reference("purge", None, partitions=3, seed=1), through=("report", "child: complete", "finish")
        ),
        "what follows a report": replace(
            _reference("purge", None, partitions=2, seed=1, follows=True),
            through=("report", "child: complete", "decide", "finish"),
        ),
        "pause now": _reference(
            "index", None, Action(0.35, "pause-now"), Action(0.4, "resume"), partitions=3, seed=11, name="x", pace=0.2
        ),
        "drain": slow.having(drains=(DrainAction(0.7, "exec-0", 0.0, True), DrainAction(1.1, "exec-1", 0.3, False))),
        "rerun": some_fail.having(
            submissions=tuple(replace(submission, rerun="failed") for submission in some_fail.scenario.submissions)
        ),
        "a node that cannot": cannot.having(hosts=(replace(able, unable=("quick",)), unable)),
        "what follows": _reference("check", None, partitions=2, seed=1, follows=True),
        "a plan of its own": replace(
            _reference("quick", None, table=CLUSTER_TABLE, partitions=1, seed=1), through=("start: put arg",)
        ),
        "of one job, together": replace(
            _one_job_operations(), through=("claim", "claim_together", "report", "finish", "claim_apart", "finish")
        ),
        "several at once": replace(
            alone.having(submissions=_after_first(alone.scenario.submissions[0], 4)),
            through=("start", "start", "finish"),
        ),
        "planned without a free slot": replace(
            _without_a_free_slot(), through=(SMALL_PLAN, SMALL_PLAN, "claim", "finish")
        ),
        "in chunks and pages": replace(
            _in_pages(), through=("chunk", "chunk", PLAN_OF_CHUNKS, "clean", "clean", "end")
        ),
        "a table comes and goes": _reference(
            "quick", None, Action(0.02, "add b"), Action(0.02, "remove b"), partitions=1, seed=1
        ),
    }


def _pending() -> dict[str, Reference]:
    """Pending operations: begin, join, dependencies and holds, two phases, ids, limits, and claims by actors."""
    one = _reference("quick", None, partitions=1, seed=1)
    (submission,) = one.scenario.submissions
    fails = {**submission.arg, "seed": 35, "partitions": 2, "trouble": 1.0}
    bad = replace(submission, type="check", policy="collect_all", arg=fails)
    index = _reference("index", None, partitions=5, seed=11, name="x", pace=0.2)
    (slow,) = index.scenario.submissions
    types = ["check", "join", "noop", "quick"]
    hosts = tuple(replace(host, types=tuple(types)) for host in one.scenario.hosts)
    later = replace(submission, delay=1.0)
    return {
        "one after another": one.having(
            hosts=hosts,
            submissions=(
                bad,
                replace(submission, after=0.35, predecessors=((0, "success"),)),
                replace(submission, after=0.4, predecessors=((0, "end"),)),
                replace(submission, after=0.45, predecessors=((2, "success"),)),
            ),
        ),
        "a graph": one.having(hosts=hosts, submissions=(replace(submission, graph=3),)),
        "a graph in pages": one.having(hosts=hosts, submissions=(replace(submission, graph=22),)),
        "one that waits is cancelled": one.having(submissions=(replace(later, actions=(Action(0.2, "cancel"),)),)),
        "prepared and confirmed": one.having(submissions=(replace(submission, prepared="confirms", verifier="yes"),)),
        "prepared, and its sender dies": one.having(
            submissions=(replace(submission, prepared="dies", verifier="yes"),)
        ),
        "prepared, and nobody vouches": one.having(submissions=(replace(submission, prepared="dies", verifier="no"),)),
        "abandoned": one.having(submissions=(replace(submission, prepared="abandons", verifier="no"),)),
        "of one id": one.having(
            submissions=(
                replace(later, id="nightly"),
                replace(later, after=0.4, id="nightly", on_duplicate="replace"),
            )
        ),
        "limited": index.having(
            submissions=(replace(slow, actions=(Action(0.3, "alter max_jobs=1"),), options={"max_jobs": 2}),)
        ),
        "others are added to what it waits for": one.having(
            submissions=(
                replace(submission, arg={**submission.arg, "pace": 1.0}),
                replace(later, after=0.35, actions=(Action(0.2, "depend-on 0"),)),
            )
        ),
        "a join": one.having(
            hosts=hosts, submissions=(replace(submission, type="join", table=CLUSTER_TABLE, graph=3),)
        ),
        "a graph that is given up and begun anew": replace(
            one.having(
                hosts=hosts,
                limits=replace(Limits(), denied_kept=1.0),
                submissions=(replace(submission, graph=22, cancels_insertion=True), replace(submission, delay=8.0)),
            ),
            through=("hold", "start", "deny", "hold", "start", "release_hold", "forget_hold"),
        ),
        "within a transaction": replace(
            one.having(submissions=(replace(submission, in_transaction=True),)),
            through=("withdraw", "transaction", "forget_receipt", "transaction", "begin"),
        ),
        "a transaction whose compares fail": one.having(
            submissions=(replace(submission, in_transaction=True, toggles=(0.2,)), submission)
        ),
        "a type is declared by a client": one.having(
            submissions=(replace(submission, actions=(Action(0.1, "register"),)),)
        ),
        "claims by actors": one.having(
            actors=2,
            submissions=(replace(submission, type="check", arg={**submission.arg, "partitions": 6, "pace": 0.5}),),
            hosts=hosts,
        ),
    }


def _taken_over() -> dict[str, Reference]:
    """A daemon is killed, and its session ends before it is started again: its work is taken over."""
    jobs = _reference("check", "collect_all", partitions=4, seed=5, pace=0.4)
    index = _reference("index", None, partitions=4, seed=11, name="x", pace=0.4)
    lone = _reference("lone", "collect_all", partitions=4, seed=5, pace=0.4)
    given_up = _reference("lone", None, Action(0.6, "cancel"), partitions=4, seed=5, pace=0.4)
    begun = Opening("child: start a job")
    lowered = _reference("check", "collect_all", Action(0.3, "alter max_jobs=1"), partitions=4, seed=5, pace=1.0)
    return {
        "take over of a plan in chunks": _in_pages().opened(
            Opening("chunk"), "elect", "chunk", PLAN_OF_CHUNKS, "finish"
        ),
        "take over of a cleanup in pages": _in_pages().opened(Opening("clean"), "elect", "clean", "end"),
        "take over of jobs": jobs.opened(begun, "take_over", "report", "finish"),
        "take over of checkpoints": index.opened(Opening("progress"), "take_over", "report", "finish"),
        "revoked within a lowered limit": lowered.having(limits=Limits(gone=0)).opened(
            begun, "alter", "revoke_lost", "report", "finish"
        ),
        "take over at the limit": lone.opened(begun, "take_over", "child: clean up", "report", "finish"),
        "take over at the limit, with nothing to clean up": _reference(
            "purge", "collect_all", partitions=4, seed=5, pace=0.4
        ).opened(begun, "fail_lost", "finish"),
        "take over of an election while planning": jobs.opened(Opening("child: plan"), "elect", SMALL_PLAN, "finish"),
        "take over of an election while reporting": _reference("purge", None, partitions=3, seed=1).opened(
            Opening("child: complete"), "elect", "child: complete", "finish"
        ),
        "take over of an election while completing": jobs.opened(Opening("decide"), "elect", "finish"),
        "take over of an election while cleaning up": jobs.opened(Opening("finish"), "elect", "end"),
        "take over of an election while cancelling": given_up.opened(
            Opening("Watch distOpClaim"), "elect", "Watch distOpClaim", "finish"
        ),
        "reap of a dead holder": given_up.opened(begun, "cancel", "reap", "finish"),
    }


def _restarted() -> dict[str, Reference]:
    """A daemon is killed or stopped, and soon started again with the same disk."""
    index = _reference("index", None, partitions=4, seed=11, name="x", pace=0.4)
    given_up = _reference("index", None, Action(0.6, "cancel"), partitions=4, seed=11, name="x", pace=0.4)
    killed = Opening("child: start a job", away=RESTART)
    return {
        "restart": index.opened(killed, "node", "take_over", "disk: remove a run", "finish"),
        "restart of what was cancelled": given_up.opened(killed, "node", "child: clean up", "disk: remove a run"),
        "stop in order": index.opened(
            Opening("child: start a job", "stop", away=1.0), "retry", "LeaseRevoke", "node", "finish"
        ),
        "death of a child": index.opened(Opening("child: start a job", "kill-child"), "child: start a job", "finish"),
    }


def _reference(
    type_name: str, policy: str | None, *actions: Action, seed: int, table: str = "a", **arg: Any
) -> Reference:
    """Two executors, one operation, and a short session.

    Steps of large operations (chunks, pages) need small limits, set with :meth:`Reference.having`.
    """
    given = {"seed": seed, "pace": 0.1, "trouble": 0.0, "chunk": 200, "calls": 0.05, **arg}
    submission = Submission(0, 0.3, type_name, table, given, None, policy, actions)
    return Reference(plain(seed, 2, [submission], types=["check"], ttl=2, poll=2.0, calm=8.0))


def _after_first(submission: Submission, count: int) -> tuple[Submission, ...]:
    """``count`` equal submissions of one client: the others are made while the first start is under way.

    So their starts share the second transaction.
    """
    later = replace(submission, after=submission.after + 0.0005)
    return (submission, *[later] * (count - 1))


def _one_job_operations() -> Reference:
    """Operations of one job each. An executor claims its share and one more job in one transaction."""
    one = _reference("quick", None, table=CLUSTER_TABLE, partitions=1, seed=1)
    submissions = _after_first(one.scenario.submissions[0], 4)
    return one.having(submissions=submissions, limits=Limits(unlearned=DEFAULT.together))


def _without_a_free_slot() -> Reference:
    """The second operation is planned while jobs of the first one take all slots."""
    busy = _reference("check", "collect_all", partitions=4, seed=5, pace=2.0)
    (first,) = busy.scenario.submissions
    second = replace(first, after=0.5, arg={**first.arg, "partitions": 2, "pace": 0.1})
    return busy.having(submissions=(first, second))


def _in_pages() -> Reference:
    return _reference("check", None, partitions=10, seed=1, follows=True).having(
        limits=SMALL, past=25, history_limit=20
    )

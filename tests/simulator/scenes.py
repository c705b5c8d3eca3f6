"""Scenes: situations that rarely result from independent draws, built as a whole in some scenarios.

A scene replaces the operations of a drawn scenario, and often its executors. It keeps the drawn faults, unless it needs
its own; a focused scene has many faults of few kinds instead. The search for planted bugs chooses no other scenarios,
so a drawn schedule can find each of these bugs. ``tests/simulation/test_planted_bugs.py`` runs one such schedule for
each bug.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distop.protocol.records import CLUSTER_TABLE
from distop.protocol.size_limits import DEFAULT
from tests.simulator.departures import with_departure
from tests.simulator.policies import PolicyAction, SimPolicy
from tests.simulator.scenario import (
    CROWD,
    LARGE_GRAPH,
    Action,
    DrainAction,
    Fault,
    Host,
    Removal,
    Scenario,
    Submission,
    draw_scenario,
)
from tests.simulator.simulated_behaviors import DRAWN, DROP, RARE

Scene = Callable[[Scenario], Scenario]
Focus = tuple[str, ...]
"""Kinds of faults; (): faults are drawn without restriction."""

SHARE = 0.15
"""Share of the seeds whose scenario is a scene without a focus."""
FOCUSED_SHARE = 0.03
"""Share of the other seeds whose scenario is a focused scene."""
REMOVAL_SHARE = 0.03
"""Share of the seeds without a scene of policies whose scenario has operations that remove their table."""
POLICY_SHARE = 0.05
"""Share of the remaining seeds whose scenario is a scene of policies."""


def minutes_long(scenario: Scenario, *actions: Action) -> Scenario:
    """Jobs that take minutes, with these actions. Drawn jobs end so soon that a missing stop is not noticed."""
    arg = {"pace": 70.0, "name": "x", "trouble": 0.0}
    submissions = tuple(
        replace(
            submission,
            actions=actions,
            type="index",
            names=None,
            arg={**submission.arg, **arg, "partitions": min(6, submission.arg["partitions"])},
        )
        for submission in scenario.submissions
    )
    hosts = tuple(replace(host, types=("index", "check"), unable=()) for host in scenario.hosts)
    return replace(scenario, submissions=submissions, hosts=hosts, drains=())


def few_jobs(scenario: Scenario) -> Scenario:
    """Two jobs in each operation, which save a few checkpoints, minutes apart."""
    long = minutes_long(scenario)
    submissions = tuple(replace(w, rerun="", arg={**w.arg, "partitions": 2}) for w in long.submissions)
    return replace(long, submissions=submissions)


def paused_for_long(scenario: Scenario) -> Scenario:
    """Long jobs are stopped by a pause, and not resumed."""
    return minutes_long(scenario, Action(1.0, "pause-now"))


def drained_for_long(scenario: Scenario) -> Scenario:
    """One of at least two executors with long jobs is drained."""
    long = minutes_long(scenario)
    (first, *_) = long.hosts
    hosts = long.hosts if len(long.hosts) > 1 else (first, replace(first, name="exec-1"))
    return replace(long, hosts=hosts, drains=(DrainAction(2.0, first.name, 100.0, False),))


def only_one_node_can_run(scenario: Scenario) -> Scenario:
    """All executors but the last one cannot run any type.

    With drawn executors, several nodes retry in turn what none can run, and the run takes a minute.
    """
    everything = tuple(sorted({type_name for host in scenario.hosts for type_name in host.types}))
    last = len(scenario.hosts) - 1
    lack = [everything if n < last else () for n in range(len(scenario.hosts))]
    hosts = (replace(h, types=everything, unable=lack[n], recovers=0.0) for n, h in enumerate(scenario.hosts))
    return replace(scenario, hosts=tuple(hosts))


def long_jobs(scenario: Scenario) -> Scenario:
    """Jobs take longer than a session lasts without renewal; each executor has slots for all of them."""
    submissions = tuple(
        replace(submission, actions=(), arg={**submission.arg, "pace": 2.0, "trouble": 0.0}, type="check")
        for submission in scenario.submissions
    )
    hosts = tuple(replace(host, slots=60, types=("check",)) for host in scenario.hosts)
    return replace(scenario, submissions=submissions, hosts=hosts, ttl=4)


def many_steps(scenario: Scenario) -> Scenario:
    """All jobs save checkpoints."""
    submissions = tuple(
        replace(
            submission,
            actions=(),
            arg={**submission.arg, "pace": 0.3, "name": "x"},
            type="index",
            id="",
            on_duplicate="join",
        )
        for submission in scenario.submissions
    )
    hosts = tuple(replace(host, types=("index", "check")) for host in scenario.hosts)
    return replace(scenario, submissions=submissions, hosts=hosts)


def planned_in_chunks(scenario: Scenario) -> Scenario:
    """A plan of many chunks is written during the first fault, interrupted, and restarted in one election."""
    actions = tuple(Action(0.1, what) for _ in range(3) for what in ("pause", "resume"))
    arg = {**scenario.submissions[0].arg, "partitions": 60, "chunk": 60, "calls": 0.05, "pace": 0.02, "trouble": 0.0}
    submission = replace(
        scenario.submissions[0], after=1.0, type="check", table="a", names=None, actions=actions, arg=arg
    )
    return replace(
        scenario,
        hosts=tuple(replace(host, types=("check",), unable=()) for host in scenario.hosts),
        submissions=(submission,),
        drains=(),
        limits=replace(scenario.limits, plan_bytes=0),
        faults=(replace(scenario.faults[0], at=1.02, lasts=12.0),),
        calm=13.02,
    )


def many_at_once(scenario: Scenario) -> Scenario:
    """One client starts many small operations of the same duration at once; some have two callers, and some are
    cancelled shortly before their end.
    """
    model = replace(
        scenario.submissions[0], client=0, after=0.5, type="quick", table="a", names=None, rerun="", policy=None
    )
    arg = {**model.arg, "partitions": 1, "pace": 0.1, "calls": 0.05, "trouble": 0.0, "chunk": 1000, "follows": False}
    ends = 0.05 + 0.01 * (scenario.seed % 30)
    submissions = [
        replace(model, arg=arg, callers=1 + n % 2, actions=(Action(ends + 0.002 * n, "cancel"),) if n > 5 else ())
        for n in range(12)
    ]
    hosts = tuple(replace(host, types=("quick", "check"), slots=12, unable=()) for host in scenario.hosts)
    return replace(scenario, submissions=tuple(submissions), hosts=hosts, drains=(), limits=DEFAULT)


def changing_job_limits(scenario: Scenario) -> Scenario:
    """Each operation has a small job limit, which changes while it runs."""
    actions = (Action(0.3, "alter max_jobs=4"), Action(0.3, "alter max_jobs=1"), Action(0.3, "alter max_jobs=3"))
    submissions = tuple(
        replace(submission, actions=actions, rerun="", options={"max_jobs": 2}, arg={**submission.arg, "pace": 0.1})
        for submission in scenario.submissions
    )
    return replace(scenario, submissions=submissions, drains=())


def toggled_job_limits_with_actors(scenario: Scenario) -> Scenario:
    """A limit of one job is set and removed in turn, while executors die and actors take over their jobs."""
    changes = ("max_jobs=1", "max_jobs=0") * 4 + ("max_jobs=1",)
    actions = tuple(Action(0.7, f"alter {what}") for what in changes)
    arg = {**scenario.submissions[0].arg, "partitions": 6, "pace": 0.3, "objects": False, "follows": False}
    submissions = tuple(
        Submission(
            0, 0.4 * n, "check", scenario.tables[0], {**arg, "seed": n}, None, None, actions, options={"max_jobs": 2}
        )
        for n in range(2)
    )
    hosts = tuple(replace(host, types=tuple({*host.types, "check"})) for host in scenario.hosts)
    return replace(scenario, submissions=submissions, hosts=hosts, drains=(), removals=(), actors=2)


def lost_jobs_fail(scenario: Scenario) -> Scenario:
    """A job limit, and a type whose jobs fail with their executor, without a cleanup."""
    arg = {
        **scenario.submissions[0].arg,
        "partitions": 6,
        "pace": 0.5,
        "trouble": 0.0,
        "objects": False,
        "follows": False,
    }
    model = Submission(0, 0.0, "purge", scenario.tables[0], arg, None, "collect_all", (), options={"max_jobs": 2})
    submissions = tuple(replace(model, after=0.4 * n, arg={**arg, "seed": n}) for n in range(2))
    hosts = tuple(replace(host, types=tuple({*host.types, "purge"}), unable=()) for host in scenario.hosts)
    return replace(scenario, submissions=submissions, hosts=hosts, drains=(), removals=(), actors=0)


def losses_beyond_compares(scenario: Scenario) -> Scenario:
    """A limit of one job is set while several run, under claims by executors that die and actors that drop them.

    No claim compares these lost claims.
    """
    changed = toggled_job_limits_with_actors(scenario)
    return replace(changed, limits=replace(changed.limits, gone=0, overdue=0))


def gates_changed_at_once(scenario: Scenario) -> Scenario:
    """Small operations that are claimed before they are read, and altered as soon as they are open.

    If the answer to a claim is lost, the repetition is refused, and only the poll finds the claimed jobs.
    """
    chance = random.Random(scenario.seed)
    arg = {"partitions": 1, "pace": 0.3, "calls": 0.05, "trouble": 0.0, "chunk": 1000}
    submissions = tuple(
        Submission(
            *(0, 0.4 * n, "check", scenario.tables[0], {**arg, "seed": n}, None, None),
            tuple(Action(chance.uniform(0.05, 0.3), f"alter priority={one}") for one in range(12)),
        )
        for n in range(8)
    )
    return replace(scenario, submissions=submissions, drains=(), removals=(), actors=0, clients=1)


def one_serves_all(scenario: Scenario) -> Scenario:
    """Two executors with all types: the first serves everything, the second serves no table of the scenario."""
    types = tuple(sorted({submission.type for submission in scenario.submissions} | {"check", "noop"}))
    host = replace(scenario.hosts[0], types=types, slots=2, skew=0.0, unable=(), labels={}, leaves=0.0)
    first = replace(host, name="exec-0", only_types=None, only_tables=None)
    second = replace(host, name="exec-1", only_types=None, only_tables=("elsewhere.*",))
    submissions = tuple(
        submission
        for submission in scenario.submissions
        if submission.type != RARE and "where" not in submission.options
    )
    return replace(scenario, submissions=submissions or scenario.submissions[:1], hosts=(first, second), drains=())


def on_one_executor(scenario: Scenario, slots: int, after: float, actions: tuple[Action, ...], **arg: Any) -> Scenario:
    """One operation on one executor, with these actions and the drawn faults."""
    drawn = scenario.submissions[0]
    given = {**drawn.arg, "partitions": 3, "name": "x", "chunk": 100_000, "trouble": 0.0, **arg}
    submission = replace(
        drawn,
        client=0,
        after=after,
        type="index",
        table="a",
        names=None,
        actions=actions,
        arg=given,
        policy=None,
        rerun="",
        options={},
        delay=0.0,
        predecessors=(),
        graph=0,
        prepared="",
        id="",
    )
    host = replace(scenario.hosts[0], name="exec-0", types=("index", "check"), slots=slots, skew=0.0, unable=())
    return replace(
        scenario, hosts=(host,), members=1, clients=1, submissions=(submission,), tables=("a",), drains=(),
        batch=1000, past=0, limits=DEFAULT,
    )  # fmt: skip


def watches_end_before_the_plan(scenario: Scenario) -> Scenario:
    """Watches end, and are refused until an operation with long jobs has been stopped."""
    refused = Fault("watches-refused", 1.2, 3.0, (0.5, 0.5, 0.9, 0.0))
    slow = on_one_executor(scenario, 4, 1.0, (Action(2.0, "pause-now"),), pace=70.0, calls=1.0)
    return replace(slow, faults=(refused,), calm=4.2)


def paused_while_planned(scenario: Scenario) -> Scenario:
    """Requests are late, and the operation is paused and resumed while it is planned."""
    actions = tuple(Action(0.1, what) for _ in range(3) for what in ("pause", "resume"))
    late = Fault("requests-late", 1.02, 8.0, (0.5, 0.8, 0.5, 0.5))
    return replace(on_one_executor(scenario, 1, 1.0, actions, pace=0.02, calls=0.05), faults=(late,), calm=9.02)


def checkpoints_and_two_pauses(scenario: Scenario) -> Scenario:
    """A few jobs with checkpoints, whose operations are stopped and resumed twice."""
    actions = (Action(2.0, "pause-now"), Action(1.0, "resume"), Action(3.0, "pause-now"), Action(1.0, "resume"))
    arg = {"partitions": 3, "pace": 1.5, "trouble": 0.0, "name": "x"}
    submissions = tuple(
        replace(
            submission,
            actions=actions,
            arg={**submission.arg, **arg},
            type="index",
            id="",
            names=None,
            rerun="",
            graph=0,
        )
        for submission in scenario.submissions
    )
    hosts = tuple(replace(host, types=("index", "check"), unable=()) for host in scenario.hosts)
    return replace(scenario, submissions=submissions, hosts=hosts, drains=())


def chain_of_operations(scenario: Scenario) -> Scenario:
    """Each operation waits for the one before it; some are cancelled, some fail."""
    plain = replace(scenario.submissions[0], in_transaction=False)
    model = replace(plain, client=0, names=None, rerun="", graph=0, delay=0.0, callers=1, type="check")
    arg = {**model.arg, "partitions": 4, "trouble": 1.0, "objects": False, "follows": False}
    submissions = [
        replace(
            model,
            after=0.2 * n,
            table=scenario.tables[0],
            arg={**arg, "seed": scenario.seed * 10 + n},
            actions=(Action(1.0, "cancel"),) if n == scenario.seed % 5 else (),
            predecessors=((n - 1, "success"),) if n else (),
        )
        for n in range(4)
    ]
    return replace(scenario, submissions=tuple(submissions))


def chords(scenario: Scenario, **changes: Any) -> Scenario:
    """Chords of one type: their parts end on the coordinator that starts the last operation."""
    plain = replace(
        scenario.submissions[0], in_transaction=False, prepared="", verifier="", id="", on_duplicate="join", options={}
    )
    arg = {**plain.arg, "partitions": 1, "trouble": 0.0, "calls": 0.05, "pace": 0.01, "objects": False}
    arg.pop("follows", None)
    model = replace(
        plain, client=0, names=None, rerun="", delay=0.0, callers=1, predecessors=(), actions=(), arg=arg,
        same_type=True, cancels_insertion=False, **changes,
    )  # fmt: skip
    submissions = tuple(replace(model, after=0.2 + 0.05 * n) for n in range(3))
    hosts = tuple(replace(host, types=(*host.types, model.type), unable=()) for host in scenario.hosts)
    return replace(scenario, submissions=submissions, hosts=hosts, removals=())


def chords_that_fail(scenario: Scenario) -> Scenario:
    """Chords whose parts all fail."""
    return chords(scenario, type="noop", table=CLUSTER_TABLE, graph=2, failing=2)


def large_chord(scenario: Scenario) -> Scenario:
    """A chord whose parts end at the same time, more than one transaction finishes."""
    crowd = chords(scenario, type="noop", table=CLUSTER_TABLE, graph=CROWD, failing=0)
    (submission, *_) = crowd.submissions
    submission = replace(submission, arg={**submission.arg, "pace": 0.0})
    return replace(crowd, submissions=(submission,), limits=replace(DEFAULT, finish_room=20))


def graph_inserted_with_late_holds(scenario: Scenario) -> Scenario:
    """A predecessor of a graph's first operation is cancelled while the graph is inserted.

    The graph's types already have coordinators, and no machine sees the graph's hold until the next listing.
    """
    (one, *_) = chain_of_operations(scenario).submissions
    failing = replace(one, delay=20.0, actions=(Action(1.15 + 0.1 * (scenario.seed % 10), "cancel"),))
    coordinated = replace(failing, actions=(), type="noop", table=CLUSTER_TABLE, arg={**one.arg, "partitions": 1})
    graph = replace(one, after=0.8, graph=LARGE_GRAPH, pause=0.6, predecessors=((0, "success"),), actions=())
    count = len(scenario.hosts)
    late = tuple(Fault("view-late", 0.78, 20.0, (n / count, 0.0, 0.0, 0.0)) for n in range(count))
    hosts = tuple(replace(host, types=("check", "noop"), unable=(), skew=0.0) for host in scenario.hosts)
    submissions = (failing, graph, coordinated)
    return replace(scenario, submissions=submissions, faults=late, calm=25.0, hosts=hosts, drains=(), removals=())


def slow_graph_insertion(scenario: Scenario) -> Scenario:
    """A live caller takes over a minute to insert a graph."""
    (one, *_) = chain_of_operations(scenario).submissions
    graph = replace(one, graph=LARGE_GRAPH, pause=20.0)
    hosts = tuple(replace(host, types=("check", "noop"), unable=()) for host in scenario.hosts)
    return replace(scenario, submissions=(graph,), faults=(), hosts=hosts, drains=(), removals=())


def dependency_added_at_its_end(scenario: Scenario) -> Scenario:
    """Pending operations get one more predecessor at about the time when it ends."""
    (one, *_) = chain_of_operations(scenario).submissions
    brief = replace(one, actions=(), type="quick", arg={**one.arg, "partitions": 1, "trouble": 0.0, "pace": 0.1})
    some = [
        replace(brief, after=0.4, delay=6.0, actions=(Action(0.02 * n, "depend-on 0"),))
        for n in range(scenario.seed % 5, scenario.seed % 5 + 20)
    ]
    hosts = tuple(replace(host, types=("quick",), unable=()) for host in scenario.hosts)
    return replace(scenario, submissions=(brief, *some), faults=(), hosts=hosts, drains=(), removals=())


def series_of_operations(scenario: Scenario) -> Scenario:
    """A series of six operations, under the drawn faults."""
    model = replace(
        scenario.submissions[0], rerun="", graph=0, prepared="", id="", in_transaction=False, callers=1, actions=()
    )
    model = replace(model, arg={**model.arg, "calls": 0.4})
    return replace(
        scenario, submissions=(replace(model, every=0.2, times=6, predecessors=(), delay=0.0),), removals=(), drains=()
    )


def departing_executor(scenario: Scenario) -> Scenario:
    """The only executor with a type or with labels leaves for good."""
    submissions, hosts = with_departure(
        random.Random(scenario.seed), scenario.submissions, scenario.hosts, labels=scenario.seed % 2 == 0
    )
    return replace(scenario, submissions=submissions, hosts=hosts)


def operations_with_one_id(scenario: Scenario) -> Scenario:
    """Operations with one id are started shortly after each other and combined; one of them is cancelled."""
    plain = replace(scenario.submissions[0], prepared="", verifier="", in_transaction=False, id="", on_duplicate="join")
    model = replace(plain, client=0, names=None, rerun="", graph=0, delay=0.0, callers=1, type="check")
    arg = {**model.arg, "partitions": 4, "trouble": 0.0, "objects": False, "follows": False}
    submissions = [
        replace(
            model,
            after=0.3 + 0.2 * n,
            table=scenario.tables[0],
            arg={**arg, "seed": scenario.seed * 10 + n},
            actions=(Action(0.1, "cancel"),) if n == 1 + scenario.seed % 3 else (),
            predecessors=(),
            id="nightly",
            on_duplicate="combine",
        )
        for n in range(4)
    ]
    return replace(scenario, submissions=tuple(submissions))


def series_with_an_id(scenario: Scenario) -> Scenario:
    """A series of three operations with an id, each soon after the end of the one before."""
    model = operations_with_one_id(scenario).submissions[0]
    return replace(scenario, submissions=(replace(model, actions=(), on_duplicate="join", every=0.1, times=3),))


def concurrent_replacements(scenario: Scenario) -> Scenario:
    """Several clients replace one pending operation at the same moment."""
    model = replace(
        operations_with_one_id(scenario).submissions[0], actions=(), after=0.5, delay=5.0, on_duplicate="replace"
    )
    submissions = tuple(replace(model, client=n % 3, after=0.5 + 0.3 * (n // 3)) for n in range(9))
    return replace(scenario, submissions=submissions, clients=3, removals=(), drains=())


def with_both_branches(scenario: Scenario) -> Scenario:
    """Client transactions whose compares change ten times a second."""
    model = replace(operations_with_one_id(scenario).submissions[0], id="", actions=(), after=0.5, in_transaction=True)
    submissions = tuple(
        replace(model, after=0.5 * n, toggles=tuple(0.5 * n + 0.1 * turn for turn in range(-1, 40)))
        for n in range(1, 5)
    )
    return replace(scenario, submissions=submissions, removals=(), drains=())


def old_server_with_watches_behind(scenario: Scenario) -> Scenario:
    """A server that answers progress requests at once, and watches that take seconds to catch up, since many jobs end
    at the same time.
    """
    arg = {"partitions": 60, "pace": 0.05, "trouble": 0.0, "calls": 0.05}
    submissions = tuple(
        replace(submission, actions=(), names=None, type="check", arg={**submission.arg, **arg})
        for submission in scenario.submissions
    )
    hosts = tuple(replace(host, types=("check",), slots=4, unable=()) for host in scenario.hosts)
    return replace(scenario, version="3.4.23", batch=1, submissions=submissions, hosts=hosts, drains=())


def three_members(scenario: Scenario) -> Scenario:
    """Three members of etcd, so that a watch can move to another one."""
    return replace(scenario, members=3)


def policies_of_tables(scenario: Scenario) -> Scenario:
    """Policies with all triggers, which are paused, resumed, changed and removed, while their tables get versions."""
    chance = random.Random(f"policies/{scenario.seed}")
    arg = {"seed": scenario.seed, "partitions": 1, "pace": 0.05, "calls": 0.05, "trouble": 0.0}
    span = min(scenario.calm or 10.0, 20.0)
    made = []
    for n in range(chance.choice((1, 2, 3))):
        on = chance.choice((("version",), ("version",), ("event:loaded",), ("version", "event:loaded")))
        commits = tuple(sorted(chance.uniform(1.0, span) for _ in range(chance.choice((0, 2, 5)))))
        made.append(
            SimPolicy(
                f"policy-{n}",
                chance.choice(scenario.tables),
                chance.choice(("check", "noop")),
                {**arg, "seed": scenario.seed * 10 + n},
                every=chance.choice((0.0, 0.0, 2.0)),
                on=on,
                when=chance.choice(("", "small_files > 25", "small_files >= 10")),
                after=chance.uniform(0.0, 2.0),
                actions=_acts_on_policy(chance, on),
                commits=commits,
            )
        )
    # A trigger that stays due, and a version, are looked at again after the time of a poll.
    return replace(scenario, policies=tuple(made), poll=min(scenario.poll, 3.0))


def removed_by_operations(scenario: Scenario) -> Scenario:
    """Operations remove their table, which users register again, beside other operations on it."""
    chance = random.Random(f"removals by operations/{scenario.seed}")
    table = scenario.tables[0]
    arg = {"partitions": 3, "pace": 0.2, "calls": 0.2, "trouble": 0.3, "chunk": chance.choice((60, 100_000))}
    submissions = tuple(
        Submission(
            *(0, chance.uniform(0.1, 2.0), DROP if n % 2 == 0 else chance.choice(("check", "noop")), table),
            *({**arg, "seed": scenario.seed * 10 + n}, None, None),
            (Action(chance.uniform(0.1, 2.0), "cancel"),) if chance.random() < 0.3 else (),
            delay=chance.choice((0.0, 0.0, 2.0)),
        )
        for n in range(chance.choice((2, 3, 4)))
    )
    removals = tuple(Removal(chance.uniform(0.5, 3.0), table, chance.uniform(0.1, 1.0)) for _ in range(12))
    hosts = tuple(replace(host, types=(*host.types, DROP), unable=()) for host in scenario.hosts)
    return replace(scenario, submissions=submissions, hosts=hosts, drains=(), removals=removals, actors=0)


def _acts_on_policy(chance: random.Random, on: tuple[str, ...]) -> tuple[PolicyAction, ...]:
    """Actions on a policy: pauses and resumptions, changes, removals after which it is made again, and events."""
    found = []
    for _ in range(chance.choice((0, 3, 6, 10))):
        after, luck = chance.choice((0.02, 0.3, 2.0)) * chance.uniform(0.5, 1.5), chance.random()
        if "event:loaded" in on and luck < 0.5:
            found.append(PolicyAction(after, "emit"))
        elif luck < 0.75:
            found += [PolicyAction(after, "pause"), PolicyAction(chance.uniform(0.1, 1.0), "resume")]
        elif luck < 0.85:
            found += [PolicyAction(after, "pause"), PolicyAction(0.1, "set"), PolicyAction(0.5, "resume")]
        elif luck < 0.93:
            found.append(PolicyAction(after, "set"))
        else:
            found += [PolicyAction(after, "remove"), PolicyAction(chance.uniform(0.1, 1.0), "set")]
            if luck > 0.96:
                found += [PolicyAction(0.02, "remove"), PolicyAction(chance.uniform(0.5, 3.0), "set")]
    return tuple(found)


SCENES: tuple[Scene, ...] = (
    long_jobs,
    many_steps,
    many_at_once,
    few_jobs,
    paused_for_long,
    drained_for_long,
    only_one_node_can_run,
    changing_job_limits,
    toggled_job_limits_with_actors,
    lost_jobs_fail,
    losses_beyond_compares,
    gates_changed_at_once,
    one_serves_all,
    watches_end_before_the_plan,
    paused_while_planned,
    checkpoints_and_two_pauses,
    chain_of_operations,
    chords_that_fail,
    large_chord,
    graph_inserted_with_late_holds,
    slow_graph_insertion,
    dependency_added_at_its_end,
    series_of_operations,
    departing_executor,
    operations_with_one_id,
    series_with_an_id,
    concurrent_replacements,
    with_both_branches,
    old_server_with_watches_behind,
)
"""The drawn scenes, all with the same probability. Their order is part of the draw."""

POLICY_SCENES: tuple[tuple[Scene, Focus], ...] = (
    (policies_of_tables, ()),
    (policies_of_tables, ("requests-late", "freeze", "crash")),
    (policies_of_tables, ("answers-lost", "requests-late")),
)
"""Scenes of policies. They have a draw of their own, so that they change no other seed."""

REMOVAL_SCENES: tuple[tuple[Scene, Focus], ...] = (
    (removed_by_operations, ()),
    (removed_by_operations, ("requests-late", "freeze", "crash")),
    (removed_by_operations, ("answers-lost", "requests-late")),
)
"""Scenes of operations that remove their table. They have a draw of their own, so that they change no other seed."""

FOCUSED: tuple[tuple[Scene | None, Focus], ...] = (
    (None, ("requests-late", "freeze", "crash", "late-renewal")),
    (None, ("slow-watches",)),
    (None, ("compaction", "refuse", "member-killed")),
    (None, ("events-lost", "crash")),
    (None, ("stale-reads", "crash")),
    (three_members, ("lag", "cut")),
    (planned_in_chunks, ("requests-late",)),
    (many_steps, ("requests-late",)),
    (long_jobs, ("late-renewal",)),
    (toggled_job_limits_with_actors, ("crash",)),
    (lost_jobs_fail, ("crash",)),
    (losses_beyond_compares, ("crash",)),
    (series_of_operations, ("crash",)),
    (with_both_branches, ("answers-lost", "requests-late")),
    (old_server_with_watches_behind, ("slow-watches",)),
)
"""The focused scenes: all faults are of these kinds. None: operations and executors are drawn as without a scene."""


def drawn_scene(seed: int) -> tuple[Scene | None, Focus] | None:
    """The scene of a seed, with its kinds of faults; None: the seed has no scene."""
    chance = random.Random(f"scenes/{seed}")
    if chance.random() < SHARE:
        return chance.choice(SCENES), ()
    focused = random.Random(f"focused scenes/{seed}")
    if focused.random() < FOCUSED_SHARE:
        return focused.choice(FOCUSED)
    policies = random.Random(f"policies of tables/{seed}")
    if policies.random() < POLICY_SHARE:
        return policies.choice(POLICY_SCENES)
    removals = random.Random(f"purged tables/{seed}")
    return removals.choice(REMOVAL_SCENES) if removals.random() < REMOVAL_SHARE else None


def with_scene(drawn: Scenario) -> Scenario:
    """The scene that the seed of a scenario draws, or the scenario itself."""
    found = drawn_scene(drawn.seed)
    return drawn if found is None else in_scene(drawn.seed, *found)


def in_scene(seed: int, scene: Scene | None, focus: Focus) -> Scenario:
    """The scenario of a seed in this scene, whatever scene the seed draws."""
    drawn = draw_scenario(seed, focus=focus, scenes=False)
    return drawn if scene is None else scene(simplified(drawn))


def simplified(drawn: Scenario) -> Scenario:
    """The scenario on which scenes build.

    Clocks are right, executors can run and serve what they offer, history is kept, and all operations are started
    directly and separately.
    """
    hosts = tuple(
        Host(
            host.name,
            tuple(dict.fromkeys((*(name for name in host.types if name in DRAWN), "check", "noop"))),
            host.slots,
            skew=0.0,
            labels=host.labels,
        )
        for host in drawn.hosts
    )
    submissions = tuple(
        Submission(w.client, w.after, w.type, w.table, w.arg, w.names, w.policy, w.actions)
        for w in drawn.submissions
        if any(w.type in host.types for host in hosts) and w.table in (*drawn.tables, CLUSTER_TABLE)
    )
    (one, *_) = drawn.submissions
    return replace(
        drawn,
        hosts=hosts,
        submissions=submissions or (Submission(0, one.after, "check", drawn.tables[0], one.arg, None, None, ()),),
        faults=tuple(fault for fault in drawn.faults if fault.kind != "clock"),
        limits=replace(drawn.limits, history_kept=DEFAULT.history_kept),
        history_age=None,
    )

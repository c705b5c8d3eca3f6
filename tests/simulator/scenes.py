"""Scenes: what rarely comes of many independent draws is arranged as a whole in some of the scenarios.

A scene replaces the operations of a drawn scenario, and often its executors; its faults are the drawn ones where the
scene needs none of its own. The search for planted bugs uses scenes, too: so each kind of planted bug is met by the
schedules as they are drawn (``scripts/simulate --planted``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distop.protocol.records import CLUSTER_TABLE
from distop.protocol.size_limits import DEFAULT
from tests.simulator.departures import with_departure
from tests.simulator.scenario import CROWD, LARGE_GRAPH, Act, DrainAct, Fault, Host, Scenario, Wish
from tests.simulator.simulated_behaviors import DRAWN, RARE

Scene = Callable[[Scenario], Scenario]

SHARE = 0.15
"""Share of the seeds whose scenario is a scene."""


def minutes_long(wanted: Scenario, *acts: Act) -> Scenario:
    """Jobs that take minutes, to whose operations clients do this. As they are drawn, jobs end in time of themselves,
    and it does not show that nobody stops them.
    """
    arg = {"pace": 70.0, "name": "x", "trouble": 0.0}
    wishes = tuple(
        replace(
            wish,
            acts=acts,
            type="index",
            names=None,
            arg={**wish.arg, **arg, "partitions": min(6, wish.arg["partitions"])},
        )
        for wish in wanted.wishes
    )
    hosts = tuple(replace(host, types=("index", "check"), unable=()) for host in wanted.hosts)
    return replace(wanted, wishes=wishes, hosts=hosts, drains=())


def few_jobs(wanted: Scenario) -> Scenario:
    """Two in each operation, which save a few times on their way, minutes apart."""
    long = minutes_long(wanted)
    wishes = tuple(replace(w, rerun="", arg={**w.arg, "partitions": 2}) for w in long.wishes)
    return replace(long, wishes=wishes)


def paused_for_long(wanted: Scenario) -> Scenario:
    """They are told to stop, and nobody resumes them."""
    return minutes_long(wanted, Act(1.0, "pause-now"))


def drained_for_long(wanted: Scenario) -> Scenario:
    """One of at least two executors is drained that runs them."""
    long = minutes_long(wanted)
    (first, *_) = long.hosts
    hosts = long.hosts if len(long.hosts) > 1 else (first, replace(first, name="exec-1"))
    return replace(long, hosts=hosts, drains=(DrainAct(2.0, first.name, 100.0, False),))


def some_cannot(wanted: Scenario) -> Scenario:
    """All executors but the last one turn out not to be able to run anything. (As it is drawn, several try in turn for
    ever what none of them can, and such a run takes a minute.)
    """
    everything = tuple(sorted({type_name for host in wanted.hosts for type_name in host.types}))
    last = len(wanted.hosts) - 1
    lack = [everything if n < last else () for n in range(len(wanted.hosts))]
    hosts = (replace(h, types=everything, unable=lack[n], recovers=0.0) for n, h in enumerate(wanted.hosts))
    return replace(wanted, hosts=tuple(hosts))


def long_jobs(wanted: Scenario) -> Scenario:
    """Jobs take longer than a session lasts without renewal, and there is room for all of them everywhere."""
    wishes = tuple(
        replace(wish, acts=(), arg={**wish.arg, "pace": 2.0, "trouble": 0.0}, type="check") for wish in wanted.wishes
    )
    hosts = tuple(replace(host, slots=60, types=("check",)) for host in wanted.hosts)
    return replace(wanted, wishes=wishes, hosts=hosts, ttl=4)


def many_steps(wanted: Scenario) -> Scenario:
    """All jobs save on their way."""
    wishes = tuple(
        replace(wish, acts=(), arg={**wish.arg, "pace": 0.3, "name": "x"}, type="index", id="", on_duplicate="join")
        for wish in wanted.wishes
    )
    hosts = tuple(replace(host, types=("index", "check")) for host in wanted.hosts)
    return replace(wanted, wishes=wishes, hosts=hosts)


def planned_in_chunks(wanted: Scenario) -> Scenario:
    """A plan of many chunks, written one by one while requests are late; it is interrupted, and begun anew under the
    same election.
    """
    acts = tuple(Act(0.1, what) for _ in range(3) for what in ("pause", "resume"))
    arg = {**wanted.wishes[0].arg, "partitions": 60, "chunk": 60, "calls": 0.05, "pace": 0.02, "trouble": 0.0}
    wish = replace(wanted.wishes[0], after=1.0, type="check", table="a", names=None, acts=acts, arg=arg)
    return replace(
        wanted,
        hosts=tuple(replace(host, types=("check",), unable=()) for host in wanted.hosts),
        wishes=(wish,),
        drains=(),
        limits=replace(wanted.limits, plan_bytes=0),
        faults=(replace(wanted.faults[0], at=1.02, lasts=12.0),),
        calm=13.02,
    )


def many_at_once(wanted: Scenario) -> Scenario:
    """One client wants many small operations at once, which take the same time; of some it has two callers, and some it
    cancels when they are about to end.
    """
    model = replace(wanted.wishes[0], client=0, after=0.5, type="quick", table="a", names=None, rerun="", policy=None)
    arg = {**model.arg, "partitions": 1, "pace": 0.1, "calls": 0.05, "trouble": 0.0, "chunk": 1000, "follows": False}
    ends = 0.05 + 0.01 * (wanted.seed % 30)
    wishes = [
        replace(model, arg=arg, callers=1 + n % 2, acts=(Act(ends + 0.002 * n, "cancel"),) if n > 5 else ())
        for n in range(12)
    ]
    hosts = tuple(replace(host, types=("quick", "check"), slots=12, unable=()) for host in wanted.hosts)
    return replace(wanted, wishes=tuple(wishes), hosts=hosts, drains=(), limits=DEFAULT)


def few_at_once(wanted: Scenario) -> Scenario:
    """No more than a few jobs of each operation run at once, which somebody changes meanwhile."""
    acts = (Act(0.3, "alter max_jobs=4"), Act(0.3, "alter max_jobs=1"), Act(0.3, "alter max_jobs=3"))
    wishes = tuple(
        replace(wish, acts=acts, rerun="", options={"max_jobs": 2}, arg={**wish.arg, "pace": 0.1})
        for wish in wanted.wishes
    )
    return replace(wanted, wishes=wishes, drains=())


def limits_come_and_go_beside_actors(wanted: Scenario) -> Scenario:
    """One job at once, then any number, then one again.

    Executors die, and actors take over their jobs.
    """
    changes = ("max_jobs=1", "max_jobs=0") * 4 + ("max_jobs=1",)
    acts = tuple(Act(0.7, f"alter {what}") for what in changes)
    arg = {**wanted.wishes[0].arg, "partitions": 6, "pace": 0.3, "objects": False, "follows": False}
    wishes = tuple(
        Wish(0, 0.4 * n, "check", wanted.tables[0], {**arg, "seed": n}, None, None, acts, options={"max_jobs": 2})
        for n in range(2)
    )
    hosts = tuple(replace(host, types=tuple({*host.types, "check"})) for host in wanted.hosts)
    return replace(wanted, wishes=wishes, hosts=hosts, drains=(), removals=(), actors=2)


def lost_jobs_fail(wanted: Scenario) -> Scenario:
    """Few jobs run at once, of a type whose jobs fail where their executor is lost, with nothing to clean up."""
    arg = {**wanted.wishes[0].arg, "partitions": 6, "pace": 0.5, "trouble": 0.0, "objects": False, "follows": False}
    model = Wish(0, 0.0, "purge", wanted.tables[0], arg, None, "collect_all", (), options={"max_jobs": 2})
    wishes = tuple(replace(model, after=0.4 * n, arg={**arg, "seed": n}) for n in range(2))
    hosts = tuple(replace(host, types=tuple({*host.types, "purge"}), unable=()) for host in wanted.hosts)
    return replace(wanted, wishes=wishes, hosts=hosts, drains=(), removals=(), actors=0)


def losses_that_no_claim_compares(wanted: Scenario) -> Scenario:
    """A limit of one job comes while several run, under claims by executors that die and actors that forget them."""
    changed = limits_come_and_go_beside_actors(wanted)
    return replace(changed, limits=replace(changed.limits, gone=0, overdue=0))


def gates_change_at_once(wanted: Scenario) -> Scenario:
    """Small operations that are claimed unread, and altered as soon as they open.

    Where the answer to a claim is lost, its repetition is refused, and only the poll finds the jobs that it won.
    """
    chance = random.Random(wanted.seed)
    arg = {"partitions": 1, "pace": 0.3, "calls": 0.05, "trouble": 0.0, "chunk": 1000}
    wishes = tuple(
        Wish(
            *(0, 0.4 * n, "check", wanted.tables[0], {**arg, "seed": n}, None, None),
            tuple(Act(chance.uniform(0.05, 0.3), f"alter priority={one}") for one in range(12)),
        )
        for n in range(8)
    )
    return replace(wanted, wishes=wishes, drains=(), removals=(), actors=0, clients=1)


def one_serves_all(wanted: Scenario) -> Scenario:
    """The first executor has all types, and serves everything; the second one has them, too, and serves no table."""
    types = tuple(sorted({wish.type for wish in wanted.wishes} | {"check", "noop"}))
    host = replace(wanted.hosts[0], types=types, slots=2, skew=0.0, unable=(), labels={}, leaves=0.0)
    first = replace(host, name="exec-0", only_types=None, only_tables=None)
    second = replace(host, name="exec-1", only_types=None, only_tables=("elsewhere.*",))
    wishes = tuple(wish for wish in wanted.wishes if wish.type != RARE and "where" not in wish.options)
    return replace(wanted, wishes=wishes or wanted.wishes[:1], hosts=(first, second), drains=())


def on_one_executor(wanted: Scenario, slots: int, after: float, acts: tuple[Act, ...], **arg: Any) -> Scenario:
    """One operation on one executor, to which clients do this. Faults are to be added."""
    drawn = wanted.wishes[0]
    given = {**drawn.arg, "partitions": 3, "name": "x", "chunk": 100_000, "trouble": 0.0, **arg}
    wish = replace(
        drawn,
        client=0,
        after=after,
        type="index",
        table="a",
        names=None,
        acts=acts,
        arg=given,
        policy=None,
        rerun="",
        options={},
        delay=0.0,
        behind=(),
        graph=0,
        prepared="",
        id="",
    )
    host = replace(wanted.hosts[0], name="exec-0", types=("index", "check"), slots=slots, skew=0.0, unable=())
    return replace(
        wanted, hosts=(host,), members=1, clients=1, wishes=(wish,), tables=("a",), drains=(), batch=1000, past=0,
        limits=DEFAULT,
    )  # fmt: skip


def watches_end_before_the_plan(wanted: Scenario) -> Scenario:
    """They are not let in again until the operation, whose jobs take minutes, was told to stop."""
    refused = Fault("watches-refused", 1.2, 3.0, (0.5, 0.5, 0.9, 0.0))
    slow = on_one_executor(wanted, 4, 1.0, (Act(2.0, "pause-now"),), pace=70.0, calls=1.0)
    return replace(slow, faults=(refused,), calm=4.2)


def paused_while_the_plan_is_on_its_way(wanted: Scenario) -> Scenario:
    """Requests are late, and the operation is paused and resumed while it is planned."""
    acts = tuple(Act(0.1, what) for _ in range(3) for what in ("pause", "resume"))
    late = Fault("requests-late", 1.02, 8.0, (0.5, 0.8, 0.5, 0.5))
    return replace(on_one_executor(wanted, 1, 1.0, acts, pace=0.02, calls=0.05), faults=(late,), calm=9.02)


def saving_and_paused_twice(wanted: Scenario) -> Scenario:
    """Few jobs that save on their way, whose operations are stopped and go on twice."""
    acts = (Act(2.0, "pause-now"), Act(1.0, "resume"), Act(3.0, "pause-now"), Act(1.0, "resume"))
    arg = {"partitions": 3, "pace": 1.5, "trouble": 0.0, "name": "x"}
    wishes = tuple(
        replace(wish, acts=acts, arg={**wish.arg, **arg}, type="index", id="", names=None, rerun="", graph=0)
        for wish in wanted.wishes
    )
    hosts = tuple(replace(host, types=("index", "check"), unable=()) for host in wanted.hosts)
    return replace(wanted, wishes=wishes, hosts=hosts, drains=())


def in_a_row(wanted: Scenario) -> Scenario:
    """Each operation waits for the one before it; some are cancelled, some fail."""
    plain = replace(wanted.wishes[0], within=False)
    model = replace(plain, client=0, names=None, rerun="", graph=0, delay=0.0, callers=1, type="check")
    arg = {**model.arg, "partitions": 4, "trouble": 1.0, "objects": False, "follows": False}
    wishes = [
        replace(
            model,
            after=0.2 * n,
            table=wanted.tables[0],
            arg={**arg, "seed": wanted.seed * 10 + n},
            acts=(Act(1.0, "cancel"),) if n == wanted.seed % 5 else (),
            behind=((n - 1, "success"),) if n else (),
        )
        for n in range(4)
    ]
    return replace(wanted, wishes=tuple(wishes))


def chords(wanted: Scenario, **changes: Any) -> Scenario:
    """Graphs of one type: their parts end on the coordinator that begins the last one."""
    plain = replace(wanted.wishes[0], within=False, prepared="", verifier="", id="", on_duplicate="join", options={})
    arg = {**plain.arg, "partitions": 1, "trouble": 0.0, "calls": 0.05, "pace": 0.01, "objects": False}
    arg.pop("follows", None)
    model = replace(
        plain, client=0, names=None, rerun="", delay=0.0, callers=1, behind=(), acts=(), arg=arg, alike=True,
        hurried=False, **changes,
    )  # fmt: skip
    wishes = tuple(replace(model, after=0.2 + 0.05 * n) for n in range(3))
    hosts = tuple(replace(host, types=(*host.types, model.type), unable=()) for host in wanted.hosts)
    return replace(wanted, wishes=wishes, hosts=hosts, removals=())


def that_fail(wanted: Scenario) -> Scenario:
    return chords(wanted, type="noop", table=CLUSTER_TABLE, graph=2, failing=2)


def that_end_at_once(wanted: Scenario) -> Scenario:
    """More than one transaction finishes."""
    crowd = chords(wanted, type="noop", table=CLUSTER_TABLE, graph=CROWD, failing=0)
    (wish, *_) = crowd.wishes
    wish = replace(wish, arg={**wish.arg, "pace": 0.0})
    return replace(crowd, wishes=(wish,), limits=replace(DEFAULT, finish_room=20))


def inserted_while_holds_are_late(wanted: Scenario) -> Scenario:
    """A graph's first operation loses its dependency while the graph is inserted.

    The dependency is cancelled. Its types are coordinated already, and no machine sees its hold until the cluster is
    listed anew.
    """
    (one, *_) = in_a_row(wanted).wishes
    failing = replace(one, delay=20.0, acts=(Act(1.15 + 0.1 * (wanted.seed % 10), "cancel"),))
    coordinated = replace(failing, acts=(), type="noop", table=CLUSTER_TABLE, arg={**one.arg, "partitions": 1})
    graph = replace(one, after=0.8, graph=LARGE_GRAPH, pause=0.6, behind=((0, "success"),), acts=())
    count = len(wanted.hosts)
    late = tuple(Fault("view-late", 0.78, 20.0, (n / count, 0.0, 0.0, 0.0)) for n in range(count))
    hosts = tuple(replace(host, types=("check", "noop"), unable=(), skew=0.0) for host in wanted.hosts)
    wishes = (failing, graph, coordinated)
    return replace(wanted, wishes=wishes, faults=late, calm=25.0, hosts=hosts, drains=(), removals=())


def inserted_for_long(wanted: Scenario) -> Scenario:
    """A caller inserts a graph for over a minute, and lives all the time."""
    (one, *_) = in_a_row(wanted).wishes
    graph = replace(one, graph=LARGE_GRAPH, pause=20.0)
    hosts = tuple(replace(host, types=("check", "noop"), unable=()) for host in wanted.hosts)
    return replace(wanted, wishes=(graph,), faults=(), hosts=hosts, drains=(), removals=())


def added_at_the_end(wanted: Scenario) -> Scenario:
    """Operations get one more dependency, at about the time when that one ends."""
    (one, *_) = in_a_row(wanted).wishes
    brief = replace(one, acts=(), type="quick", arg={**one.arg, "partitions": 1, "trouble": 0.0, "pace": 0.1})
    some = [
        replace(brief, after=0.4, delay=6.0, acts=(Act(0.02 * n, "behind 0"),))
        for n in range(wanted.seed % 5, wanted.seed % 5 + 20)
    ]
    hosts = tuple(replace(host, types=("quick",), unable=()) for host in wanted.hosts)
    return replace(wanted, wishes=(brief, *some), faults=(), hosts=hosts, drains=(), removals=())


def in_series(wanted: Scenario) -> Scenario:
    """Each operation comes again, and coordinators die."""
    model = replace(wanted.wishes[0], rerun="", graph=0, prepared="", id="", within=False, callers=1, acts=())
    model = replace(model, arg={**model.arg, "calls": 0.4})
    return replace(wanted, wishes=(replace(model, every=0.2, times=6, behind=(), delay=0.0),), removals=(), drains=())


def executors_go(wanted: Scenario) -> Scenario:
    """An executor goes for good, which alone offers a type, or alone has labels."""
    wishes, hosts = with_departure(random.Random(wanted.seed), wanted.wishes, wanted.hosts, labels=wanted.seed % 2 == 0)
    return replace(wanted, wishes=wishes, hosts=hosts)


def of_one_id(wanted: Scenario) -> Scenario:
    """Some are started of one id, one soon after the other, and combined; now and then one is cancelled."""
    plain = replace(wanted.wishes[0], prepared="", verifier="", within=False, id="", on_duplicate="join")
    model = replace(plain, client=0, names=None, rerun="", graph=0, delay=0.0, callers=1, type="check")
    arg = {**model.arg, "partitions": 4, "trouble": 0.0, "objects": False, "follows": False}
    wishes = [
        replace(
            model,
            after=0.3 + 0.2 * n,
            table=wanted.tables[0],
            arg={**arg, "seed": wanted.seed * 10 + n},
            acts=(Act(0.1, "cancel"),) if n == 1 + wanted.seed % 3 else (),
            behind=(),
            id="nightly",
            on_duplicate="combine",
        )
        for n in range(4)
    ]
    return replace(wanted, wishes=tuple(wishes))


def series_of_one_id(wanted: Scenario) -> Scenario:
    """An operation comes again twice, soon after each end, and all have one id."""
    model = of_one_id(wanted).wishes[0]
    return replace(wanted, wishes=(replace(model, acts=(), on_duplicate="join", every=0.1, times=3),))


def at_one_time(wanted: Scenario) -> Scenario:
    """Several clients want to replace one operation that waits, at the same moment."""
    model = replace(of_one_id(wanted).wishes[0], acts=(), after=0.5, delay=5.0, on_duplicate="replace")
    wishes = tuple(replace(model, client=n % 3, after=0.5 + 0.3 * (n // 3)) for n in range(9))
    return replace(wanted, wishes=wishes, clients=3, removals=(), drains=())


def with_both_branches(wanted: Scenario) -> Scenario:
    """Clients' transactions whose compares change, some of them ten times a second."""
    model = replace(of_one_id(wanted).wishes[0], id="", acts=(), after=0.5, within=True)
    wishes = tuple(
        replace(model, after=0.5 * n, turns=tuple(0.5 * n + 0.1 * turn for turn in range(-1, 40))) for n in range(1, 5)
    )
    return replace(wanted, wishes=wishes, removals=(), drains=())


def an_old_server_with_watches_behind(wanted: Scenario) -> Scenario:
    """One that answers at once where its progress is asked for; and so many jobs end at a time that a watch which fell
    behind takes seconds to catch up, while somebody waits for it.
    """
    arg = {"partitions": 60, "pace": 0.05, "trouble": 0.0, "calls": 0.05}
    wishes = tuple(replace(wish, acts=(), names=None, type="check", arg={**wish.arg, **arg}) for wish in wanted.wishes)
    hosts = tuple(replace(host, types=("check",), slots=4, unable=()) for host in wanted.hosts)
    return replace(wanted, version="3.4.23", batch=1, wishes=wishes, hosts=hosts, drains=())


SCENES: tuple[Scene, ...] = (
    long_jobs,
    many_steps,
    many_at_once,
    few_jobs,
    paused_for_long,
    drained_for_long,
    some_cannot,
    few_at_once,
    limits_come_and_go_beside_actors,
    lost_jobs_fail,
    losses_that_no_claim_compares,
    gates_change_at_once,
    one_serves_all,
    watches_end_before_the_plan,
    paused_while_the_plan_is_on_its_way,
    saving_and_paused_twice,
    in_a_row,
    that_fail,
    that_end_at_once,
    inserted_while_holds_are_late,
    inserted_for_long,
    added_at_the_end,
    in_series,
    executors_go,
    of_one_id,
    series_of_one_id,
    at_one_time,
    with_both_branches,
    an_old_server_with_watches_behind,
)
"""The scenes that are drawn, each as often as the others."""


def arranged(drawn: Scenario) -> Scenario:
    """The scenario itself, or the scene that its seed draws."""
    chance = random.Random(f"scenes/{drawn.seed}")
    return chance.choice(SCENES)(plainly(drawn)) if chance.random() < SHARE else drawn


def plainly(drawn: Scenario) -> Scenario:
    """The scenario with right clocks, executors that can run and serve what they offer, history that is kept, and
    operations that start at once, each by itself: scenes build on that.
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
    wishes = tuple(
        Wish(w.client, w.after, w.type, w.table, w.arg, w.names, w.policy, w.acts)
        for w in drawn.wishes
        if any(w.type in host.types for host in hosts) and w.table in (*drawn.tables, CLUSTER_TABLE)
    )
    (one, *_) = drawn.wishes
    return replace(
        drawn,
        hosts=hosts,
        wishes=wishes or (Wish(0, one.after, "check", drawn.tables[0], one.arg, None, None, ()),),
        faults=tuple(fault for fault in drawn.faults if fault.kind != "clock"),
        limits=replace(drawn.limits, history_kept=DEFAULT.history_kept),
        history_age=None,
    )

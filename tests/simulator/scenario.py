"""Scenarios, drawn by seed: the cluster, the operations, the actions of clients, and the faults. Pure values."""

from __future__ import annotations

import random
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.protocol.records import CLUSTER_TABLE
from distop.protocol.size_limits import DEFAULT, Limits
from tests.simulator.simulated_behaviors import DRAWN, TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.simulator.policies import SimPolicy

TABLES = ("a", "a.b", "ab")
"""Table names that are prefixes of each other, one with a delimiter (F19)."""
MOST_RECORDS = 20
"""Maximum history records of one run in one table: with this history limit only old records are deleted."""
FEW_RECORDS = (1, 2, 5)
"""History limits below the records of one run, of which none may be deleted within the hour."""
HOURS_WRONG = 5.0
"""Maximum error of an executor's clock in hours, ahead or behind."""
BEGINS = 0.2
"""Approximate seconds from the submission of an operation to its start."""
RECURRING = 0.72
"""Share of the seeds with a series, among those whose clocks are right: a sixth of all seeds."""
SHORTEST, LONGEST = 0.5, 20.0
"""Minimum and maximum of an operation's expected duration in seconds, for the times of faults."""

LARGE_GRAPH = 22
"""Operations of a graph that needs more than one transaction."""
DENIED_KEPT = 20.0
"""Minimum seconds for which denied holds and receipts are kept: copies of a request may be in flight that long."""
CROWD = 45
"""Operations that end at the same time: more than one transaction finishes."""
FORMS = ("chord", "chain", "group")


@frozen
class Host:
    """One executor. ``skew``: the error of its wall clock in seconds. ``unable``: types that it offers but cannot run,
    for good or until ``recovers`` (seconds from the start).
    """

    name: str
    types: tuple[str, ...]
    slots: int
    skew: float
    unable: tuple[str, ...] = ()
    recovers: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    leaves: float = 0.0
    """When it leaves for good, in seconds; 0: never."""
    only_types: tuple[str, ...] | None = None
    only_tables: tuple[str, ...] | None = None
    """The types and tables that it serves by its options; None: all. ``types`` are the installed ones."""


@frozen
class Action:
    """An action on an operation by the client that started it, ``after`` seconds after its previous action.

    ``what``: ``cancel``, ``pause``, ``pause-now``, ``resume``, ``status``, ``alter name=value …``, ``register``,
    ``add TABLE``, ``remove TABLE``, ``depend-on NUMBER``.
    """

    after: float
    what: str


@frozen
class Submission:
    """An operation that a client submits."""

    client: int
    after: float
    type: str
    table: str
    arg: Mapping[str, Any]
    names: tuple[str, ...] | None
    policy: str | None
    actions: tuple[Action, ...]
    rerun: str = ""
    """Which partitions are rerun after the end: ``failed`` or ``unfinished``; "": none."""
    callers: int = 1
    """Number of concurrent callers with the same request id."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further start options: priority, limits, failure budget, label selector."""
    delay: float = 0.0
    """Start delay in seconds."""
    predecessors: tuple[tuple[int, str], ...] = ()
    """Its predecessors: numbers of submissions, each with the condition "success" or "end"."""
    graph: int = 0
    """Number of further operations of one job each that are started with it as a graph."""
    form: str = "chord"
    """Form of the graph: it waits for all others (``chord``), each waits for the one before (``chain``), or none waits
    (``group``).
    """
    failing: int = 0
    """How many of the others fail, counted from the last one."""
    same_type: bool = False
    """Whether the others have its type and table; else they are no-ops without a table."""
    pause: float = 0.0
    """Seconds for which the caller of the graph pauses after each transaction."""
    prepared: str = ""
    """How the sender of a prepared operation actions: it ``confirms``, confirms ``late`` (the verifier is asked
    meanwhile), ``dies`` or ``abandons``; "": the operation is started directly.
    """
    verifier: str = ""
    """The verifier's answer for a prepared operation: ``yes``, ``no`` or ``nothing``."""
    id: str = ""
    """The operation's id; one operation with an id runs at a time."""
    on_duplicate: str = "join"
    in_transaction: bool = False
    """Whether it is started in a transaction of its client, after another one that was withdrawn."""
    toggles: tuple[float, ...] = ()
    """Times at which the compare of that transaction fails and holds in turn; at first it holds
    (``caller_transactions``).
    """
    every: float = 0.0
    """Seconds from the end of an operation of a series to the start of the next one; 0: no series."""
    times: int = 1
    """Number of operations of its series."""
    cancels_insertion: bool = False
    """Whether its client cancels the insertion of the graph soon after the start, and starts it again."""


@frozen
class DrainAction:
    """A drain of an executor. It is undrained ``lasts`` seconds later, or (``waits``) once it is empty."""

    after: float
    executor: str
    lasts: float
    waits: bool


@frozen
class Removal:
    """A removal of a table, from ``after`` on, once nothing runs on it. The table is added again ``lasts`` seconds
    later.
    """

    after: float
    table: str
    lasts: float


@frozen
class Fault:
    """One fault: its kind, start, duration, and ``aim``, which selects its targets (numbers in [0, 1))."""

    kind: str
    at: float
    lasts: float
    aim: tuple[float, ...]


VERSIONS = {"3.6.16": 60, "3.5.33": 20, "3.4.23": 20}
"""Version of etcd → in how many of 100 seeds. The model knows no difference between the first two."""


@frozen
class Scenario:
    """Everything on which a run depends."""

    seed: int
    hosts: tuple[Host, ...]
    members: int
    version: str
    ttl: int
    poll: float
    batch: int
    fragments: int
    tables: tuple[str, ...]
    clients: int
    submissions: tuple[Submission, ...]
    faults: tuple[Fault, ...] = ()
    calm: float = 0.0
    """When the last fault ends."""
    drains: tuple[DrainAction, ...] = ()
    removals: tuple[Removal, ...] = ()
    election: float = 1.0
    """etcd's election timeout in seconds."""
    limits: Limits = DEFAULT
    namespace: str = ""
    past: int = 0
    """Number of old records in each table's history."""
    history_limit: int = 1000
    history_age: float | None = None
    """Age in seconds at which records are deleted, however few there are; None: no limit."""
    actors: int = 0
    """Number of processes other than executors that claim jobs."""
    policies: tuple[SimPolicy, ...] = ()

    @property
    def users(self) -> bool:
        """Whether requests need a token: there are faults of authentication."""
        return any(fault.kind in ("tokens", "role") for fault in self.faults)

    @property
    def partitions(self) -> int:
        """Number of partitions of the largest operation."""
        return max(int(submission.arg["partitions"]) for submission in self.submissions)

    @property
    def executors(self) -> int:
        """Number of executors that offer a submitted type and do not leave."""
        types = {submission.type for submission in self.submissions}
        return sum(not types.isdisjoint(host.types) and not host.leaves for host in self.hosts)

    @property
    def workers(self) -> int:
        """Number of executors that offer the largest operation's type, and so may also coordinate it."""
        return sum(_largest(self.submissions).type in host.types for host in self.hosts)


def plain(
    seed: int,
    hosts: int,
    submissions: Sequence[Submission],
    *faults: Fault,
    types: Sequence[str] = (),
    slots: int = 2,
    ttl: int = 4,
    poll: float = 30.0,
    calm: float = 0.0,
) -> Scenario:
    """A scenario without random draws: equal hosts that offer the submitted types and ``types``, one etcd member, one
    table, one client.
    """
    offered = tuple(dict.fromkeys((*(submission.type for submission in submissions), *types)))
    return Scenario(
        seed=seed,
        hosts=tuple(Host(f"exec-{n}", offered, slots, 0.0) for n in range(hosts)),
        members=1,
        version=next(iter(VERSIONS)),
        ttl=ttl,
        poll=poll,
        batch=1000,
        fragments=0,
        tables=("a",),
        clients=1,
        submissions=tuple(submissions),
        faults=faults,
        calm=max((fault.at + fault.lasts for fault in faults), default=calm),
    )


def draw_scenario(seed: int, *, faults: bool = True, focus: tuple[str, ...] = (), scenes: bool = True) -> Scenario:
    """The scenario of a seed. ``focus``: many faults, of these kinds only.

    Some seeds draw a scene, unless ``faults`` or ``scenes`` is False or ``focus`` is given.
    """
    from tests.simulator.scenes import with_scene

    drawn = _drawn(seed, faults, focus)
    return with_scene(drawn) if scenes and faults and not focus else drawn


def _drawn(seed: int, faults: bool, focus: tuple[str, ...]) -> Scenario:
    from tests.simulator.actors import by_hand
    from tests.simulator.caller_transactions import with_branches
    from tests.simulator.departures import AWAY_TABLE, draw_leaving
    from tests.simulator.drawn_options import changing_limits, draw_limits, losses_below_limit
    from tests.simulator.drawn_serving import draw_serving
    from tests.simulator.fault_kinds import draw_faults, draw_separate_faults
    from tests.simulator.id_races import racing_starts
    from tests.simulator.slow_graphs import added_later, inserted_slowly
    from tests.simulator.successors import JOIN, followers, joins, with_id

    chance = random.Random(f"scenario/{seed}")
    tables = TABLES[: chance.choices((1, 2, 3), (60, 25, 15))[0]]
    clients = chance.choices((1, 2, 3), (50, 35, 15))[0]
    types = [chance.choice(DRAWN) for _ in range(chance.choices((1, 2, 3), (45, 35, 20))[0])]
    submissions = tuple(_draw_submission(chance, n, clients, type_name, tables) for n, type_name in enumerate(types))
    if chance.random() < 0.25:
        submissions = (
            *submissions,
            _of_the_cluster(_draw_submission(chance, len(submissions), clients, "noop", (CLUSTER_TABLE,))),
        )
    some = _hosts(chance, submissions, skewed=faults)
    listed = draw_faults(chance, expected(submissions, some), focus) if faults else ()
    if faults and not focus:
        busy = expected(submissions, some)
        separate = draw_separate_faults(seed, busy)
        listed = tuple(sorted((*listed, *separate), key=lambda fault: fault.at))
    # Each of the following draws has its own generator, so a new one changes no other draw of a seed.
    people = random.Random(f"people/{seed}")
    some = _recovering(random.Random(f"recovering/{seed}"), _unable(people, some))
    submissions = tuple(_insistent(people, submission) for submission in submissions)
    drains = _drains(people, some)
    submissions, some = draw_limits(random.Random(f"bounds/{seed}"), submissions, some)
    sizes = random.Random(f"sizes/{seed}")
    history_limit = sizes.choice((MOST_RECORDS, 1000))
    limits = _limits(sizes)
    clocks = random.Random(f"clocks/{seed}")
    kept = clocks.choice((history_limit, *FEW_RECORDS)) if history_limit == MOST_RECORDS else history_limit
    if faults and clocks.random() < 0.25:
        some = tuple(_wrong_clock(clocks, host) for host in some)
    at_once = random.Random(f"at once/{seed}")
    submissions = (*submissions, *_at_once(at_once, submissions))
    # A clock that is set back delays a scheduled start by as much, which is correct.
    steady = not any(fault.kind == "clock" for fault in listed) and all(host.skew > -60.0 for host in some)
    submissions = _pending(random.Random(f"waiting/{seed}"), submissions, timed=steady)
    submissions = _prepared(random.Random(f"prepared/{seed}"), submissions)
    graphs = random.Random(f"graphs/{seed}")
    submissions = (*(_with_form(graphs, submission) for submission in submissions), *_graphs(graphs, submissions))
    submissions = _submitted_otherwise(
        random.Random(f"ids otherwise/{seed}"), _of_one_id(random.Random(f"ids/{seed}"), submissions)
    )
    # The next start of a series is written by one clock and read by another: a clock that is ahead delays it too.
    if steady and all(host.skew < 60.0 for host in some):
        submissions = _recurring(random.Random(f"recurring/{seed}"), submissions)
        submissions = with_id(random.Random(f"series of an id/{seed}"), submissions)
    submissions = (
        *submissions,
        *with_branches(random.Random(f"branches/{seed}"), submissions),
        *racing_starts(random.Random(f"races/{seed}"), submissions, timed=steady),
        *inserted_slowly(random.Random(f"slow graphs/{seed}"), submissions),
        *(added_later(random.Random(f"added/{seed}"), submissions, some) if steady else ()),
        *joins(random.Random(f"joins/{seed}"), submissions),
        *followers(random.Random(f"followers/{seed}"), submissions),
    )
    actors = random.Random(f"actors/{seed}").choices((0, 1, 2), (70, 15, 15))[0]
    submissions = changing_limits(random.Random(f"limits that come and go/{seed}"), submissions, actors)
    if faults:
        submissions, some = draw_leaving(random.Random(f"leaving/{seed}"), submissions, some)
    if any(submission.graph for submission in submissions):
        some = tuple(replace(host, types=tuple(dict.fromkeys((*host.types, "noop")))) for host in some)
    if any(submission.type == JOIN for submission in submissions):
        some = tuple(replace(host, types=(*host.types, JOIN)) for host in some)
    some = draw_serving(random.Random(f"serving/{seed}"), submissions, some)
    if limits != DEFAULT:
        limits = replace(
            limits, begins=at_once.choice((1, 3, DEFAULT.begins)), finishes=at_once.choice((1, 2, DEFAULT.finishes))
        )
        small = random.Random(f"small/{seed}")
        limits = replace(limits, unlearned=small.choice((1, 2, DEFAULT.together)), moment=small.choice((0.1, 100.0)))
        limits = replace(limits, denied_kept=small.choice((DENIED_KEPT, DEFAULT.denied_kept)))
    lost = random.Random(f"losses within a limit/{seed}")
    crashes: tuple[Fault, ...] = ()
    if faults and not focus:
        submissions, crashes = losses_below_limit(lost, submissions)
        listed = tuple(sorted((*listed, *crashes), key=lambda fault: fault.at))
    if crashes or limits != DEFAULT:
        gone = lost.choice((0, 0, 1) if crashes else (0, 1, DEFAULT.gone))
        limits = replace(limits, gone=gone, overdue=lost.choice((0, 1, DEFAULT.overdue)))
    if limits != DEFAULT or any(submission.same_type for submission in submissions):
        limits = replace(limits, finish_room=graphs.choice((20, 40, DEFAULT.finish_room)))
    submissions, some = by_hand(random.Random(f"by hand/{seed}"), submissions, some, actors)
    # With a small history limit the number of records decides, not their age.
    ages, history_age = random.Random(f"history by age/{seed}"), None
    if kept == 1000 and any(host.skew > 60.0 for host in some) and ages.random() < 0.5:
        limits, history_age = replace(limits, history_kept=10.0), ages.choice((20.0, 40.0, 300.0))
    return Scenario(
        seed,
        some,
        chance.choice((1, 3)),
        chance.choices(tuple(VERSIONS), tuple(VERSIONS.values()))[0],
        chance.choice((2, 3, 4)),
        chance.choice((2.0, 5.0, 10.0)),
        chance.choice((1, 3, 10)),
        chance.choice((0, 0, 1, 2, 5)),
        tables if not any(submission.table == AWAY_TABLE for submission in submissions) else (*tables, AWAY_TABLE),
        max(clients, *(submission.client + 1 for submission in submissions)),
        submissions,
        listed,
        max((fault.at + fault.lasts for fault in listed), default=0.0),
        drains,
        _removals(random.Random(f"removals/{seed}"), submissions),
        people.choice((0.2, 0.5, 1.0)),
        limits,
        sizes.choice(("", "", "prod")),
        sizes.randint(1, 2 * MOST_RECORDS) if history_limit == MOST_RECORDS else 0,
        kept,
        history_age,
        actors,
    )


def _pending(chance: random.Random, submissions: Sequence[Submission], *, timed: bool) -> tuple[Submission, ...]:
    """In some seeds, let operations wait: for a time (only if ``timed``), for earlier ones, or in a graph."""
    if chance.random() < 0.6:
        return tuple(submissions)
    found: list[Submission] = []
    for n, submission in enumerate(submissions):
        luck = chance.random()
        if luck < 0.3 and timed:
            submission = replace(submission, delay=chance.uniform(0.05, 4.0))
        elif 0.3 <= luck < 0.7 and n:
            chosen = chance.sample(range(n), chance.randint(1, min(3, n)))
            submission = replace(
                submission, predecessors=tuple((one, chance.choice(("success", "end"))) for one in sorted(chosen))
            )
        elif luck < 0.85 and submission.callers == 1:
            submission = replace(submission, graph=chance.choices((1, 4, LARGE_GRAPH), (3, 5, 2))[0])
        found.append(submission)
    return tuple(found)


def _with_form(chance: random.Random, submission: Submission) -> Submission:
    """Give a graph a form, and let some of its parts fail."""
    if not submission.graph:
        return submission
    return replace(submission, form=chance.choice(FORMS), failing=chance.choice((0, 0, 1, 2)))


def _graphs(chance: random.Random, submissions: Sequence[Submission]) -> tuple[Submission, ...]:
    """In some seeds, add graphs of similar operations, some of them large.

    The predecessors fail and end at about the same time, on the coordinator of their successors.
    """
    if chance.random() >= 0.15:
        return ()
    model = chance.choice(submissions)
    if chance.random() < 0.5:
        # The labels were chosen for the executors of the former type.
        options = {name: value for name, value in model.options.items() if name != "where"}
        model = replace(model, type="noop", table=CLUSTER_TABLE, options=options)
    arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")}
    arg |= {"partitions": 1, "trouble": 0.0, "calls": 0.05, "pace": chance.choice((0.0, 0.001, 0.02, 0.1))}
    model = replace(
        model,
        arg=arg,
        names=None,
        actions=(),
        rerun="",
        callers=1,
        predecessors=(),
        delay=0.0,
        prepared="",
        verifier="",
    )
    size = chance.choices((2, 3, 6, CROWD), (50, 15, 15, 20))[0]
    return tuple(
        replace(
            model,
            after=model.after + chance.choice((0.0, 0.0, chance.uniform(0.0, 0.5))),
            graph=size,
            form=chance.choices(FORMS, (70, 15, 15))[0],
            failing=chance.choices((0, size // 2, size), (20, 20, 60))[0],
            same_type=True,
        )
        for _ in range(chance.randint(2, 4) if size < CROWD else 1)
    )


def _prepared(chance: random.Random, submissions: Sequence[Submission]) -> tuple[Submission, ...]:
    """In some seeds, submit operations in two phases."""
    if chance.random() < 0.7:
        return tuple(submissions)
    return tuple(
        replace(
            submission,
            prepared=chance.choice(("confirms", "confirms", "late", "dies", "dies", "abandons")),
            verifier=chance.choice(("yes", "no", "nothing")),
        )
        if not submission.graph and chance.random() < 0.5
        else submission
        for submission in submissions
    )


def _recurring(chance: random.Random, submissions: Sequence[Submission]) -> tuple[Submission, ...]:
    """In a sixth of all seeds (most of those whose clocks permit it), make an operation a short series."""
    simple = [
        n
        for n, submission in enumerate(submissions)
        if not (submission.graph or submission.prepared or submission.rerun or submission.id)
    ]
    if chance.random() >= RECURRING or not simple:
        return tuple(submissions)
    chosen = chance.choice(simple)
    again = replace(submissions[chosen], every=chance.choice((0.1, 0.5, 2.0)), times=chance.randint(2, 4))
    return (*submissions[:chosen], again, *submissions[chosen + 1 :])


def _of_one_id(chance: random.Random, submissions: tuple[Submission, ...]) -> tuple[Submission, ...]:
    """In some seeds, submit several operations with the same id at about the same time, with drawn duplicate policies.

    Half of those that copy a delayed one start late, so that there is a pending one to replace.
    """
    models = [submission for submission in submissions if not submission.graph and submission.callers == 1]
    if chance.random() < 0.8 or not models:
        return submissions
    model = chance.choice(models)
    policies = ["join", "refuse", "replace", *(["combine", "combine"] if TYPES[model.type].combine else [])]
    more: list[Submission] = []
    for _ in range(chance.randint(2, 4)):
        arg = {**model.arg, **({"partitions": chance.randint(1, 5)} if model.table != CLUSTER_TABLE else {})}
        actions = chance.choice(((), (), model.actions, (Action(chance.uniform(0, 2), "cancel"),)))
        more.append(
            replace(
                model,
                arg=arg if chance.random() < 0.5 else model.arg,
                after=model.after + chance.choice((0.0, 0.01, chance.uniform(0, 2))),
                delay=chance.choice((0.0, chance.uniform(0.1, 3.0))) if model.delay else 0.0,
                actions=actions,
                names=None,
                rerun="",
                predecessors=model.predecessors if chance.random() < 0.5 else (),
                id="nightly",
                on_duplicate=chance.choice(policies),
            )
        )
    first = replace(model, id="nightly", names=None, on_duplicate=chance.choice(policies))
    return (*(first if submission is model else submission for submission in submissions), *more)


def _submitted_otherwise(chance: random.Random, submissions: tuple[Submission, ...]) -> tuple[Submission, ...]:
    """Change how some operations with an id are submitted: directly, prepared, or in a client's transaction.

    The last two kinds replace no other operation.
    """
    found: list[Submission] = []
    for submission in submissions:
        how, policy = chance.random(), chance.choice(("join", "refuse"))
        if submission.id and submission.prepared and how < 0.4:
            submission = replace(submission, prepared="", verifier="")
        elif (
            submission.id
            and not submission.prepared
            and how < 0.2
            and not (submission.delay or submission.predecessors or submission.rerun)
        ):
            submission = replace(submission, in_transaction=True)
        if submission.id and (submission.prepared or submission.in_transaction):
            submission = replace(submission, on_duplicate=policy)
        found.append(submission)
    return tuple(found)


def expected(submissions: Sequence[Submission], hosts: Sequence[Host]) -> list[tuple[float, float]]:
    """The approximate start and end of each operation in a run without faults."""
    return [
        (submission.after + BEGINS, submission.after + BEGINS + _lasts(submission, hosts)) for submission in submissions
    ]


def _lasts(submission: Submission, hosts: Sequence[Host]) -> float:
    slots = max(1, sum(host.slots for host in hosts if submission.type in host.types))
    kind = TYPES[submission.type]
    jobs = len(submission.names) if submission.names is not None else int(submission.arg["partitions"])
    rounds = 1 if kind.batch else -(-jobs // max(1, slots))
    steps = 2.5 if kind.resumable else 1.0
    people = sum(action.after for action in submission.actions)
    work = 2 * float(submission.arg["calls"]) + rounds * steps * 1.2 * float(submission.arg["pace"]) + people / 2
    return min(LONGEST, max(SHORTEST, work))


def _largest(submissions: Sequence[Submission]) -> Submission:
    return max(submissions, key=lambda submission: int(submission.arg["partitions"]))


def _hosts(chance: random.Random, submissions: Sequence[Submission], *, skewed: bool) -> tuple[Host, ...]:
    """Mostly all hosts offer the largest operation's type; some hosts offer each other type."""
    count = chance.choices((1, 2, 3, 4, 5), (8, 20, 36, 22, 14))[0]
    offered = dict.fromkeys(
        (*(submission.type for submission in submissions), "check")
    )  # follow-up operations have type check
    everywhere = _largest(submissions).type if chance.random() < 0.8 else ""
    types: list[set[str]] = [{t for t in offered if t == everywhere or chance.random() < 0.6} for _ in range(count)]
    for type_name in offered:
        if not any(type_name in some for some in types):
            chance.choice(types).add(type_name)
    return tuple(
        Host(
            f"exec-{n}",
            tuple(t for t in offered if t in types[n]),
            chance.choices((1, 2, 4), (40, 40, 20))[0],
            chance.choice((0.0, 0.0, chance.uniform(-5, 5), 3600.0)) if skewed else 0.0,
        )
        for n in range(count)
    )


def _wrong_clock(chance: random.Random, host: Host) -> Host:
    """In half of the calls, set the host's clock wrong by hours."""
    if chance.random() < 0.5:
        return host
    return replace(host, skew=chance.choice((-1, 1)) * chance.uniform(1.0, HOURS_WRONG) * 3600.0)


def _limits(chance: random.Random) -> Limits:
    """In half of the seeds, such small limits that operations of some dozen jobs take the paths of large ones."""
    if chance.random() < 0.5:
        return DEFAULT
    return Limits(
        plan_bytes=chance.choice((100, 1000, DEFAULT.plan_bytes)),
        plan_chunks=chance.choice((1, 3, DEFAULT.plan_chunks)),
        claims=chance.choice((2, 5, 20)),
        reports=chance.choice((1, 3, 10)),
        reaped=chance.choice((1, 5, 20)),
        cleaned=chance.choice((3, 10, 30)),
        outcomes=chance.choice((3, 10, 30)),
        outcomes_ahead=chance.choice((0, 5, 20)),
        reads=chance.choice((1, 5, 20)),
        settled=chance.choice((1, 3, 10)),
        pruned=chance.choice((1, 2, 4)),
        prune_every=chance.choice((0.5, 5.0, 60.0)),
    )


def _of_the_cluster(submission: Submission) -> Submission:
    """The operation without a table: one job, with the plan in the start transaction."""
    return replace(submission, arg={**submission.arg, "partitions": 1}, names=None)


def _draw_submission(
    chance: random.Random, n: int, clients: int, type_name: str, tables: tuple[str, ...]
) -> Submission:
    partitions = min(60, max(1, round(chance.lognormvariate(2.45, 0.8)))) if chance.random() < 0.98 else 1
    names = None
    if chance.random() < 0.15:
        names = tuple(f"p={p}" for p in sorted(chance.sample(range(partitions), max(1, partitions // 2))))
    actions: list[Action] = []
    luck = chance.random()
    if luck < 0.18:
        actions.append(Action(chance.uniform(0, 6), "cancel"))
    elif luck < 0.42:
        actions.append(Action(chance.uniform(0, 4), "pause"))
        if chance.random() < 0.85:
            actions.append(Action(chance.uniform(0.1, 5), chance.choices(("resume", "cancel"), (80, 20))[0]))
        if chance.random() < 0.3:
            actions += [Action(chance.uniform(0.1, 2), "pause"), Action(chance.uniform(0.1, 2), "resume")]
    elif luck < 0.5:
        actions.append(Action(chance.uniform(0, 3), "status"))
    arg: dict[str, Any] = {
        "seed": chance.randrange(1 << 30),
        "partitions": partitions,
        "pace": chance.choices((0.02, 0.1, 0.3, 1.0), (30, 35, 25, 10))[0],
        "calls": chance.choices((0.05, 0.2, 2.0), (40, 40, 20))[0],
        "trouble": chance.choices((0.0, 0.4, 1.0), (40, 40, 20))[0],
        "chunk": chance.choice((200, 1000, 100_000)),
    }
    if TYPES[type_name].object_field:
        arg["name"] = chance.choice(("x", "7", "y.z"))
    if chance.random() < 0.1:
        arg["objects"] = True
    elif chance.random() < 0.1:
        arg["follows"] = True
    policy = chance.choice((None, None, "fail_fast", "collect_all"))
    return Submission(
        n % clients, chance.uniform(0, 3), type_name, chance.choice(tables), arg, names, policy, tuple(actions)
    )


def _at_once(chance: random.Random, submissions: Sequence[Submission]) -> tuple[Submission, ...]:
    """In some seeds, add small operations beside another one, with its type, table and client, all at the same time.

    Some have several callers. Half of the time they are equal, and so also end at the same time.
    """
    if chance.random() >= 0.15:
        return ()
    model = chance.choice(submissions)
    alike = chance.random() < 0.5
    arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")} | {"partitions": 1}
    actions = (Action(chance.uniform(0, 1), "cancel"),) if chance.random() < 0.3 else ()
    more: list[Submission] = []
    for _ in range(chance.randint(2, 5)):
        own: dict[str, Any] = {}
        if not alike:
            most = 1 if model.table == CLUSTER_TABLE else 3
            own |= {"seed": chance.randrange(1 << 30), "partitions": chance.randint(1, most)}
        if "name" in arg:
            own["name"] = chance.choice(("x", "7", "y.z", "z", "8"))
        callers = chance.choices((1, 2, 3), (70, 20, 10))[0]
        done = actions if alike or chance.random() < 0.3 else ()
        more.append(replace(model, arg=arg | own, names=None, actions=done, rerun="", callers=callers))
    return tuple(more)


def _unable(chance: random.Random, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Make some hosts unable to run a type that they offer. Mostly another host can run it.

    Otherwise the operations have to fail, so this excludes types whose jobs cannot fail.
    """
    unable: dict[str, list[str]] = {}
    for type_name in sorted({t for host in hosts for t in host.types}):
        offering = [host.name for host in hosts if type_name in host.types]
        if chance.random() >= 0.12:
            continue
        most = len(offering) if TYPES[type_name].can_fail and chance.random() < 0.2 else len(offering) - 1
        for name in chance.sample(offering, chance.randint(min(1, most), most)):
            unable.setdefault(name, []).append(type_name)
    return tuple(replace(host, unable=tuple(unable.get(host.name, ()))) for host in hosts)


def _recovering(chance: random.Random, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Let half of the hosts that cannot run a type recover, as if their Spark had not started at first."""
    while_ = [chance.uniform(0.5, 60.0) if chance.random() < 0.5 else 0.0 for _ in hosts]
    return tuple(replace(host, recovers=at) if host.unable else host for host, at in zip(hosts, while_, strict=True))


def _insistent(chance: random.Random, submission: Submission) -> Submission:
    """Let half of the pauses stop running jobs, and rerun some operations after their end."""
    actions: list[Action] = []
    for action in submission.actions:
        hasty = action.what == "pause" and chance.random() < 0.5
        actions.append(replace(action, what="pause-now") if hasty else action)
        if action.what == "pause" and not hasty and chance.random() < 0.2:
            actions.append(Action(chance.uniform(0.05, 1.0), "pause-now"))
    rerun = chance.choices(("", "failed", "unfinished"), (70, 20, 10))[0]
    return replace(submission, actions=tuple(actions), rerun=rerun)


def _removals(chance: random.Random, submissions: Sequence[Submission]) -> tuple[Removal, ...]:
    """Remove only tables on which no follow-up or rerun starts: it would correctly be refused for good."""
    later = {submission.table for submission in submissions if submission.rerun or "follows" in submission.arg}
    tables = sorted({submission.table for submission in submissions} - {CLUSTER_TABLE} - later)
    if not tables or chance.random() >= 0.2:
        return ()
    return tuple(
        Removal(chance.uniform(0.0, 6.0), chance.choice(tables), chance.uniform(0.05, 4.0))
        for _ in range(chance.choice((1, 2, 3)))
    )


def _drains(chance: random.Random, hosts: tuple[Host, ...]) -> tuple[DrainAction, ...]:
    if chance.random() >= 0.25:
        return ()
    return tuple(
        DrainAction(
            chance.uniform(1.0, 7.0),
            chance.choice(hosts).name,
            chance.choices((chance.uniform(0.1, 8.0), 45.0), (85, 15))[0],
            chance.random() < 0.4,
        )
        for _ in range(chance.choice((1, 1, 2, 3)))
    )

"""What a seed stands for: the cluster, the operations, what clients do to them, and the faults. Pure: a value."""

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

TABLES = ("a", "a.b", "ab")
"""Names that are prefixes of each other, with a delimiter in one (fault 19)."""
MOST_RECORDS = 20
"""History records that a run makes in one table at most: where no more are kept, all that are forgotten are old."""
FEW_RECORDS = (1, 2, 5)
"""History limits below what a run writes: none of its records may be deleted within the hour."""
HOURS_WRONG = 5.0
"""Hours by which the clock of an executor is wrong at most, ahead or behind."""
BEGINS = 0.2
"""Seconds until an operation that somebody wants has begun, about."""
RECURRING = 0.72
"""Share of the seeds with a series, of those in which no clock is wrong: a sixth of all."""
SHORTEST, LONGEST = 0.5, 20.0
"""Seconds that an operation is expected to take, at least and at most, where faults are drawn for it."""

LARGE_GRAPH = 22
"""Operations of a graph that is more than one transaction takes."""
DENIED_KEPT = 20.0
"""Seconds for which a denied hold and a receipt stay at least: as long as copies of a request are under way."""
CROWD = 45
"""Operations that end at the same time, more than one transaction finishes."""
FORMS = ("chord", "chain", "group")


@frozen
class Host:
    """One executor. ``skew``: how far its wall clock is wrong, in seconds. ``unable``: types that it offers, and turns
    out not to be able to run: for good, or until ``recovers`` (seconds from the beginning).
    """

    name: str
    types: tuple[str, ...]
    slots: int
    skew: float
    unable: tuple[str, ...] = ()
    recovers: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    leaves: float = 0.0
    """When it goes for good, in seconds; 0: never."""
    only_types: tuple[str, ...] | None = None
    only_tables: tuple[str, ...] | None = None
    """The types and tables that it is told to serve; None: all. ``types`` are those that are installed."""


@frozen
class Act:
    """What a client does to the operation that it started, ``after`` seconds later."""

    after: float
    what: str


@frozen
class Wish:
    """An operation that a client wants."""

    client: int
    after: float
    type: str
    table: str
    arg: Mapping[str, Any]
    names: tuple[str, ...] | None
    policy: str | None
    acts: tuple[Act, ...]
    rerun: str = ""
    """What is run again once it has ended: ``failed`` or ``unfinished`` partitions; "": nothing."""
    callers: int = 1
    """So many ask for it at the same time, with the same request id."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else its start is given: priority, limits, how many may fail, and where it runs."""
    delay: float = 0.0
    """Seconds from its start until it may begin."""
    behind: tuple[tuple[int, str], ...] = ()
    """The wishes whose operations it waits for, by their numbers, and for what: "success" or "end"."""
    graph: int = 0
    """How many others, of one job each, are started together with it."""
    form: str = "chord"
    """Form of that graph: it waits for all others (``chord``), each waits for the one before it (``chain``), or none
    waits (``group``).
    """
    failing: int = 0
    """How many of those, the last ones, end as failed."""
    alike: bool = False
    """Whether they have its own type and table; else they are no-ops on no table."""
    pause: float = 0.0
    """Seconds for which the caller of that graph pauses after each transaction."""
    prepared: str = ""
    """It is prepared, and its sender then ``confirms`` it, does so ``late`` (its verifier is asked meanwhile), ``dies``
    before, or ``abandons`` it; "": it is started.
    """
    verifier: str = ""
    """What the verifier of one that is prepared says: ``yes``, ``no``, or ``nothing``."""
    id: str = ""
    """The operation's id: of those that have it one goes on at a time."""
    on_duplicate: str = "join"
    within: bool = False
    """It is started in a transaction of its client's own, after another one that was withdrawn."""
    turns: tuple[float, ...] = ()
    """Times at which the compare of that transaction fails and holds again, in turn; it holds at first
    (``caller_transactions``).
    """
    every: float = 0.0
    """Seconds from its end until another one like it begins; 0: none does."""
    times: int = 1
    """How many operations its series has in all."""
    hurried: bool = False
    """Its client gives up to start it when it has just begun to, and starts it again."""


@frozen
class DrainAct:
    """Somebody drains an executor, and lets it work again ``lasts`` seconds later, or (``waits``) once it is empty."""

    after: float
    executor: str
    lasts: float
    waits: bool


@frozen
class Removal:
    """Somebody removes a table as soon as nothing runs on it, from ``after`` on, and adds it again ``lasts`` seconds
    later.
    """

    after: float
    table: str
    lasts: float


@frozen
class Fault:
    """One fault: its kind, when it begins, how long it lasts, and what it strikes (numbers in [0, 1))."""

    kind: str
    at: float
    lasts: float
    aim: tuple[float, ...]


@frozen
class Scenario:
    """All that a run depends on."""

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
    wishes: tuple[Wish, ...]
    faults: tuple[Fault, ...] = ()
    calm: float = 0.0
    """When the last fault is over."""
    drains: tuple[DrainAct, ...] = ()
    removals: tuple[Removal, ...] = ()
    election: float = 1.0
    """Seconds of etcd's election timeout."""
    limits: Limits = DEFAULT
    namespace: str = ""
    past: int = 0
    """Old records in each table's history."""
    history_limit: int = 1000
    history_age: float | None = None
    """Seconds after which records are deleted, however few there are."""
    actors: int = 0
    """Processes that claim jobs and are no executors."""

    @property
    def users(self) -> bool:
        """Requests need a token: something is to happen to users."""
        return any(fault.kind in ("tokens", "role") for fault in self.faults)

    @property
    def partitions(self) -> int:
        """Of the largest operation."""
        return max(int(wish.arg["partitions"]) for wish in self.wishes)

    @property
    def executors(self) -> int:
        """Those that offer something that is started, and stay."""
        wanted = {wish.type for wish in self.wishes}
        return sum(not wanted.isdisjoint(host.types) and not host.leaves for host in self.hosts)

    @property
    def workers(self) -> int:
        """Executors that offer the largest operation's type; each of them may coordinate it, too."""
        return sum(_largest(self.wishes).type in host.types for host in self.hosts)


def plain(
    seed: int,
    hosts: int,
    wishes: Sequence[Wish],
    *faults: Fault,
    types: Sequence[str] = (),
    slots: int = 2,
    ttl: int = 4,
    poll: float = 30.0,
    calm: float = 0.0,
) -> Scenario:
    """A scenario of which nothing is drawn: hosts that are alike and offer the types of the wishes and these, one
    member of etcd, one table, one client.
    """
    offered = tuple(dict.fromkeys((*(wish.type for wish in wishes), *types)))
    return Scenario(
        seed=seed,
        hosts=tuple(Host(f"exec-{n}", offered, slots, 0.0) for n in range(hosts)),
        members=1,
        version="3.5.33",
        ttl=ttl,
        poll=poll,
        batch=1000,
        fragments=0,
        tables=("a",),
        clients=1,
        wishes=tuple(wishes),
        faults=faults,
        calm=max((fault.at + fault.lasts for fault in faults), default=calm),
    )


def scenario(seed: int, *, faults: bool = True, focus: tuple[str, ...] = (), scenes: bool = True) -> Scenario:
    """The scenario of a seed; with faults of these kinds alone, if some are named, and then many.

    Some seeds draw a scene, but not without faults, with chosen ones, or without ``scenes``.
    """
    from tests.simulator.scenes import arranged

    drawn = _drawn(seed, faults, focus)
    return arranged(drawn) if scenes and faults and not focus else drawn


def _drawn(seed: int, faults: bool, focus: tuple[str, ...]) -> Scenario:
    from tests.simulator.actors import by_hand
    from tests.simulator.caller_transactions import with_branches
    from tests.simulator.departures import AWAY_TABLE, draw_leaving
    from tests.simulator.drawn_options import draw_limits, limits_that_change, losses_within_a_limit
    from tests.simulator.drawn_serving import draw_serving
    from tests.simulator.fault_kinds import draw_besides, draw_faults
    from tests.simulator.id_races import racing
    from tests.simulator.slow_graphs import added_later, inserted_slowly
    from tests.simulator.successors import JOIN, followers, joins, with_id

    chance = random.Random(f"scenario/{seed}")
    tables = TABLES[: chance.choices((1, 2, 3), (60, 25, 15))[0]]
    clients = chance.choices((1, 2, 3), (50, 35, 15))[0]
    wanted = [chance.choice(DRAWN) for _ in range(chance.choices((1, 2, 3), (45, 35, 20))[0])]
    wishes = tuple(_wish(chance, n, clients, type_name, tables) for n, type_name in enumerate(wanted))
    if chance.random() < 0.25:
        wishes = (*wishes, _of_the_cluster(_wish(chance, len(wishes), clients, "noop", (CLUSTER_TABLE,))))
    some = _hosts(chance, wishes, skewed=faults)
    listed = draw_faults(chance, expected(wishes, some), focus) if faults else ()
    if faults and not focus:
        busy = expected(wishes, some)
        besides = draw_besides(seed, busy)
        listed = tuple(sorted((*listed, *besides), key=lambda fault: fault.at))
    # What people do besides is drawn by itself: so a seed stands for the same cluster, whatever is added here.
    people = random.Random(f"people/{seed}")
    some = _recovering(random.Random(f"recovering/{seed}"), _unable(people, some))
    wishes = tuple(_insistent(people, wish) for wish in wishes)
    drains = _drains(people, some)
    wishes, some = draw_limits(random.Random(f"bounds/{seed}"), wishes, some)
    sizes = random.Random(f"sizes/{seed}")
    history_limit = sizes.choice((MOST_RECORDS, 1000))
    limits = _limits(sizes)
    clocks = random.Random(f"clocks/{seed}")
    kept = clocks.choice((history_limit, *FEW_RECORDS)) if history_limit == MOST_RECORDS else history_limit
    if faults and clocks.random() < 0.25:
        some = tuple(_wrong_clock(clocks, host) for host in some)
    at_once = random.Random(f"at once/{seed}")
    wishes = (*wishes, *_at_once(at_once, wishes))
    # A clock that is set back puts a time off, by as much: that is what a time is.
    steady = not any(fault.kind == "clock" for fault in listed) and all(host.skew > -60.0 for host in some)
    wishes = _waiting(random.Random(f"waiting/{seed}"), wishes, timed=steady)
    wishes = _prepared(random.Random(f"prepared/{seed}"), wishes)
    graphs = random.Random(f"graphs/{seed}")
    wishes = (*(_formed(graphs, wish) for wish in wishes), *_graphs(graphs, wishes))
    wishes = _submitted_otherwise(
        random.Random(f"ids otherwise/{seed}"), _of_one_id(random.Random(f"ids/{seed}"), wishes)
    )
    # One clock sets the next time of a series, another one reads it: a clock that is ahead delays it as well.
    if steady and all(host.skew < 60.0 for host in some):
        wishes = _recurring(random.Random(f"recurring/{seed}"), wishes)
        wishes = with_id(random.Random(f"series of an id/{seed}"), wishes)
    wishes = (
        *wishes,
        *with_branches(random.Random(f"branches/{seed}"), wishes),
        *racing(random.Random(f"races/{seed}"), wishes, timed=steady),
        *inserted_slowly(random.Random(f"slow graphs/{seed}"), wishes),
        *(added_later(random.Random(f"added/{seed}"), wishes, some) if steady else ()),
        *joins(random.Random(f"joins/{seed}"), wishes),
        *followers(random.Random(f"followers/{seed}"), wishes),
    )
    actors = random.Random(f"actors/{seed}").choices((0, 1, 2), (70, 15, 15))[0]
    wishes = limits_that_change(random.Random(f"limits that come and go/{seed}"), wishes, actors)
    if faults:
        wishes, some = draw_leaving(random.Random(f"leaving/{seed}"), wishes, some)
    if any(wish.graph for wish in wishes):
        some = tuple(replace(host, types=tuple(dict.fromkeys((*host.types, "noop")))) for host in some)
    if any(wish.type == JOIN for wish in wishes):
        some = tuple(replace(host, types=(*host.types, JOIN)) for host in some)
    some = draw_serving(random.Random(f"serving/{seed}"), wishes, some)
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
        wishes, crashes = losses_within_a_limit(lost, wishes)
        listed = tuple(sorted((*listed, *crashes), key=lambda fault: fault.at))
    if crashes or limits != DEFAULT:
        gone = lost.choice((0, 0, 1) if crashes else (0, 1, DEFAULT.gone))
        limits = replace(limits, gone=gone, overdue=lost.choice((0, 1, DEFAULT.overdue)))
    if limits != DEFAULT or any(wish.alike for wish in wishes):
        limits = replace(limits, finish_room=graphs.choice((20, 40, DEFAULT.finish_room)))
    wishes, some = by_hand(random.Random(f"by hand/{seed}"), wishes, some, actors)
    # Of few records the number decides, whatever their age is.
    ages, history_age = random.Random(f"history by age/{seed}"), None
    if kept == 1000 and any(host.skew > 60.0 for host in some) and ages.random() < 0.5:
        limits, history_age = replace(limits, history_kept=10.0), ages.choice((20.0, 40.0, 300.0))
    return Scenario(
        seed,
        some,
        chance.choice((1, 3)),
        chance.choices(("3.5.33", "3.4.23"), (80, 20))[0],
        chance.choice((2, 3, 4)),
        chance.choice((2.0, 5.0, 10.0)),
        chance.choice((1, 3, 10)),
        chance.choice((0, 0, 1, 2, 5)),
        tables if not any(wish.table == AWAY_TABLE for wish in wishes) else (*tables, AWAY_TABLE),
        max(clients, *(wish.client + 1 for wish in wishes)),
        wishes,
        listed,
        max((fault.at + fault.lasts for fault in listed), default=0.0),
        drains,
        _removals(random.Random(f"removals/{seed}"), wishes),
        people.choice((0.2, 0.5, 1.0)),
        limits,
        sizes.choice(("", "", "prod")),
        sizes.randint(1, 2 * MOST_RECORDS) if history_limit == MOST_RECORDS else 0,
        kept,
        history_age,
        actors,
    )


def _waiting(chance: random.Random, wishes: Sequence[Wish], *, timed: bool) -> tuple[Wish, ...]:
    """In some seeds operations wait: for a time (``timed``), for those before them, for others of a graph."""
    if chance.random() < 0.6:
        return tuple(wishes)
    found: list[Wish] = []
    for n, wish in enumerate(wishes):
        luck = chance.random()
        if luck < 0.3 and timed:
            wish = replace(wish, delay=chance.uniform(0.05, 4.0))
        elif 0.3 <= luck < 0.7 and n:
            chosen = chance.sample(range(n), chance.randint(1, min(3, n)))
            wish = replace(wish, behind=tuple((one, chance.choice(("success", "end"))) for one in sorted(chosen)))
        elif luck < 0.85 and wish.callers == 1:
            wish = replace(wish, graph=chance.choices((1, 4, LARGE_GRAPH), (3, 5, 2))[0])
        found.append(wish)
    return tuple(found)


def _formed(chance: random.Random, wish: Wish) -> Wish:
    """Give a graph a form, and let some of its parts fail."""
    if not wish.graph:
        return wish
    return replace(wish, form=chance.choice(FORMS), failing=chance.choice((0, 0, 1, 2)))


def _graphs(chance: random.Random, wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """In some seeds, add graphs of similar operations.

    Their predecessors fail and end at about the same time, on the same coordinator as the operations that wait for
    them. Some graphs are large.
    """
    if chance.random() >= 0.15:
        return ()
    model = chance.choice(wishes)
    if chance.random() < 0.5:
        model = replace(model, type="noop", table=CLUSTER_TABLE)
    arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")}
    arg |= {"partitions": 1, "trouble": 0.0, "calls": 0.05, "pace": chance.choice((0.0, 0.001, 0.02, 0.1))}
    model = replace(
        model, arg=arg, names=None, acts=(), rerun="", callers=1, behind=(), delay=0.0, prepared="", verifier=""
    )
    size = chance.choices((2, 3, 6, CROWD), (50, 15, 15, 20))[0]
    return tuple(
        replace(
            model,
            after=model.after + chance.choice((0.0, 0.0, chance.uniform(0.0, 0.5))),
            graph=size,
            form=chance.choices(FORMS, (70, 15, 15))[0],
            failing=chance.choices((0, size // 2, size), (20, 20, 60))[0],
            alike=True,
        )
        for _ in range(chance.randint(2, 4) if size < CROWD else 1)
    )


def _prepared(chance: random.Random, wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """In some seeds operations are submitted in two phases."""
    if chance.random() < 0.7:
        return tuple(wishes)
    return tuple(
        replace(
            wish,
            prepared=chance.choice(("confirms", "confirms", "late", "dies", "dies", "abandons")),
            verifier=chance.choice(("yes", "no", "nothing")),
        )
        if not wish.graph and chance.random() < 0.5
        else wish
        for wish in wishes
    )


def _recurring(chance: random.Random, wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """In most of the seeds whose clocks permit it, which is a sixth of all, an operation is a series of a few."""
    simple = [n for n, wish in enumerate(wishes) if not (wish.graph or wish.prepared or wish.rerun or wish.id)]
    if chance.random() >= RECURRING or not simple:
        return tuple(wishes)
    chosen = chance.choice(simple)
    again = replace(wishes[chosen], every=chance.choice((0.1, 0.5, 2.0)), times=chance.randint(2, 4))
    return (*wishes[:chosen], again, *wishes[chosen + 1 :])


def _of_one_id(chance: random.Random, wishes: tuple[Wish, ...]) -> tuple[Wish, ...]:
    """In some seeds several want an operation of the same id, about at the same time: what becomes of the second one
    each says for itself. Half of the time it begins late, so that there is something to replace.
    """
    models = [wish for wish in wishes if not wish.graph and wish.callers == 1]
    if chance.random() < 0.8 or not models:
        return wishes
    model = chance.choice(models)
    policies = ["join", "refuse", "replace", *(["combine", "combine"] if TYPES[model.type].combine else [])]
    more: list[Wish] = []
    for _ in range(chance.randint(2, 4)):
        arg = {**model.arg, **({"partitions": chance.randint(1, 5)} if model.table != CLUSTER_TABLE else {})}
        acts = chance.choice(((), (), model.acts, (Act(chance.uniform(0, 2), "cancel"),)))
        more.append(
            replace(
                model,
                arg=arg if chance.random() < 0.5 else model.arg,
                after=model.after + chance.choice((0.0, 0.01, chance.uniform(0, 2))),
                delay=chance.choice((0.0, chance.uniform(0.1, 3.0))) if model.delay else 0.0,
                acts=acts,
                names=None,
                rerun="",
                behind=model.behind if chance.random() < 0.5 else (),
                id="nightly",
                on_duplicate=chance.choice(policies),
            )
        )
    first = replace(model, id="nightly", names=None, on_duplicate=chance.choice(policies))
    return (*(first if wish is model else wish for wish in wishes), *more)


def _submitted_otherwise(chance: random.Random, wishes: tuple[Wish, ...]) -> tuple[Wish, ...]:
    """Of those that have an id some are prepared or not, or part of a transaction, whatever the others of the id are.
    Such a one takes nobody's place.
    """
    found: list[Wish] = []
    for wish in wishes:
        how, policy = chance.random(), chance.choice(("join", "refuse"))
        if wish.id and wish.prepared and how < 0.4:
            wish = replace(wish, prepared="", verifier="")
        elif wish.id and not wish.prepared and how < 0.2 and not (wish.delay or wish.behind or wish.rerun):
            wish = replace(wish, within=True)
        if wish.id and (wish.prepared or wish.within):
            wish = replace(wish, on_duplicate=policy)
        found.append(wish)
    return tuple(found)


def expected(wishes: Sequence[Wish], hosts: Sequence[Host]) -> list[tuple[float, float]]:
    """When each operation begins and ends, about, where nothing goes wrong."""
    return [(wish.after + BEGINS, wish.after + BEGINS + _lasts(wish, hosts)) for wish in wishes]


def _lasts(wish: Wish, hosts: Sequence[Host]) -> float:
    slots = max(1, sum(host.slots for host in hosts if wish.type in host.types))
    kind = TYPES[wish.type]
    jobs = len(wish.names) if wish.names is not None else int(wish.arg["partitions"])
    rounds = 1 if kind.batch else -(-jobs // max(1, slots))  # of graphs all hosts are given the type, later
    steps = 2.5 if kind.resumable else 1.0
    people = sum(act.after for act in wish.acts)
    work = 2 * float(wish.arg["calls"]) + rounds * steps * 1.2 * float(wish.arg["pace"]) + people / 2
    return min(LONGEST, max(SHORTEST, work))


def _largest(wishes: Sequence[Wish]) -> Wish:
    return max(wishes, key=lambda wish: int(wish.arg["partitions"]))


def _hosts(chance: random.Random, wishes: Sequence[Wish], *, skewed: bool) -> tuple[Host, ...]:
    """Mostly all of them offer the largest operation's type; each of the others some do."""
    count = chance.choices((1, 2, 3, 4, 5), (8, 20, 36, 22, 14))[0]
    offered = dict.fromkeys((*(wish.type for wish in wishes), "check"))  # what follows is of type check
    everywhere = _largest(wishes).type if chance.random() < 0.8 else ""
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
    """In half of the calls, the host's clock is wrong by hours."""
    if chance.random() < 0.5:
        return host
    return replace(host, skew=chance.choice((-1, 1)) * chance.uniform(1.0, HOURS_WRONG) * 3600.0)


def _limits(chance: random.Random) -> Limits:
    """In half of the seeds so small that operations of some dozen jobs take the courses of large ones."""
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


def _of_the_cluster(wish: Wish) -> Wish:
    """It works on no table: one job for everything, in a plan that its start brings along."""
    return replace(wish, arg={**wish.arg, "partitions": 1}, names=None)


def _wish(chance: random.Random, n: int, clients: int, type_name: str, tables: tuple[str, ...]) -> Wish:
    partitions = min(60, max(1, round(chance.lognormvariate(2.45, 0.8)))) if chance.random() < 0.98 else 1
    names = None
    if chance.random() < 0.15:
        names = tuple(f"p={p}" for p in sorted(chance.sample(range(partitions), max(1, partitions // 2))))
    acts: list[Act] = []
    luck = chance.random()
    if luck < 0.18:
        acts.append(Act(chance.uniform(0, 6), "cancel"))
    elif luck < 0.42:
        acts.append(Act(chance.uniform(0, 4), "pause"))
        if chance.random() < 0.85:
            acts.append(Act(chance.uniform(0.1, 5), chance.choices(("resume", "cancel"), (80, 20))[0]))
        if chance.random() < 0.3:
            acts += [Act(chance.uniform(0.1, 2), "pause"), Act(chance.uniform(0.1, 2), "resume")]
    elif luck < 0.5:
        acts.append(Act(chance.uniform(0, 3), "look"))
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
    return Wish(n % clients, chance.uniform(0, 3), type_name, chance.choice(tables), arg, names, policy, tuple(acts))


def _at_once(chance: random.Random, wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """Now and then a client wants several small operations beside one of its own, of the same type on the same table,
    all at once; or several callers of it want the same one. Half of the time they are alike, and so end at once, too.
    """
    if chance.random() >= 0.15:
        return ()
    model = chance.choice(wishes)
    alike = chance.random() < 0.5
    arg = {name: value for name, value in model.arg.items() if name not in ("objects", "follows")} | {"partitions": 1}
    acts = (Act(chance.uniform(0, 1), "cancel"),) if chance.random() < 0.3 else ()
    more: list[Wish] = []
    for _ in range(chance.randint(2, 5)):
        own: dict[str, Any] = {}
        if not alike:
            most = 1 if model.table == CLUSTER_TABLE else 3
            own |= {"seed": chance.randrange(1 << 30), "partitions": chance.randint(1, most)}
        if "name" in arg:
            own["name"] = chance.choice(("x", "7", "y.z", "z", "8"))
        callers = chance.choices((1, 2, 3), (70, 20, 10))[0]
        done = acts if alike or chance.random() < 0.3 else ()
        more.append(replace(model, arg=arg | own, names=None, acts=done, rerun="", callers=callers))
    return tuple(more)


def _unable(chance: random.Random, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """Some hosts cannot run a type that they offer. Mostly another one can; where none can, its operations have to
    fail, and so this spares the type whose jobs are not allowed to.
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
    """Half of the hosts that cannot run a type recover after a while.

    Their Spark does not start at first, say.
    """
    while_ = [chance.uniform(0.5, 60.0) if chance.random() < 0.5 else 0.0 for _ in hosts]
    return tuple(replace(host, recovers=at) if host.unable else host for host, at in zip(hosts, while_, strict=True))


def _insistent(chance: random.Random, wish: Wish) -> Wish:
    """Half of the pauses do not wait for running jobs; some of what ends is run again."""
    acts: list[Act] = []
    for act in wish.acts:
        hasty = act.what == "pause" and chance.random() < 0.5
        acts.append(replace(act, what="pause-now") if hasty else act)
        if act.what == "pause" and not hasty and chance.random() < 0.2:
            acts.append(Act(chance.uniform(0.05, 1.0), "pause-now"))
    rerun = chance.choices(("", "failed", "unfinished"), (70, 20, 10))[0]
    return replace(wish, acts=tuple(acts), rerun=rerun)


def _removals(chance: random.Random, wishes: Sequence[Wish]) -> tuple[Removal, ...]:
    """Only of tables on which nothing is to begin later than its client asks for it (what follows, what is run again):
    that would be refused for good, and rightly so.
    """
    later = {wish.table for wish in wishes if wish.rerun or wish.every or "follows" in wish.arg}
    tables = sorted({wish.table for wish in wishes} - {CLUSTER_TABLE} - later)
    if not tables or chance.random() >= 0.2:
        return ()
    return tuple(
        Removal(chance.uniform(0.0, 6.0), chance.choice(tables), chance.uniform(0.05, 4.0))
        for _ in range(chance.choice((1, 2, 3)))
    )


def _drains(chance: random.Random, hosts: tuple[Host, ...]) -> tuple[DrainAct, ...]:
    if chance.random() >= 0.25:
        return ()
    return tuple(
        DrainAct(
            chance.uniform(1.0, 7.0),
            chance.choice(hosts).name,
            chance.choices((chance.uniform(0.1, 8.0), 45.0), (85, 15))[0],
            chance.random() < 0.4,
        )
        for _ in range(chance.choice((1, 1, 2, 3)))
    )

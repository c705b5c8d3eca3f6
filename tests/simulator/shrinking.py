"""The smallest scenario found that breaches the same: what does not matter is left out of it, one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from distop.protocol.frozen import frozen
from distop.protocol.operation_options import fits
from distop.protocol.size_limits import DEFAULT
from tests.simulator.breach_story import describe, replay
from tests.simulator.run import Simulation, quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tests.simulator.run import Breach
    from tests.simulator.scenario import Fault, Host, Scenario, Wish

TRIES = 200
"""Runs at most; one takes some hundredths of a second."""
TRIES_AT_ONCE = 100
"""Where a failing seed is one of many: enough to leave most of it out, and a matter of seconds."""

T = TypeVar("T")


@frozen
class Shrunk:
    """``scenario`` breaches ``kind``; ``complete``: nothing more can be left out of it, by the means that there are."""

    scenario: Scenario
    kind: str
    tries: int
    complete: bool


def breaches(wanted: Scenario) -> list[Breach]:
    """What a run of it breaches."""
    return Simulation(wanted).run().breaches


def shrink(
    wanted: Scenario, *, tries: int = TRIES, breached: Callable[[Scenario], Sequence[Breach]] = breaches
) -> Shrunk | None:
    """Make a scenario smaller as long as what it breaches first is breached still; None where it breaches nothing.

    Runs are deterministic, so the answer is, too. A fault that remains may strike something else than it did: it aims
    at a share of the processes, and there are fewer of them.
    """
    found = breached(wanted)
    if not found:
        return None
    kind, tried = found[0].kind, 0
    smaller: Scenario | None = wanted
    while smaller is not None:
        wanted, smaller = smaller, None
        for candidate in candidates(wanted):
            if tried == tries:
                return Shrunk(wanted, kind, tried, complete=False)
            tried += 1
            if any(breach.kind == kind for breach in breached(candidate)):
                smaller = candidate
                break
    return Shrunk(wanted, kind, tried, complete=True)


def candidates(wanted: Scenario) -> Iterator[Scenario]:
    """Smaller scenarios, those first that leave out most: of the faults halves, then each of them, and so on."""
    for faults in fewer(wanted.faults):
        yield _with_faults(wanted, faults)
    for wishes in fewer(wanted.wishes):
        if wishes:
            yield replace(wanted, wishes=wishes)
    for hosts in fewer(wanted.hosts):
        if _enough(hosts, wanted.wishes):
            yield replace(wanted, hosts=hosts)
    if wanted.actors:
        yield replace(wanted, actors=wanted.actors - 1)
    for number, wish in enumerate(wanted.wishes):
        for simpler in _simpler_wishes(wish):
            yield replace(wanted, wishes=(*wanted.wishes[:number], simpler, *wanted.wishes[number + 1 :]))
    for number, fault in enumerate(wanted.faults):
        if fault.lasts > 1.0:
            shorter = replace(fault, lasts=fault.lasts / 2)
            yield _with_faults(wanted, (*wanted.faults[:number], shorter, *wanted.faults[number + 1 :]))
    yield from _simpler_worlds(wanted)


def fewer(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Without one half and the other, without each quarter, …, without each one."""
    size = (len(items) + 1) // 2
    while size:
        for start in range(0, len(items), size):
            yield (*items[:start], *items[start + size :])
        size = size // 2 if size > 1 else 0


def tell(shrunk: Shrunk, before: Scenario) -> Iterator[str]:
    """For people: what the smallest scenario is, and its story."""
    wanted = shrunk.scenario
    whole = "nothing more can be left out" if shrunk.complete else "there may be a smaller one"
    yield f"the smallest scenario after {shrunk.tries} tries that breaches the same ({whole}):"
    for what in ("faults", "wishes", "hosts"):
        yield f"  {what}: {len(getattr(wanted, what))} of {len(getattr(before, what))}"
    yield from (f"  {wish}" for wish in wanted.wishes)
    yield from (f"  {fault}" for fault in wanted.faults)
    sim = Simulation(wanted)
    breach = next(breach for breach in sim.run().breaches if breach.kind == shrunk.kind)
    yield from describe(sim, breach)
    if wanted != before and (again := replay(before)):
        yield f"  replay: {again}"


def smallest(wanted: Scenario, tries: int = TRIES) -> list[str]:
    """For people: what a scenario breaches, by the smallest one that was found; nothing, where it breaches nothing."""
    with quietly():
        shrunk = shrink(wanted, tries=tries)
        return [] if shrunk is None else list(tell(shrunk, wanted))


def _with_faults(wanted: Scenario, faults: Iterable[Fault]) -> Scenario:
    left = tuple(faults)
    return replace(wanted, faults=left, calm=max((fault.at + fault.lasts for fault in left), default=0.0))


def _enough(hosts: Sequence[Host], wishes: Sequence[Wish]) -> bool:
    """Somebody offers each type where it is wanted: else nothing is begun, which is another scenario."""
    return all(
        any(wish.type in host.types and fits(wish.options.get("where", {}), host.labels) for host in hosts)
        for wish in wishes
    )


def _simpler_wishes(wish: Wish) -> Iterator[Wish]:
    for acts in fewer(wish.acts):
        yield replace(wish, acts=acts)
    if wish.names is not None:
        yield replace(wish, names=None)
    for left in fewer(tuple(wish.options.items())):
        yield replace(wish, options=dict(left))
    if wish.callers > 1:
        yield replace(wish, callers=1)
    partitions = int(wish.arg["partitions"])
    for count in dict.fromkeys((1, partitions // 4, partitions // 2, partitions - 1)):
        if 0 < count < partitions:
            yield replace(wish, arg={**wish.arg, "partitions": count}, names=_named(wish, count))
    for calmer in _calmer(wish.arg):
        yield replace(wish, arg=calmer)


def _named(wish: Wish, count: int) -> tuple[str, ...] | None:
    """Those that are still there; all of them, if none is."""
    if wish.names is None:
        return None
    return tuple(name for name in wish.names if int(name.partition("=")[2]) < count) or None


def _calmer(arg: Any) -> Iterator[dict[str, Any]]:
    if arg.get("trouble"):
        yield {**arg, "trouble": 0.0}
    for extra in ("objects", "follows"):
        if extra in arg:
            yield {name: value for name, value in arg.items() if name != extra}


def _simpler_worlds(wanted: Scenario) -> Iterator[Scenario]:
    if wanted.members > 1:
        yield replace(wanted, members=1)
    if wanted.clients > 1:
        yield replace(wanted, clients=1, wishes=tuple(replace(wish, client=0) for wish in wanted.wishes))
    if wanted.limits != DEFAULT:
        yield replace(wanted, limits=DEFAULT)
    if wanted.past or wanted.namespace:
        yield replace(wanted, past=0, history_limit=1000, namespace="")
    if wanted.history_age is not None:
        yield replace(wanted, history_age=None)
    if wanted.removals:
        yield replace(wanted, removals=())
    if wanted.fragments:
        yield replace(wanted, fragments=0)
    if any(host.skew for host in wanted.hosts):
        yield replace(wanted, hosts=tuple(replace(host, skew=0.0) for host in wanted.hosts))

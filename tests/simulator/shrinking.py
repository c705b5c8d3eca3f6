"""Shrinks a scenario: removes one part at a time, as long as the same kind of breach remains."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from distop.protocol.frozen import frozen
from distop.protocol.operation_options import fits
from distop.protocol.size_limits import DEFAULT
from tests.simulator.breach_timeline import describe, replay
from tests.simulator.run import Simulation, without_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tests.simulator.run import Breach
    from tests.simulator.scenario import Fault, Host, Scenario, Submission

TRIES = 200
"""Maximum runs; one takes some hundredths of a second."""
TRIES_AT_ONCE = 100
"""Maximum runs for a failing seed among many: seconds, and enough to remove most parts."""

T = TypeVar("T")


@frozen
class Shrunk:
    """A shrunk ``scenario`` with a breach of ``kind``. ``complete``: no candidate is smaller."""

    scenario: Scenario
    kind: str
    tries: int
    complete: bool


def breaches(scenario: Scenario) -> list[Breach]:
    """The breaches of a run."""
    return Simulation(scenario).run().breaches


def shrink(
    scenario: Scenario, *, tries: int = TRIES, breached: Callable[[Scenario], Sequence[Breach]] = breaches
) -> Shrunk | None:
    """Shrink a scenario as long as the kind of its first breach remains; None if it has no breach.

    Deterministic, as runs are. A remaining fault may hit another target than before: its aim is a share of the
    processes, of which there are fewer.
    """
    found = breached(scenario)
    if not found:
        return None
    kind, tried = found[0].kind, 0
    smaller: Scenario | None = scenario
    while smaller is not None:
        scenario, smaller = smaller, None
        for candidate in candidates(scenario):
            if tried == tries:
                return Shrunk(scenario, kind, tried, complete=False)
            tried += 1
            if any(breach.kind == kind for breach in breached(candidate)):
                smaller = candidate
                break
    return Shrunk(scenario, kind, tried, complete=True)


def candidates(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller scenarios, those that remove most first."""
    for faults in fewer(scenario.faults):
        yield _with_faults(scenario, faults)
    for submissions in fewer(scenario.submissions):
        if submissions:
            yield replace(scenario, submissions=submissions)
    for hosts in fewer(scenario.hosts):
        if _enough(hosts, scenario.submissions):
            yield replace(scenario, hosts=hosts)
    for n in range(len(scenario.policies)):
        yield replace(scenario, policies=scenario.policies[:n] + scenario.policies[n + 1 :])
    if scenario.actors:
        yield replace(scenario, actors=scenario.actors - 1)
    for number, submission in enumerate(scenario.submissions):
        for simpler in _simpler_submissions(submission):
            yield replace(
                scenario, submissions=(*scenario.submissions[:number], simpler, *scenario.submissions[number + 1 :])
            )
    for number, fault in enumerate(scenario.faults):
        if fault.lasts > 1.0:
            shorter = replace(fault, lasts=fault.lasts / 2)
            yield _with_faults(scenario, (*scenario.faults[:number], shorter, *scenario.faults[number + 1 :]))
    yield from _simpler_surroundings(scenario)


def fewer(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """The items without each half, without each quarter, …, without each single one."""
    size = (len(items) + 1) // 2
    while size:
        for start in range(0, len(items), size):
            yield (*items[:start], *items[start + size :])
        size = size // 2 if size > 1 else 0


def report_lines(shrunk: Shrunk, before: Scenario) -> Iterator[str]:
    """The smallest scenario and its timeline, as text."""
    scenario = shrunk.scenario
    whole = "nothing more can be removed" if shrunk.complete else "there may be a smaller one"
    yield f"the smallest scenario with the same kind of breach, after {shrunk.tries} runs ({whole}):"
    for what in ("faults", "submissions", "hosts"):
        yield f"  {what}: {len(getattr(scenario, what))} of {len(getattr(before, what))}"
    yield from (f"  {submission}" for submission in scenario.submissions)
    yield from (f"  {fault}" for fault in scenario.faults)
    sim = Simulation(scenario)
    breach = next(breach for breach in sim.run().breaches if breach.kind == shrunk.kind)
    yield from describe(sim, breach)
    if scenario != before and (again := replay(before)):
        yield f"  replay: {again}"


def smallest(scenario: Scenario, tries: int = TRIES) -> list[str]:
    """Shrink a scenario, and describe the result as text; [] if it has no breach."""
    with without_logs():
        shrunk = shrink(scenario, tries=tries)
        return [] if shrunk is None else list(report_lines(shrunk, scenario))


def _with_faults(scenario: Scenario, faults: Iterable[Fault]) -> Scenario:
    left = tuple(faults)
    return replace(scenario, faults=left, calm=max((fault.at + fault.lasts for fault in left), default=0.0))


def _enough(hosts: Sequence[Host], submissions: Sequence[Submission]) -> bool:
    """Whether each submitted type is offered where it may run; otherwise nothing would start."""
    return all(
        any(submission.type in host.types and fits(submission.options.get("where", {}), host.labels) for host in hosts)
        for submission in submissions
    )


def _simpler_submissions(submission: Submission) -> Iterator[Submission]:
    for actions in fewer(submission.actions):
        yield replace(submission, actions=actions)
    if submission.names is not None:
        yield replace(submission, names=None)
    for left in fewer(tuple(submission.options.items())):
        yield replace(submission, options=dict(left))
    if submission.callers > 1:
        yield replace(submission, callers=1)
    partitions = int(submission.arg["partitions"])
    for count in dict.fromkeys((1, partitions // 4, partitions // 2, partitions - 1)):
        if 0 < count < partitions:
            yield replace(submission, arg={**submission.arg, "partitions": count}, names=_named(submission, count))
    for arg in _simpler_arguments(submission.arg):
        yield replace(submission, arg=arg)


def _named(submission: Submission, count: int) -> tuple[str, ...] | None:
    """The partition names that still exist; None (all) if none does."""
    if submission.names is None:
        return None
    return tuple(name for name in submission.names if int(name.partition("=")[2]) < count) or None


def _simpler_arguments(arg: Any) -> Iterator[dict[str, Any]]:
    if arg.get("trouble"):
        yield {**arg, "trouble": 0.0}
    for extra in ("objects", "follows"):
        if extra in arg:
            yield {name: value for name, value in arg.items() if name != extra}


def _simpler_surroundings(scenario: Scenario) -> Iterator[Scenario]:
    if scenario.members > 1:
        yield replace(scenario, members=1)
    if scenario.clients > 1:
        yield replace(
            scenario, clients=1, submissions=tuple(replace(submission, client=0) for submission in scenario.submissions)
        )
    if scenario.limits != DEFAULT:
        yield replace(scenario, limits=DEFAULT)
    if scenario.past or scenario.namespace:
        yield replace(scenario, past=0, history_limit=1000, namespace="")
    if scenario.history_age is not None:
        yield replace(scenario, history_age=None)
    if scenario.removals:
        yield replace(scenario, removals=())
    if scenario.fragments:
        yield replace(scenario, fragments=0)
    if any(host.skew for host in scenario.hosts):
        yield replace(scenario, hosts=tuple(replace(host, skew=0.0) for host in scenario.hosts))

"""Lists and runs strikes: one action on a process at one crash point of a reference run."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from distop.protocol.frozen import frozen
from tests.simulator.breach_timeline import describe
from tests.simulator.crash_points import ACTIONS, MOMENTS, PlannedStrike, ReferenceRun, discover
from tests.simulator.reference_runs import references
from tests.simulator.run import Breach, without_logs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_TIMELINES = 1
"""Maximum breaches of one strike that are reported: the first one causes the others."""


class Kind(NamedTuple):
    """The kind of a strike. ``opened``: the run's opening came before, so the step is part of a recovery."""

    role: str
    what: str
    opened: bool
    action: str
    moment: str

    @property
    def at_each_change(self) -> Kind:
        """The coarser kind of which CI runs one strike; ``scripts/simulate --points`` runs all."""
        return self._replace(action="", moment="")


@frozen
class Strike:
    """A strike at the ``number``-th point of a reference run."""

    reference: str
    number: int
    action: str
    moment: str

    def __str__(self) -> str:
        """The command that runs this strike."""
        return f"scripts/simulate --strike {shlex.quote(self.reference)} {self.number} {self.action} {self.moment}"


@frozen
class StrikeResult:
    """The result of a strike. ``timelines``: of its first breaches; ``seconds``: of processor time."""

    strike: Strike
    timelines: tuple[str, ...]
    seconds: float


@frozen
class StrikeList:
    """All strikes, by kind. ``points``: number of points of all runs."""

    runs: int
    points: int
    kinds: dict[Kind, list[Strike]]

    def all(self) -> list[Strike]:
        return [strike for alike in self.kinds.values() for strike in alike]

    def some(self) -> list[Strike]:
        """The strikes that CI runs: one of each coarser kind, chosen by a hash."""
        alike: defaultdict[Kind, list[Strike]] = defaultdict(list)
        for kind, strikes in self.kinds.items():
            alike[kind.at_each_change] += strikes
        return [min(strikes, key=_hash) for strikes in alike.values()]

    def figures(self, outcomes: Iterable[StrikeResult]) -> Iterator[str]:
        """The coverage of these results, as text."""
        struck = list(outcomes)
        where = {(one.strike.reference, one.strike.number) for one in struck}
        yield (
            f"{len(struck)} of {len(self.all())} strikes, of {len(self.kinds)} kinds, at {len(where)} of {self.points} "
            f"points of {self.runs} runs"
        )
        yield f"  {sum(one.seconds for one in struck):.0f} s of processor time"
        yield f"  strikes with a breach: {sum(bool(one.timelines) for one in struck)}"


def strikes(runs: Mapping[str, ReferenceRun] | None = None) -> StrikeList:
    """All strikes: each action that applies, at both moments of each point of each reference run.

    ``runs``: the discovered runs by name, if they are known already.
    """
    if runs is None:
        runs = {name: discover(reference) for name, reference in references().items()}
    kinds: dict[Kind, list[Strike]] = {}
    points = 0
    for name, run in runs.items():
        points += len(run.points)
        for point in run.points:
            for action in point.actions():
                if action == "overtake" and not run.cleans_after_losses:
                    continue
                for moment in MOMENTS:
                    kind = Kind(point.role, point.what, 0 <= run.opened < point.number, action, moment)
                    kinds.setdefault(kind, []).append(Strike(name, point.number, action, moment))
    return StrikeList(len(runs), points, kinds)


def _hash(strike: Strike) -> int:
    return crc32(str(strike).encode())


def run_strike(strike: Strike) -> StrikeResult:
    """Run one strike. A point that is not reached is a breach: the run was not the discovered one."""
    began = time.process_time()
    with without_logs():
        run, breaches = _run(strike)
        timelines = tuple("\n".join(_lines(strike, run, breach)) for breach in breaches[:MAX_TIMELINES])
    return StrikeResult(strike, timelines, time.process_time() - began)


def describe_strike(strike: Strike) -> tuple[bool, list[str]]:
    """Whether a strike has a breach, and the timeline of the breach, or else of the first operation."""
    with without_logs():
        run, breaches = _run(strike)
        sim = run.sim
        first = next(iter(sim.answers.started.values()), "")
        whole = Breach("no breach", sim.loop.now, sim.etcd.revision, "", f"timeline of {first}", first)
        return bool(breaches), list(_lines(strike, run, breaches[0] if breaches else whole))


def _run(strike: Strike) -> tuple[ReferenceRun, list[Breach]]:
    planned = PlannedStrike(lambda point: point.number == strike.number, strike.action, strike.moment)
    run = ReferenceRun(references()[strike.reference], planned)
    breaches = run.run().breaches
    if planned.struck is None:
        breaches.append(Breach("no such point", run.sim.loop.now, 0, "", f"the run has {len(run.points)} points"))
    return run, breaches


def _lines(strike: Strike, run: ReferenceRun, breach: Breach) -> Iterator[str]:
    point = run.points[strike.number] if strike.number < len(run.points) else "no process"
    yield f"{strike.action} {point}, {strike.moment}:"
    yield from describe(run.sim, breach, str(strike))


def parse_strike(reference: str, number: str, action: str, moment: str) -> Strike:
    """A strike by its parts, as on the command line. Raises ValueError."""
    for given, known in ((reference, references()), (action, ACTIONS), (moment, MOMENTS)):
        if given not in known:
            raise ValueError(f"{given!r} is none of: {', '.join(known)}")
    if not number.isdigit():
        raise ValueError(f"{number!r} is no number of a point")
    return Strike(reference, int(number), action, moment)

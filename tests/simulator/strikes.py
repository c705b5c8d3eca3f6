"""Strikes: what can be done to a process at each crash point of each reference run, and what it breaches."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from distop.protocol.frozen import frozen
from tests.simulator.breach_story import describe
from tests.simulator.crash_points import ACTIONS, MOMENTS, Blow, Course, discover
from tests.simulator.reference_runs import references
from tests.simulator.run import Breach, quietly

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

STORIES = 1
"""Breaches of one strike that are told: the first shows what led to the others."""


class Kind(NamedTuple):
    """What makes strikes alike. ``opened``: the run's own opening came before, so the step is part of a recovery."""

    role: str
    what: str
    opened: bool
    action: str
    moment: str

    @property
    def at_each_change(self) -> Kind:
        """Of those that share this, one is run at each change of the project; ``scripts/simulate --points`` runs all.
        """
        return self._replace(action="", moment="")


@frozen
class Strike:
    """A reference run that is struck at its ``number``-th point."""

    reference: str
    number: int
    action: str
    moment: str

    def __str__(self) -> str:
        """The command that runs it again."""
        return f"scripts/simulate --strike {shlex.quote(self.reference)} {self.number} {self.action} {self.moment}"


@frozen
class Struck:
    """How a strike went. ``stories``: of its first breaches; ``seconds``: of processor time."""

    strike: Strike
    stories: tuple[str, ...]
    seconds: float


@frozen
class Listed:
    """All strikes there are, by kind. ``points``: of all runs."""

    runs: int
    points: int
    kinds: dict[Kind, list[Strike]]

    def all(self) -> list[Strike]:
        return [strike for alike in self.kinds.values() for strike in alike]

    def some(self) -> list[Strike]:
        """Those of each change, the same ones each time, from anywhere in the runs."""
        alike: defaultdict[Kind, list[Strike]] = defaultdict(list)
        for kind, strikes in self.kinds.items():
            alike[kind.at_each_change] += strikes
        return [min(strikes, key=_anywhere) for strikes in alike.values()]

    def figures(self, outcomes: Iterable[Struck]) -> Iterator[str]:
        """For people: what of all was run."""
        struck = list(outcomes)
        where = {(one.strike.reference, one.strike.number) for one in struck}
        yield (
            f"{len(struck)} of {len(self.all())} strikes, of {len(self.kinds)} kinds, at {len(where)} of {self.points} "
            f"points of {self.runs} runs"
        )
        yield f"  {sum(one.seconds for one in struck):.0f} s of processor time"
        yield f"  strikes with a breach: {sum(bool(one.stories) for one in struck)}"


def strikes(courses: Mapping[str, Course] | None = None) -> Listed:
    """All of them: two moments, and each action that the process knows, at each point of each reference run.
    ``courses``: these runs by their names, where they have been made.
    """
    if courses is None:
        courses = {name: discover(reference) for name, reference in references().items()}
    kinds: dict[Kind, list[Strike]] = {}
    points = 0
    for name, course in courses.items():
        points += len(course.points)
        for point in course.points:
            for action in point.actions():
                if action == "overtake" and not course.cleans_after_losses:
                    continue
                for moment in MOMENTS:
                    kind = Kind(point.role, point.what, 0 <= course.opened < point.number, action, moment)
                    kinds.setdefault(kind, []).append(Strike(name, point.number, action, moment))
    return Listed(len(courses), points, kinds)


def _anywhere(strike: Strike) -> int:
    return crc32(str(strike).encode())


def one_strike(strike: Strike) -> Struck:
    """Run it. A strike whose point never comes is told as a breach: the run was not the one that was discovered."""
    began = time.process_time()
    with quietly():
        course, breaches = _run(strike)
        stories = tuple("\n".join(_told(strike, course, breach)) for breach in breaches[:STORIES])
    return Struck(strike, stories, time.process_time() - began)


def tell(strike: Strike) -> tuple[bool, list[str]]:
    """Whether the strike breaches anything, and its story; where it does not, that of the first operation."""
    with quietly():
        course, breaches = _run(strike)
        sim = course.sim
        first = next(iter(sim.told.started.values()), "")
        whole = Breach("nothing is breached", sim.loop.now, sim.etcd.revision, "", f"the story of {first}", first)
        return bool(breaches), list(_told(strike, course, breaches[0] if breaches else whole))


def _run(strike: Strike) -> tuple[Course, list[Breach]]:
    blow = Blow(lambda point: point.number == strike.number, strike.action, strike.moment)
    course = Course(references()[strike.reference], blow)
    breaches = course.run().breaches
    if blow.struck is None:
        breaches.append(Breach("no such point", course.sim.loop.now, 0, "", f"there are {len(course.points)}"))
    return course, breaches


def _told(strike: Strike, course: Course, breach: Breach) -> Iterator[str]:
    point = course.points[strike.number] if strike.number < len(course.points) else "nobody"
    yield f"{strike.action} {point}, {strike.moment}:"
    yield from describe(course.sim, breach, str(strike))


def checked(reference: str, number: str, action: str, moment: str) -> Strike:
    """A strike by its parts, as a person names them. Raises ValueError."""
    for given, known in ((reference, references()), (action, ACTIONS), (moment, MOMENTS)):
        if given not in known:
            raise ValueError(f"{given!r} is none of: {', '.join(known)}")
    if not number.isdigit():
        raise ValueError(f"{number!r} is no number of a point")
    return Strike(reference, int(number), action, moment)

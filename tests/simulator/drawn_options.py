"""Draws the priorities, limits, label selectors and failure budgets of operations, and changes to them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulator.scenario import Action, Fault

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.simulator.scenario import Host, Submission

ZONES = ("a", "b")


def draw_limits(
    chance: random.Random, submissions: Sequence[Submission], hosts: Sequence[Host]
) -> tuple[tuple[Submission, ...], tuple[Host, ...]]:
    """In a third of the seeds, add labels, options and changes of options.

    The generator is separate, so the rest of the scenario is the same with and without this draw.
    """
    if chance.random() >= 0.35:
        return tuple(submissions), tuple(hosts)
    hosts = tuple(replace(host, labels={"zone": chance.choice(ZONES)}) for host in hosts)
    return tuple(_with_options(chance, submission, hosts) for submission in submissions), hosts


def _with_options(chance: random.Random, submission: Submission, hosts: Sequence[Host]) -> Submission:
    if chance.random() < 0.3:
        return submission
    options = _options(chance)
    zones = {
        host.labels["zone"] for host in hosts if submission.type in host.types and submission.type not in host.unable
    }
    if chance.random() < 0.3 and zones:
        options["where"] = {"zone": chance.choice(sorted(zones))}
    actions = list(submission.actions)
    if chance.random() < 0.5:
        for _ in range(chance.randint(1, 4)):
            action = Action(chance.uniform(0.05, 1.5), _alter(_options(chance, anew=True)))
            actions.insert(chance.randint(0, len(actions)), action)
    return replace(submission, options=options, actions=tuple(actions))


def changing_limits(chance: random.Random, submissions: Sequence[Submission], actors: int) -> tuple[Submission, ...]:
    """In half of the seeds with actors, set, remove and restore a job limit while jobs run.

    Actors take no permits.
    """
    if not actors or chance.random() < 0.5:
        return tuple(submissions)
    n = chance.randrange(len(submissions))
    limits = [most for _ in range(chance.randint(1, 3)) for most in (0, chance.choice((1, 1, 2)))]
    actions = tuple(Action(chance.uniform(0.1, 1.5), _alter({"max_jobs": most})) for most in limits)
    limited = replace(
        submissions[n], options={**submissions[n].options, "max_jobs": 1}, actions=(*actions, *submissions[n].actions)
    )
    return (*submissions[:n], limited, *submissions[n + 1 :])


def losses_below_limit(
    chance: random.Random, submissions: Sequence[Submission]
) -> tuple[tuple[Submission, ...], tuple[Fault, ...]]:
    """In a tenth of the seeds, lower the limit of an operation below its running jobs, then kill executors."""
    if chance.random() >= 0.1:
        return tuple(submissions), ()
    n = chance.randrange(len(submissions))
    submission = submissions[n]
    lowered = Action(chance.uniform(0.5, 1.0), _alter({"max_jobs": chance.choice((1, 1, 2))}))
    arg = {**submission.arg, "pace": chance.choice((1.0, 2.0))}
    limited = replace(submission, arg=arg, options={}, actions=(lowered, *submission.actions))
    at = submission.after + 1.0 + chance.uniform(0.1, 1.0)
    crashes = (Fault("crash", at, chance.uniform(0.5, 3.0), (chance.random(), 0.0, 0.0, 0.0)) for _ in range(3))
    return (*submissions[:n], limited, *submissions[n + 1 :]), tuple(crashes)


def _options(chance: random.Random, *, anew: bool = False) -> dict[str, Any]:
    """Draw some options. ``anew``: as a change, which may also remove limits."""
    found: dict[str, Any] = {}
    if chance.random() < 0.5:
        found["priority"] = chance.choice((-5, 0, 1, 9))
    if chance.random() < 0.6:
        found["max_jobs"] = chance.choice((1, 2, 3, 5, *((0, 1) if anew else ())))
    if chance.random() < 0.25:
        found["max_jobs_per_executor"] = chance.choice((1, 2, *((0,) if anew else ())))
    if chance.random() < 0.2:
        found["max_failed"] = chance.choice(("0", "2", "20%"))
    return found


def _alter(options: dict[str, Any]) -> str:
    return " ".join(["alter", *(f"{name}={value}" for name, value in (options or {"priority": 3}).items())])


def parse_alter(what: str) -> dict[str, Any]:
    """The arguments of ``Operation.alter`` in an action ``alter name=value …``."""
    pairs = (one.split("=", 1) for one in what.split()[1:])
    return {name: value if name == "max_failed" else int(value) for name, value in pairs}

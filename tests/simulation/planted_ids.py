"""Bugs in who holds an id."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distop.core import finishing as f
from distop.core import waiting as w
from distop.submission import duplicates
from distop.submission.duplicates import Asked
from distop.testing.simulation import Scenario
from distop.testing.simulation.scenario import Act
from tests.simulation.planted_limits import BUGS, Planted
from tests.simulation.planting import Patch, bug, substitute, wrap

# --------------------------------------------------------------------- shapes


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


# ----------------------------------------------------------------------- bugs


@bug("invariant 18", shape=of_one_id)
def an_end_keeps_the_id(patch: Patch) -> None:
    for module in (f, w):
        substitute(patch, module, "freed", lambda keys, ref, history: ())


@bug("invariant 18", shape=of_one_id)
def an_id_does_not_go_back_to_what_runs(patch: Patch) -> None:
    wrap(patch, Asked, "spec", lambda spec, _: replace(spec, follows=""))


@bug("invariant 18", shape=of_one_id)
def what_shall_follow_begins_at_once(patch: Patch) -> None:
    def beside(asked: Asked, given: Any) -> Asked:
        return replace(asked, request=given.wanted)

    wrap(patch, duplicates, "_behind", beside)


__all__ = ["BUGS", "Planted"]

"""Held requests: one request of a schedule is delayed, its sender perhaps killed.

Schedules hold requests at random moments. For a guard that is not decisive otherwise, each request with its label is
held in turn: for some moments, or until its sender's lease has ended and another node has taken over.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from distop.protocol.txn import Txn
from mutating.hooks import Observed
from tests.simulator import Simulation
from tests.simulator.virtual_loop import Process

AWAY = 12.0
"""Seconds until a killed daemon, or actor, is started again."""
VARIANTS = ((0.4, False), (1.5, False), (4.0, False), (7.0, True), (2.0, True))
"""Seconds for which a request is held, and whether its sender is killed when it has sent it."""
MOST = 4
"""Maximum requests with one label in one schedule."""

Held = tuple[int, float, bool]
"""The number of a transaction among those that were sent, for how long it is held, and whether its sender is killed."""


class Requests:
    """The numbers of the transactions that a schedule sends, by label."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._sent: dict[Txn, int] = {}
        self.labels: defaultdict[str, list[int]] = defaultdict(list)

    def watch(self, sim: Simulation) -> None:
        """Start counting for a schedule."""
        self._sent.clear()
        self.labels.clear()
        sim.network.sending = self._sending

    def _sending(self, process: Process, path: str, asked: Any) -> float:
        labelled = self._observed.labelled(asked) if isinstance(asked, Txn) else None
        if labelled is not None and labelled not in self._sent:
            number = self._sent[labelled] = len(self._sent)
            if len(self.labels[labelled.label]) < MOST:
                self.labels[labelled.label].append(number)
        return 0.0


def hold(sim: Simulation, observed: Observed, held: Held) -> None:
    """Hold one request of a simulation that is about to run.

    ``observed`` knows the labels of transactions.
    """
    number, lasts, kills = held
    sent: set[Txn] = set()

    def sending(process: Process, path: str, asked: Any) -> float:
        labelled = observed.labelled(asked) if isinstance(asked, Txn) else None
        if labelled is None or labelled in sent:
            return 0.0
        sent.add(labelled)
        if len(sent) - 1 != number:
            return 0.0
        if kills:
            sim.loop.world_at(sim.loop.now + 0.0001, _kill, sim, process)
        # The request and the kill may come after the scenario's last fault. A job that was killed near its end starts
        # again, so the limit of liveness, which covers one such job, is counted from the end of this fault.
        sim.fault_lasts_until(sim.loop.now + max(lasts, AWAY if kills else 0.0))
        return lasts

    sim.network.sending = sending


def _kill(sim: Simulation, process: Process) -> None:
    machine = next((one for one in sim.machines if one.process is process), None)
    if machine is not None:
        machine.crash()
        sim.loop.world_at(sim.loop.now + AWAY, machine.start)
    elif not process.dead and process in sim.clients:
        sim.loop.kill(process)
        sim.network.died(process)
        if process.name.startswith("actor-"):  # nobody else runs the jobs of a type without code
            sim.loop.world_at(sim.loop.now + AWAY, sim.run_again, process)

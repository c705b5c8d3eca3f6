"""A deterministic simulator: production code on a model of etcd, in virtual time, with faults drawn by seed.

``simulate(seed)`` runs one scenario and reports every breach. ``scripts/simulate`` runs many scenarios, or replays one.
"""

from __future__ import annotations

from tests.simulator.run import Breach, Report, Simulation, simulate
from tests.simulator.scenario import Scenario, draw_scenario

__all__ = ["Breach", "Report", "Scenario", "Simulation", "draw_scenario", "simulate"]

"""The heat map of an operation: its partitions in a bounded number of cells, aggregated on the server. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from distop.server.page.partition_states import STAGES

if TYPE_CHECKING:
    from distop.server.page.partition_states import PartitionStates

MOST_CELLS = 2_400
"""Cells that a picture has at most. With more partitions, each cell stands for several neighbours."""


def cell_size(count: int) -> int:
    """How many partitions share a cell."""
    return max(1, -(-count // MOST_CELLS))


def grid(states: PartitionStates, after: int = -1) -> dict[str, Any]:
    """The cells that have changed after this revision; -1: all.

    A cell is a list: its number; how many of its jobs are open, successful, running, waiting for a retry, and failed;
    the longest duration in seconds (-1: none has ended); its rows (-1: unknown); and the highest attempt.
    """
    per = cell_size(states.count)
    head = {"count": states.count, "per": per, "cells": -(-states.count // per) if states.count else 0}
    if not states.count:
        return {**head, "changed": []}
    firsts = np.arange(0, states.count, per)
    wanted = np.flatnonzero(np.maximum.reduceat(states.changed, firsts) > after)
    if not wanted.size:
        return {**head, "changed": []}
    counts = [np.add.reduceat(states.stage == stage, firsts, dtype=np.int64)[wanted] for stage in STAGES]
    timed = (states.started > 0) & (states.finished >= states.started)
    seconds = np.where(timed, states.finished - states.started, -1.0)
    longest = np.maximum.reduceat(seconds, firsts)[wanted]
    rows = np.add.reduceat(np.maximum(states.rows, 0), firsts)[wanted]
    known = np.maximum.reduceat(states.rows, firsts)[wanted] >= 0
    attempts = np.maximum.reduceat(states.attempt, firsts)[wanted]
    columns = [
        wanted.tolist(),
        *(one.tolist() for one in counts),
        np.round(longest, 3).tolist(),
        np.where(known, rows, -1).tolist(),
        attempts.tolist(),
    ]
    return {**head, "changed": [list(cell) for cell in zip(*columns, strict=True)]}

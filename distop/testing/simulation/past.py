"""Records of former operations that are old enough to be forgotten.

They stand in each table's history, with the keys of their request ids and an old watermark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.codec import rfc3339, word
from distop.core.model import History, OperationRef, State
from distop.core.txn import Put, Txn
from distop.testing.simulation.source import EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.core.keys import Keys
    from distop.testing.simulation.scenario import Scenario

LONG_AGO = 3 * 3600.0
"""Seconds; more than the history is kept for, whatever a clock of the simulation is wrong by."""


def past(keys: Keys, wanted: Scenario, revision: Callable[[], int]) -> Iterator[Txn]:
    """The transactions that write it, oldest records first. ``revision``: that of the last one that was applied."""
    finished = rfc3339(EPOCH - LONG_AGO)
    for table in wanted.tables:
        for instance in range(1, wanted.past + 1):
            ref = OperationRef(table, "check", "", instance)
            request = f"past-{instance}"
            record = History(str(ref), State.SUCCESS, finished, finished, 1, 1, 0, request_id=request)
            following = Put(keys.next_instance(table, "check"), word(str(instance + 1)))
            named = Put(keys.request(table, "check", request), word(str(ref)))
            yield Txn((), (Put(keys.history(ref), record.encode()), following, named))
    if wanted.past:
        yield Txn((), (Put(keys.watermark(0), word(str(revision()))),))

"""Checks that history records are kept for an hour, and for the age that a scenario sets; and writes old records.

Ages are measured in the simulation's own time, not by the executors' clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol import keys as K
from distop.protocol.json_codec import parse_time, rfc3339, word
from distop.protocol.records import History, OperationRef, State
from distop.protocol.size_limits import DEFAULT, Limits
from distop.protocol.txn import Put, Txn
from tests.simulator.process_clock import EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from distop.protocol.keys import Keys, ParsedKey
    from distop.protocol.revisioned import Change
    from tests.simulator.scenario import Scenario


HOUR = 3600.0
"""Seconds for which docs/contract.md guarantees a record; deliberately not read from :class:`Limits`."""


MINUTE = 60.0
"""Maximum error in seconds of a clock that deletes by age (docs/how-to/monitor.md)."""


def retention_by_age(scenario: Scenario) -> float | None:
    """The seconds for which records are kept by age; None if another rule may delete them earlier.

    A clock that is ahead by up to a minute deletes that much earlier.
    """
    clocks_jump = any(fault.kind == "clock" for fault in scenario.faults)
    if scenario.history_age is None or scenario.history_limit < 1000 or clocks_jump:
        return None
    return scenario.history_age - max([host.skew for host in scenario.hosts if 0 < host.skew <= MINUTE], default=0.0)


def guaranteed_retention(limits: Limits) -> float:
    """The seconds for which records are kept with these limits: an hour, unless they set another time."""
    return HOUR if limits.history_kept == DEFAULT.history_kept else limits.history_kept


class HistoryRetention:
    """Checks each deletion of a history record.

    ``kept``: the minimum seconds from the writing of a record; ``age``: the minimum seconds from the operation's end
    in the record, None: not checked.
    """

    def __init__(
        self, kept: float, age: float | None, now: Callable[[], float], found: Callable[[str, str, str], None]
    ) -> None:
        self._kept = kept
        self._age = age
        self._now = now
        self._found = found
        self._written: dict[str, tuple[float, float]] = {}
        """Record → when it was written, and the operation's end in it. Records from before the run are absent."""

    def step(self, parsed: Iterable[tuple[ParsedKey, Change]]) -> None:
        """Check the changes of one revision."""
        for key, change in parsed:
            if key.family != K.HISTORY or key.name:
                continue
            if not change.deleted:
                ended = parse_time(History.decode(change.kv.value).finished) - EPOCH
                self._written[change.kv.key] = self._now(), ended
            elif (known := self._written.pop(change.kv.key, None)) is not None:
                self._deleted(change.kv.key, *known)

    def _deleted(self, key: str, written: float, ended: float) -> None:
        age = self._now() - written
        if age < self._kept:
            text = f"deleted {age:.1f} s after its operation ended; it is kept for {self._kept:g} s"
            self._found("record deleted too early", key, text)
        elif self._age is not None and (since := self._now() - ended) < self._age:
            text = f"deleted by age, {since:.1f} s after the end in the record; it is kept for {self._age:g} s"
            self._found("record deleted too early", key, text)


LONG_AGO = 3 * 3600.0
"""Age in seconds of old records: older than any retention, even by a clock that is wrong."""


def old_records(keys: Keys, scenario: Scenario, revision: Callable[[], int]) -> Iterator[Txn]:
    """Transactions that write old records for each table, with their request ids and an old watermark, oldest first.

    ``revision``: returns the revision of the last transaction.
    """
    finished = rfc3339(EPOCH - LONG_AGO)
    for table in scenario.tables:
        for instance in range(1, scenario.past + 1):
            ref = OperationRef(table, "check", "", instance)
            request = f"past-{instance}"
            record = History(str(ref), State.SUCCESS, finished, finished, 1, 1, 0, request_id=request)
            following = Put(keys.next_instance(table, "check"), word(str(instance + 1)))
            named = Put(keys.request(table, "check", request), word(str(ref)))
            yield Txn((), (Put(keys.history(ref), record.encode()), following, named))
    if scenario.past:
        yield Txn((), (Put(keys.watermark(0), word(str(revision()))),))

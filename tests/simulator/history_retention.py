"""Whether history records and their request ids are kept for an hour, and for the age that a scenario sets.

The simulation's own time counts, and not what executors take for the time.

Records of former operations that are old enough to be forgotten.

They stand in each table's history, with the keys of their request ids and an old watermark.
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
"""Seconds for which docs/contract.md promises a record; deliberately not read from :class:`Limits`."""


MINUTE = 60.0
"""Seconds by which a clock may be wrong that deletes by age, as docs/how-to/monitor.md says."""


def age(wanted: Scenario) -> float | None:
    """The seconds for which records are kept by age; None where something else may delete them earlier.

    A clock that is ahead by less than a minute deletes as much earlier.
    """
    clocks_jump = any(fault.kind == "clock" for fault in wanted.faults)
    if wanted.history_age is None or wanted.history_limit < 1000 or clocks_jump:
        return None
    return wanted.history_age - max([host.skew for host in wanted.hosts if 0 < host.skew <= MINUTE], default=0.0)


def promised(limits: Limits) -> float:
    """The seconds for which records are kept in a scenario with these limits: the hour, unless it sets another time."""
    return HOUR if limits.history_kept == DEFAULT.history_kept else limits.history_kept


class HistoryRetention:
    """Judges each deletion of a history record.

    ``kept``: the seconds for which a record must be kept at least; ``age``: the seconds for which it is kept after the
    end that it tells, None where that is not judged.
    """

    def __init__(
        self, kept: float, age: float | None, now: Callable[[], float], found: Callable[[str, str, str], None]
    ) -> None:
        self._kept = kept
        self._age = age
        self._now = now
        self._found = found
        self._written: dict[str, tuple[float, float]] = {}
        """When each record of this run was written, and the end that it tells; those that stood there before are older.
        """

    def step(self, parsed: Iterable[tuple[ParsedKey, Change]]) -> None:
        """Take the changes of one revision."""
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
            self._found("forgotten", key, text)
        elif self._age is not None and (told := self._now() - ended) < self._age:
            text = f"deleted by age, {told:.1f} s after the end that it tells; it is kept for {self._age:g} s"
            self._found("forgotten", key, text)


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

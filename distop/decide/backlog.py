"""The backlog of an executor: the jobs it claims next, as a pure state machine.

It takes events and returns instructions; the shell (``daemon.executor.executor_role``) performs them and reports the
results. Each open operation has an entry, whose states and events are a table (``decide.backlog_entries``). Nothing
here has a clock: ``now`` is a monotonic time in seconds.

A *suspect* is a job that must run alone in its executor. An idle executor takes it first. If all are busy, one of them
becomes *quiet*: it claims nothing more until its own jobs have ended. It is the first by rendezvous for that job. The
others continue, and take their turn only if the suspect is still there much later.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

from distop.decide.backlog_entries import (
    FIRST_PAUSE,
    LONGEST_PAUSES,
    REPORTED_PAUSE,
    Accepted,
    BackOffReason,
    ClaimableJobs,
    Entry,
    EntryEvent,
    EntryState,
    Forget,
    Grant,
    Instruction,
    ReleaseJobs,
    Round,
    RoundResult,
    RunJobs,
    Stop,
    Trouble,
    Wait,
)
from distop.decide.circuit_breaker import BreakerScope, CircuitBreaker
from distop.decide.fresh_operations import FreshOperations
from distop.protocol.operation_options import DEFAULT as NO_OPTIONS
from distop.protocol.operation_options import rank
from distop.protocol.records import ALL_OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from distop.protocol.plan import Gate
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Seen
    from distop.protocol.size_limits import Limits

ROUND = 2.0
"""Seconds for which less urgent operations wait for a more urgent round.

The round may clean up or be retried again and again, and free slots must not wait for that.
"""
FIRST_LOOK = 0.5
"""Seconds until the next check of an operation of which no more jobs may run.

The interval doubles up to the poll.
"""


class Surroundings(Protocol):
    """The backlog's view of the cluster, which changes only between events."""

    executor_id: str
    caught_up_at: int
    limits: Limits

    def others(self, type_name: str, tables: Collection[str], where: Mapping[str, str] | None = None) -> list[str]:
        """The other executors that serve such operations."""

    def serves(self, type_name: str, tables: Collection[str]) -> bool:
        """Whether this executor serves such operations."""

    def fits(self, where: Mapping[str, str]) -> bool:
        """Whether this executor has these labels."""

    @property
    def draining(self) -> bool:
        """Whether this executor has to drain."""


class Backlog:
    """The backlog of one incarnation with a number of slots."""

    def __init__(self, around: Surroundings, slots: int, poll: float) -> None:
        self._around = around
        self.slots = self.free = slots
        self._poll = poll
        self.entries: dict[OperationRef, Entry] = {}
        self._scheduled: dict[OperationRef, Entry] = {}
        """Entries that are served one by one: READY, CLAIMING and DRY."""
        self._fresh = FreshOperations(around.executor_id, around.limits, self._others_of)
        self.breaker = CircuitBreaker(lambda ref: bool(self._others_of(ref.type, ref.table)))
        self._turn_of_fresh = True
        self.leaving = False
        self._held = 0
        self._runs = 0
        self._rounds: set[Round] = set()
        self.exclusive: OperationRef | None = None
        """Only a suspect of this operation is claimed here, if set.

        It ends when a check finds no suspect left, the operation cannot be served, or its suspect has run here. Hints
        and polls do not end it.
        """
        self.running_alone = False
        """The suspect of ``exclusive`` runs here."""
        self._with_suspects: dict[OperationRef, None] = {}
        """Other operations with suspects, which are left to other executors unless this one is idle."""
        self._long: dict[OperationRef, Trouble] = {}
        """Trouble with long pauses; :meth:`skipped` drops what is over."""

    def _others_of(self, type_name: str, table: str) -> list[str]:
        return self._around.others(type_name, (table,))

    # ------------------------------------------------------------------- gates

    def changed(
        self, gates: Mapping[OperationRef, Seen[Gate]], refs: Iterable[OperationRef] | None, now: float
    ) -> list[Instruction]:
        """Take changes of these operations' gates (None: of any)."""
        out: list[Instruction] = []
        for ref in list(dict.fromkeys((*self.entries, *gates))) if refs is None else refs:
            entry, gate = self.entries.get(ref), gates.get(ref)
            if gate is None:
                if entry is not None:
                    out += self._close(entry)
            elif entry is None:
                self._open(ref, gate, now)
            elif gate.mod != entry.gate_mod:
                entry.gate, entry.gate_mod, entry.again = gate.value, gate.mod, True
                shut = entry.state in (EntryState.CLOSED, EntryState.CLOSING)
                self._move(entry, EntryEvent.OPEN if shut else EntryEvent.AGAIN)
        if self._around.draining:  # it claims nothing, so etcd rejects nothing
            for entry in self.entries.values():
                out += self._settle(entry)
                entry.trouble = None
            out += [Stop(entry.ref, draining=True) for entry in self.entries.values() if entry.held]
        return out

    def _open(self, ref: OperationRef, gate: Seen[Gate], now: float) -> None:
        entry = self.entries[ref] = Entry(ref, gate.value, gate.mod, now)
        one = gate.value.count == 1 and gate.value.options == NO_OPTIONS
        plain = one and not gate.value.where and not gate.value.beside
        fresh = plain and gate.mod > self._around.caught_up_at and self._around.serves(ref.type, (ref.table,))
        self._move(entry, EntryEvent.OPEN_NEW if fresh else EntryEvent.OPEN)
        if fresh:
            self._fresh.add(ref, now)

    def _close(self, entry: Entry) -> list[Instruction]:
        """Take the end of an operation's gate: no more claims, and held jobs are stopped.

        The stop is repeated each time, because a run may have been starting.
        """
        if entry.state not in (EntryState.CLOSED, EntryState.CLOSING):
            self._move(entry, EntryEvent.CLOSE)
        out: list[Instruction] = self._settle(entry)
        entry.trouble = None
        self._with_suspects.pop(entry.ref, None)
        if self.exclusive == entry.ref and not self.running_alone:
            self.exclusive = None
        if entry.held:
            return [*out, Stop(entry.ref)]
        if entry.state is EntryState.CLOSED:
            self._move(entry, EntryEvent.GONE)
            self._end_exclusive(entry.ref)
            self._with_suspects.pop(entry.ref, None)
            self.breaker.forget(entry.ref)
            del self.entries[entry.ref]
            out.append(Forget(entry.ref))
        return out

    def _move(self, entry: Entry, event: EntryEvent) -> None:
        entry.happens(event)
        if entry.state is not EntryState.NEW:
            self._fresh.remove(entry.ref)
        if entry.state in (EntryState.READY, EntryState.CLAIMING, EntryState.DRY):
            self._scheduled[entry.ref] = entry
        else:
            self._scheduled.pop(entry.ref, None)

    def nodes_changed(self, now: float) -> None:
        """Take a change of nodes; :meth:`changed` follows."""
        self._fresh.divide_anew(now)

    def hint(self) -> None:
        """Jobs may be claimable: a node left, jobs were released, or the poll is due."""
        for entry in self.entries.values():
            if entry.state in (EntryState.DRY, EntryState.LEFT):
                self._move(entry, EntryEvent.AGAIN)
            elif entry.state is EntryState.CLAIMING:
                entry.again = True

    # ----------------------------------------------------------------- queries

    @property
    def busy(self) -> bool:
        """Whether it holds a claim, or may be about to."""
        return bool(self._rounds or self._held)

    def stopping(self, ref: OperationRef) -> bool:
        """Whether no job of the operation may start any more."""
        entry = self.entries.get(ref)
        shut = entry is None or entry.state in (EntryState.CLOSED, EntryState.CLOSING)
        return self.leaving or self._around.draining or shut

    def claiming(self, ref: OperationRef) -> bool:
        """Whether a claim round for the operation is in progress."""
        entry = self.entries.get(ref)
        return entry is not None and entry.round is not None

    def wait(self, ref: OperationRef, now: float) -> float:
        """Seconds for which the operation is not served here."""
        entry = self.entries[ref]
        if not self._able(entry):
            return self._poll
        trouble = entry.trouble.until - now if entry.trouble is not None else 0.0
        return max(trouble, self.breaker.wait(ref, now))

    def skipped(self, now: float, most: int) -> tuple[dict[str, str], int]:
        """Up to ``most`` operations whose jobs are not claimed here for a while, and why; how many others there are.

        ``ALL_OPERATIONS`` stands for all that other executors serve.
        """
        self._long = {ref: one for ref, one in self._long.items() if one.reported and self._has(ref, one)}
        found: dict[OperationRef | None, object] = {**self.breaker.open(now)}
        found |= {ref: one for ref, one in self._long.items() if ref not in found}
        named = {str(ref or ALL_OPERATIONS): str(why) for ref, why in islice(found.items(), most)}
        return named, len(found) - len(named)

    def _has(self, ref: OperationRef, trouble: Trouble) -> bool:
        return ref in self.entries and self.entries[ref].trouble is trouble

    def _able(self, entry: Entry) -> bool:
        gate, ref = entry.gate, entry.ref
        return self._around.serves(ref.type, gate.tables(ref.table)) and self._around.fits(gate.where)

    def _alone(self, mine: int = 0) -> bool:
        """Whether nothing else runs here and no end is being written, besides ``mine`` slots."""
        return self.free + mine == self.slots and not self._held

    # ------------------------------------------------------------------ choice

    def next(self, now: float) -> list[Instruction]:
        """The rounds to begin, and how long to wait afterwards.

        The most urgent operations come first; of equally urgent ones, those with the fewest held jobs.
        """
        if self.leaving or self._around.draining:
            return [Wait(None)]
        if self.exclusive is None and self._with_suspects and self._alone():
            known = (ref for ref in self._with_suspects if self.entries[ref].count and self.wait(ref, now) <= 0)
            self.exclusive = next(known, None)
        if self.exclusive is not None and not self.running_alone and self.wait(self.exclusive, now) > 0:
            self._end_exclusive(self.exclusive)
        if self.exclusive is not None:
            return [*self._rounds_alone(self.entries[self.exclusive], now), Wait(None)]
        if self.free <= 0:
            return [Wait(None)]  # until a slot is free
        out: list[Instruction] = []
        # They alternate, so neither waits for all of the others; more urgent operations come first.
        urgent = any(entry.gate.options.priority > 0 for entry in self._scheduled.values())
        self._turn_of_fresh = not self._turn_of_fresh and not urgent
        kinds = [self._rounds_of_fresh(now, out), self._rounds_of_others(now, out)]
        pauses = [pause for kind in (kinds if self._turn_of_fresh else reversed(kinds)) for pause in kind]
        return [*out, Wait(min(pauses, default=None))]

    def _rounds_alone(self, entry: Entry, now: float) -> list[Instruction]:
        """The round for a suspect of this operation, once nothing else runs here.

        After each hint the operation is checked again: another executor may have run the suspect.
        """
        alone = self._alone()
        if self.running_alone or entry.round is not None or not (alone or entry.state is EntryState.READY):
            return []
        if entry.state is EntryState.DRY:
            self._move(entry, EntryEvent.AGAIN)
        return [self._begin([entry.ref], int(alone), 0, 0.0)] if entry.state is EntryState.READY else []

    def _rounds_of_fresh(self, now: float, out: list[Instruction]) -> Iterator[float]:
        """Gives free slots to groups of one-job operations; yields seconds until that may be possible."""
        while self.free > 0:
            refs, borrowed, pause = self._fresh.choose(self.free, now, lambda ref: self.wait(ref, now))
            if not refs:
                if pause is not None:
                    yield pause
                return
            begun = self._begin(refs, 1, 0, 0.0)
            begun.borrowed, begun.fresh = borrowed, True
            out.append(begun)

    def _rounds_of_others(self, now: float, out: list[Instruction]) -> Iterator[float]:
        """Gives free slots to all other operations; yields seconds until each waiting one is due."""
        ranks: dict[OperationRef, int] = {}
        for ref, entry in list(self._scheduled.items()):
            if entry.state is EntryState.DRY:  # most of many open operations are, so they must cost little at each wake
                wait = entry.due - now if entry.due is not None else self._poll
                if wait > 0:
                    yield wait
                    continue
            if self._able(entry):
                ranks[ref] = self._rank(entry, now)
        # A round in progress has not taken its slots yet: less urgent operations wait for it for a short time.
        under_way = [(one.rank, one.until) for one in self._rounds if one.until > now and one.refs[0] in ranks]
        first, until = max(under_way, default=(None, now))
        waiting = [self.entries[ref] for ref in ranks if self.entries[ref].round is None]
        for entry in sorted(waiting, key=lambda one: (-ranks[one.ref], len(one.held))):
            if entry.busy_with_batch or entry.crowded:
                continue
            wait = self.wait(entry.ref, now)
            if wait <= 0 and entry.state is EntryState.DRY:
                self._move(entry, EntryEvent.AGAIN)
            if wait <= 0 and first is not None and ranks[entry.ref] < first:
                wait = until - now
            if wait > 0:
                yield wait
                continue
            if self.free <= 0:
                return
            first, until = ranks[entry.ref], now + ROUND
            known = entry.count > 0 and not entry.batch
            out.append(self._begin([entry.ref], 0 if known else 1, first, until))

    def _rank(self, entry: Entry, now: float) -> int:
        missing = entry.trouble is not None and entry.trouble.reason is BackOffReason.MISSING
        return rank(0 if missing else entry.gate.options.priority, 0.0 if entry.held else now - entry.since)

    def _begin(self, refs: Sequence[OperationRef], slots: int, rank: int, until: float) -> Round:
        begun = Round(tuple(refs), slots, rank=rank, until=until)
        self.free -= slots
        self._rounds.add(begun)
        for ref in refs:
            entry = self.entries[ref]
            self._move(entry, EntryEvent.BEGIN)
            entry.round, entry.again = begun, False
        return begun

    def _take_slots(self, wanted: int) -> int:
        """Take up to this number of free slots."""
        taken = max(0, min(wanted, self.free))
        self.free -= taken
        return taken

    # ------------------------------------------------------------------ rounds

    def read(self, ref: OperationRef, count: int, *, batch: bool) -> None:
        """Take the facts of an operation's records after they were read."""
        if (entry := self.entries.get(ref)) is not None:
            entry.count, entry.batch = count, batch

    def looked(self, under: Round, look: ClaimableJobs, now: float, jitter: float) -> Grant | None:
        """Take a check of a round's operation.

        Returns the slots it may claim for (None: nothing for now). ``jitter``: the factor of a back-off, from 0.5 to 1.
        """
        (ref,) = under.refs
        entry = self.entries[ref]
        entry.due = look.due
        if not look.room and not look.suspects:
            # Others hold all jobs that may run, and no event shows their end.
            entry.full = min(entry.full * 2 or min(FIRST_LOOK, self._poll), self._poll)
            entry.due = now + entry.full * jitter
            self._with_suspects.pop(ref, None)
            self._end_exclusive(ref, look_again=False)
            under.over[ref] = EntryEvent.NOTHING
            return None
        if self.exclusive not in (None, ref):
            return None
        if look.suspects:
            if not self._claims_alone(entry, under, look, now):
                under.over[ref] = EntryEvent.NOTHING
                return None
            return Grant(under.slots, alone=True)
        self._with_suspects.pop(ref, None)
        if self.exclusive == ref and not self.running_alone:
            self.exclusive = None
        if not entry.batch:
            under.slots += self._take_slots(min(look.open_jobs, look.room) - under.slots)
        return Grant(under.slots)

    def _claims_alone(self, entry: Entry, under: Round, look: ClaimableJobs, now: float) -> bool:
        """Whether one of the operation's suspects is to be claimed now.

        If not, this executor may have become quiet for it, or the operation is checked again when it is due.
        """
        ref, alone, first = entry.ref, self._alone(under.slots), min(look.suspects.values())
        if self.exclusive is None and (alone or first <= 0):
            self.exclusive = ref
        if self.exclusive == ref:
            self._with_suspects.pop(ref, None)
            self.running_alone = self.running_alone or alone
            return alone
        self._with_suspects[ref] = None
        due = now + max(first, 0.0)
        entry.due = due if entry.due is None else min(entry.due, due)
        return False

    def claimed(
        self, under: Round, got: Mapping[OperationRef, RoundResult], now: float, jitter: float
    ) -> list[Instruction]:
        """Take the claims of a round. Operations missing in ``got`` were claimed by others."""
        out: list[Instruction] = []
        for ref in under.refs:
            entry, one = self.entries[ref], got.get(ref)
            if one is None:
                under.over[ref] = EntryEvent.LOST
                continue
            self._hold(entry, one.won)
            if one.refused:
                # The event of the change may have arrived already, so check again.
                self._back_off(entry, BackOffReason.CHANGED, now, jitter)
            if one.refused or one.failed:
                continue
            out += self._served(entry)
            entry.since = now
            entry.full = 0.0 if one.won else entry.full
            if not one.won and not one.open_jobs:
                under.over[ref] = EntryEvent.NOTHING
        if under.borrowed:
            self._fresh.borrowed(under.refs[0].type, any(one.won for one in got.values()))
        return [*out, *self._run_or_release(under, got)]

    def _hold(self, entry: Entry, won: Iterable[int]) -> None:
        before = len(entry.held)
        entry.held.update(won)
        self._held += len(entry.held) - before

    def _run_or_release(self, under: Round, got: Mapping[OperationRef, RoundResult]) -> list[Instruction]:
        out: list[Instruction] = []
        started: list[tuple[OperationRef, tuple[int, ...]]] = []
        for ref, one in got.items():
            if one.won and self.stopping(ref):
                out.append(ReleaseJobs(ref, one.won))
            elif one.won:
                started.append((ref, one.won))
        if len(under.refs) == 1 and not self.entries[under.refs[0]].batch:
            runs = [RunJobs(((ref, (p,)),)) for ref, won in started for p in won]
        else:
            runs = [RunJobs(tuple(started))] if started else []
        under.slots -= len(runs)
        self._runs += len(runs)
        return [*out, *runs]

    def apart(self, under: Round) -> None:
        """etcd does not accept such a group: serve each operation on its own."""
        under.over.update(dict.fromkeys(under.refs, EntryEvent.MORE))

    def round_over(self, under: Round, now: float) -> list[Instruction]:
        """Take the end of a round, successful or not."""
        out: list[Instruction] = []
        self._rounds.discard(under)
        self.free += under.slots
        for ref in under.refs:
            entry = self.entries[ref]
            entry.round = None
            event = under.over.get(ref, EntryEvent.MORE)
            if entry.again and event in (EntryEvent.NOTHING, EntryEvent.LOST):
                event = EntryEvent.MORE
            self._move(entry, EntryEvent.ALL if entry.all_taken else event)
            if entry.trouble is not None and entry.trouble.until <= now:
                entry.trouble.reported = entry.trouble.reported and entry.trouble.run
            if not entry.held and (self.running_alone or (entry.trouble and entry.trouble.until > now)):
                self._end_exclusive(ref)  # its suspect was not claimed
            if entry.state is EntryState.CLOSED:
                out += self._close(entry)
        return out

    def _end_exclusive(self, ref: OperationRef, *, look_again: bool = True) -> None:
        """Stop being exclusive for this operation, and serve others again.

        No job of it runs here any more, or it cannot be served for now. The next check shows whether another suspect is
        left.
        """
        if self.exclusive == ref:
            self.exclusive, self.running_alone = None, False
            if look_again:
                self._with_suspects[ref] = None

    # ------------------------------------------------------------------- jobs

    def run_over(self, slots: int = 1) -> None:
        """Take the end of a run: its slot is free."""
        self.free += slots
        self._runs -= slots

    def ran_together(self, type_name: str, seconds: Sequence[float]) -> None:
        """Take the durations of jobs of a type that ran in sequence."""
        self._fresh.ran(type_name, seconds)

    def took_long(self, type_name: str) -> None:
        """Jobs of a type that ran in sequence took longer than allowed."""
        self._fresh.took_long(type_name)

    def job_failed(self, ref: OperationRef, now: float) -> tuple[BreakerScope | None, int, int]:
        """As :meth:`CircuitBreaker.job_failed`."""
        return self.breaker.job_failed(ref, now)

    def settled(self, ref: OperationRef, partition: int, *, ended: bool) -> list[Instruction]:
        """A job is no longer held. Not ``ended``: it waits, or another has it, so check again."""
        entry = self.entries[ref]
        if partition in entry.held:
            entry.held.discard(partition)
            self._held -= 1
        entry.ended += ended
        over = not entry.held
        if over and self.running_alone:
            self._end_exclusive(ref)
        done = 0 < entry.count <= entry.ended
        if not ended or ((over or entry.gate.options.limited) and not done):
            # The block is done: jobs that failed here or were released by others may be claimable.
            entry.again = True
            self._move(entry, EntryEvent.AGAIN)
        elif done and entry.round is None:
            self._move(entry, EntryEvent.ALL)
        return self._close(entry) if over and entry.state is EntryState.CLOSED else []

    # ----------------------------------------------------------------- back-off

    def failed(
        self,
        ref: OperationRef,
        reason: BackOffReason,
        now: float,
        jitter: float,
        *,
        pause: float | None = None,
        run: bool = False,
        text: str = "",
    ) -> float:
        """An operation could not be served, or (``run``) a run of its jobs not begin.

        Returns the seconds until the next try. ``pause``: a back-off that the caller has computed. ``text``: the error.
        """
        entry = self.entries.get(ref)
        if entry is None or entry.state in (EntryState.CLOSED, EntryState.CLOSING):
            return 0.0
        trouble = self._back_off(entry, reason, now, jitter, pause)
        trouble.run, trouble.text = run, text
        if reason is BackOffReason.MISSING:
            entry.since = now  # its waiting time starts again, so others have their turn
        return trouble.until - now

    def _back_off(
        self, entry: Entry, reason: BackOffReason, now: float, jitter: float, pause: float | None = None
    ) -> Trouble:
        trouble = entry.trouble = entry.trouble or Trouble(reason)
        trouble.reason, trouble.text = reason, ""
        trouble.rejected = trouble.rejected or reason is BackOffReason.REJECTED
        if pause is None:
            trouble.pause = min(max(FIRST_PAUSE, trouble.pause * 2), LONGEST_PAUSES[reason])
            trouble.until = now + trouble.pause * jitter
        else:
            trouble.pause, trouble.until = pause, now + pause
        trouble.reported = reason in LONGEST_PAUSES and trouble.pause >= REPORTED_PAUSE
        if trouble.reported:
            self._long[entry.ref] = trouble
        return trouble

    def _served(self, entry: Entry) -> list[Instruction]:
        """Its jobs were claimed. Trouble with runs stays until a run succeeds."""
        out = self._settle(entry)
        if entry.trouble is not None and not entry.trouble.run:
            entry.trouble = None
        return out

    def ran(self, ref: OperationRef) -> None:
        """A run of its jobs ended, which shows nothing about other claims."""
        entry = self.entries.get(ref)
        if entry is not None and entry.trouble is not None:
            entry.trouble.run = False
            if not entry.trouble.rejected:
                entry.trouble = None

    @staticmethod
    def _settle(entry: Entry) -> list[Instruction]:
        if entry.trouble is None or not entry.trouble.rejected:
            return []
        entry.trouble.rejected = False
        return [Accepted(entry.ref)]

    # --------------------------------------------------------------- invariants

    def check_invariants(self) -> None:
        """Raises AssertionError if an invariant is broken; all hold after each event."""
        taken = sum(one.slots for one in self._rounds) + self._runs
        assert self.free >= 0, "more slots are taken than exist"
        assert self.free + taken == self.slots, f"{self.free} of {self.slots} slots are free, and {taken} are taken"
        assert self._held == sum(len(entry.held) for entry in self.entries.values())
        assert all(ref == entry.ref for ref, entry in self.entries.items())
        for ref, entry in self.entries.items():
            claiming = entry.state in (EntryState.CLAIMING, EntryState.CLOSING)
            assert claiming == (entry.round is not None and ref in entry.round.refs), f"{ref} is {entry.state}"
            assert entry.round is None or entry.round in self._rounds
            assert (entry.state is EntryState.NEW) == (ref in self._fresh), f"{ref} is {entry.state}, but listed as new"
            scheduled = entry.state in (EntryState.READY, EntryState.CLAIMING, EntryState.DRY)
            assert scheduled == (ref in self._scheduled), f"{ref} is {entry.state}, but not scheduled"
            assert entry.state is not EntryState.ABSENT
            assert entry.state is not EntryState.CLOSED or entry.held, (
                f"{ref} is closed and holds nothing, but was kept"
            )
            assert entry.state is not EntryState.TAKEN or entry.all_taken, f"{ref} is taken, but has unclaimed jobs"
        assert self._scheduled.keys() <= self.entries.keys()
        assert self._with_suspects.keys() <= self.entries.keys(), "suspects of closed operations were kept"
        if self.running_alone:
            assert self.exclusive is not None, "a job runs alone, but no operation is exclusive"
            others = [ref for ref, entry in self.entries.items() if entry.held and ref != self.exclusive]
            assert not others, f"{others} run beside a job that must run alone"
        assert self.exclusive is None or self.exclusive in self.entries

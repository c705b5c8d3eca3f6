"""One branch of a caller's transaction is applied at most, whatever its copies do.

The caller is told which. The production client runs on the model of etcd. An explorer tries all sequences of decisions
up to a bound: whether an answer is lost, whether a copy is applied late, whether the caller's own compare starts or
stops to hold, whether another start moves the counters, whether the client gives up and is called again with the same
request id.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distop.clock import source
from distop.errors import OutcomeUnknown
from distop.invariants.checker import check
from distop.protocol.txn import Delete, Get, Put, Txn, TxnResult, absent
from tests.conftest import FIGURES
from tests.unit.support.clock import StandingClock
from tests.unit.support.model_submission import KEYS, Etcd, noop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GATE = "gate"
"""What the caller's transaction compares: that it is absent."""
RAN = "ran"
"""Which branch of it ran: a key that both write."""


class Decisions:
    """One sequence of decisions: first the given ones, then the first possible ones."""

    def __init__(self, given: list[int]) -> None:
        self._given = given
        self.made: list[tuple[int, int]] = []
        """(what was decided, out of how many)."""

    def one_of(self, count: int) -> int:
        taken = self._given[len(self.made)] if len(self.made) < len(self._given) else 0
        self.made.append((taken, count))
        return taken


def all_decisions() -> Iterator[Decisions]:
    """Every sequence of decisions, once; what one run decides shows the next sequence."""
    given: list[int] | None = []
    while given is not None:
        decisions = Decisions(given)
        yield decisions
        made = decisions.made
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        given = [*(taken for taken, _ in made[:-1]), made[-1][0] + 1] if made else None


class Network:
    """The network between client and store."""

    def __init__(self, etcd: Etcd, decisions: Decisions, lost: int, events: int, unknown: int) -> None:
        self.etcd = etcd
        self.decisions = decisions
        self.late: list[Txn] = []
        """Copies that are still on their way."""
        self._lost, self._events, self._unknown = lost, events, unknown

    def event(self) -> None:
        """What others do, or what arrives late."""
        possible = [lambda: None]
        if self._events:
            possible += [self._flip, self.etcd.change_counter]
        if self.late:
            possible.append(lambda: self.etcd.store.apply(self.late.pop(0)))  # type: ignore[arg-type, return-value]
        taken = self.decisions.one_of(len(possible)) if len(possible) > 1 else 0
        self._events -= 0 < taken < 3 and self._events > 0
        possible[taken]()

    def arrive(self) -> None:
        """A copy that is late may be applied before something is read."""
        if self.late and self.decisions.one_of(2):
            self.etcd.store.apply(self.late.pop(0))

    def _flip(self) -> None:
        there = self.etcd.value(GATE) is not None
        self.etcd.store.apply(Txn((), (Delete(GATE) if there else Put(GATE, b""),)))

    def commit(self, txn: Txn) -> TxnResult:
        repeated = False
        while True:
            self.event()
            fates = 1 + (2 if self._lost else 0)
            fate = self.decisions.one_of(fates) if fates > 1 else 0
            if fate == 0:
                return replace(self.etcd.store.apply(txn), repeated=repeated)
            self._lost -= 1
            repeated = True
            if fate == 1:
                self.etcd.store.apply(txn)
            else:
                self.late.append(txn)
            if self._unknown and self.decisions.one_of(2):
                self._unknown -= 1
                raise OutcomeUnknown("etcd stopped answering")


class ReachedBy(Etcd):
    """A client whose requests go through a network."""

    network: Network | None = None

    async def request(self, what: str) -> None:
        await super().request(what)
        if self.network is not None and what == "read":
            self.network.arrive()
        elif self.network is not None and what == "transaction":
            self.fates.append(self.network.commit)

    async def commit(self, txn: Txn, *, deadline: float | None = None, until: Any = None) -> TxnResult:
        await self.request(txn.label)
        self.committed.append(txn)
        answer: TxnResult = (self.fates.popleft() if self.fates else self.store.apply)(txn)
        return answer


async def violation_in_run(decisions: Decisions, failure: list[Any], request_id: str | None, **bounds: int) -> str:
    """The violation in one run, or ""."""
    etcd = ReachedBy()
    network = Network(etcd, decisions, **bounds)
    if decisions.one_of(2):
        etcd.put(GATE, b"")
    etcd.network = network
    while True:
        try:
            outcome = await etcd.client.transaction(
                compare=[absent(GATE)], success=[Put(RAN, b"success")], failure=failure, start=noop(),
                request_id=request_id,
            )  # fmt: skip
            break
        except OutcomeUnknown as error:
            found = re.search("request_id='([^']+)'", str(error))
            assert found is not None
            request_id = found[1]
    while network.late:
        network.event()
        if network.late:
            etcd.store.apply(network.late.pop(0))
    ran = [change.kv.value for _, changes in etcd.store.history for change in changes if change.kv.key == RAN]
    writes = any(isinstance(op, Put) for op in failure)
    expected = [b"success"] if outcome.committed else [b"failure"] if writes else []
    if ran != expected:
        return f"told {'committed' if outcome.committed else 'not committed'}, while {ran} ran"
    if len(etcd.operations()) != outcome.committed:
        return f"told {'committed' if outcome.committed else 'not committed'}, while {etcd.operations()} were started"
    if [str(one.ref) for one in outcome.operations] != etcd.operations():
        return f"told of {[one.ref for one in outcome.operations]}, while {etcd.operations()} were started"
    return "".join(map(str, check(KEYS, etcd.store.history)))


BOUNDS = {
    "two copies lost": {"lost": 2, "events": 2, "unknown": 0},
    "given up once": {"lost": 2, "events": 1, "unknown": 1},
}


@pytest.mark.parametrize("request_id", [None, "mine"])
@pytest.mark.parametrize("failure", [[Put(RAN, b"failure")], [Get(GATE)]], ids=["writes", "reads"])
@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(BOUNDS["two copies lost"], id="two copies lost", marks=pytest.mark.slow),
        pytest.param(BOUNDS["given up once"], id="given up once"),
    ],
)
def test_C9_C10_one_branch_is_applied_and_reported_whatever_copies_do(
    bounds: dict[str, int],
    failure: list[Any],
    request_id: str | None,
    record_property: Callable[[str, object], None],
) -> None:
    async def explore() -> int:
        clock, runs = StandingClock(), 0
        clock.least = True  # it pauses for no time before it tries again
        source.set(clock)
        for decisions in all_decisions():
            wrong = await violation_in_run(decisions, failure, request_id, **bounds)
            assert wrong == "", decisions.made
            runs += 1
        return runs

    runs = asyncio.run(explore())
    record_property(FIGURES, f"{runs} sequences of decisions")
    assert runs > 500

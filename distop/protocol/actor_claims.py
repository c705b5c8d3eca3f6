"""What actors do with jobs (L11-L24): people's own worker loops, in any process, without a node key and a session.

An actor's claim is live while its revision changes within its duration, which whoever looks measures by a monotonic
clock of its own; no wall clock decides, and nothing here knows of time at all. Every extension writes the claim again,
which moves its revision: so what compares the revision can only take what was not extended. The ``grant`` stays, and
tells which claim a token is for: one whose extension was applied and the answer lost finds itself again by it. The
protocol was explored in a model, clause by clause; for the rule of one-way guards see
``protocol.operation_transitions``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, InvalidToken
from distop.protocol.frozen import frozen
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import word
from distop.protocol.permits import gives_back
from distop.protocol.records import OperationRef, State
from distop.protocol.texts import shown
from distop.protocol.txn import Delete, Get, GetResult, Operation, Put, Txn, TxnResult, absent, is_not, unchanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue

OWNED_PER_TXN = 120
"""Claims that one transaction takes, extends or fails at most; each is a nested one with up to four compares, puts or
reads (T1)."""

_TOKEN = re.compile(r"(?P<op>.+)#(?P<partition>\d{1,6})@(?P<fence>\d{1,19})\.(?P<grant>[0-9a-f]{16})", re.DOTALL)
MAX_TOKEN = 4096


@frozen
class Token:
    """What an actor shows to extend or return a job: which one, the fence at the grant, and the grant. Its text may be
    kept, and given to another process.
    """

    ref: OperationRef
    partition: int
    fence: int
    grant: str

    def __str__(self) -> str:
        return f"{self.ref}#{self.partition}@{self.fence}.{self.grant}"

    @classmethod
    def parse(cls, text: object) -> Token:
        """The reverse of ``str``. Raises InvalidToken."""
        found = _TOKEN.fullmatch(text) if isinstance(text, str) and len(text) <= MAX_TOKEN else None
        try:
            if found is None:
                raise ValueError
            ref = OperationRef.parse(found["op"])
            return cls(ref, int(found["partition"]), int(found["fence"]), found["grant"])
        except (InvalidArgument, ValueError):
            raise InvalidToken(f"{shown(text)} is no token of a job: own_jobs() gives them") from None


@frozen
class Taking:
    """A job that an actor takes: free, waiting and due, or of a holder that is gone. ``seen_mod`` 0: there is no claim.
    ``dead``: the incarnation that must have no node key. ``outcome``: it is over; this is written instead of a claim.
    ``former``: the claim of the holder that is gone, whose permit is given back.
    """

    ref: OperationRef
    gate_mod: int
    partition: int
    claim: Claim
    seen_mod: int = 0
    dead: str = ""
    outcome: Outcome | None = None
    former: Claim | None = None


def own(keys: Keys, takings: Sequence[Taking]) -> Txn:
    """Take jobs of any operations, each decided alone. Unlike an executor's, the claim needs no node key (invariant 4):
    its holder is not told dead by a session, but by a claim that nobody extends.
    """
    return Txn((), tuple(_take(keys, one) for one in takings), (), "own")


def _take(keys: Keys, one: Taking) -> Txn:
    key, state = keys.claim(one.ref, one.partition), keys.job(one.ref, one.partition, "state")
    seen = (unchanged(key, one.seen_mod),) if one.seen_mod else (absent(key), absent(state))
    gone = (absent(keys.node(one.dead)),) if one.dead else ()
    ops: tuple[Operation, ...] = (Put(key, one.claim.encode()),)
    if one.outcome is not None:
        told = Put(keys.job(one.ref, one.partition, "outcome"), one.outcome.encode())
        ops = (Put(state, word(JobState.FAILED)), told, Delete(key))
    ops = (*ops, *gives_back(keys, one.ref, one.former))
    return Txn((unchanged(keys.gate(one.ref), one.gate_mod), *seen, *gone), ops, (Get(key),))


def granted(one: Taking, answer: TxnResult, revision: int) -> int:
    """The fence of a job that was taken at ``revision``, or by an earlier copy of the transaction (T9); else 0."""
    if one.outcome is not None:
        return 0
    if answer.succeeded:
        return revision
    kv = _read(answer, 0)
    return kv.mod_revision if kv is not None and kv.value == one.claim.encode() else 0


@frozen
class Extending:
    """A claim that is to be written again: as it is, but for its duration."""

    token: Token
    claim: Claim
    fence: int


def extend(keys: Keys, extendings: Sequence[Extending]) -> Txn:
    """Each decided alone. Not while the operation is being cancelled: its holder is to stop, and the claim to end. That
    it is being cancelled is for good, so the guard is one-way; while it is paused, jobs go on.
    """
    return Txn(
        (),
        tuple(
            Txn(
                (
                    unchanged(keys.claim(one.token.ref, one.token.partition), one.fence),
                    is_not(keys.of(one.token.ref, "state"), word(State.CANCELLING)),
                ),
                (Put(keys.claim(one.token.ref, one.token.partition), one.claim.encode()),),
                (Get(keys.claim(one.token.ref, one.token.partition)), Get(keys.of(one.token.ref, "state"))),
            )
            for one in extendings
        ),
        (),
        "extend",
    )


def refused_extension(token: Token, answer: TxnResult) -> tuple[Claim, int] | None:
    """The claim as it stands with its fence, where it is still the token's and may be extended; else None."""
    held, state = held_by(token, _read(answer, 0)), _read(answer, 1)
    return held if state is not None and state.value != word(State.CANCELLING) else None


def held_by(token: Token, kv: KeyValue | None) -> tuple[Claim, int] | None:
    """The claim and its fence, where it is the one that the token is for."""
    claim = Claim.decode(kv.value) if kv is not None else None
    return (claim, kv.mod_revision) if kv is not None and claim is not None and claim.grant == token.grant else None


def finish(keys: Keys, token: Token, fence: int, state: JobState, outcome: Outcome) -> Txn:
    """A job's end, under its claim's fence: as a report of an executor."""
    key = keys.claim(token.ref, token.partition)
    state_key, told = (keys.job(token.ref, token.partition, name) for name in ("state", "outcome"))
    puts = (Put(state_key, word(state)), Put(told, outcome.encode()), Delete(key))
    return Txn((unchanged(key, fence),), puts, _what_stands(keys, token), "return")


def put_back(keys: Keys, token: Token, fence: int, waiting: Claim) -> Txn:
    """The claim is set to waiting: to be tried again, or released."""
    key = keys.claim(token.ref, token.partition)
    return Txn((unchanged(key, fence),), (Put(key, waiting.encode()),), _what_stands(keys, token), "return")


def _what_stands(keys: Keys, token: Token) -> tuple[Get, ...]:
    ref, p = token.ref, token.partition
    return (Get(keys.claim(ref, p)), Get(keys.job(ref, p, "state")), Get(keys.job(ref, p, "outcome")))


@frozen
class Refused:
    """What a return that was refused found. ``held``: the claim is still the token's, with another fence; ``returned``:
    the job has the end that was to be written, from this token (an earlier copy, or an earlier call, has brought it);
    ``gone``: nothing is left of the job.
    """

    held: tuple[Claim, int] | None
    returned: bool
    gone: bool
    text: str


def refused_return(token: Token, answer: TxnResult, wanted: JobState | Claim) -> Refused:
    """``wanted``: the state, or the waiting claim, that was to be written."""
    claim_kv, state_kv, outcome_kv = (_read(answer, n) for n in range(3))
    held, outcome = held_by(token, claim_kv), Outcome.decode(outcome_kv.value) if outcome_kv is not None else None
    claim = Claim.decode(claim_kv.value) if claim_kv is not None else None
    ours = outcome is not None and outcome.grant == token.grant
    if isinstance(wanted, Claim):
        returned = claim is not None and (claim == Claim.decode(wanted.encode()) or _follows(claim, wanted))
    else:
        returned = ours and state_kv is not None and state_kv.value == word(wanted)
    if ours and not returned:
        text = "it was returned already, with another outcome"
    elif outcome is not None:
        text = f"the job has ended, by {outcome.executor}"
    elif claim is not None and claim.waiting:
        text = "the job was put back, and waits to be claimed"
    elif claim is not None:
        text = f"{claim.executor} has been granted the job"
    else:
        text = "nobody has the job: its operation has ended, or was cancelled, or there is none"
    return Refused(held, returned, outcome is None and claim is None, text)


def _follows(claim: Claim, wanted: Claim) -> bool:
    """Somebody has claimed the job since it was put back so. A retry is told in the story of the attempts; after a
    release the next attempt has no more failures than before, as it would where the job had been taken over.
    """
    before = Claim.decode(wanted.encode())
    if claim.attempt <= before.attempt or not before.tried or before.tried[-1].attempt != before.attempt:
        return (claim.attempt, claim.failures) == (before.attempt + 1, before.failures) and not claim.waiting
    return before.tried[-1] in claim.tried


def _read(answer: TxnResult, n: int) -> KeyValue | None:
    found = answer.responses[n] if len(answer.responses) > n else None
    return found.kv if isinstance(found, GetResult) else None

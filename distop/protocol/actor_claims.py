"""Transactions of actors: users' own worker loops, in any process (L11-L24).

Actors have no node key and no session. An actor's claim is live while its revision changes within its duration. Each
observer measures that with its own monotonic clock; no wall clock decides, and this module does not know the time.
Every extension writes the claim again, which changes its revision. So a compare with the revision only takes claims
that were not extended.

The ``grant`` stays the same and identifies the claim that a token is for. If an extension was applied and its answer
lost, the holder finds its claim by the grant. A model checked the protocol, compare by compare.
``protocol.operation_transitions`` explains one-way guards.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, InvalidToken
from distop.protocol.frozen import frozen
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import word
from distop.protocol.permits import permit_puts
from distop.protocol.records import OperationRef, State
from distop.protocol.texts import shown
from distop.protocol.txn import Delete, Get, GetResult, Put, Txn, TxnOperation, TxnResult, absent, is_not, unchanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue

OWNED_PER_TXN = 120
"""Maximum number of claims that one transaction takes, extends or fails.

Each is a nested transaction with up to four compares, puts or reads (T1).
"""

_TOKEN = re.compile(r"(?P<op>.+)#(?P<partition>\d{1,6})@(?P<fence>\d{1,19})\.(?P<grant>[0-9a-f]{16})", re.DOTALL)
MAX_TOKEN = 4096


@frozen
class Token:
    """The proof with which an actor extends or returns a job.

    It names the job, its fence at the grant, and the grant. Its text may be stored and given to another process.
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
            raise InvalidToken(f"{shown(text)} is not a job token: pass a token that own_jobs() returned") from None


@frozen
class Taking:
    """A job that an actor takes: free, waiting and due, or of a holder that is gone.

    ``seen_mod``: the claim's mod revision as read; 0: there is none. ``dead``: the incarnation that must have no node
    key. ``outcome``: the job is at its limit; this outcome is written instead of a claim. ``former``: the claim of the
    former holder, whose permit is given back.
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
    """Take jobs of any operations for an actor, each decided on its own.

    Unlike an executor's claim this needs no node key (invariant 4): an actor is dead when nobody extends its claim, not
    when a session ends.

    Guards of each job: the gate is unchanged; its claim is unchanged, or claim and state are absent; the node key of
    ``dead`` is absent.
    """
    return Txn((), tuple(take(keys, one) for one in takings), (), "own")


def take(keys: Keys, one: Taking) -> Txn:
    """Take one job: the part of :func:`own` about it."""
    key, state = keys.claim(one.ref, one.partition), keys.job(one.ref, one.partition, "state")
    seen = (unchanged(key, one.seen_mod),) if one.seen_mod else (absent(key), absent(state))
    gone = (absent(keys.node(one.dead)),) if one.dead else ()
    ops: tuple[TxnOperation, ...] = (Put(key, one.claim.encode()),)
    if one.outcome is not None:
        outcome = Put(keys.job(one.ref, one.partition, "outcome"), one.outcome.encode())
        ops = (Put(state, word(JobState.FAILED)), outcome, Delete(key))
    ops = (*ops, *permit_puts(keys, one.ref, one.former))
    return Txn((unchanged(keys.gate(one.ref), one.gate_mod), *seen, *gone), ops, (Get(key),))


def granted(one: Taking, answer: TxnResult, revision: int) -> int:
    """The fence of a job taken at ``revision``, or by an earlier copy of the transaction (T9); 0: not taken."""
    if one.outcome is not None:
        return 0
    if answer.succeeded:
        return revision
    kv = _read(answer, 0)
    return kv.mod_revision if kv is not None and kv.value == one.claim.encode() else 0


@frozen
class Extending:
    """A claim to write again with a new duration."""

    token: Token
    claim: Claim
    fence: int


def extend(keys: Keys, extendings: Sequence[Extending]) -> Txn:
    """Extend claims, each decided on its own.

    Guards of each: the claim is unchanged; the operation is not cancelling. While it is cancelling the holder has to
    stop, so that the claim ends. Cancelling is never undone, so the guard is one-way. While the operation is paused,
    its jobs continue.
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
    """The claim with its fence, if it is still the token's and may be extended; else None."""
    held, state = held_by(token, _read(answer, 0)), _read(answer, 1)
    return held if state is not None and state.value != word(State.CANCELLING) else None


def held_by(token: Token, kv: KeyValue | None) -> tuple[Claim, int] | None:
    """The claim with its fence, if the token is for it."""
    claim = Claim.decode(kv.value) if kv is not None else None
    return (claim, kv.mod_revision) if kv is not None and claim is not None and claim.grant == token.grant else None


def finish(keys: Keys, token: Token, fence: int, state: JobState, outcome: Outcome) -> Txn:
    """End a job with its state and outcome, like an executor's report. Guard: the fence."""
    key = keys.claim(token.ref, token.partition)
    state_key, outcome_key = (keys.job(token.ref, token.partition, name) for name in ("state", "outcome"))
    puts = (Put(state_key, word(state)), Put(outcome_key, outcome.encode()), Delete(key))
    return Txn((unchanged(key, fence),), puts, _job_reads(keys, token), "return")


def put_back(keys: Keys, token: Token, fence: int, waiting: Claim) -> Txn:
    """Set a claim to waiting, for a retry or a release. Guard: the fence."""
    key = keys.claim(token.ref, token.partition)
    return Txn((unchanged(key, fence),), (Put(key, waiting.encode()),), _job_reads(keys, token), "return")


def _job_reads(keys: Keys, token: Token) -> tuple[Get, ...]:
    """Reads of the job's claim, state and outcome."""
    ref, p = token.ref, token.partition
    return (Get(keys.claim(ref, p)), Get(keys.job(ref, p, "state")), Get(keys.job(ref, p, "outcome")))


@frozen
class RefusedReturn:
    """What a refused return found.

    ``held``: the claim is still the token's, with another fence. ``returned``: the job already has the intended end
    from this token, by an earlier copy or call. ``gone``: no key of the job is left.
    """

    held: tuple[Claim, int] | None
    returned: bool
    gone: bool
    text: str


def refused_return(token: Token, answer: TxnResult, wanted: JobState | Claim) -> RefusedReturn:
    """Why a return was refused. ``wanted``: the state, or the waiting claim, that it would have written."""
    claim_kv, state_kv, outcome_kv = (_read(answer, n) for n in range(3))
    held, outcome = held_by(token, claim_kv), Outcome.decode(outcome_kv.value) if outcome_kv is not None else None
    claim = Claim.decode(claim_kv.value) if claim_kv is not None else None
    ours = outcome is not None and outcome.grant == token.grant
    if isinstance(wanted, Claim):
        returned = claim is not None and (claim == Claim.decode(wanted.encode()) or _follows(claim, wanted))
    else:
        returned = ours and state_kv is not None and state_kv.value == word(wanted)
    if ours and not returned:
        text = "the job was already returned with another outcome"
    elif outcome is not None:
        text = f"the job has ended: {outcome.executor} reported it"
    elif claim is not None and claim.waiting:
        text = "the job was put back and waits to be claimed"
    elif claim is not None:
        text = f"the job was granted to {claim.executor}"
    else:
        text = "nobody holds the job: its operation has ended, was cancelled or does not exist"
    return RefusedReturn(held, returned, outcome is None and claim is None, text)


def _follows(claim: Claim, wanted: Claim) -> bool:
    """Whether the job was claimed again after this token put it back.

    After a retry the list of attempts contains it. After a release the next attempt has as many failures as before;
    after a takeover it would have more.
    """
    before = Claim.decode(wanted.encode())
    if claim.attempt <= before.attempt or not before.tried or before.tried[-1].attempt != before.attempt:
        return (claim.attempt, claim.failures) == (before.attempt + 1, before.failures) and not claim.waiting
    return before.tried[-1] in claim.tried


def _read(answer: TxnResult, n: int) -> KeyValue | None:
    found = answer.responses[n] if len(answer.responses) > n else None
    return found.kv if isinstance(found, GetResult) else None

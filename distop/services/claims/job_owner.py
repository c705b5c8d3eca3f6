"""Claims, extends and returns jobs for actors (L11-L24).

The transactions are those of ``protocol.actor_claims``. An actor needs only a token: the cache of jobs that were
claimed through this client merely saves reads, and another process may return a job as well.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distop.clock import random, time
from distop.decide import job_claims
from distop.errors import DistopError, InvalidToken, MalformedRequest, OutcomeUnknown, describe
from distop.protocol import actor_claims
from distop.protocol.actor_claims import Token
from distop.protocol.jobs import Claim, JobState, Outcome, Tried, bounded_errors
from distop.protocol.json_codec import loads, rfc3339
from distop.protocol.plan import CHUNK_PAGE
from distop.protocol.record_reading import read
from distop.protocol.records import OperationRef, Spec
from distop.protocol.txn import Get, TxnResult
from distop.services.claims import owned_jobs as m
from distop.services.claims.claim_candidates import Candidates, takings
from distop.store.connection_settings import WRITE_LIMIT
from distop.store.group_commit import by_halves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.protocol.actor_claims import Taking
    from distop.protocol.behavior_declaration import Rules
    from distop.protocol.keys import Keys
    from distop.protocol.txn import Txn
    from distop.services.open_operation import OpenOperation
    from distop.store.client import EtcdClient

log = logging.getLogger("distop.client")

ROUNDS = 8
"""Rounds in which a call searches for more jobs after other claimants were faster."""
REMEMBERED = 20_000
"""Maximum cached jobs, each with its claim and fence."""
TRIES = 5
"""Maximum attempts to return a job whose fence keeps changing, because it is extended."""


@dataclass(slots=True)
class _Held:
    """The cached state of a claimed job."""

    claim: Claim
    fence: int
    name: str
    rules: Rules


class Owner:
    """The owned jobs of one client."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys
        self.candidates = Candidates(etcd, keys)
        self._held: OrderedDict[tuple[OperationRef, int, str], _Held] = OrderedDict()

    async def close(self) -> None:
        """Stop watching."""
        await self.candidates.close()

    # -------------------------------------------------------------------- own

    async def own(
        self,
        actor: str,
        types: Mapping[str, int | None],
        most: int,
        duration: float,
        accept: Callable[[m.OfferedJob], bool] | None,
    ) -> list[m.OwnedJob]:
        """Claim up to so many jobs; see :meth:`distop.client.async_client.Client.own_jobs`."""
        if most == 0:
            return []
        await self.candidates.ready()
        owned: list[m.OwnedJob] = []
        for _ in range(ROUNDS):
            try:
                more = await self._round(actor, types, most, owned, duration, accept)
            except Exception:  # of accept or etcd: the caller does not get the jobs that were claimed before
                for job in owned:
                    with suppress(DistopError):
                        await self.give(job.token, m.Release())
                raise
            if not more:
                if owned or not await self.candidates.relist_if_behind():
                    break
                continue
            if len(owned) >= most:
                break
        return owned

    async def _round(
        self,
        actor: str,
        types: Mapping[str, int | None],
        most: int,
        owned: list[m.OwnedJob],
        duration: float,
        accept: Callable[[m.OfferedJob], bool] | None,
    ) -> bool:
        """Claim more jobs, and add them to ``owned``; returns whether another round may find more.

        Raises MalformedRequest if etcd rejects claims as invalid, even alone, and ``owned`` stays empty; else logs it.
        """
        room, per_type = most - len(owned), Counter(job.type for job in owned)
        left = {name: room if most is None else min(room, most - per_type[name]) for name, most in types.items()}
        left = {name: n for name, n in left.items() if n > 0}
        operations = await self.candidates.gather(actor, left, room)
        wants: list[tuple[Taking, OpenOperation]] = []
        for op in operations:

            def wanted(claim: Claim, p: int, op: OpenOperation = op) -> bool:
                return accept is None or bool(accept(_offered(op, p, claim)))

            chosen = takings(op, actor, min(room, left.get(op.ref.type, 0)), duration, wanted)
            taken = sum(one.outcome is None for one in chosen)
            room -= taken
            left[op.ref.type] -= taken
            wants += [(one, op) for one in chosen]
            if room <= 0:
                break
        if not wants:
            return False
        before, rejected = len(owned), None

        async def send(group: Sequence[tuple[Taking, OpenOperation]]) -> None:
            owned.extend(await self._take(group))

        for n in range(0, len(wants), actor_claims.OWNED_PER_TXN):
            rejected = await by_halves(wants[n : n + actor_claims.OWNED_PER_TXN], send) or rejected
        if rejected is not None:
            for _, op in wants:
                op.forget_candidates()  # the rejected job among them is still free
            if not owned:
                raise rejected
            log.warning("Cannot claim some jobs; a later call tries again: %s", describe(rejected))
        return rejected is None or len(owned) > before

    async def _take(self, wants: Sequence[tuple[Taking, OpenOperation]]) -> list[m.OwnedJob]:
        result = await self._commit(actor_claims.own(self._keys, [one for one, _ in wants]))
        owned: list[m.OwnedJob] = []
        for (one, op), answer in zip(wants, result.responses, strict=True):
            assert isinstance(answer, TxnResult)
            if fence := actor_claims.granted(one, answer, result.revision):
                token = Token(one.ref, one.partition, fence, one.claim.grant)
                offered = _offered(op, one.partition, one.claim)
                self._remember(token, _Held(one.claim, fence, offered.partition, op.spec.rules))
                owned.append(
                    m.OwnedJob(
                        *(offered.op, offered.type, offered.table, offered.object, offered.partition, offered.ordinal),
                        *(offered.arg, offered.attempt, offered.failures, offered.plan),
                        token=str(token),
                        duration=one.claim.duration,
                    )
                )
            elif not answer.succeeded:
                op.forget_candidates()  # another claimer was first: the listing is stale
        return owned

    # ----------------------------------------------------------------- extend

    async def extend(self, tokens: Iterable[Any], duration: float) -> list[bool]:
        """Extend claims; see :meth:`distop.client.async_client.Client.extend`."""
        found: list[Token | None] = []
        for text in tokens:
            try:
                found.append(Token.parse(text))
            except InvalidToken:
                found.append(None)
        alive: dict[Token, bool] = dict.fromkeys((token for token in found if token is not None), False)
        await self._extend(sorted(alive, key=lambda token: _key(token) not in self._held), duration, alive)
        return [token is not None and alive[token] for token in found]

    async def _extend(self, tokens: Sequence[Token], duration: float, alive: dict[Token, bool]) -> None:
        rejected: MalformedRequest | None = None
        for n in range(0, len(tokens), actor_claims.OWNED_PER_TXN):
            page = [
                one for token in tokens[n : n + actor_claims.OWNED_PER_TXN] if (one := self._again(token, duration))
            ]
            missing = [token for token in tokens[n : n + actor_claims.OWNED_PER_TXN] if _key(token) not in self._held]
            page += await self._read_claims(missing, duration)
            for _ in range(TRIES):
                if not page:
                    break
                page, error = await self._extend_page(page, duration, alive)
                rejected = rejected or error
        if rejected is not None:
            raise rejected

    def _again(self, token: Token, duration: float) -> actor_claims.Extending | None:
        held = self._held.get(_key(token))
        return actor_claims.Extending(token, replace(held.claim, duration=duration), held.fence) if held else None

    async def _read_claims(self, tokens: Sequence[Token], duration: float) -> list[actor_claims.Extending]:
        """The claims of tokens from other clients."""
        if not tokens:
            return []
        answers = await self._etcd.read(*(Get(self._keys.claim(one.ref, one.partition)) for one in tokens))
        found = ((token, actor_claims.held_by(token, answer.kv)) for token, answer in zip(tokens, answers, strict=True))
        return [
            actor_claims.Extending(token, replace(held[0], duration=duration), held[1]) for token, held in found if held
        ]

    async def _extend_page(
        self, page: Sequence[actor_claims.Extending], duration: float, alive: dict[Token, bool]
    ) -> tuple[list[actor_claims.Extending], MalformedRequest | None]:
        """The tokens to retry, because their fences have changed, and etcd's error if it rejects one alone."""
        again: list[actor_claims.Extending] = []

        async def send(group: Sequence[actor_claims.Extending]) -> None:
            result = await self._commit(actor_claims.extend(self._keys, group))
            for one, answer in zip(group, result.responses, strict=True):
                assert isinstance(answer, TxnResult)
                held = self._held.get(_key(one.token))
                if answer.succeeded:
                    alive[one.token] = True
                    if held is not None:
                        held.claim, held.fence = one.claim, result.revision
                elif (found := actor_claims.refused_extension(one.token, answer)) is not None and found[1] != one.fence:
                    again.append(actor_claims.Extending(one.token, replace(found[0], duration=duration), found[1]))

        rejected = await by_halves(page, send)
        return again, rejected

    # ----------------------------------------------------------------- return

    async def give(self, text: Any, outcome: m.OwnedOutcome) -> None:
        """Return a job; see :meth:`distop.client.async_client.Client.return_job`."""
        token = Token.parse(text)
        held = self._held.get(_key(token)) or await self._find(token, outcome)
        if held is None:
            return
        for _ in range(TRIES):
            txn, wanted = self._end(token, held, outcome)
            result = await self._commit(txn)
            if result.succeeded:
                break
            refused = actor_claims.refused_return(token, result, wanted)
            if refused.returned:
                break
            if refused.held is not None and refused.held[1] != held.fence:
                held = replace(held, claim=refused.held[0], fence=refused.held[1])
                continue
            self._held.pop(_key(token), None)
            if result.repeated and refused.gone:
                raise OutcomeUnknown(
                    f"cannot tell whether {token.ref}#{token.partition} was returned: etcd's answer was lost, and the "
                    "operation has ended since; nothing is left to do"
                )
            raise InvalidToken(f"the token {str(token)!r} is invalid: {refused.text}")
        else:
            raise OutcomeUnknown(
                f"could not return {token.ref}#{token.partition}, because another process keeps extending its claim: "
                "return it again"
            )
        self._held.pop(_key(token), None)
        self.candidates.look_again(token.ref)

    async def _find(self, token: Token, outcome: m.OwnedOutcome) -> _Held | None:
        """Read a job that this client did not claim.

        None if the token has already returned it in the same way. Raises InvalidToken.
        """
        ref, p = token.ref, token.partition
        gets = (
            Get(self._keys.claim(ref, p)),
            Get(self._keys.job(ref, p, "state")),
            Get(self._keys.job(ref, p, "outcome")),
            Get(self._keys.of(ref, "spec")),
        )
        answers = await self._etcd.read(*gets)
        held = actor_claims.held_by(token, answers[0].kv)
        if held is None or answers[3].kv is None:
            state = JobState.SUCCESS if isinstance(outcome, m.Complete) else JobState.FAILED
            refused = actor_claims.refused_return(token, TxnResult(False, 0, answers[:3]), state)
            if refused.returned:
                return None
            raise InvalidToken(f"the token {str(token)!r} is invalid: {refused.text}")
        name = await self._name(ref, p)
        return _Held(held[0], held[1], name, read(Spec.decode, answers[3].kv).rules)

    async def _name(self, ref: OperationRef, partition: int) -> str:
        known = self.candidates.known(ref)
        if known is not None:
            return str(known.partition(partition).get("name", partition))
        chunks = await self._etcd.list(*self._keys.chunks_range(ref), page=CHUNK_PAGE)
        for kv in chunks.kvs:
            for row in read(loads, kv):
                if row.get("partition") == partition:
                    return str(row.get("name", partition))
        return str(partition)

    def _end(self, token: Token, held: _Held, outcome: m.OwnedOutcome) -> tuple[Txn, JobState | Claim]:
        """The transaction that returns a job, and the value that it writes to its state or claim."""
        claim, rules, now = held.claim, held.rules, rfc3339(time.time())
        if isinstance(outcome, m.Release):
            waiting = job_claims.released(claim, claim.actor)
            return actor_claims.put_back(self._keys, token, held.fence, waiting), waiting
        error = ""
        if isinstance(outcome, m.Retry) or (isinstance(outcome, m.Abort) and not rules.can_fail):
            error = outcome.error if isinstance(outcome, m.Retry) else outcome.message
            if not rules.at_limit(claim.failures + 1):
                pause = rules.retry.delay(claim.failures + 1) * random.uniform(0.5, 1.0)
                waiting = job_claims.retried(claim, claim.actor, error, rfc3339(time.time() + pause))
                return actor_claims.put_back(self._keys, token, held.fence, waiting), waiting
        elif isinstance(outcome, m.Abort):
            error = outcome.message
        well = isinstance(outcome, m.Complete)
        result = None if isinstance(outcome, m.Retry | m.Release) else outcome.result
        tried = (
            bounded_errors(claim.tried, Tried(claim.attempt, claim.actor, error)) if not well and claim.tried else ()
        )
        record = Outcome(
            *(held.name, claim.actor, "", claim.attempt, claim.since or now, now, result),
            error if well or error else "failed",
            tried,
            token.grant,
        )
        state = JobState.SUCCESS if well else JobState.FAILED
        return actor_claims.finish(self._keys, token, held.fence, state, record), state

    # ------------------------------------------------------------------ parts

    async def _commit(self, txn: Txn) -> TxnResult:
        return await self._etcd.commit(txn, deadline=WRITE_LIMIT)

    def _remember(self, token: Token, held: _Held) -> None:
        self._held[_key(token)] = held
        while len(self._held) > REMEMBERED:
            self._held.popitem(last=False)


def _key(token: Token) -> tuple[OperationRef, int, str]:
    return token.ref, token.partition, token.grant


def _offered(op: OpenOperation, partition: int, claim: Claim) -> m.OfferedJob:
    plan = op.partition(partition)
    ref = op.ref
    return m.OfferedJob(
        *(str(ref), ref.type, ref.table, ref.object, str(plan.get("name", partition)), partition),
        *(op.arg, claim.attempt, claim.failures, plan),
    )

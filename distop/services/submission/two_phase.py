"""Two-phase submission: prepare an operation, then confirm (C13) or abandon it.

A sender prepares the operation under the external id of its own transaction, makes its change, and confirms. A prepared
operation does not start before. Executors decide about one that nobody confirms
(``daemon.upkeep.prepared_verification``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.decide import verifier_urls
from distop.errors import InvalidArgument, NotAllowed, NotFound, OutcomeUnknown, UnreadableRecord
from distop.protocol import keys as K
from distop.protocol import prepared_operations as p
from distop.protocol.caller_values import LONGEST_DELAY, seconds, text
from distop.protocol.dependencies import Hold, HoldState
from distop.protocol.identity import request_digest
from distop.protocol.json_codec import rfc3339
from distop.protocol.record_reading import read, word
from distop.protocol.records import History, OperationRef, Spec, State
from distop.protocol.texts import shown
from distop.protocol.txn import Get, GetResult
from distop.protocol.user_actions import NO_ACTIONS, Action, Actions
from distop.services.submission.contention import Lost, until_won
from distop.services.submission.graph_start import in_one
from distop.services.submission.idempotency import won
from distop.services.submission.insertion import Started
from distop.services.submission.start_request import PREPARED, acting
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

LONGEST_ID = 200
"""Maximum characters of an external id."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")


def external(value: Any) -> str:
    """The checked external id. Raises InvalidArgument."""
    if not 0 < len(text(value, "the external id")) <= LONGEST_ID:
        raise InvalidArgument(f"an external id must be a text of 1 to {LONGEST_ID} characters")
    try:
        for id_ in (p.hold_id(value), p.receipt_id(value)):
            K.encode(id_)
    except InvalidArgument:
        raise InvalidArgument(
            f"the external id {shown(value)} takes too many bytes in a key, percent-encoded (at most "
            f"{K.MAX_COMPONENT_BYTES}): choose a shorter one"
        ) from None
    return str(value)


def terms(
    wanted: Request, verify: Any, verify_after: Any, verify_attempts: Any, verify_pause: Any, external_id: str
) -> p.PreparedTerms:
    """The hold's record without the operation, which has no number yet.

    Raises InvalidArgument.
    """
    after, between = seconds(verify_after, "verify_after"), seconds(verify_pause, "verify_pause")
    if not 0 < after <= LONGEST_DELAY:
        raise InvalidArgument(
            f"verify_after must be a number of seconds above 0 and at most a hundred years, not {after:g}"
        )
    if not 0 <= between <= p.LONGEST_PAUSE:
        raise InvalidArgument(
            f"verify_pause must be a number of seconds from 0 to {p.LONGEST_PAUSE:g}, not {between:g}"
        )
    if not isinstance(verify_attempts, int) or isinstance(verify_attempts, bool) or not 1 <= verify_attempts <= 1_000:
        raise InvalidArgument(f"verify_attempts must be a whole number from 1 to 1000, not {shown(verify_attempts)}")
    asked = "" if verify is None else check_verifier(verify)
    digest = p.digest(wanted.type, wanted.table, request_digest(wanted.arg, wanted.partitions), asked, after)
    return p.PreparedTerms(external_id, "", digest, asked, after, verify_attempts, between)


def check_verifier(verify: Any) -> str:
    """The name of a registered verifier, or a URL. Raises InvalidArgument; the sentence repeats nothing secret.

    Whether an executor's list allows the URL shows when it is asked: the lists are settings of each executor.
    """
    asked = text(verify, "the verifier")
    if "://" not in asked:
        if not _NAME.fullmatch(asked):
            raise InvalidArgument(
                f"{shown(asked[:100])} is not a verifier: give the name of an installed verifier, or a URL "
                "(https://host/path)"
            )
        return asked
    verifier_urls.parse(asked)
    return asked


def request_id(external_id: str) -> str:
    """The request id of a prepared operation: by it, it is found once its hold and its receipt are forgotten."""
    return f"{PREPARED}{external_id}"


async def prepare(etcd: EtcdClient, keys: Keys, wanted: Request, asked: p.PreparedTerms) -> Started:
    """Insert the operation, held, once for each external id.

    Raises as ``submit.submit`` does; InvalidArgument if the external id was used for another request.
    """

    async def attempt() -> Started:
        there = await _find(etcd, keys, asked.external_id)
        if there is not None:
            return _same(there[0], asked, wanted)
        whole = await in_one(etcd, keys, [wanted], (), p.hold_id(asked.external_id))
        if whole.earlier:
            return Started(whole.refs[0], earlier=True)
        held = p.under_hold(keys, whole.txn, replace(asked, op=str(whole.refs[0])))
        result = await etcd.commit(held, deadline=WRITE_LIMIT)
        spec = result.responses[0] if not result.succeeded and result.repeated else None
        # An earlier copy may have been applied (T9).
        if not result.succeeded and not (isinstance(spec, GetResult) and won(spec.kv, None, wanted, whole.refs[0])):
            raise Lost
        return Started(whole.refs[0])

    try:
        return await until_won(etcd, keys, wanted, attempt)
    except OutcomeUnknown as error:
        raise OutcomeUnknown(
            f"cannot tell whether {wanted.type} on {wanted.table} was prepared, because etcd did not answer: "
            f"prepare it again with the external id {shown(asked.external_id)}, which prepares it at most once"
        ) from error


def _same(there: p.PreparedTerms, asked: p.PreparedTerms, wanted: Request) -> Started:
    ref = OperationRef.parse(there.op)
    if there.digest != asked.digest:
        # The caller may be allowed to see the operations of its own type and table only.
        seen = str(ref) if (ref.type, ref.table) == (wanted.type, wanted.table) else "another operation"
        raise InvalidArgument(
            f"the external id {shown(asked.external_id)} has prepared {seen} by another request: repeat that "
            "request unchanged, or choose a new external id"
        )
    return Started(ref, earlier=True)


async def _find(etcd: EtcdClient, keys: Keys, external_id: str) -> tuple[p.PreparedTerms, Hold, int] | None:
    """The record of the hold, or else of the receipt, and its mod revision."""
    ids = (p.hold_id(external_id), p.receipt_id(external_id))
    for answer in await etcd.read(*(Get(keys.hold(id_)) for id_ in ids)):
        if answer.kv is not None:
            return _terms(answer.kv)
    return None


def _terms(kv: KeyValue) -> tuple[p.PreparedTerms, Hold, int]:
    record = read(Hold.decode, kv)
    found = p.PreparedTerms.of(record)
    if found is None:
        raise UnreadableRecord(f"the record at {kv.key} cannot be read: it does not name the operation that it holds")
    return found, record, kv.mod_revision


async def confirm(etcd: EtcdClient, keys: Keys, external_id: str, expected: OperationRef | None = None) -> OperationRef:
    """Confirm a prepared operation, so that it may start. Idempotent.

    Raises NotFound; NotAllowed, with the reason, if it was given up, abandoned or cancelled, or is not the ``expected``
    operation; OutcomeUnknown (confirm it again).
    """
    while True:
        found = await _find(etcd, keys, external_id)
        if found is None:
            raise NotFound(_not_prepared(external_id))
        terms, record, mod = found
        ref = OperationRef.parse(terms.op)
        if expected not in (None, ref):
            raise NotAllowed(f"{expected} was not prepared: its spec names the external id of {ref}")
        if record.state is HoldState.CONFIRMED:
            return ref
        if record.state is HoldState.DENIED:
            raise NotAllowed(f"{ref} can no longer be confirmed and will never run: {record.text}")
        waits = await _still_waits(etcd, keys, ref, keys.hold(p.hold_id(external_id)), mod)
        if waits is None:
            continue
        state_mod, actions = waits
        actions = actions.and_then(Action(rfc3339(time.time()), "confirm", acting(etcd)))
        try:
            txn = p.confirm(keys, ref, terms, mod, actions, state_mod)
            if (await etcd.commit(txn, deadline=WRITE_LIMIT)).succeeded:
                return ref
        except OutcomeUnknown as error:
            raise OutcomeUnknown(
                f"cannot tell whether {shown(external_id)} was confirmed, because etcd did not answer: confirm it "
                "again, which is safe to repeat"
            ) from error


async def _still_waits(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, hold: str, mod: int
) -> tuple[int, Actions] | None:
    """The mod revision of its state, and its recorded actions; None if its hold has changed.

    After a change of the hold the operation may have been confirmed, started and ended. Raises NotAllowed if it has
    ended under its hold.
    """
    own = (Get(keys.of(ref, "state")), Get(keys.of(ref, "actions")))
    state, done, history, now = await etcd.read(*own, Get(keys.history(ref)), Get(hold))
    if now.kv is None or now.kv.mod_revision != mod:
        return None
    if history.kv is not None:
        record = read(History.decode, history.kv)
        why = f": {record.cancel.text}" if record.cancel is not None and record.cancel.text else ""
        raise NotAllowed(f"{ref} cannot be confirmed: it ended as {record.state}{why}")
    if state.kv is None or read(word(State), state.kv) is not State.PENDING:
        raise NotAllowed(f"{ref} cannot be confirmed: it is no longer waiting")
    return state.kv.mod_revision, read(Actions.decode, done.kv) if done.kv is not None else NO_ACTIONS


async def held_by(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> str | None:
    """The external id of a prepared operation; None if it was not prepared. Raises NotFound."""
    spec, history = await etcd.read(Get(keys.of(ref, "spec")), Get(keys.history(ref)))
    if spec.kv is not None:
        return p.external_id_of(read(Spec.decode, spec.kv).hold)
    if history.kv is None:
        raise NotFound(f"there is no operation {ref}")
    return p.external_id_of(read(History.decode, history.kv).request_id)


def never_ran(record: History) -> bool:
    """Whether the operation ended as cancelled before it had a plan."""
    return record.total == 0 and record.state is State.CANCELLED


async def confirm_operation(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> None:
    """Confirm an operation by its name, as :func:`confirm` does.

    Works also when only its history is left.
    """
    external_id = await held_by(etcd, keys, ref)
    if external_id is None:
        raise NotAllowed(f"{ref} was not prepared: there is nothing to confirm")
    try:
        await confirm(etcd, keys, external_id, ref)
    except NotFound:
        kv = await etcd.get(keys.history(ref))
        record = read(History.decode, kv) if kv is not None else None
        if record is not None and never_ran(record):
            why = record.cancel.text if record.cancel is not None else record.state
            raise NotAllowed(f"{ref} can no longer be confirmed and will never run: {why}") from None


async def find(etcd: EtcdClient, keys: Keys, external_id: str) -> OperationRef:
    """The operation that was prepared under this external id. Raises NotFound."""
    found = await _find(etcd, keys, external_id)
    if found is None:
        raise NotFound(_not_prepared(external_id))
    return OperationRef.parse(found[0].op)


def _not_prepared(external_id: str) -> str:
    name = shown(external_id)
    return f"no operation is prepared under the external id {name}: it was never prepared, or it ended long ago"

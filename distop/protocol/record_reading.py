"""Reads records from etcd.

This is the one place where a value becomes a record, or an error with its key. A later release, a person, or another
program that uses the same etcd may have written the value.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from distop.errors import InvalidArgument, UnreadableRecord
from distop.protocol import keys as K
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.dependencies import Edge, Hold
from distop.protocol.executor_nodes import Drain
from distop.protocol.field_checks import shown
from distop.protocol.identity import holder_of
from distop.protocol.jobs import Claim
from distop.protocol.json_codec import SCHEMA_VERSION, UNREADABLE, loads
from distop.protocol.operation_options import Options
from distop.protocol.plan import Plan
from distop.protocol.policy import NO_EVENTS, Policy, PolicyState, SeenPolicy, WaitingEvents
from distop.protocol.records import Attempts, Cancel, Decision, History, Node, Phase, Spec, State, TableRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from distop.protocol.keys import Keys, ParsedKey
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue

T = TypeVar("T")

_SPACE = re.compile(r"[0-9a-f]{32}")


def read(decode: Callable[[bytes], T], kv: KeyValue) -> T:
    """The record of a key. Raises UnreadableRecord, which names the key and the reason."""
    try:
        return decode(kv.value)
    except UNREADABLE as error:
        raise UnreadableRecord(f"the record at {kv.key} cannot be read: {_why(kv.value, error)}") from error


def of_its_kind(ref: OperationRef, table: str, type_name: str, key: str) -> OperationRef:
    """The operation ``ref``, if it is of this table and type.

    The record at ``key`` names it. Raises UnreadableRecord for any other. Otherwise a user who may only write one
    table's keys could make others act on another table's operations.
    """
    if (ref.table, ref.type) != (table, type_name):
        raise UnreadableRecord(f"the record at {key} names {ref}, which is not of type {type_name} on table {table}")
    return ref


def read_holder(kv: KeyValue, table: str, type_name: str) -> OperationRef:
    """The operation of this table and type that an id's or request's key names. Raises UnreadableRecord."""
    return of_its_kind(read(holder_of, kv), table, type_name, kv.key)


def read_policy(policy: KeyValue | None, state: KeyValue | None, events: KeyValue | None) -> SeenPolicy:
    """A policy from its keys (``policy.policy_reads``). Raises UnreadableRecord."""
    return SeenPolicy(
        read(Policy.decode, policy) if policy is not None else None,
        policy.mod_revision if policy is not None else 0,
        read(PolicyState.decode, state) if state is not None else PolicyState(),
        state.mod_revision if state is not None else 0,
        read(WaitingEvents.decode, events) if events is not None else NO_EVENTS,
        events.mod_revision if events is not None else 0,
    )


def _why(value: bytes, error: BaseException) -> str:
    try:
        data: Any = loads(value)
    except (ValueError, RecursionError):
        return f"{shown(value)} is not a valid value"
    version = data.get("v") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        return f"it has version {version}, but this release only knows version {SCHEMA_VERSION}: use a later release"
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    if isinstance(data, dict):
        return str(error)
    return f"{shown(value)} is not a valid value"


def word(kind: Callable[[str], T]) -> Callable[[bytes], T]:
    """The decoder of a plain word or number."""
    return lambda value: kind(value.decode())


def space_of(value: bytes) -> str:
    """The decoder of a namespace's id, which is also the name of a folder."""
    text = value.decode()
    if not _SPACE.fullmatch(text):
        raise ValueError("it is not 32 hexadecimal digits")
    return text


def counts(value: bytes) -> dict[str, int]:
    """The decoder of runOps, without zeros."""
    return {str(name): int(n) for name, n in loads(value).items() if int(n) > 0}


_OF_FAMILY: Mapping[str, Callable[[bytes], object]] = {
    K.NODE: Node.decode,
    K.NODE_DRAIN: Drain.decode,
    K.BEHAVIOR: Declaration.decode,
    K.TABLE: TableRecord.decode,
    K.REMOVED_TABLE: TableRecord.decode,
    K.CLAIM: Claim.decode,
    K.HOLD: Hold.decode,
    K.UNIQUE: holder_of,
    K.REQUEST: holder_of,
    K.PENDING: word(Phase),
    K.COORDINATOR: word(str),
    K.POLICY: Policy.decode,
    K.POLICY_STATE: PolicyState.decode,
    K.POLICY_EVENT: WaitingEvents.decode,
    K.POLICY_EVALUATOR: word(str),
    K.SPACE: space_of,
}
_OF_OPERATION: Mapping[str, Callable[[bytes], object]] = {
    "runOps": counts,
    "nextInstanceId": word(int),
    "current": word(int),
    "arg": loads,
    "spec": Spec.decode,
    "state": word(State),
    "cancel": Cancel.decode,
    "plan": Plan.decode,
    "planning": Attempts.decode,
    "decision": Decision.decode,
    "options": Options.decode,
    "after": Edge.decode,
    "next": Edge.decode,
}


def decoder(key: ParsedKey) -> Callable[[bytes], object] | None:
    """The decoder of a key's value; None if it is not checked.

    Not checked are large values, those of jobs' keys (there are many), and gates: any value is valid.
    """
    if key.family in _OF_FAMILY:
        return _OF_FAMILY[key.family]
    if key.family == K.HISTORY and not key.name:
        return History.decode
    if key.chunk >= 0 or (key.family == K.OP and key.partition >= 0):
        return None
    return _OF_OPERATION.get(key.name)


def to_check(keys: Keys, found: Iterable[str]) -> list[str]:
    """The keys whose values :func:`unreadable` can check."""
    wanted = []
    for key in found:
        try:
            if decoder(keys.parse(key)) is not None:
                wanted.append(key)
        except InvalidArgument:
            continue  # decide.orphan_keys reports it
    return wanted


def unreadable(keys: Keys, found: Iterable[KeyValue]) -> list[str]:
    """A sentence for each of these records that cannot be read."""
    wrong = []
    for kv in found:
        decode = decoder(keys.parse(kv.key))
        try:
            if decode is not None:
                read(decode, kv)
        except UnreadableRecord as error:
            wrong.append(str(error))
    return wrong

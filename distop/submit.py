"""Starting an operation: what is read and checked, and the race for the next instance number (I39)."""

from __future__ import annotations

import getpass
import logging
import math
import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from distop.clock import random, time, uuid
from distop.core import catalog
from distop.core import keys as K
from distop.core import transitions as t
from distop.core.codec import rfc3339
from distop.core.declaration import Declaration
from distop.core.digest import plan_digest, request_digest
from distop.core.frozen import frozen
from distop.core.model import CLUSTER_TABLE, MAX_ARGUMENT_BYTES, WHOLE, History, OperationRef, Phase, Spec, TableRecord
from distop.core.plan import PartitionPlan, Plan, encode_chunk
from distop.core.records import read, word
from distop.core.txn import Get, GetResult
from distop.errors import (
    Incompatible,
    InvalidArgument,
    NotFound,
    OperationStartError,
    OutcomeUnknown,
    UnknownBehavior,
    UnreadableRecord,
)
from distop.reading import readable
from distop.suggest import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.core.keys import Keys
    from distop.core.txn import KeyValue, TxnResult
    from distop.store.client import EtcdClient

log = logging.getLogger("distop.client")

WRITE_LIMIT = 30.0
"""Seconds that a client repeats a transaction whose outcome is unknown before it says so."""
CONTENTION_LIMIT = 60.0
"""Seconds after which a start that always loses the race for the table's counters gives up."""
_POLICIES = ("fail_fast", "collect_all")


class Lost(Exception):
    """Another start or finish on the table came first: read again."""


@frozen
class Request:
    """What the caller asks for, checked as far as it can be without etcd."""

    type: str
    table: str
    arg: bytes
    partitions: tuple[str, ...] | None
    request_id: str
    own_id: bool
    """The caller chose the request id: the same call may have been made before."""
    failure_policy: str | None
    retry_attempts: int | None
    submitter: str
    rerun_of: str = ""
    """The operation of whose partitions these are some."""


def whoami() -> str:
    """Who submits, where the caller does not say: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def text(value: Any, what: str) -> str:
    """The value, which must be a text. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a text, not {value!r}")
    return value


def seconds(value: Any, what: str) -> float:
    """The value, which must be a number. Raises InvalidArgument."""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise InvalidArgument(f"{what} must be a number of seconds, not {value!r}")
    return value


def request(
    type_name: str,
    table: str,
    arg: bytes,
    partitions: Sequence[str] | None,
    request_id: str | None,
    failure_policy: str | None,
    retry_attempts: int | None,
    submitter: str,
) -> Request:
    """Raises InvalidArgument."""
    K.check_type_name(text(type_name, "the operation type"))
    K.encode(text(table, "the name of a table"))
    names = _names(partitions)
    if names is not None and table == CLUSTER_TABLE:
        raise InvalidArgument(f"an operation on {CLUSTER_TABLE} has one job for everything: name no partitions")
    if failure_policy is not None and (not isinstance(failure_policy, str) or failure_policy not in _POLICIES):
        raise InvalidArgument(f"the failure policy {failure_policy!r} must be one of {', '.join(_POLICIES)}")
    if retry_attempts is not None and (
        not isinstance(retry_attempts, int) or isinstance(retry_attempts, bool) or retry_attempts < 1
    ):
        raise InvalidArgument(f"the number of attempts must be a whole number of at least 1, not {retry_attempts!r}")
    if request_id is not None and not (isinstance(request_id, str) and 0 < len(request_id) <= 200):
        raise InvalidArgument("a request id is a text of 1 to 200 characters")
    text(submitter, "the submitter")
    own = request_id is not None
    identity = request_id if request_id is not None else str(uuid.uuid4())
    return Request(type_name, table, arg, names, identity, own, failure_policy, retry_attempts, submitter)


def _names(partitions: Sequence[str] | None) -> tuple[str, ...] | None:
    if partitions is None:
        return None
    if isinstance(partitions, str):
        raise InvalidArgument(f"partitions is a list of names, such as [{partitions!r}]")
    if not isinstance(partitions, Iterable):
        raise InvalidArgument(f"partitions is a list of names, not {partitions!r}")
    names = tuple(partitions)
    if not names:
        raise InvalidArgument("the list of partitions is empty: name some, or leave it out for all of them")
    if not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument("a partition's name must be a text that is not empty")
    if len(set(names)) < len(names):
        twice = next(name for n, name in enumerate(names) if name in names[:n])
        raise InvalidArgument(f"the partition {twice!r} is named twice")
    try:
        size = sum(len(name.encode()) + 3 for name in names)
    except UnicodeEncodeError:
        raise InvalidArgument("a partition's name holds a lone surrogate, which is no character") from None
    if size > MAX_ARGUMENT_BYTES:
        raise InvalidArgument(f"the names of {len(names)} partitions take {size} bytes; at most 512 KiB are allowed")
    return names


async def submit(etcd: EtcdClient, keys: Keys, wanted: Request) -> OperationRef:
    """Start the operation, once for each request id (invariant 14).

    Raises UnknownBehavior, InvalidArgument, NotFound (the table), Incompatible, OutcomeUnknown (call again with the
    same request id), EtcdUnavailable.
    """
    from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

    began = time.monotonic()

    def pause(state: RetryCallState) -> float:
        return random.uniform(0, min(0.25, 0.004 * 2.0 ** min(state.attempt_number - 1, 10)))

    try:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Lost),
            wait=pause,
            stop=lambda _: time.monotonic() - began > CONTENTION_LIMIT,
            reraise=True,
        ):
            with attempt:
                return await _attempt(etcd, keys, wanted)
    except Lost:
        raise OperationStartError(
            f"{wanted.type} on {wanted.table} could not be started within {CONTENTION_LIMIT:g} s, because others start "
            "and finish operations on it all the time: try again"
        ) from None
    raise AssertionError("unreachable")


async def _attempt(etcd: EtcdClient, keys: Keys, wanted: Request) -> OperationRef:
    run_ops, following, declared, record = await etcd.read(
        Get(keys.run_ops(wanted.table)),
        Get(keys.next_instance(wanted.table, wanted.type)),
        Get(keys.behavior(wanted.type)),
        Get(keys.table(wanted.table)),
    )
    if wanted.own_id and following.kv is not None and (found := await find_request(etcd, keys, wanted)) is not None:
        return found
    declaration = await _declaration(etcd, keys, wanted.type, declared)
    if record.kv is None and wanted.table != CLUSTER_TABLE:
        raise NotFound(
            f"there is no table {wanted.table!r}: register it with "
            f"{command('table', 'add', wanted.table, '--format', 'parquet', '--location', 'DIR')}"
        )
    if declaration.needs_table and wanted.table == CLUSTER_TABLE:
        raise InvalidArgument(f"{wanted.type} works on a table: name one instead of {CLUSTER_TABLE}")
    obj = _object(declaration, wanted)
    running = catalog.running(run_ops.kv)
    await _check_conflicts(etcd, keys, wanted, declaration, running)
    ref = OperationRef(wanted.table, wanted.type, obj, read(word(int), following.kv) if following.kv is not None else 1)
    seen = t.Counters(running, _mod(run_ops), ref.instance, _mod(following))
    spec = _spec(wanted, declaration, read(TableRecord.decode, record.kv) if record.kv is not None else None)
    planned = _whole() if wanted.table == CLUSTER_TABLE else None
    txn = t.start(keys, ref, seen, spec, wanted.arg, planned)
    try:
        result = await etcd.commit(txn, deadline=WRITE_LIMIT)
    except OutcomeUnknown as error:
        raise OutcomeUnknown(
            f"whether {wanted.type} on {wanted.table} was started is not known, because etcd stopped answering: call "
            f"again with request_id={wanted.request_id!r}, which starts it only if it was not"
        ) from error
    if result.succeeded or _won(result, wanted, ref):
        return ref
    current = _get(result, 4)
    if spec.one_at_a_time and current is not None:
        holder = OperationRef(ref.table, ref.type, ref.object, read(word(int), current))
        raise Incompatible(
            f"{_name(ref)} cannot start while {holder} runs: {wanted.type} runs one at a time"
            + (" for each object" if obj else "")
        )
    log.debug("start of %s on %s lost the race for instance %d", wanted.type, wanted.table, ref.instance)
    raise Lost


def _mod(found: GetResult) -> int:
    return found.kv.mod_revision if found.kv is not None else 0


def _get(result: TxnResult, position: int) -> KeyValue | None:
    answer = result.responses[position]
    return answer.kv if isinstance(answer, GetResult) else None


def _won(result: TxnResult, wanted: Request, ref: OperationRef) -> bool:
    """An earlier copy of a refused start was applied: its request id stands in the spec, or in the history (T9)."""
    spec, history = _get(result, 2), _get(result, 3)
    try:
        return (spec is not None and _is_of(read(Spec.decode, spec), wanted, ref)) or (
            history is not None and _is_of(read(History.decode, history), wanted, ref)
        )
    except UnreadableRecord:
        return False  # we wrote nothing that we cannot read


def _is_of(found: Spec | History, wanted: Request, ref: OperationRef) -> bool:
    """The operation was started by this request. Raises InvalidArgument where its id was used for another one."""
    if found.request_id != wanted.request_id:
        return False
    if found.request_digest not in ("", request_digest(wanted.arg, wanted.partitions)):  # "": of an earlier release
        raise InvalidArgument(
            f"the request id {wanted.request_id!r} has started {ref}, with another argument or other partitions: "
            "repeat that request as it was, or choose a new id"
        )
    return True


def _name(ref: OperationRef) -> str:
    return f"{ref.type} on {ref.table}" + (f" for {ref.object}" if ref.object else "")


def _spec(wanted: Request, declaration: Declaration, record: TableRecord | None) -> Spec:
    from dataclasses import replace

    rules = declaration.rules()
    if wanted.failure_policy is not None:
        rules = replace(rules, failure_policy=wanted.failure_policy)
    if wanted.retry_attempts is not None:
        rules = replace(rules, retry=replace(rules.retry, attempts=wanted.retry_attempts))
    return Spec(
        wanted.request_id,
        rfc3339(time.time()),
        wanted.submitter,
        rules,
        record,
        wanted.partitions,
        declaration.instances == "one",
        rerun_of=wanted.rerun_of,
        request_digest=request_digest(wanted.arg, wanted.partitions),
    )


def _whole() -> tuple[Plan, list[bytes]]:
    chunk = encode_chunk([PartitionPlan(0, WHOLE)])
    return Plan(1, "", plan_digest([chunk]), 1), [chunk]


def _object(declaration: Declaration, wanted: Request) -> str:
    from distop.schema import check_argument

    arg = check_argument(wanted.type, declaration.arg_schema, wanted.arg)
    if declaration.object_field is None:
        return ""
    value = arg.get(declaration.object_field) if isinstance(arg, dict) else None
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise InvalidArgument(
            f"the argument of {wanted.type} needs {declaration.object_field!r}, a text that names what it works on"
        )
    K.encode_object(str(value))
    return str(value)


async def _declaration(etcd: EtcdClient, keys: Keys, type_name: str, found: GetResult) -> Declaration:
    if found.kv is not None:
        return read(Declaration.decode, found.kv)
    listing = await etcd.list(*keys.family(K.BEHAVIOR), keys_only=True)
    published = ", ".join(sorted(kv.key.rpartition(".")[2] for kv in listing.kvs))
    known = f"published: {published}" if published else "none is published yet"
    raise UnknownBehavior(
        f"there is no behavior {type_name!r} ({known}); an executor that has it installed must have been started once"
    )


async def _check_conflicts(
    etcd: EtcdClient, keys: Keys, wanted: Request, declaration: Declaration, running: Mapping[str, int]
) -> None:
    """``conflicts_with``, both ways. The guard on runOps makes what is seen here hold at the start."""
    types = sorted(running)
    if not types or (types == [wanted.type] and wanted.type not in declaration.conflicts_with):
        return
    answers = await etcd.read(*(Get(keys.behavior(name)) for name in types))
    others = {
        name: read(Declaration.decode, answer.kv).conflicts_with if answer.kv is not None else ()
        for name, answer in zip(types, answers, strict=True)
    }
    excluding = catalog.excluded_by(wanted.type, declaration.conflicts_with, others)
    if not excluding:
        return
    holders = [ref for name in excluding for ref in await running_refs(etcd, keys, wanted.table, name)]
    if not holders:
        raise Lost  # it ended between the two reads
    names = " and ".join(map(str, holders[:3])) + (" and others" if len(holders) > 3 else "")
    run = "runs" if len(holders) == 1 else "run"
    raise Incompatible(
        f"{wanted.type} on {wanted.table} cannot start while {names} {run}: {wanted.type} and "
        f"{' and '.join(excluding)} exclude each other"
    )


async def running_refs(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> list[OperationRef]:
    """The operations of a type that run on a table (those that only wait or are being cleaned up are left out)."""
    idle = (Phase.WAITING.encode(), Phase.CLEANING.encode())
    return catalog.refs(keys, [kv for kv in await _active(etcd, keys, table, type_name) if kv.value not in idle])


async def _active(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> list[KeyValue]:
    """Gates and pending keys at one revision: an operation moves between the two, and always has one of them."""
    ranges = (catalog.type_family(keys, family, table, type_name) for family in (K.OPEN, K.PENDING))
    return [kv for found in await etcd.read(*(Get(start, end) for start, end in ranges)) for kv in found.kvs]


async def find_request(etcd: EtcdClient, keys: Keys, wanted: Request) -> OperationRef | None:
    """The operation that this request has started before, if any. Raises InvalidArgument where its id was used for
    another request.

    It is looked for after the counters were read, and the start is guarded by them: so what starts in between makes
    the start fail. Active ones first, then the history, since an operation goes from there to here.
    """
    found = catalog.refs(keys, await _active(etcd, keys, wanted.table, wanted.type))
    for n in range(0, len(found), 100):
        page = found[n : n + 100]
        for ref, answer in zip(page, await etcd.read(*(Get(keys.of(ref, "spec")) for ref in page)), strict=True):
            if answer.kv is not None and _is_of(read(Spec.decode, answer.kv), wanted, ref):
                return ref
    listing = await etcd.list(*catalog.type_family(keys, K.HISTORY, wanted.table, wanted.type), page=100)
    for kv, record in readable(etcd, History.decode, (kv for kv in listing.kvs if catalog.refs(keys, [kv]))):
        if _is_of(record, wanted, ref := catalog.refs(keys, [kv])[0]):
            return ref
    return None

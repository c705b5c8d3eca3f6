"""Finds the operation that a request has started before, and running operations.

Both are searched among those of one type on one table. A request id that the caller chose has its own key, which names
the operation (``protocol.identity``): it is read with each start, since a hundred thousand operations may be pending. A
generated id has no key: only a caller that was told of an unknown outcome can repeat it. It is searched in the specs of
active operations, newest first, then in the history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from distop.errors import InvalidArgument, UnreadableRecord
from distop.protocol import keys as K
from distop.protocol import table_registry
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.dependencies import GRAPH, Hold, HoldState
from distop.protocol.frozen import frozen
from distop.protocol.identity import MADE, request_digest
from distop.protocol.record_reading import read, read_holder
from distop.protocol.records import History, OperationRef, Phase, Spec
from distop.protocol.txn import Get
from distop.services.readable_records import readable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

_PAGE = 100


@frozen
class BeingInserted:
    """An earlier call is inserting the operation's graph, under this hold."""

    ref: OperationRef
    hold: str


Found: TypeAlias = "OperationRef | BeingInserted | InvalidArgument | UnreadableRecord | None"


def is_of(found: Spec | History, wanted: Request, ref: OperationRef) -> bool:
    """Whether the operation was started by this request.

    Raises InvalidArgument if its request id was used for another request.
    """
    if found.request_id != wanted.request_id:
        return False
    if found.request_digest != request_digest(wanted.arg, wanted.partitions):
        raise InvalidArgument(
            f"the request id {wanted.request_id!r} has started {ref} with another argument or other partitions: "
            "repeat that request unchanged, or choose a new request id"
        )
    return True


def won(spec: KeyValue | None, history: KeyValue | None, wanted: Request, ref: OperationRef) -> bool:
    """Whether an earlier copy of a refused start was applied: spec or history record has its request id (T9).

    Raises InvalidArgument as :func:`is_of` does.
    """
    try:
        return (spec is not None and is_of(read(Spec.decode, spec), wanted, ref)) or (
            history is not None and is_of(read(History.decode, history), wanted, ref)
        )
    except UnreadableRecord:
        return False  # an earlier copy of this start would be readable


class _Search:
    """The operations of these requests found so far."""

    def __init__(self, wanted: Sequence[Request]) -> None:
        self.found: list[Found] = [None] * len(wanted)
        self._left: dict[str, list[tuple[int, Request]]] = {}
        for n, one in enumerate(wanted):
            self._left.setdefault(one.request_id, []).append((n, one))

    def complete(self) -> bool:
        """Whether all requests are found."""
        return not self._left

    def has_no_key(self) -> bool:
        """Whether one of the remaining request ids was generated, not chosen by a caller."""
        return any(request_id.startswith(MADE) for request_id in self._left)

    def concerns(self, record: Spec | History) -> bool:
        """Whether the operation has one of the request ids searched for."""
        return record.request_id in self._left

    def take(self, record: Spec | History, ref: OperationRef, inserted: str = "") -> None:
        """Record this operation. ``inserted``: the hold under which its graph is being inserted."""
        for n, one in self._left.pop(record.request_id, ()):
            try:
                is_of(record, one, ref)
                self.found[n] = BeingInserted(ref, inserted) if inserted else ref
            except InvalidArgument as error:
                self.found[n] = error

    def refuse(self, request_id: str, error: UnreadableRecord) -> None:
        """Record that an unreadable record hides the operation of this request id."""
        for n, _ in self._left.pop(request_id, ()):
            self.found[n] = error


async def find_earlier(etcd: EtcdClient, keys: Keys, wanted: Sequence[Request]) -> list[Found]:
    """For each of these requests of one type on one table: the operation that an earlier call started, or None.

    An InvalidArgument if the request id was used for another request, an UnreadableRecord if a record of the operation
    cannot be read. Operations of an abandoned graph were never started.

    The search follows the read of the counters, which the start compares. So an operation that starts in between makes
    the start fail.
    """
    search, keyed = _Search(wanted), [one for one in wanted if not one.request_id.startswith(MADE)]
    for n in range(0, len(keyed), _PAGE):
        await _look_up(etcd, keys, search, keyed[n : n + _PAGE])
    if search.has_no_key():
        await _look_everywhere(etcd, keys, search, wanted[0].table, wanted[0].type)
    return search.found


async def _look_up(etcd: EtcdClient, keys: Keys, search: _Search, page: Sequence[Request]) -> None:
    """Search by the keys of request ids.

    An operation moves from its own keys to its history record, so both are read at once.
    """
    answers = await etcd.read(*(Get(keys.request(one.table, one.type, one.request_id)) for one in page))
    named: dict[OperationRef, str] = {}
    for one, answer in zip(page, answers, strict=True):
        try:
            if answer.kv is not None:
                named[read_holder(answer.kv, one.table, one.type)] = one.request_id
        except UnreadableRecord as error:
            search.refuse(one.request_id, error)
    gets = [Get(key) for ref in named for key in (keys.of(ref, "spec"), keys.history(ref))]
    found = [answer.kv for n in range(0, len(gets), _PAGE) for answer in await etcd.read(*gets[n : n + _PAGE])]
    specs: dict[OperationRef, Spec] = {}
    for (ref, request_id), spec, history in zip(named.items(), found[::2], found[1::2], strict=True):
        try:
            if history is None and spec is not None:
                specs[ref] = read(Spec.decode, spec)
            elif history is not None and not (ended := read(History.decode, history)).void:
                search.take(ended, ref)
        except UnreadableRecord as error:
            search.refuse(request_id, error)
    holds = await graph_holds(etcd, keys, {spec.hold for spec in specs.values()})
    for ref, active in specs.items():
        _take_active(search, holds, active, ref)


async def _look_everywhere(etcd: EtcdClient, keys: Keys, search: _Search, table: str, type_name: str) -> None:
    """Search active operations first, then the history, in which ended ones are."""
    active = await active_refs(etcd, keys, table, type_name)
    await _look_through(etcd, keys, search, active[::-1])  # most repeated calls repeat a recent one
    if not search.complete():
        listing = await etcd.list(*table_registry.type_family(keys, K.HISTORY, table, type_name), page=_PAGE)
        for kv, record in readable(etcd, History.decode, (kv for kv in listing.kvs if table_registry.refs(keys, [kv]))):
            if search.concerns(record) and not record.void:
                search.take(record, table_registry.refs(keys, [kv])[0])
                if search.complete():
                    break


async def _look_through(etcd: EtcdClient, keys: Keys, search: _Search, active: Sequence[OperationRef]) -> None:
    for n in range(0, len(active), _PAGE):
        if search.complete():
            return
        page = active[n : n + _PAGE]
        answers = await etcd.read(*(Get(keys.of(ref, "spec")) for ref in page))
        specs = ((ref, read(Spec.decode, one.kv)) for ref, one in zip(page, answers, strict=True) if one.kv is not None)
        concerned = [(ref, spec) for ref, spec in specs if search.concerns(spec)]
        holds = await graph_holds(etcd, keys, {spec.hold for _, spec in concerned})
        for ref, spec in concerned:
            _take_active(search, holds, spec, ref)


def _take_active(search: _Search, holds: Mapping[str, HoldState], spec: Spec, ref: OperationRef) -> None:
    """Record an active operation, unless its graph is denied. ``holds``: the state of each graph's hold."""
    state = holds.get(spec.hold)
    if state is not HoldState.DENIED:
        search.take(spec, ref, spec.hold if state is HoldState.HELD else "")


async def graph_holds(etcd: EtcdClient, keys: Keys, names: Iterable[str]) -> dict[str, HoldState]:
    """The existing holds of graphs among these."""
    wanted = sorted(set(names) - {""})
    found: dict[str, HoldState] = {}
    for n in range(0, len(wanted), _PAGE):
        page = wanted[n : n + _PAGE]
        for name, one in zip(page, await etcd.read(*(Get(keys.hold(name)) for name in page)), strict=True):
            record = read(Hold.decode, one.kv) if one.kv is not None else None
            if record is not None and record.kind == GRAPH:
                found[name] = record.state
    return found


async def excluding(
    etcd: EtcdClient, keys: Keys, type_name: str, running: Iterable[str], declared: Sequence[str] | None = None
) -> tuple[Sequence[str], list[str]]:
    """The types that this type declares to exclude, and the running types that exclude it by either declaration.

    ``declared``: the types that it declares to exclude; None: the declaration is read. ``running``: the types that run
    on the table.
    """
    types = sorted(running)
    if declared is not None and types in ([], [type_name]):
        return declared, types if table_registry.excludes(declared, type_name) else []
    names = types if declared is not None else sorted({type_name, *types})
    answers = await etcd.read(*(Get(keys.behavior(name)) for name in names))
    found = {
        name: read(Declaration.decode, answer.kv).conflicts_with if answer.kv is not None else ()
        for name, answer in zip(names, answers, strict=True)
    }
    own = declared if declared is not None else found[type_name]
    return own, table_registry.excluded_by(type_name, own, {name: found[name] for name in types})


async def active_refs(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> list[OperationRef]:
    """The existing operations of a type on a table, by instance number."""
    refs = table_registry.refs(keys, await _active(etcd, keys, table, type_name))
    return sorted(refs, key=lambda ref: ref.instance)


async def running_refs(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> list[OperationRef]:
    """The running operations of a type on a table, without pending and cleaning ones."""
    idle = (Phase.WAITING.encode(), Phase.CLEANING.encode())
    return table_registry.refs(keys, [kv for kv in await _active(etcd, keys, table, type_name) if kv.value not in idle])


async def _active(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> list[KeyValue]:
    """Gates and pending keys at one revision: an operation moves between the two, and always has one of them."""
    ranges = (table_registry.type_family(keys, family, table, type_name) for family in (K.OPEN, K.PENDING))
    return [kv for found in await etcd.read(*(Get(start, end) for start, end in ranges)) for kv in found.kvs]

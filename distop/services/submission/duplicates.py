"""Applies the duplicate policy to starts whose id is active.

(docs/internals/protocols.md, "Ids".) The holder of the id is read, and compared again by the start's transaction: a
concurrent change makes the transaction fail, and everything is read again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.clock import time
from distop.decide.due_operations import ended_waiting
from distop.errors import Incompatible, InvalidArgument, UnreadableRecord
from distop.protocol import identity
from distop.protocol.dependencies import GRAPH, Edge, Hold
from distop.protocol.frozen import frozen
from distop.protocol.identity import Takes, may_come_again, request_digest
from distop.protocol.json_codec import parse_time, rfc3339
from distop.protocol.record_reading import of_its_kind, read, read_holder, word
from distop.protocol.records import Cancel, History, OperationRef, Spec, State
from distop.protocol.schedule import Series
from distop.protocol.txn import Get
from distop.protocol.user_actions import NO_ACTIONS, Actions
from distop.services.submission.option_values import After
from distop.services.submission.start_request import FOLLOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue
    from distop.services.submission.start_request import Request
    from distop.store.client import EtcdClient

PAGE = 100
"""Number of id keys that are read at once."""
BETWEEN_TWO = 10.0
"""Seconds for which an ended operation's id is reserved for the next operation of its series."""
MAX_TAKEN_OVER = 30
"""Maximum predecessors of an operation that can be replaced: one transaction compares them."""


@frozen
class ResolvedStart:
    """The operation to start: the request, or its combination with the operation that it replaces."""

    request: Request
    id: str = ""
    holder: Holder | None = None
    """The holder of the id: it has ended, is followed, or is replaced."""
    replaces: bool = False
    alone: bool = False
    follows: OperationRef | None = None

    def spec(self, spec: Spec, wanted: Request) -> Spec:
        """The spec with the id; a repeated request is recognized by the digest of ``wanted``."""
        if not self.id:
            return spec
        digest = request_digest(wanted.arg, wanted.partitions)
        return replace(spec, id=self.id, follows=str(self.follows or ""), request_digest=digest)

    def takes(self, ref: OperationRef) -> Takes | None:
        """The compares and writes of the operation's start."""
        if not self.id:
            return None
        holder = self.holder
        if holder is None:
            return Takes(self.id)
        if not self.replaces or holder.spec is None:
            return Takes(self.id, holder.ref, holder.mod)
        now, by = rfc3339(time.time()), self.request.by or self.request.submitter
        why = Cancel("aborted", f"replaced by {ref}", str(ref), by, now)
        history = ended_waiting(holder.ref, holder.spec, State.CANCELLED, now, why, actions=holder.actions)
        return Takes(self.id, holder.ref, holder.mod, (history, why), self.alone)


@frozen
class Joined:
    """Nothing is started: this active operation is joined."""

    ref: OperationRef
    id: str


@frozen
class Undecided:
    """Not decided yet: the holder of the id is changing, or its graph is being inserted."""


@frozen
class Holder:
    """The holder of an id, as read at one revision.

    ``state`` None: it is gone, with all its records.
    """

    ref: OperationRef
    state: State | None
    mod: int
    spec: Spec | None
    arg: bytes
    actions: Actions = NO_ACTIONS


def id_of(declaration: Declaration, wanted: Request) -> str:
    """The id of a request, or "".

    Raises InvalidArgument for a duplicate policy without an id.
    """
    if wanted.one_off:
        return ""
    computed = None if wanted.id else identity.computed_id(declaration, wanted.table, wanted.arg)
    found = wanted.id or computed or ""
    if wanted.on_duplicate and not found:
        raise InvalidArgument(
            f"{wanted.type} computes no id, so the operation cannot have duplicates: give an id (--id) together with "
            "the duplicate policy"
        )
    if wanted.on_duplicate == "combine" and not declaration.combine:
        raise InvalidArgument(
            f"{wanted.type} declares no rule for combining arguments: choose another duplicate policy"
        )
    return found


async def resolve(
    etcd: EtcdClient, keys: Keys, declaration: Declaration, wanted: Sequence[Request], *, joins: bool = True
) -> list[ResolvedStart | Joined | Undecided | Incompatible | InvalidArgument | UnreadableRecord]:
    """Decide by id and policy what each of these requests of one type and table does.

    Without ``joins``, no request joins another operation: an error names the operation instead.
    """
    found: list[ResolvedStart | Joined | Undecided | Incompatible | InvalidArgument | UnreadableRecord] = []
    named: dict[str, KeyValue | None] = {}
    asked: list[str | InvalidArgument] = []
    for one in wanted:
        try:
            asked.append(id_of(declaration, one))
        except InvalidArgument as error:
            asked.append(error)
    every = sorted({id_ for id_ in asked if isinstance(id_, str) and id_})
    for first in range(0, len(every), PAGE):
        page = every[first : first + PAGE]
        answers = await etcd.read(*(Get(keys.unique(wanted[0].table, wanted[0].type, id_)) for id_ in page))
        named.update((id_, answer.kv) for id_, answer in zip(page, answers, strict=True))
    for one, id_ in zip(wanted, asked, strict=True):
        if isinstance(id_, InvalidArgument):
            found.append(id_)
        elif (kv := named.get(id_)) is None:
            found.append(ResolvedStart(one, id_))
        else:
            try:
                holder = await _holder(etcd, keys, read_holder(kv, one.table, one.type))
                found.append(await _by_policy(etcd, keys, declaration, one, id_, holder, joins))
            except (Incompatible, InvalidArgument, UnreadableRecord) as error:
                found.append(error)
    return found


async def _holder(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> Holder:
    state, spec, arg, actions = await etcd.read(
        *(Get(keys.of(ref, name)) for name in ("state", "spec", "arg", "actions"))
    )
    return Holder(
        ref,
        read(word(State), state.kv) if state.kv is not None else None,
        state.kv.mod_revision if state.kv is not None else 0,
        read(Spec.decode, spec.kv) if spec.kv is not None else None,
        arg.kv.value if arg.kv is not None else b"",
        read(Actions.decode, actions.kv) if actions.kv is not None else NO_ACTIONS,
    )


async def _by_policy(
    etcd: EtcdClient, keys: Keys, declaration: Declaration, wanted: Request, id_: str, holder: Holder, joins: bool
) -> ResolvedStart | Joined | Undecided:
    """Raises Incompatible, InvalidArgument."""
    policy, state = wanted.on_duplicate or "join", holder.state
    if not joins and holder.spec is not None and holder.spec.request_id == wanted.request_id:
        return Undecided()  # an earlier call has started it since that was looked for
    if state is None or state.terminal:
        return (
            Undecided() if await _series_continues(etcd, keys, policy, holder) else ResolvedStart(wanted, id_, holder)
        )
    held = await _held(etcd, keys, holder)
    if policy == "refuse":
        raise _duplicate_error(wanted, id_, holder, "")
    if held == GRAPH:
        return Undecided()  # whether it will ever have been is not known yet
    if not joins:
        raise _duplicate_error(wanted, id_, holder, ", and this start cannot join it")
    if policy == "join":
        _check_same(declaration, wanted, id_, holder)
        return Joined(holder.ref, id_)
    if policy == FOLLOW and holder.spec is not None and holder.spec.series is not None:
        return Joined(holder.ref, id_)
    if policy == FOLLOW and state is State.PENDING:
        raise _duplicate_error(wanted, id_, holder, ", and it is not part of a series")
    if policy == "replace" and state is not State.PENDING:
        why = ", and it has started: only operations that have not started can be replaced"
        raise _duplicate_error(wanted, id_, holder, why)
    if state is not State.PENDING:
        return _after_holder(wanted, id_, holder)
    if holder.spec is None:
        return Undecided()  # read while it was deleted
    if any(one.ref == holder.ref for one in wanted.after):
        raise InvalidArgument(f"an operation cannot both replace {holder.ref} and wait for it")
    if held:
        raise _duplicate_error(wanted, id_, holder, ", and it is held until it is confirmed")
    if policy == "replace":
        return await _in_turn(etcd, keys, ResolvedStart(wanted, id_, holder, replaces=True), holder.spec)
    return await _combined(etcd, keys, declaration, wanted, id_, holder)


async def _series_continues(etcd: EtcdClient, keys: Keys, policy: str, holder: Holder) -> bool:
    """Whether the holder has just ended, and the next operation of its series is about to start.

    If no coordinator cleans up, other starts go first after a while.
    """
    if holder.state is None or holder.spec is None or holder.spec.series is None or policy == FOLLOW:
        return False
    if not may_come_again(True, holder.state):
        return False
    kv = await etcd.get(keys.history(holder.ref))
    return kv is not None and time.time() - parse_time(read(History.decode, kv).finished) < BETWEEN_TWO


def _after_holder(wanted: Request, id_: str, holder: Holder) -> ResolvedStart:
    """The operation runs after the holder's end, and gets the id at once."""
    after = wanted.after
    if all(one.ref != holder.ref for one in after):
        after = (*after, After(holder.ref, "end"))
    return ResolvedStart(replace(wanted, after=after), id_, holder, follows=holder.ref)


async def _in_turn(etcd: EtcdClient, keys: Keys, asked: ResolvedStart, former: Spec) -> ResolvedStart:
    """The replacing operation waits for the running one of the same id, as the replaced one did."""
    if not former.follows:
        return asked
    wanted, holder = asked.request, asked.holder
    assert holder is not None
    key = keys.of(holder.ref, "spec")
    runs = of_its_kind(OperationRef.parse(former.follows), wanted.table, wanted.type, key)
    state = await etcd.get(keys.of(runs, "state"))
    if state is None or read(word(State), state).terminal:
        return asked
    after = asked.request.after
    if all(one.ref != runs for one in after):
        after = (*after, After(runs, "end"))
    return replace(asked, request=replace(asked.request, after=after), follows=runs)


async def _combined(
    etcd: EtcdClient, keys: Keys, declaration: Declaration, wanted: Request, id_: str, holder: Holder
) -> ResolvedStart | Joined | Undecided:
    """Replace the holder by an operation that combines both requests.

    It starts at the earlier start time, waits for the predecessors of both, and repeats if either does. If the request
    adds nothing, the holder is joined.
    """
    former = holder.spec
    assert former is not None
    if former.partitions != wanted.partitions and _names(former.partitions) != _names(wanted.partitions):
        raise _duplicate_error(wanted, id_, holder, " over other partitions")
    try:
        arg = identity.combined(declaration, holder.arg, wanted.arg)
    except InvalidArgument as error:
        raise _duplicate_error(wanted, id_, holder, f", and cannot be combined with this: {error}") from None
    due = min(former.not_before, wanted.not_before)  # "": at once
    if arg == holder.arg and due == former.not_before and not wanted.after and wanted.series is None:
        return Joined(holder.ref, id_)
    edges = [read(Edge.decode, kv) for kv in (await etcd.list(*keys.edges_range(holder.ref, "after"))).kvs]
    if any(edge.broken for edge in edges):
        return Undecided()  # it is about to end
    if len(edges) > MAX_TAKEN_OVER:
        why = f", and it waits for {len(edges)} operations, too many to replace it"
        raise _duplicate_error(wanted, id_, holder, why)
    if (await etcd.read(Get(*keys.edges_range(holder.ref, "next"), count_only=True)))[0].count:
        raise _duplicate_error(wanted, id_, holder, ", and other operations wait for it, so it cannot be replaced")
    known = {one.ref for one in wanted.after}
    taken_over = [After(ref, edge.on) for edge in edges if (ref := OperationRef.parse(edge.op)) not in known]
    series = wanted.series or (Series.from_json(former.series) if former.series is not None else None)
    request = replace(wanted, arg=arg, not_before=due, after=(*wanted.after, *taken_over), series=series)
    return await _in_turn(etcd, keys, ResolvedStart(request, id_, holder, replaces=True, alone=True), former)


async def _held(etcd: EtcdClient, keys: Keys, holder: Holder) -> str:
    """The kind of hold that keeps the operation from starting, or ""."""
    if holder.spec is None or not holder.spec.hold or holder.state is not State.PENDING:
        return ""
    kv = await etcd.get(keys.hold(holder.spec.hold))
    return read(Hold.decode, kv).kind if kv is not None else ""


def _check_same(declaration: Declaration, wanted: Request, id_: str, holder: Holder) -> None:
    """Raises Incompatible if the holder differs from the request in a way that matters."""
    if holder.spec is None or not holder.arg:
        return  # it ended in this moment, having had the id when that was read
    if _names(holder.spec.partitions) != _names(wanted.partitions):
        raise _duplicate_error(wanted, id_, holder, " over other partitions")
    if differ := identity.differing(declaration, holder.arg, wanted.arg):
        fields = f" ({', '.join(differ)})" if differ != [""] else ""
        raise _duplicate_error(wanted, id_, holder, f" with another argument{fields}, so its result would differ")


def _names(partitions: Sequence[str] | None) -> list[str] | None:
    return sorted(partitions) if partitions is not None else None


def _duplicate_error(wanted: Request, id_: str, holder: Holder, why: str) -> Incompatible:
    whose = "the same id" if id_.startswith(identity.COMPUTED) else f"the id {id_!r}"
    return Incompatible(
        f"{wanted.type} on {wanted.table} was not started: {holder.ref} has {whose} and is {holder.state}{why}"
    )

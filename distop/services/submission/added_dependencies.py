"""Adds dependencies to pending operations.

The dependencies of the new predecessors are followed, so that no cycle is created.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import InvalidArgument, NotAllowed, NotFound, OperationStartError
from distop.protocol import pending_operations as w
from distop.protocol.dependencies import GRAPH, Edge, Hold
from distop.protocol.record_reading import read
from distop.protocol.records import OperationRef, Spec, State
from distop.protocol.txn import Get
from distop.services.submission.awaited_operations import Standing, known, standings
from distop.services.submission.contention import overdue, pause
from distop.store.connection_settings import WRITE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distop.protocol.keys import Keys
    from distop.services.submission.option_values import After
    from distop.store.client import EtcdClient


async def add_dependencies(etcd: EtcdClient, keys: Keys, wanted: Sequence[tuple[After, OperationRef]]) -> None:
    """Add dependencies between operations: all of these pairs, or none (L26).

    A predecessor that has already succeeded is skipped. Raises NotFound; NotAllowed if a waiting operation has started
    or ended; OperationStartError if a predecessor ended so that the other could never start, or too many operations
    must be compared; InvalidArgument for a cycle.
    """
    pairs: dict[tuple[OperationRef, OperationRef], str] = {}
    for after, run in wanted:
        if pairs.setdefault((after.ref, run), after.on) != after.on:
            raise InvalidArgument(f"{run} can wait for {after.ref} only once: for its success or for its end")
    unique = list(dict.fromkeys(wanted))
    began, tries = time.monotonic(), 0
    while not await _try(etcd, keys, unique):
        tries += 1
        if overdue(began):
            raise OperationStartError("the operations to wait for keep changing: try again")
        await asyncio.sleep(pause(tries))


async def _try(etcd: EtcdClient, keys: Keys, wanted: Sequence[tuple[After, OperationRef]]) -> bool:
    found = await standings(etcd, keys, {ref for after, run in wanted for ref in (after.ref, run)})
    links: list[tuple[w.SeenState, w.SeenState, str]] = []
    standing = [(after, run, known(found[run]), known(found[after.ref])) for after, run in wanted]
    for after, run, waits, pred in standing:
        if waits.state is not State.PENDING:
            raise NotAllowed(f"{run} is {waits.state}: only operations that have not started can get dependencies")
        if pred.mod:
            links.append((_seen(pred), _seen(waits), after.on))
        elif after.on == "success" and pred.state is not State.SUCCESS:
            raise OperationStartError(f"{after.ref} ended as {pred.state}, so {run} could never start")
    if not links:
        return True
    above = await _above(etcd, keys, links)
    await _check_holds(etcd, keys, {one.ref for link in links for one in link[:2]} | {one.ref for one in above})
    names = {pred.ref for pred, _, _ in links} | {run.ref for _, run, _ in links} | {one.ref for one in above}
    if len(names) > w.SEEN_PER_TXN:
        raise OperationStartError(
            f"{len(names)} operations must be compared, and one transaction compares at most {w.SEEN_PER_TXN}: add "
            "fewer dependencies at once, or start such operations together (start_operations)"
        )
    return (await etcd.commit(w.add_dependencies(keys, links, above), deadline=WRITE_LIMIT)).succeeded


def _seen(one: Standing) -> w.SeenState:
    return w.SeenState(one.ref, one.state, one.mod)


async def _check_holds(etcd: EtcdClient, keys: Keys, refs: Collection[OperationRef]) -> None:
    """Raises NotAllowed for an operation whose graph is still being inserted."""
    specs = await etcd.read(*(Get(keys.of(ref, "spec")) for ref in sorted(refs)))
    for ref, answer in zip(sorted(refs), specs, strict=True):
        spec = read(Spec.decode, answer.kv) if answer.kv is not None else None
        held = await etcd.get(keys.hold(spec.hold)) if spec is not None and spec.hold else None
        if held is not None and read(Hold.decode, held).kind == GRAPH:
            raise NotAllowed(
                f"{ref} belongs to a graph that is still being inserted: add dependencies after the insertion"
            )


async def _above(
    etcd: EtcdClient, keys: Keys, links: Sequence[tuple[w.SeenState, w.SeenState, str]]
) -> list[w.SeenState]:
    """The direct and indirect dependencies of the new predecessors.

    Raises InvalidArgument for a cycle.
    """
    new: dict[OperationRef, set[OperationRef]] = {}
    for pred, run, _ in links:
        if pred.ref == run.ref:
            raise InvalidArgument(f"{run.ref} cannot wait for itself")
        new.setdefault(run.ref, set()).add(pred.ref)
    above: dict[OperationRef, set[OperationRef]] = {}
    todo = sorted({pred.ref for pred, _, _ in links})
    while todo and len(above) <= w.SEEN_PER_TXN:
        ref = todo.pop()
        if ref in above:
            continue
        listing = await etcd.list(*keys.edges_range(ref, "after"))
        above[ref] = {OperationRef.parse(read(Edge.decode, kv).op) for kv in listing.kvs}
        todo += sorted((above[ref] | new.get(ref, set())) - above.keys())
    _check_circle(above, new)
    linked = {pred.ref for pred, _, _ in links} | {run.ref for _, run, _ in links}
    found = await standings(etcd, keys, above.keys() - linked)
    existing = [known(one) for one in found.values() if not isinstance(one, NotFound)]
    return [_seen(one) for one in existing if one.mod]


def _check_circle(
    above: Mapping[OperationRef, set[OperationRef]], new: Mapping[OperationRef, set[OperationRef]]
) -> None:
    """Raises InvalidArgument if an operation would wait for itself."""
    for run in new:
        seen: set[OperationRef] = set()
        todo = set(new[run])
        while todo:
            ref = todo.pop()
            if ref == run:
                raise InvalidArgument(
                    f"the dependencies form a cycle: {run} would wait for itself through other operations"
                )
            seen.add(ref)
            todo |= (above.get(ref, set()) | new.get(ref, set())) - seen

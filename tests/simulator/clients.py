"""The clients of a simulation: they run the production client, and do what the scenario says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from distop.client.async_client import Client
from distop.client.graphs import Start, chain, chord, group
from distop.errors import (
    DistopError,
    EtcdRejected,
    EtcdUnavailable,
    NotAllowed,
    NotFound,
    OperationStartError,
    OutcomeUnknown,
    PermissionDenied,
    UnknownBehavior,
    WaitTimeout,
)
from distop.protocol import keys as K
from distop.protocol.executor_nodes import NodeState
from distop.protocol.records import CLUSTER_TABLE, OperationRef, TableRecord
from distop.protocol.txn import Get
from distop.services.submission import two_phase
from distop.services.submission.option_values import After, Every
from tests.simulator.caller_transactions import refused_within, start_with_branches
from tests.simulator.drawn_options import altered
from tests.simulator.prepared_starts import PATIENCE, decide
from tests.simulator.reruns import Rerun
from tests.simulator.slow_graphs import slowed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from distop.client.async_operation import Operation
    from distop.protocol.behavior_declaration import Declaration
    from distop.settings import ClientConfig
    from tests.simulator.scenario import DrainAct, Removal, Wish

PAUSING = 60.0
"""Seconds after which a pause has come about, or there is nobody left who would tell."""
AGAIN = 0.3
"""Seconds after which a client tries again what did not work."""
TRIES = 200
"""So often it tries to start something that is refused."""


class Told:
    """What clients were told: checked against etcd's history in the end."""

    def __init__(self, receipts_kept: float) -> None:
        self.receipts_kept = receipts_kept
        """Seconds for which it is known what became of a prepared operation, at least."""
        self.prepared: dict[str, float] = {}
        """Prepared operation → when its sender first knew of it."""
        self.started: dict[str, str] = {}
        """Request id → the operation that it began."""
        self.ended: dict[str, str] = {}
        """Operation → the state in which ``wait`` said that it ended."""
        self.of_ids: dict[str, str] = {}
        """Request → the id for which it may have been told of an operation that another one had begun."""
        self.reruns: list[Rerun] = []
        self.branches: dict[str, list[bool]] = {}
        """Request → whether its client's own transaction was committed, each time that it was told."""
        self.refused = 0
        self.surprises: list[str] = []
        self.not_found: dict[str, str] = {}
        """Operation → the answer to a call about it that raised NotFound."""
        self.senders: dict[str, str] = {}
        """Operation → what its sender said of it at last, of those that were prepared: ``confirming`` (it may have been
        heard), ``confirmed``, ``refused``."""


async def set_up(config: ClientConfig, tables: tuple[str, ...], declared: tuple[Declaration, ...] = ()) -> None:
    """Register the types without code, and the tables."""
    async with Client(config) as client:
        await _connected(client)
        for one in declared:
            policy, retry = one.failure_policy, one.retry
            await _insist(client.register_type, one.type_name, failure_policy=policy, retry=retry)
        for name in tables:
            await _insist(client.add_table, TableRecord(name, "parquet", f"/data/{name}"), check=False)


async def one_client(config: ClientConfig, wishes: list[tuple[int, Wish]], told: Told) -> None:
    """Fulfil these wishes, all at the same time."""
    async with Client(config) as client:
        await _connected(client)
        await asyncio.gather(*(_fulfil(client, f"request-{n}", wish, told) for n, wish in wishes))


async def drain_some(config: ClientConfig, drains: tuple[DrainAct, ...]) -> None:
    """Drain these executors, each for its time, or until it is empty."""
    async with Client(config) as client:
        await _connected(client)
        await asyncio.gather(*(_drain(client, wanted) for wanted in drains))


async def remove_some(config: ClientConfig, removals: tuple[Removal, ...], over: Callable[[], bool]) -> None:
    """Remove these tables, one after the other, and add them again. ``over``: nobody waits for anything any more."""
    async with Client(config) as client:
        await _connected(client)
        for wanted in removals:
            await asyncio.sleep(wanted.after)
            if await _remove(client, wanted.table, over):
                await asyncio.sleep(wanted.lasts)
            record = TableRecord(wanted.table, "parquet", f"/data/{wanted.table}")
            await _insist(client.add_table, record, check=False)


async def _remove(client: Client, table: str, over: Callable[[], bool]) -> bool:
    while not over():
        try:
            await _insist(client.remove_table, table)
            return True
        except NotFound:
            return True  # by a try whose outcome was unknown; or it is not registered yet
        except NotAllowed:
            await asyncio.sleep(AGAIN)  # operations run on it
    return False


async def _drain(client: Client, wanted: DrainAct) -> None:
    await asyncio.sleep(wanted.after)
    try:
        await _insist(client.drain, wanted.executor)
    except NotFound:
        return  # it is not alive
    if wanted.waits:
        while await _empty(client, wanted.executor) is not NodeState.DRAINED:
            continue
    else:
        await asyncio.sleep(wanted.lasts)
    await _undrain(client, wanted.executor)


async def _empty(client: Client, executor: str) -> NodeState:
    try:
        return NodeState(await _insist(client.drain, executor, wait=True, timeout=30.0))
    except WaitTimeout:
        return NodeState.DRAINING
    except NotFound:  # somebody else let it work again, and it is not alive
        return NodeState.DRAINED


async def _undrain(client: Client, executor: str) -> None:
    with contextlib.suppress(NotFound):  # it is not alive, and was never drained
        await _insist(client.undrain, executor)


async def let_go(
    config: ClientConfig,
    over: Callable[[], bool],
    drained: Callable[[], tuple[str, ...]],
    forsaken: Callable[[], tuple[str, ...]],
) -> None:
    """After all faults, undo what would keep operations from ending.

    Resume operations that somebody paused and left so, undo the drains of the ``drained`` executors, and cancel the
    ``forsaken`` operations: their executor is gone for good, and perhaps their client is, too.

    A paused operation is resumed once no job of it runs, so that the pause is seen to come about; or after a while,
    since an actor that is gone holds its jobs for as long.
    """
    async with Client(config) as client:
        await _connected(client)
        for n in itertools.count():
            if over():
                return
            try:
                for status in await client.operations():
                    if status.state == "paused" and (status.stage != "pausing" or n * 2.0 > PAUSING):
                        await client.operation(status.op).resume()
            except DistopError:
                pass
            for executor in drained():
                await _undrain(client, executor)
            for op in forsaken() if n * 2.0 > PAUSING / 2 else ():
                with contextlib.suppress(DistopError):
                    await client.operation(op).cancel()
            await asyncio.sleep(2.0)


async def _connected(client: Client) -> None:
    while True:
        try:
            await client.connect()
            return
        except (EtcdUnavailable, PermissionDenied):
            await asyncio.sleep(AGAIN)


async def _insist(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Until it works; an unknown outcome is settled by the same call."""
    while True:
        try:
            return await call(*args, **named)
        except (EtcdUnavailable, OutcomeUnknown, EtcdRejected):
            await asyncio.sleep(AGAIN)


async def _fulfil(client: Client, request: str, wish: Wish, told: Told) -> None:
    await asyncio.sleep(wish.after)
    started = await asyncio.gather(*(_start(client, request, wish, told) for _ in range(wish.callers)))
    if wish.id:
        told.of_ids[request] = wish.id
    for one in started:
        if one is not None:
            _begun(told, _request_id(request, wish), one)
    operation = started[0]
    if operation is None:
        told.refused += 1
        return
    if wish.prepared:
        await decide(client, operation, request, wish.prepared, told, _insist)
    for act in wish.acts:
        await asyncio.sleep(act.after)
        try:
            await _insist(_act, client, operation, act.what, told)
        except NotAllowed:
            pass
        except NotFound as error:
            told.not_found[operation.ref] = f"{act.what}: {error}"
    await _until_ended(operation, told)
    if wish.rerun and (again := await _rerun(operation, f"{request}-again", wish.rerun, told)) is not None:
        _begun(told, f"{request}-again", again)
        await _until_ended(again, told)


def _request_id(request: str, wish: Wish) -> str:
    """By which its operation is known."""
    if wish.prepared:
        return two_phase.request_id(request)
    return f"{request}#{wish.graph}" if wish.graph or wish.within else request


def _begun(told: Told, request: str, operation: Operation) -> None:
    """A client may be told again what it began, in another life of it; it is told the same."""
    if request in told.of_ids:
        told.started[request] = operation.ref  # one that goes on has its id, and another one did before
    elif told.started.setdefault(request, operation.ref) != operation.ref:
        told.surprises.append(f"{request} was told to be {told.started[request]}, and then {operation.ref}")


async def _until_ended(operation: Operation, told: Told) -> None:
    while True:
        try:
            result = await operation.wait(timeout=30.0)
            told.ended[operation.ref] = str(result.state)
            return
        except NotFound as error:
            told.not_found[operation.ref] = f"wait: {error}"
            return
        except WaitTimeout:
            continue
        except (EtcdUnavailable, EtcdRejected):
            await asyncio.sleep(AGAIN)


async def _rerun(operation: Operation, request: str, what: str, told: Told) -> Operation | None:
    for _ in range(TRIES):
        try:
            again = await operation.rerun(unfinished=what == "unfinished" or None, request_id=request)
        except NotAllowed as error:
            told.reruns.append(Rerun(operation.ref, what, why=str(error)))
            return None
        except NotFound as error:
            told.not_found[operation.ref] = f"rerun: {error}"
            return None
        except (EtcdUnavailable, EtcdRejected, OutcomeUnknown, OperationStartError):
            await asyncio.sleep(AGAIN)
        else:
            told.reruns.append(Rerun(operation.ref, what, again.ref))
            return again
    told.refused += 1
    return None


async def _start(client: Client, request: str, wish: Wish, told: Told) -> Operation | None:
    options: dict[str, Any] = {"partitions": wish.names, "failure_policy": wish.policy, "submitter": "a client"}
    options |= wish.options
    after: list[After] = []
    for _ in range(TRIES):
        ids = [(f"request-{n}", on) for n, on in wish.behind]
        known = [(told.started.get(one) or told.started.get(two_phase.request_id(one)), on) for one, on in ids]
        if not all(name for name, _ in known):
            await asyncio.sleep(AGAIN)  # what it shall wait for has not been started, and perhaps never is
            continue
        # Two requests of one id may be the same operation, which is waited for in one way only.
        after = [After(OperationRef.parse(name), on) for name, on in dict(known).items() if name]
        break
    delay = wish.delay or None
    if wish.every:
        options["every"] = Every(wish.every, times=wish.times)
    if wish.id:
        options |= {"id": wish.id, "on_duplicate": wish.on_duplicate}
    for _ in range(TRIES):
        try:
            if wish.prepared:
                return await client.prepare_operation(
                    wish.type, wish.table, dict(wish.arg), external_id=request, verify=wish.verifier, delay=delay,
                    after=after, **PATIENCE, **options,
                )  # fmt: skip
            if wish.turns:
                return await start_with_branches(client, request, wish, options, told)
            if wish.within:
                return await _start_within(client, request, wish, options)
            if wish.graph:
                if wish.pause:
                    slowly = slowed(client, wish.pause)
                    return client.operation((await _start_graph(slowly, request, wish, options, told, after)).ref)
                return await _start_graph(client, request, wish, options, told, after)
            return await client.start_operation(
                *(wish.type, wish.table, dict(wish.arg)), request_id=request, delay=delay, after=after, **options
            )
        except OperationStartError as error:
            if "could never start" in str(error):
                after = []
            await asyncio.sleep(AGAIN)
        except (UnknownBehavior, NotFound, EtcdUnavailable, EtcdRejected, OutcomeUnknown):
            await asyncio.sleep(AGAIN)
    return None


async def _start_graph(
    client: Client, request: str, wish: Wish, options: dict[str, Any], told: Told, after: list[After]
) -> Operation:
    """Start the operation with the others of its graph.

    The first of them waits for the operations that the wish is behind.
    """
    small = {**wish.arg, "partitions": 1, "trouble": 0.0, "objects": False, "follows": False}
    type_name, table = (wish.type, wish.table) if wish.alike else ("noop", CLUSTER_TABLE)
    fails = wish.graph - wish.failing
    parts = [
        Start(type_name, table, {**small, "fails": n >= fails}, after=() if n else tuple(after))
        for n in range(wish.graph)
    ]
    last = Start(wish.type, wish.table, dict(wish.arg), options=options)
    forms = {"chord": lambda: chord(parts, last), "chain": lambda: chain(*parts, last)}
    graph = forms.get(wish.form, lambda: group(*parts, last))()
    if wish.hurried:
        await _give_up(client, client.start_operations(graph, request_id=request))
    started = await client.start_operations(graph, request_id=request)
    for n, one in enumerate(started[:-1]):
        _begun(told, f"{request}#{n}", one)
    return started[-1]


async def _give_up(client: Client, start: Coroutine[Any, Any, Any]) -> None:
    """As soon as the graph has its hold."""
    starting = asyncio.ensure_future(start)
    while not starting.done():
        with contextlib.suppress(EtcdUnavailable, EtcdRejected):
            if (await client.etcd.list(*client.keys.family(K.HOLD))).kvs:
                break
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting


async def _start_within(client: Client, request: str, wish: Wish, options: dict[str, Any]) -> Operation:
    """The operation, in a transaction that does something of the client's as well."""
    start = Start(wish.type, wish.table, dict(wish.arg), options=options)
    with contextlib.suppress(OperationStartError):  # an earlier life has done it
        other = await client.submission(start, request_id=f"{request}-other")
        await other.committed()
        await refused_within(client, request, start)
    own = [Get(client.keys.table(wish.table))]
    done = await client.transaction(success=own, start=start, request_id=request)
    started: Operation = done.operations[0]
    return started


async def _act(client: Client, operation: Operation, what: str, told: Told) -> None:
    if what == "register":
        await client.register_type("by-hand")
    elif what.startswith("behind "):
        if before := told.started.get(f"request-{what.removeprefix('behind ')}"):
            with contextlib.suppress(OperationStartError):  # that has ended badly
                await client.add_dependencies([(before, operation)])
    elif what.startswith("add "):
        name = what.removeprefix("add ")
        await client.add_table(TableRecord(name, "parquet", f"/data/{name}"), check=False)
    elif what.startswith("remove "):
        with contextlib.suppress(NotFound):  # it is done
            await client.remove_table(what.removeprefix("remove "))
    elif what == "cancel":
        await operation.cancel("it is not wanted any more")
    elif what == "pause":
        await operation.pause()
    elif what == "pause-now":
        await operation.pause(now=True)
    elif what == "resume":
        await operation.resume()
    elif what.startswith("alter "):
        await operation.alter(**altered(what))
    else:
        await operation.status()

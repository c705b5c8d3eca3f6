"""The clients of a simulation: they act as the scenario says, through the production client."""

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
from tests.simulator.caller_transactions import refused_start, start_with_branches
from tests.simulator.drawn_options import parse_alter
from tests.simulator.prepared_starts import VERIFY_OPTIONS, act_as_sender
from tests.simulator.reruns import Rerun
from tests.simulator.slow_graphs import slowed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from distop.client.async_operation import Operation
    from distop.protocol.behavior_declaration import Declaration
    from distop.settings import ClientConfig
    from tests.simulator.scenario import DrainAction, Removal, Submission

PAUSE_LIMIT = 60.0
"""Seconds after which an operation that is still pausing is resumed: its pause may never complete."""
AGAIN = 0.3
"""Seconds before a client retries."""
TRIES = 200
"""Maximum attempts to start a refused operation."""


class ClientAnswers:
    """The answers that clients got. They are checked against etcd's history at the end."""

    def __init__(self, receipts_kept: float) -> None:
        self.receipts_kept = receipts_kept
        """Minimum seconds for which the outcome of a prepared operation can be looked up."""
        self.prepared: dict[str, float] = {}
        """Prepared operation → when its sender first learned its name."""
        self.started: dict[str, str] = {}
        """Request id → the operation that it started."""
        self.ended: dict[str, str] = {}
        """Operation → the final state that ``wait`` returned."""
        self.of_ids: dict[str, str] = {}
        """Request → the operation id that it names: its answer may be an operation that another request started."""
        self.reruns: list[Rerun] = []
        self.branches: dict[str, list[bool]] = {}
        """Request → whether its client's own transaction was committed, in each answer."""
        self.refused = 0
        """Starts that were refused until the last attempt."""
        self.surprises: list[str] = []
        """Descriptions of answers that no client may get."""
        self.not_found: dict[str, str] = {}
        """Operation → the answer to a call about it that raised NotFound."""
        self.senders: dict[str, str] = {}
        """Prepared operation → its sender's last step: ``confirming`` (may have arrived), ``confirmed``, ``refused``.
        """


async def set_up(config: ClientConfig, tables: tuple[str, ...], declared: tuple[Declaration, ...] = ()) -> None:
    """Register the types without code, and the tables."""
    async with Client(config) as client:
        await _connected(client)
        for one in declared:
            policy, retry = one.failure_policy, one.retry
            await _insist(client.register_type, one.type_name, failure_policy=policy, retry=retry)
        for name in tables:
            await _insist(client.add_table, TableRecord(name, "parquet", f"/data/{name}"), check=False)


async def run_client(config: ClientConfig, submissions: list[tuple[int, Submission]], answers: ClientAnswers) -> None:
    """Submit these operations, all concurrently."""
    async with Client(config) as client:
        await _connected(client)
        await asyncio.gather(*(_fulfil(client, f"request-{n}", submission, answers) for n, submission in submissions))


async def run_drains(config: ClientConfig, drains: tuple[DrainAction, ...]) -> None:
    """Drain these executors, each for its time or until it is empty."""
    async with Client(config) as client:
        await _connected(client)
        await asyncio.gather(*(_drain(client, drain) for drain in drains))


async def run_removals(config: ClientConfig, removals: tuple[Removal, ...], over: Callable[[], bool]) -> None:
    """Remove these tables one after the other and add them again, until ``over()``."""
    async with Client(config) as client:
        await _connected(client)
        for removal in removals:
            await asyncio.sleep(removal.after)
            if await _remove(client, removal.table, over):
                await asyncio.sleep(removal.lasts)
            record = TableRecord(removal.table, "parquet", f"/data/{removal.table}")
            await _insist(client.add_table, record, check=False)


async def _remove(client: Client, table: str, over: Callable[[], bool]) -> bool:
    while not over():
        try:
            await _insist(client.remove_table, table)
            return True
        except NotFound:
            return True  # removed by an attempt whose outcome was unknown, or not registered yet
        except NotAllowed:
            await asyncio.sleep(AGAIN)  # operations run on it
    return False


async def _drain(client: Client, drain: DrainAction) -> None:
    await asyncio.sleep(drain.after)
    try:
        await _insist(client.drain, drain.executor)
    except NotFound:
        return  # the executor is not alive
    if drain.waits:
        while await _empty(client, drain.executor) is not NodeState.DRAINED:
            continue
    else:
        await asyncio.sleep(drain.lasts)
    await _undrain(client, drain.executor)


async def _empty(client: Client, executor: str) -> NodeState:
    try:
        return NodeState(await _insist(client.drain, executor, wait=True, timeout=30.0))
    except WaitTimeout:
        return NodeState.DRAINING
    except NotFound:  # another client undrained it, and it is not alive
        return NodeState.DRAINED


async def _undrain(client: Client, executor: str) -> None:
    with contextlib.suppress(NotFound):  # the executor is not alive, and was never drained
        await _insist(client.undrain, executor)


async def unblock_operations(
    config: ClientConfig,
    over: Callable[[], bool],
    drained: Callable[[], tuple[str, ...]],
    stranded: Callable[[], tuple[str, ...]],
    policies_left: Callable[[], bool],
) -> None:
    """After all faults, undo what keeps operations from ending.

    Resumes paused operations, undrains the ``drained`` executors, and cancels the ``stranded`` operations, whose
    executor is gone for good, and perhaps their client too. Removes policies whose keeper is gone (``policies_left``).

    A paused operation is resumed once none of its jobs runs, so that the pause is seen to complete, or after
    ``PAUSE_LIMIT``, since the claims of a dead actor last that long.
    """
    async with Client(config) as client:
        await _connected(client)
        for n in itertools.count():
            if over():
                return
            try:
                for status in await client.operations():
                    if status.state == "paused" and (status.stage != "pausing" or n * 2.0 > PAUSE_LIMIT):
                        await client.operation(status.op).resume()
            except DistopError:
                pass
            if policies_left():
                with contextlib.suppress(DistopError):
                    for left in await client.policies():
                        await client.remove_policy(left.table, left.name)
            for executor in drained():
                await _undrain(client, executor)
            for op in stranded() if n * 2.0 > PAUSE_LIMIT / 2 else ():
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
    """Repeat a call until it succeeds; the repetition settles an unknown outcome."""
    while True:
        try:
            return await call(*args, **named)
        except (EtcdUnavailable, OutcomeUnknown, EtcdRejected):
            await asyncio.sleep(AGAIN)


async def _fulfil(client: Client, request: str, submission: Submission, answers: ClientAnswers) -> None:
    await asyncio.sleep(submission.after)
    started = await asyncio.gather(*(_start(client, request, submission, answers) for _ in range(submission.callers)))
    if submission.id:
        answers.of_ids[request] = submission.id
    for one in started:
        if one is not None:
            _begun(answers, _request_id(request, submission), one)
    operation = started[0]
    if operation is None:
        answers.refused += 1
        return
    if submission.prepared:
        await act_as_sender(client, operation, request, submission.prepared, answers, _insist)
    for action in submission.actions:
        await asyncio.sleep(action.after)
        try:
            await _insist(_perform, client, operation, action.what, answers)
        except NotAllowed:
            pass
        except NotFound as error:
            answers.not_found[operation.ref] = f"{action.what}: {error}"
    await _until_ended(operation, answers)
    if (
        submission.rerun
        and (again := await _rerun(operation, f"{request}-again", submission.rerun, answers)) is not None
    ):
        _begun(answers, f"{request}-again", again)
        await _until_ended(again, answers)


def _request_id(request: str, submission: Submission) -> str:
    """The request id under which distop knows the operation."""
    if submission.prepared:
        return two_phase.request_id(request)
    return f"{request}#{submission.graph}" if submission.graph or submission.in_transaction else request


def _begun(answers: ClientAnswers, request: str, operation: Operation) -> None:
    """Record the answer to a start. A client that is run again must get the same one."""
    if request in answers.of_ids:
        answers.started[request] = operation.ref  # the holder of the id may have changed since the last answer
    elif answers.started.setdefault(request, operation.ref) != operation.ref:
        answers.surprises.append(
            f"{request} started {answers.started[request]} by the first answer, then {operation.ref}"
        )


async def _until_ended(operation: Operation, answers: ClientAnswers) -> None:
    while True:
        try:
            result = await operation.wait(timeout=30.0)
            answers.ended[operation.ref] = str(result.state)
            return
        except NotFound as error:
            answers.not_found[operation.ref] = f"wait: {error}"
            return
        except WaitTimeout:
            continue
        except (EtcdUnavailable, EtcdRejected):
            await asyncio.sleep(AGAIN)


async def _rerun(operation: Operation, request: str, what: str, answers: ClientAnswers) -> Operation | None:
    for _ in range(TRIES):
        try:
            again = await operation.rerun(unfinished=what == "unfinished" or None, request_id=request)
        except NotAllowed as error:
            answers.reruns.append(Rerun(operation.ref, what, why=str(error)))
            return None
        except NotFound as error:
            answers.not_found[operation.ref] = f"rerun: {error}"
            return None
        except (EtcdUnavailable, EtcdRejected, OutcomeUnknown, OperationStartError):
            await asyncio.sleep(AGAIN)
        else:
            answers.reruns.append(Rerun(operation.ref, what, again.ref))
            return again
    answers.refused += 1
    return None


async def _start(client: Client, request: str, submission: Submission, answers: ClientAnswers) -> Operation | None:
    options: dict[str, Any] = {
        "partitions": submission.names,
        "failure_policy": submission.policy,
        "submitter": "a client",
    }
    options |= submission.options
    after: list[After] = []
    for _ in range(TRIES):
        ids = [(f"request-{n}", on) for n, on in submission.predecessors]
        known = [(answers.started.get(one) or answers.started.get(two_phase.request_id(one)), on) for one, on in ids]
        if not all(name for name, _ in known):
            await asyncio.sleep(AGAIN)  # a predecessor has not been started, and may never be
            continue
        # Two requests with one id may be the same operation, which is one predecessor.
        after = [After(OperationRef.parse(name), on) for name, on in dict(known).items() if name]
        break
    delay = submission.delay or None
    if submission.every:
        options["every"] = Every(submission.every, times=submission.times)
    if submission.id:
        options |= {"id": submission.id, "on_duplicate": submission.on_duplicate}
    for _ in range(TRIES):
        try:
            if submission.prepared:
                return await client.prepare_operation(
                    submission.type, submission.table, dict(submission.arg), external_id=request,
                    verify=submission.verifier, delay=delay, after=after, **VERIFY_OPTIONS, **options,
                )  # fmt: skip
            if submission.toggles:
                return await start_with_branches(client, request, submission, options, answers)
            if submission.in_transaction:
                return await _start_within(client, request, submission, options)
            if submission.graph:
                if submission.pause:
                    slowly = slowed(client, submission.pause)
                    return client.operation(
                        (await _start_graph(slowly, request, submission, options, answers, after)).ref
                    )
                return await _start_graph(client, request, submission, options, answers, after)
            return await client.start_operation(
                *(submission.type, submission.table, dict(submission.arg)),
                request_id=request,
                delay=delay,
                after=after,
                **options,
            )
        except OperationStartError as error:
            if "could never start" in str(error):
                after = []
            await asyncio.sleep(AGAIN)
        except (UnknownBehavior, NotFound, EtcdUnavailable, EtcdRejected, OutcomeUnknown):
            await asyncio.sleep(AGAIN)
    return None


async def _start_graph(
    client: Client,
    request: str,
    submission: Submission,
    options: dict[str, Any],
    answers: ClientAnswers,
    after: list[After],
) -> Operation:
    """Start the operation with the others of its graph.

    The first of them waits for the operation's predecessors.
    """
    small = {**submission.arg, "partitions": 1, "trouble": 0.0, "objects": False, "follows": False}
    type_name, table = (submission.type, submission.table) if submission.same_type else ("noop", CLUSTER_TABLE)
    fails = submission.graph - submission.failing
    parts = [
        Start(type_name, table, {**small, "fails": n >= fails}, after=() if n else tuple(after))
        for n in range(submission.graph)
    ]
    last = Start(submission.type, submission.table, dict(submission.arg), options=options)
    forms = {"chord": lambda: chord(parts, last), "chain": lambda: chain(*parts, last)}
    graph = forms.get(submission.form, lambda: group(*parts, last))()
    if submission.cancels_insertion:
        await _cancel_insertion(client, client.start_operations(graph, request_id=request))
    started = await client.start_operations(graph, request_id=request)
    for n, one in enumerate(started[:-1]):
        _begun(answers, f"{request}#{n}", one)
    return started[-1]


async def _cancel_insertion(client: Client, start: Coroutine[Any, Any, Any]) -> None:
    """Cancel the insertion of a graph as soon as its hold is written."""
    starting = asyncio.ensure_future(start)
    while not starting.done():
        with contextlib.suppress(EtcdUnavailable, EtcdRejected):
            if (await client.etcd.list(*client.keys.family(K.HOLD))).kvs:
                break
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting


async def _start_within(client: Client, request: str, submission: Submission, options: dict[str, Any]) -> Operation:
    """Start the operation in a transaction with a read of the client's own."""
    start = Start(submission.type, submission.table, dict(submission.arg), options=options)
    with contextlib.suppress(OperationStartError):  # done before the client was run again
        other = await client.submission(start, request_id=f"{request}-other")
        await other.committed()
        await refused_start(client, request, start)
    own = [Get(client.keys.table(submission.table))]
    done = await client.transaction(success=own, start=start, request_id=request)
    started: Operation = done.operations[0]
    return started


async def _perform(client: Client, operation: Operation, what: str, answers: ClientAnswers) -> None:
    if what == "register":
        await client.register_type("by-hand")
    elif what.startswith("depend-on "):
        if before := answers.started.get(f"request-{what.removeprefix('depend-on ')}"):
            with contextlib.suppress(OperationStartError):  # the predecessor failed or was cancelled
                await client.add_dependencies([(before, operation)])
    elif what.startswith("add "):
        name = what.removeprefix("add ")
        await client.add_table(TableRecord(name, "parquet", f"/data/{name}"), check=False)
    elif what.startswith("remove "):
        with contextlib.suppress(NotFound):  # already removed
            await client.remove_table(what.removeprefix("remove "))
    elif what == "cancel":
        await operation.cancel("no longer needed")
    elif what == "pause":
        await operation.pause()
    elif what == "pause-now":
        await operation.pause(now=True)
    elif what == "resume":
        await operation.resume()
    elif what.startswith("alter "):
        await operation.alter(**parse_alter(what))
    else:
        await operation.status()

"""The clients of a soak that run its workflows, and what they were told.

Each place of a lane has a thread, which runs one workflow after the other, each from its starts to the end of its
operations. A call whose outcome is not known is repeated with the same request id until it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distop import After, Every, Start, chain, chord
from distop.errors import (
    DistopError,
    EtcdUnavailable,
    Incompatible,
    NotAllowed,
    NotFound,
    OperationStartError,
    OutcomeUnknown,
    PermissionDenied,
)
from distop.protocol.records import OperationRef
from distop.protocol.txn import Delete, Get, Put, Txn, absent, exists
from distop.store.client import EtcdClient
from soaking.judging import CALLERS, History, gate, judge, missing, next_of, ran
from soaking.workflows import AT_ONCE, RACERS, TIMES, draw

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.blocking import Client
    from soaking.cluster import SoakCluster
    from soaking.workflows import Part, Workflow

T = TypeVar("T")
AGAIN = 0.3
"""Seconds until a call is repeated, and between two looks at the history."""
LIMIT = 240.0
"""Seconds for all workflows to end, once everything is healed."""
UNANSWERED = (EtcdUnavailable, OutcomeUnknown, PermissionDenied)
"""What a call raises that is to be repeated."""


@dataclass(slots=True)
class Told:
    """What the clients of one workflow were told."""

    workflow: Workflow
    starts: dict[str, str | None] = field(default_factory=dict)
    """Request id → the operation that stands for it; None where the start was refused."""
    joined: set[str] = field(default_factory=set)
    """The request ids whose operation was there before."""
    cancelled: set[str] = field(default_factory=set)
    """Operations that a client has cancelled, or may have."""
    ends: dict[str, str] = field(default_factory=dict)
    """Operation → the state in which it ended."""
    committed: list[bool] = field(default_factory=list)
    """Of a transaction: what each call was told."""
    doing: str = "starts"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"


class Clients:
    """Runs the workflows. ``say``: tells what they meet."""

    def __init__(self, cluster: SoakCluster, seed: int, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._seed = seed
        self._say = say
        self._told: list[Told] = []
        self._failures: list[str] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self.repeated: Counter[str] = Counter()
        """The error of a call that was repeated → how often."""

    def begin(self) -> None:
        """Run workflows from now on, until :meth:`stop`."""
        for lane, places in AT_ONCE.items():
            for place in range(places):
                thread = threading.Thread(target=self._work, args=(lane, place), daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self) -> None:
        """Begin no more workflows."""
        self._over.set()

    def finish(self) -> list[str]:
        """Wait for the end of all workflows; those that do not end."""
        deadline = time.monotonic() + LIMIT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        going = [told for told in self._told if told.doing]
        names = [f"{told.workflow.name} ({told.workflow.kind}) does not end, it {told.doing}: {told}" for told in going]
        return self._failures + names

    def judge(self) -> list[str]:
        """What is wrong with what the clients and the actor were told, once the audit has seen all of the history."""
        return judge(self._told, self._history(), self._cluster.actor.returned())

    def missing(self) -> list[str]:
        """What a long soak has to show of the workflows, and did not."""
        return missing(self._told, self._history(), self._cluster.actor.returned())

    def report(self) -> list[str]:
        """Lines about what was done."""
        kinds = Counter(f"{told.workflow.lane} {told.workflow.kind}" for told in self._told)
        starts = [ref for told in self._told for ref in told.starts.values()]
        joined = sum(len(told.joined) for told in self._told)
        branches = Counter("committed" if told.committed[-1] else "refused" for told in self._told if told.committed)
        history, returned = self._history(), self._cluster.actor.returned()
        reasons = Counter("replaced" if c.get("replaced_by") else c["reason"] for c in history.cancels())
        return [
            f"workflows: {len(self._told)} ({_listed(kinds)})",
            f"  starts: {len(starts)}, of which {joined} joined another operation and "
            f"{starts.count(None)} were refused; operations that were aborted: {reasons['aborted']}, replaced: "
            f"{reasons['replaced']}; transactions: {_listed(branches)}",
            f"  jobs that the actor completed: {len(returned)}; calls that were repeated: {_listed(self.repeated)}",
        ]

    def _history(self) -> History:
        follower = self._cluster.follower
        return History(
            dict(follower.specs), dict(follower.args), dict(follower.records), dict(follower.outcomes), self._written
        )

    @property
    def _written(self) -> dict[str, tuple[str, int]]:
        """The keys that transactions of clients wrote: (value, how often it was written)."""

        async def ask() -> dict[str, tuple[str, int]]:
            async with EtcdClient(self._cluster.as_root()) as client:
                listing = await client.list(CALLERS, f"{CALLERS[:-1]}0")
            return {kv.key: (kv.value.decode(), kv.version) for kv in listing.kvs}

        return asyncio.run(ask())

    # ---------------------------------------------------------------- threads

    def _work(self, lane: str, place: int) -> None:
        number = place
        with contextlib.ExitStack() as stack:
            count = RACERS if lane == "id" else 1
            clients = [stack.enter_context(self._known(self._cluster.proxied_client)) for _ in range(count)]
            while not self._over.is_set():
                workflow = draw(self._seed, lane, number, self._cluster.folder)
                told = Told(workflow)
                self._told.append(told)
                try:
                    getattr(self, f"_{lane}")(clients, told)
                except Exception as error:
                    self._failures.append(f"{workflow.name} ({workflow.kind}) met {error!r} as it {told.doing}")
                told.doing = ""
                self._over.wait(workflow.pause)
                number += AT_ONCE[lane]

    def _known(self, call: Callable[[], T]) -> T:
        """What a call returns, once that is known."""
        while True:
            try:
                return call()
            except UNANSWERED as error:
                self.repeated[type(error).__name__] += 1
                time.sleep(AGAIN)

    def _start(self, client: Client, told: Told, part: Part, request: str, **options: Any) -> OperationRef | None:
        """Start one operation; None where that is refused."""
        options = {**part.options, **options, "request_id": request}
        try:
            started = self._known(lambda: client.start_operation(part.type, part.table, part.arg, **options))
        except OperationStartError as error:
            if not (isinstance(error, Incompatible) or "after" in options):
                raise
            told.starts[request] = None
            return None
        told.starts[request] = started.ref
        if started.already_started:
            told.joined.add(request)
        return OperationRef.parse(started.ref)

    def _ended(self, client: Client, told: Told) -> None:
        """Wait for the end of all that was started."""
        for ref in sorted({ref for ref in told.starts.values() if ref is not None}):
            self._end(client, told, ref)

    def _end(self, client: Client, told: Told, ref: str) -> None:
        told.doing = f"waits for the end of {ref}"
        while OperationRef.parse(ref) not in self._cluster.follower.records:
            time.sleep(AGAIN)
        told.ends[ref] = str(self._known(lambda: client.operation(ref).wait(30)).state)

    # ------------------------------------------------------------------ lanes

    def _graph(self, clients: list[Client], told: Told) -> None:
        """Several copies of a graph at once; or a start after an operation that may have ended."""
        (client,), workflow = clients, told.workflow
        if workflow.kind.startswith("after"):
            first = self._start(client, told, workflow.parts[0], f"{workflow.request}0")
            assert first is not None  # what waits for nothing is not refused
            after = After(first, "end" if workflow.kind == "after end" else "success")
            self._start(client, told, workflow.parts[1], f"{workflow.request}1", after=[after])
        else:
            for copy in range(workflow.copies):
                self._start_graph(client, told, f"{workflow.request}{copy}")
        for seconds, step in workflow.steps:
            time.sleep(seconds)
            ref = list(told.starts.values())[int(step.split()[1])]
            if ref is not None:
                told.cancelled.add(ref)
                with contextlib.suppress(NotAllowed, NotFound):  # it has ended
                    self._known(lambda ref=ref: client.operation(ref).cancel("soaking"))
        self._ended(client, told)

    def _start_graph(self, client: Client, told: Told, request: str) -> None:
        starts = [Start(part.type, part.table, part.arg) for part in told.workflow.parts]
        graph = chain(*starts) if told.workflow.kind.startswith("chain") else chord(starts[:-1], starts[-1])
        started = self._known(lambda: client.start_operations(graph, request_id=request))
        told.starts.update({f"{request}#{n}": one.ref for n, one in enumerate(started)})

    def _id(self, clients: list[Client], told: Told) -> None:
        """Clients that start operations of one id at the same time, twice."""
        workflow = told.workflow
        hold = Path(workflow.parts[0].arg["hold"])

        def start(number: int) -> None:
            part, client = workflow.parts[number], clients[number % RACERS]
            self._start(client, told, part, f"{workflow.request}{number}", id=workflow.name)

        try:
            with ThreadPoolExecutor(RACERS) as pool:
                for first, (seconds, _) in zip((0, RACERS), workflow.steps, strict=True):
                    list(pool.map(start, range(first, first + RACERS)))
                    time.sleep(seconds)
        finally:
            hold.touch()
        self._ended(clients[0], told)

    def _limit(self, clients: list[Client], told: Told) -> None:
        """Set and remove limits, while jobs run on executors and on the actor."""
        (client,), workflow = clients, told.workflow
        ref = self._start(client, told, workflow.parts[0], f"{workflow.request}0")
        for seconds, step in workflow.steps:
            time.sleep(seconds)
            limit = int(step.split()[1])
            with contextlib.suppress(NotAllowed, NotFound):  # it has ended
                self._known(lambda limit=limit: client.operation(str(ref)).alter(max_jobs=limit))
        self._ended(client, told)

    def _transaction(self, clients: list[Client], told: Told) -> None:
        """A transaction whose compare changes meanwhile; then the same call again."""
        (client,), workflow = clients, told.workflow
        part, name = workflow.parts[0], workflow.name
        writes = [] if workflow.kind == "turns and reads" else [Put(ran(name), b"failure")]
        start = Start(part.type, part.table, part.arg, options={"request_id": f"{workflow.request}0"})
        if workflow.kind == "fails":
            self._known(lambda: asyncio.run(self._close_gate(name)))
        turns = [seconds for seconds, _ in workflow.steps]
        with ThreadPoolExecutor(1) as pool:
            turned = pool.submit(lambda: asyncio.run(self._turn(name, turns)))
            time.sleep(sum(turns) / 3)
            for _ in range(2):
                done = self._known(
                    lambda: client.transaction(
                        compare=[absent(gate(name))],
                        success=[Put(ran(name), b"success")],
                        failure=[*writes, Get(gate(name))],
                        start=start,
                        request_id=workflow.request,
                    )
                )
                told.committed.append(done.committed)
                for operation in done.operations:
                    told.starts[f"{workflow.request}0"] = operation.ref
            turned.result()
        told.starts.setdefault(f"{workflow.request}0", None)
        self._ended(client, told)

    async def _close_gate(self, name: str) -> None:
        """Make the compare of a transaction fail."""
        async with EtcdClient(self._cluster.as_root()) as client:
            await client.commit(Txn((), (Put(gate(name), b""),), (), "turn"))

    async def _turn(self, name: str, turns: list[float]) -> None:
        """Make the compare of a transaction fail, or hold again, each time after so many seconds."""
        key = gate(name)
        turned = Txn((exists(key),), (Delete(key),), (Put(key, b""),), "turn")
        with contextlib.suppress(EtcdUnavailable):
            async with EtcdClient(self._cluster.as_root()) as client:
                for seconds in turns:
                    await asyncio.sleep(seconds)
                    with contextlib.suppress(DistopError):  # then it is not turned this time, or once more
                        await client.commit(turned, deadline=AGAIN)

    def _series(self, clients: list[Client], told: Told) -> None:
        """Wait for all operations of a series, or end it."""
        (client,), workflow = clients, told.workflow
        part = workflow.parts[0]
        ref = self._start(client, told, part, f"{workflow.request}0", every=Every(**part.options["every"]))
        for seconds, _ in workflow.steps:
            time.sleep(seconds)
            with contextlib.suppress(NotAllowed, NotFound):  # it has ended
                ended = self._known(client.operation(str(ref)).end_series)
                told.cancelled.add(ended)
        follower, count = self._cluster.follower, 0
        while ref is not None:
            self._end(client, told, str(ref))
            count += 1
            if count == TIMES or not next_of(workflow, follower.records[ref]):
                return
            told.doing = f"waits for what follows {ref}"
            while (found := follower.started.get(f"{ref}#next")) is None:
                time.sleep(AGAIN)
            ref = found[0]

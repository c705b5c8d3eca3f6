"""The clients of a soak that run its workflows, and their answers.

Each place of a lane has a thread that runs one workflow after the other, from its starts to the end of its operations.
A call with an unknown outcome is repeated with the same request id until its outcome is known.
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
    Unavailable,
)
from distop.protocol.records import OperationRef
from distop.protocol.txn import Delete, Get, Put, Txn, absent, exists
from distop.store.client import EtcdClient
from soaking.workflow_checks import CALLERS, History, branch_key, check, gate_key, has_next, missing
from soaking.workflows import AT_ONCE, RACERS, TIMES, draw

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.blocking import Client
    from soaking.cluster import SoakCluster
    from soaking.workflows import Part, Workflow

T = TypeVar("T")
AGAIN = 0.3
"""Seconds before a call is repeated, and between two checks of the history."""
LIMIT = 240.0
"""Time limit in seconds for the end of all workflows, after all faults are undone."""
UNANSWERED = (Unavailable, OutcomeUnknown, PermissionDenied)
"""The errors after which a call is repeated."""


@dataclass(slots=True)
class WorkflowAnswers:
    """The answers that the clients of one workflow got."""

    workflow: Workflow
    starts: dict[str, str | None] = field(default_factory=dict)
    """Request id → its operation; None: the start was refused."""
    joined: set[str] = field(default_factory=set)
    """Request ids that got an operation which existed before."""
    cancelled: set[str] = field(default_factory=set)
    """Operations that a client has cancelled, or may have cancelled."""
    ends: dict[str, str] = field(default_factory=dict)
    """Operation → its final state."""
    committed: list[bool] = field(default_factory=list)
    """The answers to each call of a transaction."""
    doing: str = "starts"
    """The current step; "": the workflow has ended."""


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"


class Clients:
    """Runs the workflows. ``say``: prints progress."""

    def __init__(self, cluster: SoakCluster, seed: int, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._seed = seed
        self._say = say
        self._answers: list[WorkflowAnswers] = []
        self._failures: list[str] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self.repeated: Counter[str] = Counter()
        """Error of a repeated call → how often."""

    def begin(self) -> None:
        """Start to run workflows, until :meth:`stop`."""
        for lane, places in AT_ONCE.items():
            for place in range(places):
                thread = threading.Thread(target=self._work, args=(lane, place), daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self) -> None:
        """Start no more workflows."""
        self._over.set()

    def finish(self) -> list[str]:
        """Wait for the end of all workflows; returns the problems."""
        deadline = time.monotonic() + LIMIT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        going = [answers for answers in self._answers if answers.doing]
        names = [
            f"{answers.workflow.name} ({answers.workflow.kind}) does not end, it {answers.doing}: {answers}"
            for answers in going
        ]
        return self._failures + names

    def check(self) -> list[str]:
        """The wrong answers to clients and the actor, once the audit has seen all of the history."""
        return check(self._answers, self._history(), self._cluster.actor.returned())

    def missing(self) -> list[str]:
        """The situations that a long soak has to meet, and did not."""
        return missing(self._answers, self._history(), self._cluster.actor.returned())

    def report(self) -> list[str]:
        """The summary as lines of text."""
        kinds = Counter(f"{answers.workflow.lane} {answers.workflow.kind}" for answers in self._answers)
        starts = [ref for answers in self._answers for ref in answers.starts.values()]
        joined = sum(len(answers.joined) for answers in self._answers)
        branches = Counter(
            "committed" if answers.committed[-1] else "refused" for answers in self._answers if answers.committed
        )
        history, returned = self._history(), self._cluster.actor.returned()
        reasons = Counter("replaced" if c.get("replaced_by") else c["reason"] for c in history.cancels())
        return [
            f"workflows: {len(self._answers)} ({_listed(kinds)})",
            f"  starts: {len(starts)}, of which {joined} joined another operation and "
            f"{starts.count(None)} were refused; aborted operations: {reasons['aborted']}, replaced: "
            f"{reasons['replaced']}; transactions: {_listed(branches)}",
            f"  jobs completed by the actor: {len(returned)}; repeated calls: {_listed(self.repeated)}",
        ]

    def _history(self) -> History:
        follower = self._cluster.follower
        return History(
            dict(follower.specs), dict(follower.args), dict(follower.records), dict(follower.outcomes), self._written
        )

    @property
    def _written(self) -> dict[str, tuple[str, int]]:
        """Key written by a client's transaction → (value, number of writes)."""

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
                answers = WorkflowAnswers(workflow)
                self._answers.append(answers)
                try:
                    getattr(self, f"_{lane}")(clients, answers)
                except Exception as error:
                    self._failures.append(f"{workflow.name} ({workflow.kind}) failed as it {answers.doing}: {error!r}")
                answers.doing = ""
                self._over.wait(workflow.pause)
                number += AT_ONCE[lane]

    def _known(self, call: Callable[[], T]) -> T:
        """Repeat a call until its outcome is known; returns its result."""
        while True:
            try:
                return call()
            except UNANSWERED as error:
                self.repeated[type(error).__name__] += 1
                time.sleep(AGAIN)

    def _start(
        self, client: Client, answers: WorkflowAnswers, part: Part, request: str, **options: Any
    ) -> OperationRef | None:
        """Start one operation; None: the start was refused."""
        options = {**part.options, **options, "request_id": request}
        try:
            started = self._known(lambda: client.start_operation(part.type, part.table, part.arg, **options))
        except OperationStartError as error:
            if not (isinstance(error, Incompatible) or "after" in options):
                raise
            answers.starts[request] = None
            return None
        answers.starts[request] = started.ref
        if started.already_started:
            answers.joined.add(request)
        return OperationRef.parse(started.ref)

    def _ended(self, client: Client, answers: WorkflowAnswers) -> None:
        """Wait for the end of all started operations."""
        for ref in sorted({ref for ref in answers.starts.values() if ref is not None}):
            self._end(client, answers, ref)

    def _end(self, client: Client, answers: WorkflowAnswers, ref: str) -> None:
        answers.doing = f"waits for the end of {ref}"
        while OperationRef.parse(ref) not in self._cluster.follower.records:
            time.sleep(AGAIN)
        answers.ends[ref] = str(self._known(lambda: client.operation(ref).wait(30)).state)

    # ------------------------------------------------------------------ lanes

    def _graph(self, clients: list[Client], answers: WorkflowAnswers) -> None:
        """Start copies of a graph, or an operation after one that may have ended."""
        (client,), workflow = clients, answers.workflow
        if workflow.kind.startswith("after"):
            first = self._start(client, answers, workflow.parts[0], f"{workflow.request}0")
            assert first is not None  # a start without predecessors is not refused
            after = After(first, "end" if workflow.kind == "after end" else "success")
            self._start(client, answers, workflow.parts[1], f"{workflow.request}1", after=[after])
        else:
            for copy in range(workflow.copies):
                self._start_graph(client, answers, f"{workflow.request}{copy}")
        for seconds, step in workflow.steps:
            time.sleep(seconds)
            ref = list(answers.starts.values())[int(step.split()[1])]
            if ref is not None:
                answers.cancelled.add(ref)
                with contextlib.suppress(NotAllowed, NotFound):  # it has ended
                    self._known(lambda ref=ref: client.operation(ref).cancel("soaking"))
        self._ended(client, answers)

    def _start_graph(self, client: Client, answers: WorkflowAnswers, request: str) -> None:
        starts = [Start(part.type, part.table, part.arg) for part in answers.workflow.parts]
        graph = chain(*starts) if answers.workflow.kind.startswith("chain") else chord(starts[:-1], starts[-1])
        started = self._known(lambda: client.start_operations(graph, request_id=request))
        answers.starts.update({f"{request}#{n}": one.ref for n, one in enumerate(started)})

    def _id(self, clients: list[Client], answers: WorkflowAnswers) -> None:
        """Let several clients start operations with one id at the same time, twice."""
        workflow = answers.workflow
        hold = Path(workflow.parts[0].arg["hold"])

        def start(number: int) -> None:
            part, client = workflow.parts[number], clients[number % RACERS]
            self._start(client, answers, part, f"{workflow.request}{number}", id=workflow.name)

        try:
            with ThreadPoolExecutor(RACERS) as pool:
                for first, (seconds, _) in zip((0, RACERS), workflow.steps, strict=True):
                    list(pool.map(start, range(first, first + RACERS)))
                    time.sleep(seconds)
        finally:
            hold.touch()
        self._ended(clients[0], answers)

    def _limit(self, clients: list[Client], answers: WorkflowAnswers) -> None:
        """Set and remove limits while jobs run on executors and on the actor."""
        (client,), workflow = clients, answers.workflow
        ref = self._start(client, answers, workflow.parts[0], f"{workflow.request}0")
        for seconds, step in workflow.steps:
            time.sleep(seconds)
            limit = int(step.split()[1])
            with contextlib.suppress(NotAllowed, NotFound):  # it has ended
                self._known(lambda limit=limit: client.operation(str(ref)).alter(max_jobs=limit))
        self._ended(client, answers)

    def _transaction(self, clients: list[Client], answers: WorkflowAnswers) -> None:
        """Call a transaction whose compare changes meanwhile, then repeat the call."""
        (client,), workflow = clients, answers.workflow
        part, name = workflow.parts[0], workflow.name
        writes = [] if workflow.kind == "turns and reads" else [Put(branch_key(name), b"failure")]
        start = Start(part.type, part.table, part.arg, options={"request_id": f"{workflow.request}0"})
        if workflow.kind == "fails":
            self._known(lambda: asyncio.run(self._close_gate(name)))
        pauses = [seconds for seconds, _ in workflow.steps]
        with ThreadPoolExecutor(1) as pool:
            toggling = pool.submit(lambda: asyncio.run(self._toggle(name, pauses)))
            time.sleep(sum(pauses) / 3)
            for _ in range(2):
                done = self._known(
                    lambda: client.transaction(
                        compare=[absent(gate_key(name))],
                        success=[Put(branch_key(name), b"success")],
                        failure=[*writes, Get(gate_key(name))],
                        start=start,
                        request_id=workflow.request,
                    )
                )
                answers.committed.append(done.committed)
                for operation in done.operations:
                    answers.starts[f"{workflow.request}0"] = operation.ref
            toggling.result()
        answers.starts.setdefault(f"{workflow.request}0", None)
        self._ended(client, answers)

    async def _close_gate(self, name: str) -> None:
        """Make the compare of a transaction fail."""
        async with EtcdClient(self._cluster.as_root()) as client:
            await client.commit(Txn((), (Put(gate_key(name), b""),), (), "turn"))

    async def _toggle(self, name: str, pauses: list[float]) -> None:
        """Toggle the compare of a transaction after each of these pauses."""
        key = gate_key(name)
        toggle = Txn((exists(key),), (Delete(key),), (Put(key, b""),), "turn")
        with contextlib.suppress(EtcdUnavailable):
            async with EtcdClient(self._cluster.as_root()) as client:
                for seconds in pauses:
                    await asyncio.sleep(seconds)
                    with contextlib.suppress(DistopError):  # one toggle more or less does no harm
                        await client.commit(toggle, deadline=AGAIN)

    def _series(self, clients: list[Client], answers: WorkflowAnswers) -> None:
        """Start a series, and wait for all its operations or end it."""
        (client,), workflow = clients, answers.workflow
        part = workflow.parts[0]
        ref = self._start(client, answers, part, f"{workflow.request}0", every=Every(**part.options["every"]))
        for seconds, _ in workflow.steps:
            time.sleep(seconds)
            with contextlib.suppress(NotAllowed, NotFound):  # it has ended
                ended = self._known(client.operation(str(ref)).end_series)
                answers.cancelled.add(ended)
        follower, count = self._cluster.follower, 0
        while ref is not None:
            self._end(client, answers, str(ref))
            count += 1
            if count == TIMES or not has_next(workflow, follower.records[ref]):
                return
            answers.doing = f"waits for the operation after {ref}"
            while (found := follower.started.get(f"{ref}#next")) is None:
                time.sleep(AGAIN)
            ref = found[0]

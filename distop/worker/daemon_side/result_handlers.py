"""The daemon's state of a run or call in the child, and the handlers of the child's frames."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.errors import describe
from distop.protocol.frozen import frozen
from distop.protocol.jobs import to_go_on_from
from distop.worker import child_messages
from distop.worker.daemon_side.requests import JobEnded, WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from distop.runtime.logs import Log
    from distop.worker.daemon_side.child_launch import ChildProcess
    from distop.worker.daemon_side.requests import JobItem, RunRequest

    Page = tuple[list[str], int | None]
    """Outcomes, each as JSON, and the ordinal of the next page (None: no more)."""
    Fetch = Callable[[int], Awaitable[Page]]
    """Fetches the page of outcomes from an ordinal on, or the partitions of a plan's chunk by its number."""
    FindTable = Callable[[str], Awaitable[Mapping[str, Any] | None]]
    """Finds the record of a table by its name."""


class RunSink:
    """The state of one run request. It outlives the children that it is sent to."""

    def __init__(
        self,
        request: RunRequest,
        incarnation: str,
        on_events: Callable[[list[JobEnded]], None],
        on_status: Callable[[int, str], None] | None,
        on_progress: Callable[[int, Any], Awaitable[bool]] | None,
        on_tasks: Callable[[int, int], None] | None,
        log: Log,
        on_work: Callable[[int, Any], None] | None = None,
    ) -> None:
        self.request = request
        self.where = {"operation": request.op}
        self.incarnation = incarnation
        self.pending: dict[int, JobItem] = {item.ordinal: item for item in request.items}
        self.cancelled: set[int] = set()
        self.keep = False
        """Cancelled jobs are only released, to resume from their checkpoints here or on another node."""
        self.progress: dict[int, Any] = {}
        """Checkpoints saved since the request: a job that runs again resumes from them."""
        self.sparks_lost = 0
        """The number of its children with an unusable Spark session."""
        self.child: ChildProcess | None = None
        self.given_up = False
        """The child abandoned the run: its pending jobs need another child."""
        self.number = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.probed: asyncio.Future[bool] | None = None
        self.enforcer: asyncio.Task[None] | None = None
        self._on_events = on_events
        self._on_status = on_status
        self._on_progress = on_progress
        self._on_tasks = on_tasks
        self._on_work = on_work
        self._log = log
        self._saving: set[asyncio.Task[None]] = set()

    def on_frame(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "ended":
            self.end(JobEnded(*row) for row in message["jobs"])
        elif kind == "done" and message["run"] == self.number:
            if not self.done.done():
                self.given_up = message.get("given_up", False)
                self.done.set_result(None)
        elif kind == "status":
            if self._on_status is not None:
                self._on_status(message["partition"], message["text"])
        elif kind == "tasks":
            if self._on_tasks is not None:
                self._on_tasks(message["done"], message["total"])
        elif kind == "work":
            if self._on_work is not None and (message["partition"] in self.pending or message["partition"] < 0):
                self._on_work(message["partition"], message["work"])
        elif kind == "probed":
            if self.probed is not None and not self.probed.done():
                self.probed.set_result(message["stubborn"])
        elif kind == "progress" and self.child is not None:
            task = asyncio.ensure_future(self._save(self.child, message))
            self._saving.add(task)
            task.add_done_callback(self._saving.discard)

    def can_resume(self, ordinal: int) -> bool:
        """Whether a job is resumable and has a checkpoint."""
        return self.request.resumable and to_go_on_from(self.item(ordinal).progress) is not None

    def item(self, ordinal: int) -> JobItem:
        """A pending job with its last checkpoint."""
        item = self.pending[ordinal]
        return replace(item, progress=self.progress[ordinal]) if ordinal in self.progress else item

    def end(self, events: Iterable[JobEnded]) -> None:
        """Report jobs that ended, each once."""
        fresh = [event for event in events if self.pending.pop(event.partition, None) is not None]
        if fresh:
            try:
                self._on_events(fresh)
            except Exception:
                # Not the child's fault: its connection must stay open.
                self._log.exception("Unexpected error while handling the ends of jobs", extra=self.where)

    def end_rest(self, kind: child_messages.EndKind, error: str, ordinals: Iterable[int] | None = None) -> None:
        """End these jobs, or all pending ones, with the same kind and error."""
        self.end([JobEnded(p, kind, None, error) for p in list(self.pending if ordinals is None else ordinals)])

    def silence(self) -> None:
        """Stop calling the callbacks: the caller is gone."""
        self._on_events = lambda _: None
        self._on_status = self._on_progress = self._on_tasks = self._on_work = None

    async def wait_for_checkpoints(self) -> None:
        """Wait until pending checkpoints are saved.

        A job that runs again under the same claim resumes from the last checkpoint. If the new run started from an
        older one, its next checkpoint would undo the last one.
        """
        while self._saving:
            await asyncio.wait(set(self._saving))

    async def _save(self, child: ChildProcess, message: dict[str, Any]) -> None:
        saved = False
        if self._on_progress is not None and message["partition"] in self.pending:
            try:
                saved = await self._on_progress(message["partition"], message["value"])
            except Exception:
                where = {**self.where, "partition": message["partition"]}
                self._log.exception("Cannot save a checkpoint", extra=where)
        if saved:
            self.progress[message["partition"]] = message["value"]
        child.send(child_messages.ReplyMessage(t="reply", seq=message["seq"], value=saved))


@frozen
class Sources:
    """The data that a call may request from the daemon: pages of outcomes, pages of the plan, table records.

    ``tables``: the records of all registered tables, in one page.
    """

    outcomes: Fetch | None = None
    plan: Fetch | None = None
    table: FindTable | None = None
    tables: Fetch | None = None


class CallSink:
    """The state of one call: its chunks, and the future of its result. ``sources``: the data it may request."""

    def __init__(
        self,
        number: int,
        child: ChildProcess,
        sources: Sources,
        on_status: Callable[[str], None] = lambda _: None,
        on_work: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.number = number
        self.child = child
        self.chunks: list[bytes] = []
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._sources = sources
        self._on_status = on_status
        self._on_work = on_work
        self._fetching: set[asyncio.Task[None]] = set()

    def on_frame(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "chunk":
            self.chunks.append(message["data"].encode())
        elif kind == "status":
            self._on_status(message["text"])
        elif kind == "work":
            self._on_work(message["work"])
        elif kind == "result" and not self.result.done():
            self.result.set_result(message["value"])
        elif kind == "failed" and not self.result.done():
            self.result.set_exception(WorkerError(message["kind"], message["message"]))
        elif kind in ("fetch", "table"):
            task = asyncio.ensure_future(self._answer(message) if kind == "fetch" else self._find(message))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)

    def stop(self) -> None:
        """Cancel the call in the child, and refuse its requests: it may wait for an answer."""
        self._sources = Sources()
        self.child.send(child_messages.CancelMessage(t="cancel", call=self.number))
        for task in self._fetching:
            task.cancel()

    async def _answer(self, message: dict[str, Any]) -> None:
        seq = message["seq"]
        try:
            page = getattr(self._sources, _source_of(message))
            if page is None:
                raise RuntimeError("not available to this call")
            rows, following = await page(message["start"])
            for frame in child_messages.encode_paged(
                child_messages.ReplyMessage(t="reply", seq=seq, value=following), rows
            ):
                self.child.send_frame(frame)
        except (Exception, asyncio.CancelledError) as error:
            text = f"cannot read the {_source_of(message)}: {describe(error)}"
            self.child.send(child_messages.ReplyMessage(t="reply", seq=seq, value=None, error=text))

    async def _find(self, message: dict[str, Any]) -> None:
        seq = message["seq"]
        try:
            find = self._sources.table
            if find is None:
                raise RuntimeError("not available to this call")
            self.child.send(child_messages.ReplyMessage(t="reply", seq=seq, value=await find(message["name"])))
        except (Exception, asyncio.CancelledError) as error:
            text = f"cannot read the record of table {message['name']!r}: {describe(error)}"
            self.child.send(child_messages.ReplyMessage(t="reply", seq=seq, value=None, error=text))


def _source_of(message: Mapping[str, Any]) -> str:
    """The name of the source that a request asks for."""
    return "plan" if message.get("plan") else "tables" if message.get("tables") else "outcomes"


async def wait_first(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of the futures is done, without retrieving its result."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

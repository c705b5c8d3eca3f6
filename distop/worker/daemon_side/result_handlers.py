"""What the daemon keeps of a run or call that is in the child, and what it does with the child's frames."""

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
    from distop.worker.daemon_side.child_launch import Child
    from distop.worker.daemon_side.requests import JobItem, RunRequest

    Page = tuple[list[str], int | None]
    """Outcomes, each as JSON, and the ordinal to go on from (None: that was all)."""
    Fetch = Callable[[int], Awaitable[Page]]
    """The page of outcomes from an ordinal on; or that of a plan's partitions, by the number of their chunk."""
    FindTable = Callable[[str], Awaitable[Mapping[str, Any] | None]]
    """The record of a table by its name."""


class RunSink:
    """One request: which of its jobs have not ended. It outlives the children that it is sent to."""

    def __init__(
        self,
        request: RunRequest,
        incarnation: str,
        on_events: Callable[[list[JobEnded]], None],
        on_status: Callable[[int, str], None] | None,
        on_progress: Callable[[int, Any], Awaitable[bool]] | None,
        on_tasks: Callable[[int, int], None] | None,
        log: Log,
    ) -> None:
        self.request = request
        self.where = {"operation": request.op}
        self.incarnation = incarnation
        self.pending: dict[int, JobItem] = {item.ordinal: item for item in request.items}
        self.cancelled: set[int] = set()
        self.keep = False
        """What was cancelled is only released: to go on from its checkpoints, here or elsewhere."""
        self.progress: dict[int, Any] = {}
        """Checkpoints saved since the request: a job that is run again goes on from them."""
        self.sparks_lost = 0
        """How many of its children had an unusable Spark session."""
        self.child: Child | None = None
        self.given_up = False
        """The child gave it up, with what is still pending: that needs another child."""
        self.number = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.probed: asyncio.Future[bool] | None = None
        self.enforcer: asyncio.Task[None] | None = None
        self._on_events = on_events
        self._on_status = on_status
        self._on_progress = on_progress
        self._on_tasks = on_tasks
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
        elif kind == "probed":
            if self.probed is not None and not self.probed.done():
                self.probed.set_result(message["stubborn"])
        elif kind == "progress" and self.child is not None:
            task = asyncio.ensure_future(self._save(self.child, message))
            self._saving.add(task)
            task.add_done_callback(self._saving.discard)

    def goes_on(self, ordinal: int) -> bool:
        """The job is one that can go on from a checkpoint, and has one."""
        return self.request.resumable and to_go_on_from(self.item(ordinal).progress) is not None

    def item(self, ordinal: int) -> JobItem:
        """A job to be sent, with its last checkpoint."""
        item = self.pending[ordinal]
        return replace(item, progress=self.progress[ordinal]) if ordinal in self.progress else item

    def end(self, events: Iterable[JobEnded]) -> None:
        """Tell of jobs that ended, each once."""
        fresh = [event for event in events if self.pending.pop(event.partition, None) is not None]
        if fresh:
            try:
                self._on_events(fresh)
            except Exception:
                # Not the child's fault: its connection must live on.
                self._log.exception("ends of jobs could not be taken in", extra=self.where)

    def end_rest(self, kind: child_messages.Kind, error: str, ordinals: Iterable[int] | None = None) -> None:
        """End these jobs, or all that have not ended, for one reason."""
        self.end([JobEnded(p, kind, None, error) for p in list(self.pending if ordinals is None else ordinals)])

    def silence(self) -> None:
        """Nobody wants to hear of it any more."""
        self._on_events = lambda _: None
        self._on_status = self._on_progress = self._on_tasks = None

    async def saved(self) -> None:
        """Wait for the checkpoints that are being saved. A job that is run again under its claim goes on from the last
        of them: an older one, saved by the new run after it, would undo it.
        """
        while self._saving:
            await asyncio.wait(set(self._saving))

    async def _save(self, child: Child, message: dict[str, Any]) -> None:
        saved = False
        if self._on_progress is not None and message["partition"] in self.pending:
            try:
                saved = await self._on_progress(message["partition"], message["value"])
            except Exception:
                where = {**self.where, "partition": message["partition"]}
                self._log.exception("a checkpoint could not be saved", extra=where)
        if saved:
            self.progress[message["partition"]] = message["value"]
        child.send(child_messages.ReplyMessage(t="reply", seq=message["seq"], value=saved))


@frozen
class Sources:
    """What a call may ask the daemon for: pages of outcomes, pages of the plan, records of tables."""

    outcomes: Fetch | None = None
    plan: Fetch | None = None
    table: FindTable | None = None


class CallSink:
    """One call: its chunks, and the future of its result. ``sources``: what it may ask for."""

    def __init__(self, number: int, child: Child, sources: Sources) -> None:
        self.number = number
        self.child = child
        self.chunks: list[bytes] = []
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._sources = sources
        self._fetching: set[asyncio.Task[None]] = set()

    def on_frame(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "chunk":
            self.chunks.append(message["data"].encode())
        elif kind == "result" and not self.result.done():
            self.result.set_result(message["value"])
        elif kind == "failed" and not self.result.done():
            self.result.set_exception(WorkerError(message["kind"], message["message"]))
        elif kind in ("fetch", "table"):
            task = asyncio.ensure_future(self._answer(message) if kind == "fetch" else self._find(message))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)

    def stop(self) -> None:
        """Tell the child to stop it, and answer its questions with no from now on: it may wait for an answer."""
        self._sources = Sources()
        self.child.send(child_messages.CancelMessage(t="cancel", call=self.number))
        for task in self._fetching:
            task.cancel()

    async def _answer(self, message: dict[str, Any]) -> None:
        seq = message["seq"]
        try:
            page = self._sources.plan if message.get("plan") else self._sources.outcomes
            if page is None:
                raise RuntimeError("nobody gives any to this call")
            rows, following = await page(message["start"])
            for frame in child_messages.encode_paged(
                child_messages.ReplyMessage(t="reply", seq=seq, value=following), rows
            ):
                self.child.send_frame(frame)
        except (Exception, asyncio.CancelledError) as error:
            what = "plan" if message.get("plan") else "outcomes"
            text = f"the {what} could not be read: {describe(error)}"
            self.child.send(child_messages.ReplyMessage(t="reply", seq=seq, value=None, error=text))

    async def _find(self, message: dict[str, Any]) -> None:
        seq = message["seq"]
        try:
            find = self._sources.table
            if find is None:
                raise RuntimeError("nobody gives any to this call")
            self.child.send(child_messages.ReplyMessage(t="reply", seq=seq, value=await find(message["name"])))
        except (Exception, asyncio.CancelledError) as error:
            text = f"the record of the table {message['name']!r} could not be read: {describe(error)}"
            self.child.send(child_messages.ReplyMessage(t="reply", seq=seq, value=None, error=text))


async def first(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait for the first of them, without consuming it."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

"""The calls of a client that is connected to etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.client.graphs import requests, steps
from distop.client.operation_end import OperationEnd
from distop.clock import time, uuid
from distop.errors import EtcdUnavailable, InvalidArgument, NotFound, UnreadableRecord
from distop.protocol.identity import MADE
from distop.protocol.texts import shown
from distop.services import actions, autopilot, policies, registered, table_registry
from distop.services.claims import owned_jobs as claims
from distop.services.claims.types_without_code import register
from distop.services.draining import drain, undo
from distop.services.inspection.history_pages import ask
from distop.services.inspection.outcomes import outcomes
from distop.services.inspection.status import alarms, judge, live_nodes, status, take
from distop.services.inspection.survey import counts, survey
from distop.services.inspection.why import why
from distop.services.operation_commands import OperationCommands
from distop.services.readable_records import left_out
from distop.services.submission import two_phase
from distop.services.submission.added_dependencies import add_dependencies
from distop.services.submission.graph_start import AFTER_PER_START, IN_GRAPHS, start_graph
from distop.services.submission.option_values import LONGEST_ID, after_one
from distop.services.submission.rerun import rerun
from distop.services.submission.start_batches import Starts
from distop.services.submission.start_request import acting, check_not_derived, derived, request
from distop.services.submission.transactional_start import commit_with, own, submission

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from distop.client.graphs import Start, Step
    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.keys import Keys
    from distop.protocol.policy import Policy
    from distop.protocol.records import History, Node, OperationRef, TableRecord
    from distop.protocol.txn import Compare, TxnOperation
    from distop.services.autopilot import Autopilot
    from distop.services.claims.job_owner import Owner
    from distop.services.claims.owned_jobs import OfferedJob, OwnedJob
    from distop.services.inspection.history_filters import HistoryFilters
    from distop.services.inspection.history_pages import HistoryPage
    from distop.services.inspection.outcomes import JobResult
    from distop.services.inspection.status import JobStates
    from distop.services.inspection.survey import Count, Filter
    from distop.services.inspection.why import Why
    from distop.services.operation_results import OperationStatus
    from distop.services.policies import PolicyStatus
    from distop.services.submission.graph_start import StartLink
    from distop.services.submission.insertion import Started
    from distop.services.submission.start_options import StartOptions
    from distop.services.submission.start_request import Request
    from distop.services.submission.transactional_start import Committed, Submission
    from distop.store.client import EtcdClient

_AT_ONCE = 8


def check_made(request_id: str) -> str:
    """A request id that a client has made. Raises InvalidArgument for one of another form."""
    if not request_id.startswith(MADE) or len(request_id) > LONGEST_ID or not request_id.isascii():
        raise InvalidArgument(f"{shown(request_id)} is not a request id that a client makes: {MADE}…")
    check_not_derived(request_id)
    return request_id


class DirectBackend:
    """:class:`~distop.client.backend.Backend` by transactions and reads of etcd.

    ``shared_dir``: the path of the executors' shared directory on this machine, for results in files.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, shared_dir: str = "") -> None:
        self.etcd = etcd
        self.keys = keys
        self._shared_dir = shared_dir
        self._starts = Starts(etcd, keys)
        self._owner: Owner | None = None

    async def connect(self) -> None:
        await self.etcd.connect()

    async def close(self) -> None:
        if self._owner is not None:
            await self._owner.close()
        await self.etcd.close()

    # ------------------------------------------------------------------ start

    async def start(self, type_name: str, table: str, arg: bytes, options: StartOptions, new_id: str = "") -> Started:
        """``new_id``: a request id that was made for this call alone, so no earlier call has it."""
        wanted = request(type_name, table, arg, options, acting(self.etcd))
        if new_id and not wanted.own_id:
            wanted = replace(wanted, request_id=check_made(new_id))
        if len(wanted.after) > AFTER_PER_START and wanted.on_duplicate in IN_GRAPHS:
            (started,) = await start_graph(self.etcd, self.keys, [wanted], [], wanted.request_id)
            return started
        return await self._starts.start(wanted)

    async def start_graph(self, starts: Step | Iterable[Start], request_id: str | None) -> list[Started]:
        wanted, links, name = self._once(starts, request_id)
        return await start_graph(self.etcd, self.keys, wanted, links, name)

    async def add_dependencies(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        try:
            given = [(after_one(after), after_one(run).ref) for after, run in pairs]
        except (TypeError, ValueError):
            raise InvalidArgument("dependencies must be pairs: (operation to wait for, waiting operation)") from None
        await add_dependencies(self.etcd, self.keys, given)

    async def submission(self, starts: Step | Iterable[Start], request_id: str | None) -> Submission:
        wanted, links, _ = self._once(starts, request_id)
        return await submission(self.etcd, self.keys, wanted, links)

    async def transaction(
        self,
        compare: Iterable[Compare],
        success: Iterable[TxnOperation],
        failure: Iterable[TxnOperation],
        start: Step | Iterable[Start],
        request_id: str | None,
    ) -> Committed:
        mine = own(self.keys, compare, success, failure)
        wanted, links, name = self._once(start, request_id)
        return await commit_with(self.etcd, self.keys, wanted, links, mine, name)

    async def prepare(
        self,
        type_name: str,
        table: str,
        arg: bytes,
        options: StartOptions,
        external_id: str,
        verify: str | None,
        verify_after: float,
        verify_attempts: int,
        verify_pause: float,
    ) -> Started:
        known = two_phase.external(external_id)
        wanted = request(type_name, table, arg, options, acting(self.etcd))
        wanted = derived(wanted, two_phase.request_id(known))
        terms = two_phase.terms(wanted, verify, verify_after, verify_attempts, verify_pause, known)
        return await two_phase.prepare(self.etcd, self.keys, wanted, terms)

    async def confirm(self, external_id: str) -> OperationRef:
        return await two_phase.confirm(self.etcd, self.keys, two_phase.external(external_id))

    async def prepared_operation(self, external_id: str) -> OperationRef:
        return await two_phase.find(self.etcd, self.keys, two_phase.external(external_id))

    async def rerun(self, ref: OperationRef, options: StartOptions, unfinished: bool | None) -> Started:
        if unfinished is not None and not isinstance(unfinished, bool):
            raise InvalidArgument(f"unfinished must be True, False or None, not {shown(unfinished)}")
        return await rerun(self.etcd, self.keys, ref, options, unfinished=unfinished)

    def _once(
        self, starts: Step | Iterable[Start], request_id: str | None
    ) -> tuple[list[Request], list[StartLink], str]:
        """The operations to start, and the request id of all of them.

        If the caller chose none, it is a generated one, which an error can name. Operations with a request id of their
        own keep it.
        """
        who = acting(self.etcd)
        if request_id is not None:
            return *requests(steps(starts), request_id, who), request_id
        name = f"{MADE}{uuid.uuid4()}"
        wanted, links = requests(steps(starts), None, who)
        named = [one if one.own_id else replace(one, request_id=f"{name}#{n}") for n, one in enumerate(wanted)]
        return named, links, name

    # ---------------------------------------------------------- one operation

    async def status(self, ref: OperationRef, seen: JobStates) -> OperationStatus:
        return await status(self.etcd, self.keys, ref, seen)

    async def why(self, ref: OperationRef) -> Why:
        return await why(self.etcd, self.keys, ref)

    async def end(self, ref: OperationRef) -> History:
        return await OperationEnd(self.etcd, self.keys, ref).wait()

    async def watch(self, ref: OperationRef, seen: JobStates, interval: float) -> AsyncGenerator[OperationStatus, None]:
        last: OperationStatus | None = None
        waiter = asyncio.ensure_future(self.end(ref))
        try:
            while True:
                with suppress(EtcdUnavailable):
                    now = await self.status(ref, seen)
                    if now != last:
                        yield now
                    if now.ended:
                        return
                    last = now
                await asyncio.wait([waiter], timeout=interval)
                if waiter.done() and waiter.exception() is not None:
                    waiter.result()
        finally:
            waiter.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await waiter

    def outcomes(self, ref: OperationRef, model: type | None, start: int = 0) -> AsyncGenerator[JobResult, None]:
        return outcomes(self.etcd, self.keys, ref, model, self._shared_dir, start)

    async def cancel(self, ref: OperationRef, text: str) -> None:
        await self._commands(ref).cancel(text)

    async def end_series(self, ref: OperationRef, text: str) -> str:
        return await self._commands(ref).end_series(text)

    async def confirm_operation(self, ref: OperationRef) -> None:
        await two_phase.confirm_operation(self.etcd, self.keys, ref)

    async def abandon(self, ref: OperationRef, text: str) -> None:
        await self._commands(ref).abandon(text)

    async def pause(self, ref: OperationRef, now: bool) -> None:
        await self._commands(ref).pause(now=now)

    async def resume(self, ref: OperationRef) -> None:
        await self._commands(ref).resume()

    async def alter(self, ref: OperationRef, options: Mapping[str, Any]) -> None:
        if not options:
            raise InvalidArgument("there is nothing to alter: give a priority, a limit or a number of failures")
        await self._commands(ref).alter(options)

    def _commands(self, ref: OperationRef) -> OperationCommands:
        return OperationCommands(self.etcd, self.keys, ref)

    # ----------------------------------------------------- several operations

    async def operations(self, wanted: Filter) -> list[OperationStatus]:
        active = [one.ref async for one in survey(self.etcd, self.keys, wanted)]
        live, raised = await asyncio.gather(self.nodes(), alarms(self.etcd)) if active else ({}, ())
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(ref: OperationRef) -> OperationStatus | None:
            async with gate:
                try:
                    return judge(await take(self.etcd, self.keys, ref), live, time.time(), raised)
                except NotFound:
                    return None  # ended and cleaned up meanwhile
                except UnreadableRecord as error:
                    left_out(self.etcd, error)
                    return None

        seen = await asyncio.gather(*map(one, active))
        return [s for s in seen if s is not None and not s.ended]

    async def counts(self, wanted: Filter) -> tuple[Count, ...]:
        return await counts(self.etcd, self.keys, wanted)

    async def history(self, table: str | None, limit: int, filters: HistoryFilters) -> HistoryPage:
        return await ask(self.etcd, self.keys, filters.query(self.keys, table, limit))

    async def actions(self, table: str | None) -> list[dict[str, Any]]:
        return await actions.of_registry(self.etcd, self.keys, table)

    # ---------------------------------------------------- nodes and behaviors

    async def nodes(self) -> dict[str, Node]:
        return await live_nodes(self.etcd, self.keys)

    async def drain(self, executor: str, wait: bool, timeout: float | None) -> str:
        return str(await drain(self.etcd, self.keys, executor, wait=wait, timeout=timeout))

    async def undrain(self, executor: str) -> None:
        await undo(self.etcd, self.keys, executor)

    async def behaviors(self) -> list[Declaration]:
        return await registered.behaviors(self.etcd, self.keys)

    async def register_type(self, declaration: Declaration, replace: bool) -> None:
        await register(self.etcd, self.keys, declaration, replace=replace)

    # ------------------------------------------------------------------- jobs

    @property
    def _own(self) -> Owner:
        if self._owner is None:
            from distop.services.claims.job_owner import Owner

            self._owner = Owner(self.etcd, self.keys)
        return self._owner

    async def own_jobs(
        self,
        actor: str,
        types: Iterable[str] | Mapping[str, int | None],
        most: int,
        duration: float,
        accept: Callable[[OfferedJob], bool] | None,
    ) -> list[OwnedJob]:
        return await self._own.own(
            claims.check_actor(actor),
            claims.check_types(types),
            claims.check_count(most, "the maximum number of jobs to own"),
            claims.check_duration(duration),
            accept,
        )

    async def extend(self, tokens: Iterable[str], duration: float) -> list[bool]:
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise InvalidArgument(f"extend() takes a list of tokens, not {shown(tokens)}")
        return await self._own.extend(tokens, claims.check_duration(duration))

    async def return_job(self, token: str, outcome: claims.OwnedOutcome) -> None:
        await self._own.give(token, claims.checked(outcome))

    async def jobs_version(self) -> int:
        await self._own.candidates.ready()
        return self._own.candidates.version

    async def jobs_changed(self, version: int, timeout: float) -> None:
        await self._own.candidates.wait(version, timeout)

    # --------------------------------------------------- tables and policies

    async def tables(self) -> list[TableRecord]:
        return await registered.tables(self.etcd, self.keys)

    async def add_table(self, record: TableRecord, replace: bool, check: bool) -> TableRecord:
        return await table_registry.add(self.etcd, self.keys, record, replace=replace, check=check)

    async def remove_table(self, name: str) -> None:
        await table_registry.remove(self.etcd, self.keys, name)

    async def set_policies(self, table: str, new: Mapping[str, Policy]) -> list[PolicyStatus]:
        return await policies.set_policies(self.etcd, self.keys, table, new)

    async def autopilot(self, table: str, dry_run: bool) -> Autopilot:
        return await autopilot.apply(self.etcd, self.keys, table, dry_run=dry_run)

    async def policies(self, table: str | None) -> list[PolicyStatus]:
        return await policies.policies(self.etcd, self.keys, table)

    async def policy(self, table: str, name: str) -> PolicyStatus:
        return await policies.policy(self.etcd, self.keys, table, name)

    async def pause_policy(self, table: str, name: str) -> PolicyStatus:
        return await policies.pause(self.etcd, self.keys, table, name)

    async def resume_policy(self, table: str, name: str) -> PolicyStatus:
        return await policies.resume(self.etcd, self.keys, table, name)

    async def remove_policy(self, table: str, name: str) -> None:
        await policies.remove(self.etcd, self.keys, table, name)

    async def emit(self, table: str, name: str, event_id: str | None) -> list[str]:
        return await policies.emit(self.etcd, self.keys, table, name, event_id)

"""The calls of a client that is connected to a service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.client import service_messages as m
from distop.client.graphs import Ended, Start, requests, steps
from distop.client.remote_starts import RemoteStarts
from distop.client.service_channel import CALL_LIMIT, ServiceChannel
from distop.clock import time, uuid
from distop.errors import InvalidArgument, NotAllowed, Unavailable, WaitTimeout
from distop.protocol.caller_values import text as check_text
from distop.protocol.identity import MADE
from distop.protocol.texts import shown
from distop.runtime import caller_trace
from distop.runtime.backoff import Backoff
from distop.services import table_registry
from distop.services.claims import owned_jobs as claims
from distop.services.inspection.history_pages import HistoryPage
from distop.services.operation_results import OperationResult, parsed
from distop.services.submission import two_phase
from distop.services.submission.insertion import Started
from distop.services.submission.option_values import after_one
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import request, whoami
from distop.v1 import (
    behaviors_pb2,
    claims_pb2,
    events_pb2,
    nodes_pb2,
    operations_pb2,
    policies_pb2,
    tables_pb2,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from distop.client.graphs import Step
    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.policy import Policy
    from distop.protocol.records import History, Node, OperationRef, TableRecord
    from distop.protocol.txn import Compare, TxnOperation
    from distop.services.autopilot import Autopilot
    from distop.services.claims.owned_jobs import OfferedJob, OwnedJob
    from distop.services.inspection.history_filters import HistoryFilters
    from distop.services.inspection.outcomes import JobResult
    from distop.services.inspection.status import JobStates
    from distop.services.inspection.survey import Count, Filter
    from distop.services.inspection.why import Why
    from distop.services.operation_results import OperationStatus
    from distop.services.policies import PolicyStatus
    from distop.services.submission.transactional_start import Committed, Submission

_PAUSE = (0.1, 2.0)
"""Back-off in seconds while the service does not answer, first and longest."""
_DRAIN_POLL = 0.5
"""Seconds between two looks whether an executor is drained."""


class RemoteBackend:
    """:class:`~distop.client.backend.Backend` by calls of a service.

    Arguments are checked by the service, and those that a message cannot hold also here. A start without a request id
    gets one, so that a caller can repeat it if the connection is lost.
    """

    def __init__(self, channel: ServiceChannel, connect_limit: float = 10.0, *, identified: bool = False) -> None:
        """``identified``: the service knows the caller, who is then the submitter; else this client reports it."""
        self._channel = channel
        self._starts = RemoteStarts(channel)
        self._connect_limit = connect_limit
        self._identified = identified

    async def connect(self) -> None:
        await self._channel.connect(self._connect_limit)

    async def close(self) -> None:
        await self._channel.close()

    async def _read(self, method: str, message: Any) -> Any:
        return await self._channel.call(method, message, writes=False)

    async def _write(self, method: str, message: Any) -> Any:
        return await self._channel.call(method, message, writes=True)

    # ------------------------------------------------------------------ start

    async def start(self, type_name: str, table: str, arg: bytes, options: StartOptions, new_id: str = "") -> Started:
        request(type_name, table, arg, options, whoami())
        chosen = m.options_message(self._by_caller(options))
        message = operations_pb2.StartRequest(type=type_name, table=table, options=chosen)
        if options.request_id is None:
            message.new_request_id = new_id or f"{MADE}{uuid.uuid4()}"
        if trace := caller_trace.traceparent():  # of this start: others may share its call
            message.options.traceparent = message.options.traceparent or trace
        message.arg.text = arg.decode()
        return _started(await self._starts.start(message))

    async def start_graph(self, starts: Step | Iterable[Start], request_id: str | None) -> list[Started]:
        graph = list(dict.fromkeys(steps(starts)))
        name = request_id if request_id is not None else f"{MADE}{uuid.uuid4()}"
        wanted, links = requests(graph, name, whoami())
        message = operations_pb2.StartGraphRequest(request_id=name)
        for one, checked in zip(graph, wanted, strict=True):
            outside = [pred for pred in one.after if not isinstance(pred, Start | Ended)]
            chosen = StartOptions.of({**one.options, "after": outside or None}, "graph")
            start = message.starts.add(
                type=one.type_name, table=one.table, options=m.options_message(self._by_caller(chosen))
            )
            start.arg.text = checked.arg.decode()
        for after, run, on in links:
            message.links.add(after=after, run=run, on=on)
        answer = await self._write("Operations/StartGraph", message)
        return [_started(one) for one in answer.started]

    async def add_dependencies(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        message = operations_pb2.AddDependenciesRequest()
        try:
            for after, run in pairs:
                message.pairs.add(after=m.after_message(after), run=str(after_one(run).ref))
        except (TypeError, ValueError):
            raise InvalidArgument("dependencies must be pairs: (operation to wait for, waiting operation)") from None
        await self._write("Operations/AddDependencies", message)

    async def submission(self, starts: Step | Iterable[Start], request_id: str | None) -> Submission:
        raise _needs_etcd("submission()")

    async def transaction(
        self,
        compare: Iterable[Compare],
        success: Iterable[TxnOperation],
        failure: Iterable[TxnOperation],
        start: Step | Iterable[Start],
        request_id: str | None,
    ) -> Committed:
        raise _needs_etcd("transaction()")

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
        wanted = request(type_name, table, arg, options, whoami())
        two_phase.terms(wanted, verify, verify_after, verify_attempts, verify_pause, two_phase.external(external_id))
        message = operations_pb2.PrepareRequest(
            type=type_name,
            table=table,
            options=m.options_message(self._by_caller(options)),
            external_id=external_id,
            verify=verify,
            verify_after=verify_after,
            verify_attempts=verify_attempts,
            verify_pause=verify_pause,
        )
        message.arg.text = arg.decode()
        return _started(await self._write("Operations/Prepare", message))

    async def confirm(self, external_id: str) -> OperationRef:
        message = operations_pb2.ConfirmRequest(external_id=two_phase.external(external_id))
        return _ref((await self._write("Operations/Confirm", message)).op)

    async def prepared_operation(self, external_id: str) -> OperationRef:
        message = operations_pb2.GetPreparedRequest(external_id=two_phase.external(external_id))
        return _ref((await self._read("Operations/GetPrepared", message)).op)

    async def rerun(self, ref: OperationRef, options: StartOptions, unfinished: bool | None) -> Started:
        if unfinished is not None and not isinstance(unfinished, bool):
            raise InvalidArgument(f"unfinished must be True, False or None, not {shown(unfinished)}")
        options.checked()
        message = operations_pb2.RerunRequest(
            op=str(ref), unfinished=unfinished, options=m.options_message(self._named(options))
        )
        return _started(await self._write("Operations/Rerun", message))

    def _named(self, options: StartOptions) -> StartOptions:
        """The options with a request id, under which the call can be repeated, and a submitter."""
        chosen = options.request_id if options.request_id is not None else f"{MADE}{uuid.uuid4()}"
        return replace(self._by_caller(options), request_id=chosen)

    def _by_caller(self, options: StartOptions) -> StartOptions:
        if self._identified or options.submitter is not None:
            return options
        return replace(options, submitter=whoami())

    # ---------------------------------------------------------- one operation

    async def status(self, ref: OperationRef, seen: JobStates) -> OperationStatus:
        return m.operation_status(await self._read("Operations/Get", operations_pb2.GetRequest(op=str(ref))))

    async def why(self, ref: OperationRef) -> Why:
        return m.why_value(await self._read("Operations/Why", operations_pb2.WhyRequest(op=str(ref))))

    async def end(self, ref: OperationRef) -> History:
        backoff = Backoff(*_PAUSE)
        message = operations_pb2.WaitRequest(op=str(ref))
        while True:
            try:
                return m.history_of(await self._channel.call("Operations/Wait", message, writes=False, limit=None))
            except Unavailable:
                await asyncio.sleep(backoff.pause())

    async def watch(self, ref: OperationRef, seen: JobStates, interval: float) -> AsyncGenerator[OperationStatus, None]:
        backoff = Backoff(*_PAUSE)
        message = operations_pb2.WatchRequest(op=str(ref))
        last: OperationStatus | None = None
        while last is None or not last.ended:
            try:
                async with aclosing(self._channel.stream("Operations/Watch", message)) as found:
                    async for answer in found:
                        message.revision = answer.revision
                        backoff.reset()
                        status = m.operation_status(answer.operation)
                        if status != last:
                            yield status
                        last = status
            except Unavailable:
                await asyncio.sleep(backoff.pause())

    async def outcomes(self, ref: OperationRef, model: type | None, start: int = 0) -> AsyncGenerator[JobResult, None]:
        token: str | None = str(start)
        while token is not None:
            message = operations_pb2.ListJobsRequest(op=str(ref), page_token=token)
            page = await self._read("Operations/ListJobs", message)
            for one in page.jobs:
                job = m.job_value(one)
                what = f"the result of the job {job.name} of {ref}"
                yield job if model is None else replace(job, result=parsed(model, job.result, what))
            token = m.given(page, "next_page_token")

    async def cancel(self, ref: OperationRef, text: str) -> None:
        await self._write(
            "Operations/Cancel",
            operations_pb2.CancelRequest(op=str(ref), text=check_text(text, "the reason of a cancel")),
        )

    async def end_series(self, ref: OperationRef, text: str) -> str:
        message = operations_pb2.EndSeriesRequest(op=str(ref), text=check_text(text, "the reason of a cancel"))
        return str((await self._write("Operations/EndSeries", message)).op)

    async def confirm_operation(self, ref: OperationRef) -> None:
        await self._write("Operations/Confirm", operations_pb2.ConfirmRequest(op=str(ref)))

    async def abandon(self, ref: OperationRef, text: str) -> None:
        await self._write(
            "Operations/Abandon", operations_pb2.AbandonRequest(op=str(ref), text=check_text(text, "the reason"))
        )

    async def pause(self, ref: OperationRef, now: bool) -> None:
        await self._write("Operations/Pause", operations_pb2.PauseRequest(op=str(ref), now=now))

    async def resume(self, ref: OperationRef) -> None:
        await self._write("Operations/Resume", operations_pb2.ResumeRequest(op=str(ref)))

    async def alter(self, ref: OperationRef, options: Mapping[str, Any]) -> None:
        await self._write("Operations/Alter", operations_pb2.AlterRequest(op=str(ref), **options))

    # ----------------------------------------------------- several operations

    async def operations(self, wanted: Filter) -> list[OperationStatus]:
        answer = await self._read("Operations/List", operations_pb2.ListRequest(**_filter(wanted)))
        return [m.operation_status(one) for one in answer.operations]

    async def counts(self, wanted: Filter) -> tuple[Count, ...]:
        answer = await self._read("Operations/Counts", operations_pb2.CountsRequest(**_filter(wanted)))
        return tuple(map(m.count_value, answer.counts))

    async def history(self, table: str | None, limit: int, filters: HistoryFilters) -> HistoryPage:
        found: list[OperationResult] = []
        left = limit
        while True:  # the service limits the bytes of a page
            message = m.history_request(table, left, filters)
            answer = await self._read("Operations/ListHistory", message)
            ended = (m.operation_status(one).result for one in answer.operations)
            found += [one for one in ended if one is not None]
            after, left = m.given(answer, "next_page_token"), limit - len(found)
            if after is None or left <= 0:
                return HistoryPage(found, after)
            filters = replace(filters, after=after)

    async def actions(self, table: str | None) -> list[dict[str, Any]]:
        answer = await self._read("Tables/ListActions", tables_pb2.ListActionsRequest(table=table))
        return [m.json_value(one) for one in answer.actions]

    # ---------------------------------------------------- nodes and behaviors

    async def nodes(self) -> dict[str, Node]:
        answer = await self._read("Nodes/List", nodes_pb2.ListNodesRequest())
        return {one.incarnation: m.node_value(one) for one in answer.nodes}

    async def drain(self, executor: str, wait: bool, timeout: float | None) -> str:
        until = None if timeout is None else time.monotonic() + timeout
        check_text(executor, "the id of an executor")
        while True:
            state = str((await self._write("Nodes/Drain", nodes_pb2.DrainRequest(executor=executor))).state)
            if not wait or state == "drained":
                return state
            if until is not None and time.monotonic() >= until:
                raise WaitTimeout(f"{executor} is not drained within {timeout:g} s; it goes on")
            await asyncio.sleep(_DRAIN_POLL)

    async def undrain(self, executor: str) -> None:
        await self._write(
            "Nodes/Undrain", nodes_pb2.UndrainRequest(executor=check_text(executor, "the id of an executor"))
        )

    async def behaviors(self) -> list[Declaration]:
        answer = await self._read("Behaviors/List", behaviors_pb2.ListBehaviorsRequest())
        return [m.behavior_value(one) for one in answer.behaviors]

    async def register_type(self, declaration: Declaration, replace: bool) -> None:
        await self._write("Behaviors/Register", m.registration_message(declaration, replace))

    # ------------------------------------------------------------------- jobs

    async def own_jobs(
        self,
        actor: str,
        types: Iterable[str] | Mapping[str, int | None],
        most: int,
        duration: float,
        accept: Callable[[OfferedJob], bool] | None,
    ) -> list[OwnedJob]:
        limits = m.limits_message(claims.check_types(types))
        wanted = claims_pb2.OwnRequest(
            actor=claims.check_actor(actor),
            types=limits,
            most=claims.check_count(most, "the maximum number of jobs to own"),
            duration=claims.check_duration(duration),
        )
        if accept is not None:
            offered = await self._read("Claims/Offer", claims_pb2.OfferRequest(types=limits, most=_MOST_OFFERS))
            accepted = [one for one in offered.jobs if accept(m.offered_value(one))]
            if not accepted:
                return []
            for one in accepted:
                wanted.only.add(op=one.op, ordinal=one.ordinal)
        answer = await self._write("Claims/Own", wanted)
        return [m.owned_value(one) for one in answer.jobs]

    async def extend(self, tokens: Iterable[str], duration: float) -> list[bool]:
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise InvalidArgument(f"extend() takes a list of tokens, not {shown(tokens)}")
        given = [one if isinstance(one, str) else "" for one in tokens]
        message = claims_pb2.ExtendRequest(tokens=given, duration=claims.check_duration(duration))
        return list((await self._write("Claims/Extend", message)).owned)

    async def return_job(self, token: str, outcome: claims.OwnedOutcome) -> None:
        await self._write("Claims/Return", m.return_message(token, outcome))

    async def jobs_version(self) -> int:
        return int((await self._read("Claims/WaitForJobs", claims_pb2.WaitForJobsRequest())).version)

    async def jobs_changed(self, version: int, timeout: float) -> None:
        message = claims_pb2.WaitForJobsRequest(version=version, timeout=timeout)
        await self._channel.call("Claims/WaitForJobs", message, writes=False, limit=timeout + CALL_LIMIT)

    # --------------------------------------------------- tables and policies

    async def tables(self) -> list[TableRecord]:
        answer = await self._read("Tables/List", tables_pb2.ListTablesRequest())
        return [m.table_value(one) for one in answer.tables]

    async def add_table(self, record: TableRecord, replace: bool, check: bool) -> TableRecord:
        table_registry.check_record(record)
        message = tables_pb2.AddTableRequest(table=m.table_message(record), replace=replace, unchecked=not check)
        return m.table_value(await self._write("Tables/Add", message))

    async def remove_table(self, name: str) -> None:
        await self._write("Tables/Remove", tables_pb2.RemoveTableRequest(name=check_text(name, "the name of a table")))

    async def set_policies(self, table: str, new: Mapping[str, Policy]) -> list[PolicyStatus]:
        found = []
        for name, policy in new.items():
            message = m.policy_request(table, name, policy)
            found.append(m.policy_value(await self._write("Policies/Set", message)))
        return found

    async def autopilot(self, table: str, dry_run: bool) -> Autopilot:
        message = policies_pb2.AutopilotRequest(table=table, dry_run=dry_run)
        return m.autopilot_value(await self._write("Policies/Autopilot", message))

    async def policies(self, table: str | None) -> list[PolicyStatus]:
        answer = await self._read("Policies/List", policies_pb2.ListPoliciesRequest(table=table))
        return [m.policy_value(one) for one in answer.policies]

    async def policy(self, table: str, name: str) -> PolicyStatus:
        message = policies_pb2.GetPolicyRequest(table=table, name=name)
        return m.policy_value(await self._read("Policies/Get", message))

    async def pause_policy(self, table: str, name: str) -> PolicyStatus:
        message = policies_pb2.PausePolicyRequest(table=table, name=name)
        return m.policy_value(await self._write("Policies/Pause", message))

    async def resume_policy(self, table: str, name: str) -> PolicyStatus:
        message = policies_pb2.ResumePolicyRequest(table=table, name=name)
        return m.policy_value(await self._write("Policies/Resume", message))

    async def remove_policy(self, table: str, name: str) -> None:
        await self._write("Policies/Remove", policies_pb2.RemovePolicyRequest(table=table, name=name))

    async def emit(self, table: str, name: str, event_id: str | None) -> list[str]:
        message = events_pb2.EmitRequest(table=table, name=check_text(name, "the name of an event"), event_id=event_id)
        return list((await self._write("Events/Emit", message)).policies)


_MOST_OFFERS = 1_000
"""Maximum jobs of which a caller's ``accept`` chooses."""


def _started(message: operations_pb2.StartResponse) -> Started:
    return Started(_ref(message.op), message.already_started)


def _ref(text: str) -> OperationRef:
    return after_one(text).ref


def _filter(wanted: Filter) -> dict[str, Any]:
    states = [str(one) for one in wanted.states or ()]
    return {"table": wanted.table, "type": wanted.type, "states": states, "labels": dict(wanted.labels or {})}


def _needs_etcd(call: str) -> NotAllowed:
    return NotAllowed(f"{call} is a part of a transaction of etcd: connect to etcd for it, not to a service")

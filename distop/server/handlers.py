"""The methods of distop's services: a message in, a message out. They call :class:`DirectBackend` as a client does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distop.client import service_messages as m
from distop.client.async_operation import parse_ref
from distop.client.graphs import Ended, Start
from distop.client.service_errors import start_error
from distop.errors import DistopError, InvalidArgument, NotAllowed, NotFound, PermissionDenied
from distop.protocol.caller_values import seconds
from distop.protocol.operation_labels import labels as check_labels
from distop.protocol.texts import shown
from distop.runtime import caller_trace
from distop.schemas.argument_schema import encode_argument
from distop.server.access import CallScope
from distop.server.call_admission import caller
from distop.server.long_running import SERVICE as LONG_RUNNING
from distop.server.long_running import LongRunningCalls
from distop.server.permissions import scope_of
from distop.server.polycat import PolyCatCalls
from distop.services import policies
from distop.services.inspection import filters
from distop.services.inspection.history_filters import HistoryFilters
from distop.services.inspection.status import JobStates
from distop.services.inspection.survey import Filter, open_states
from distop.services.submission.start_options import StartOptions
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
    from collections.abc import AsyncGenerator, Mapping

    from distop.client.backend import Backend
    from distop.server.operation_watches import OperationWatches
    from distop.services.claims.owned_jobs import OfferedJob
    from distop.services.submission.insertion import Started

log = logging.getLogger("distop.service")

MOST_STARTS = 1_000
"""Maximum starts in a request."""
MOST_JOBS = 1_000
"""Maximum outcomes of jobs in a response."""
MOST_RECORDS = 250
"""Maximum records of the history that are read at once."""
MOST_BYTES = 4 << 20
"""Bytes of outcomes or of the history after which a response ends."""
_OFFER_DURATION = 1.0
"""A valid duration of a claim. Offers claim nothing."""


def services(backend: Backend, watches: OperationWatches | None = None) -> Mapping[str, Any]:
    """The handlers of each service, by its full name. Their methods have the names of the calls.

    ``watches``: for the calls that watch operations.
    """
    found: dict[str, Any] = {f"distop.v1.{name}": calls(backend) for name, calls in SERVICES.items()}
    operations = found["distop.v1.Operations"] = OperationCalls(backend, watches)
    return {**found, "distop.v1.PolyCat": PolyCatCalls(operations), LONG_RUNNING: LongRunningCalls(operations)}


class _Service:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend


def _argument(message: Any) -> bytes:
    return encode_argument(m.given_json(message, "arg"))


def _options(message: operations_pb2.StartOptions) -> StartOptions:
    """The options of a start by the current caller, whose identity is the submitter.

    Raises PermissionDenied if somebody else than an admin names another one.
    """
    options, who = m.start_options(message), caller.get()
    if who.identity is None or (who.admin and options.submitter is not None):
        return options
    if options.submitter not in (None, who.identity.name):
        raise PermissionDenied(f"{who.identity.name} may not name another submitter: it needs the role admin")
    return replace(options, submitter=who.identity.name)


def _started(started: Started) -> operations_pb2.StartResponse:
    return operations_pb2.StartResponse(op=str(started.ref), already_started=started.earlier)


class OperationCalls(_Service):
    """Starts, finds and changes operations."""

    def __init__(self, backend: Backend, watches: OperationWatches | None = None) -> None:
        super().__init__(backend)
        self._watches = watches

    async def Start(self, request: operations_pb2.StartRequest) -> operations_pb2.StartResponse:
        options = _options(request.options)
        arg, new_id = _argument(request), request.new_request_id
        return _started(await self._backend.start(request.type, request.table, arg, options, new_id))

    async def BatchStart(self, request: operations_pb2.BatchStartRequest) -> operations_pb2.BatchStartResponse:
        if len(request.requests) > MOST_STARTS:
            raise InvalidArgument(f"at most {MOST_STARTS} starts are allowed, not {len(request.requests)}")
        admit_nested = caller.get().admit_nested
        assert admit_nested is not None

        async def result(one: operations_pb2.StartRequest) -> operations_pb2.BatchStartResponse.Result:
            try:
                caller_trace.answered("")  # each has its own in its options
                with admit_nested("Operations/Start", one) as admitted:
                    return operations_pb2.BatchStartResponse.Result(started=await admitted.run(self.Start))
            except Exception as error:
                if not isinstance(error, DistopError):
                    log.error("Unexpected error in a start", exc_info=error)
                known = error if isinstance(error, DistopError) else DistopError()
                return operations_pb2.BatchStartResponse.Result(error=start_error(known))

        return operations_pb2.BatchStartResponse(results=await asyncio.gather(*map(result, request.requests)))

    async def StartGraph(self, request: operations_pb2.StartGraphRequest) -> operations_pb2.StartGraphResponse:
        starts = []
        for one in request.starts:
            options = _options(one.options).given()
            after = options.pop("after", ())
            starts.append(Start(one.type, one.table, m.given_json(one, "arg"), tuple(after), options))
        for link in request.links:
            if not (0 <= link.after < len(starts) and 0 <= link.run < len(starts)):
                raise InvalidArgument(f"a link from {link.after} to {link.run}: there are {len(starts)} operations")
            before, run = starts[link.after], starts[link.run]
            run.after = (*run.after, Ended(before) if link.on == "end" else before)
        found = await self._backend.start_graph(starts, request.request_id or None)
        return operations_pb2.StartGraphResponse(started=map(_started, found))

    async def AddDependencies(
        self, request: operations_pb2.AddDependenciesRequest
    ) -> operations_pb2.AddDependenciesResponse:
        await self._backend.add_dependencies((m.after_value(pair.after), pair.run) for pair in request.pairs)
        return operations_pb2.AddDependenciesResponse()

    async def Prepare(self, request: operations_pb2.PrepareRequest) -> operations_pb2.StartResponse:
        options = _options(request.options)
        defaults = {"verify": None, "verify_after": 60.0, "verify_attempts": 5, "verify_pause": 5.0}
        asked: dict[str, Any] = {}
        for name, default in defaults.items():
            value = m.given(request, name)
            asked[name] = default if value is None else value
        started = await self._backend.prepare(
            request.type, request.table, _argument(request), options, request.external_id, **asked
        )
        return _started(started)

    async def Confirm(self, request: operations_pb2.ConfirmRequest) -> operations_pb2.ConfirmResponse:
        if request.op:
            await self._backend.confirm_operation(parse_ref(request.op))
            return operations_pb2.ConfirmResponse(op=request.op)
        return operations_pb2.ConfirmResponse(op=str(await self._backend.confirm(request.external_id)))

    async def Abandon(self, request: operations_pb2.AbandonRequest) -> operations_pb2.AbandonResponse:
        await self._backend.abandon(parse_ref(request.op), request.text)
        return operations_pb2.AbandonResponse()

    async def GetPrepared(self, request: operations_pb2.GetPreparedRequest) -> operations_pb2.GetPreparedResponse:
        found = await self._backend.prepared_operation(request.external_id)
        return operations_pb2.GetPreparedResponse(op=str(found))

    async def Get(self, request: operations_pb2.GetRequest) -> operations_pb2.Operation:
        return m.operation_message(await self._backend.status(parse_ref(request.op), JobStates()))

    async def List(self, request: operations_pb2.ListRequest) -> operations_pb2.ListResponse:
        found = await self._backend.operations(_filter(request))
        return operations_pb2.ListResponse(operations=map(m.operation_message, found))

    async def ListHistory(self, request: operations_pb2.ListHistoryRequest) -> operations_pb2.ListHistoryResponse:
        names = ("type", "op", "since", "until", "request_id")
        wanted = HistoryFilters(
            **{name: m.given(request, name) for name in names},
            states=list(request.states) or None,
            labels=dict(request.labels) or None,
            alarms=request.alarms,
            after=m.given(request, "page_token"),
        )
        size, may = m.given(request, "page_size"), caller.get().may_see
        size = 100 if size is None else size
        answer = operations_pb2.ListHistoryResponse()
        while True:
            most = min(size - len(answer.operations), MOST_RECORDS)
            page = await self._backend.history(m.given(request, "table"), most, wanted)
            visible = [one for one in page if may(scope_of(one.op))]
            answer.operations.extend(map(m.result_message, visible))
            if page.after is None:
                return answer
            is_full = len(answer.operations) == size or answer.ByteSize() >= MOST_BYTES
            if is_full and visible and visible[-1] is page[-1]:  # the page token names the last operation
                answer.next_page_token = page.after
                return answer
            wanted = replace(wanted, after=page.after)

    async def Watch(self, request: operations_pb2.WatchRequest) -> AsyncGenerator[operations_pb2.WatchResponse, None]:
        if request.revision < 0:
            raise InvalidArgument(f"the revision must be 0 or more, not {request.revision}")
        assert self._watches is not None
        if request.only_end:
            yield operations_pb2.WatchResponse(operation=await self._watches.ends.wait(parse_ref(request.op)))
            return
        async with contextlib.aclosing(self._watches.watch(parse_ref(request.op), request.revision)) as found:
            async for response in found:
                yield response

    async def Wait(self, request: operations_pb2.WaitRequest) -> operations_pb2.Operation:
        ref, timeout = parse_ref(request.op), m.given(request, "timeout")
        if timeout is not None:
            seconds(timeout, "the timeout")
        assert self._watches is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self._watches.ends.wait(ref)
        return m.operation_message(await self._backend.status(ref, JobStates()))

    async def Cancel(self, request: operations_pb2.CancelRequest) -> operations_pb2.CancelResponse:
        await self._backend.cancel(parse_ref(request.op), request.text)
        return operations_pb2.CancelResponse()

    async def EndSeries(self, request: operations_pb2.EndSeriesRequest) -> operations_pb2.EndSeriesResponse:
        ended = await self._backend.end_series(parse_ref(request.op), request.text)
        return operations_pb2.EndSeriesResponse(op=ended)

    async def Pause(self, request: operations_pb2.PauseRequest) -> operations_pb2.PauseResponse:
        await self._backend.pause(parse_ref(request.op), request.now)
        return operations_pb2.PauseResponse()

    async def Resume(self, request: operations_pb2.ResumeRequest) -> operations_pb2.ResumeResponse:
        await self._backend.resume(parse_ref(request.op))
        return operations_pb2.ResumeResponse()

    async def Alter(self, request: operations_pb2.AlterRequest) -> operations_pb2.AlterResponse:
        names = ("priority", "max_jobs", "max_jobs_per_executor", "max_failed")
        wanted = {name: value for name in names if (value := m.given(request, name)) is not None}
        await self._backend.alter(parse_ref(request.op), StartOptions.of(wanted, "alter").checked())
        return operations_pb2.AlterResponse()

    async def Rerun(self, request: operations_pb2.RerunRequest) -> operations_pb2.StartResponse:
        options = StartOptions.of(_options(request.options).given(), "rerun")
        return _started(await self._backend.rerun(parse_ref(request.op), options, m.given(request, "unfinished")))

    async def Why(self, request: operations_pb2.WhyRequest) -> operations_pb2.WhyResponse:
        return m.why_message(await self._backend.why(parse_ref(request.op)))

    async def Counts(self, request: operations_pb2.CountsRequest) -> operations_pb2.CountsResponse:
        return operations_pb2.CountsResponse(counts=map(m.count_message, await self._backend.counts(_filter(request))))

    async def ListJobs(self, request: operations_pb2.ListJobsRequest) -> operations_pb2.ListJobsResponse:
        if request.page_size < 0:
            raise InvalidArgument(f"the page size must be 0 or more, not {request.page_size}")
        most = min(request.page_size or MOST_JOBS, MOST_JOBS)
        response = operations_pb2.ListJobsResponse()
        size = 0
        async for job in self._backend.outcomes(parse_ref(request.op), None, _page(request)):
            if len(response.jobs) == most or (response.jobs and size >= MOST_BYTES):
                response.next_page_token = str(job.partition)
                break
            if request.failed_only and job.success:
                continue
            message = m.job_message(job)
            size += message.ByteSize()
            response.jobs.append(message)
        return response

    async def GetReport(self, request: operations_pb2.GetReportRequest) -> operations_pb2.GetReportResponse:
        status = await self._backend.status(parse_ref(request.op), JobStates())
        if status.result is None:
            raise NotFound(f"{request.op} has no report yet: it has not ended")
        result = status.result
        report = None if result.report is None else m.json_message(result.report)
        record = m.json_message(dict(result.record))
        return operations_pb2.GetReportResponse(state=result.state, report=report, record=record)

    async def GetCertificate(
        self, request: operations_pb2.GetCertificateRequest
    ) -> operations_pb2.GetCertificateResponse:
        status = await self._backend.status(parse_ref(request.op), JobStates())
        if status.result is None:
            raise NotAllowed(f"{request.op} has no certificate yet: wait until it has ended")
        certificate = m.json_message(dict(status.result.certificate()))
        return operations_pb2.GetCertificateResponse(certificate=certificate)


def _page(request: operations_pb2.ListJobsRequest) -> int:
    token = m.given(request, "page_token") or "0"
    if not (token.isascii() and token.isdigit() and len(token) <= 12):
        raise InvalidArgument(f"{shown(token)} is not a page token of this list")
    return int(token)


def _filter(request: Any) -> Filter:
    """The filter of a request that lists open operations."""
    return Filter(
        filters.table_of(m.given(request, "table")),
        filters.type_of(m.given(request, "type")),
        open_states(list(request.states) or None),
        check_labels(dict(request.labels) or None),
    )


class TableCalls(_Service):
    """Registers tables."""

    async def List(self, request: tables_pb2.ListTablesRequest) -> tables_pb2.ListTablesResponse:
        return tables_pb2.ListTablesResponse(tables=map(m.table_message, await self._backend.tables()))

    async def Get(self, request: tables_pb2.GetTableRequest) -> tables_pb2.Table:
        for table in await self._backend.tables():
            if table.name == request.name:
                return m.table_message(table)
        raise NotFound(f"there is no table {shown(request.name)}")

    async def Add(self, request: tables_pb2.AddTableRequest) -> tables_pb2.Table:
        record = m.table_value(request.table)
        return m.table_message(await self._backend.add_table(record, request.replace, not request.unchecked))

    async def Remove(self, request: tables_pb2.RemoveTableRequest) -> tables_pb2.RemoveTableResponse:
        await self._backend.remove_table(request.name)
        return tables_pb2.RemoveTableResponse()

    async def ListActions(self, request: tables_pb2.ListActionsRequest) -> tables_pb2.ListActionsResponse:
        found = await self._backend.actions(m.given(request, "table"))
        return tables_pb2.ListActionsResponse(actions=map(m.json_message, found))


class BehaviorCalls(_Service):
    """The operation types that executors have published."""

    async def List(self, request: behaviors_pb2.ListBehaviorsRequest) -> behaviors_pb2.ListBehaviorsResponse:
        return behaviors_pb2.ListBehaviorsResponse(behaviors=map(m.behavior_message, await self._backend.behaviors()))

    async def Register(self, request: behaviors_pb2.RegisterBehaviorRequest) -> behaviors_pb2.Behavior:
        declaration = m.type_options(request).declaration(request.type, m.given_json(request, "arg_schema"))
        await self._backend.register_type(declaration, request.replace)
        return m.behavior_message(declaration)


class NodeCalls(_Service):
    """The live executors."""

    async def List(self, request: nodes_pb2.ListNodesRequest) -> nodes_pb2.ListNodesResponse:
        found = await self._backend.nodes()
        return nodes_pb2.ListNodesResponse(nodes=[m.node_message(name, node) for name, node in found.items()])

    async def Drain(self, request: nodes_pb2.DrainRequest) -> nodes_pb2.DrainResponse:
        return nodes_pb2.DrainResponse(state=await self._backend.drain(request.executor, False, None))

    async def Undrain(self, request: nodes_pb2.UndrainRequest) -> nodes_pb2.UndrainResponse:
        await self._backend.undrain(request.executor)
        return nodes_pb2.UndrainResponse()


class _EnoughOffers(Exception):
    """So many jobs as were asked for are known."""


class ClaimCalls(_Service):
    """Claims jobs for worker loops that are no executors."""

    async def Offer(self, request: claims_pb2.OfferRequest) -> claims_pb2.OfferResponse:
        found: list[OfferedJob] = []

        def keep(job: OfferedJob) -> bool:
            found.append(job)
            if len(found) >= min(request.most, MOST_JOBS):
                raise _EnoughOffers
            return False

        types = m.limits_value(request.types)
        with contextlib.suppress(_EnoughOffers):
            await self._backend.own_jobs("offer", types, request.most, _OFFER_DURATION, keep)
        return claims_pb2.OfferResponse(jobs=map(m.offered_message, found))

    async def Own(self, request: claims_pb2.OwnRequest) -> claims_pb2.OwnResponse:
        chosen = {(one.op, one.ordinal) for one in request.only}
        accept = (lambda job: (job.op, job.ordinal) in chosen) if chosen else None
        types = m.limits_value(request.types)
        found = await self._backend.own_jobs(request.actor, types, request.most, request.duration, accept)
        return claims_pb2.OwnResponse(jobs=map(m.offered_message, found))

    async def Extend(self, request: claims_pb2.ExtendRequest) -> claims_pb2.ExtendResponse:
        return claims_pb2.ExtendResponse(owned=await self._backend.extend(list(request.tokens), request.duration))

    async def Return(self, request: claims_pb2.ReturnRequest) -> claims_pb2.ReturnResponse:
        await self._backend.return_job(request.token, m.outcome_value(request))
        return claims_pb2.ReturnResponse()

    async def WaitForJobs(self, request: claims_pb2.WaitForJobsRequest) -> claims_pb2.WaitForJobsResponse:
        version = await self._backend.jobs_version()
        if request.timeout > 0 and version <= request.version:
            await self._backend.jobs_changed(request.version, min(request.timeout, 60.0))
            version = await self._backend.jobs_version()
        return claims_pb2.WaitForJobsResponse(version=version)


class PolicyCalls(_Service):
    """Policies start operations when they are due."""

    async def Set(self, request: policies_pb2.SetPolicyRequest) -> policies_pb2.Policy:
        limits = {name: m.given(request, name) for name in policies.LIMITS}
        every, arg, when = m.given(request, "every"), m.given_json(request, "arg"), m.given(request, "when")
        made = policies.definition(request.name, request.start, arg, every, list(request.on) or None, when, limits)
        await self._check_replaced_policy(request)
        (status,) = await self._backend.set_policies(request.table, {request.name: made})
        return m.policy_message(status)

    async def _check_replaced_policy(self, request: policies_pb2.SetPolicyRequest) -> None:
        """Raises PermissionDenied if the request replaces a policy of a type that the caller may not administer.

        The permission for the request covers only the type of the new policy.
        """
        who = caller.get()
        if who.identity is None or who.admin:
            return
        with contextlib.suppress(NotFound):
            former = (await self._backend.policy(request.table, request.name)).policy
            if not who.may_see(CallScope(None if former is None else former.start, request.table)):
                raise PermissionDenied(f"{who.identity.name} may not replace the policy {shown(request.name)}")

    async def List(self, request: policies_pb2.ListPoliciesRequest) -> policies_pb2.ListPoliciesResponse:
        found = await self._backend.policies(m.given(request, "table"))
        return policies_pb2.ListPoliciesResponse(policies=map(m.policy_message, found))

    async def Get(self, request: policies_pb2.GetPolicyRequest) -> policies_pb2.Policy:
        return m.policy_message(await self._backend.policy(request.table, request.name))

    async def Pause(self, request: policies_pb2.PausePolicyRequest) -> policies_pb2.Policy:
        return m.policy_message(await self._backend.pause_policy(request.table, request.name))

    async def Resume(self, request: policies_pb2.ResumePolicyRequest) -> policies_pb2.Policy:
        return m.policy_message(await self._backend.resume_policy(request.table, request.name))

    async def Remove(self, request: policies_pb2.RemovePolicyRequest) -> policies_pb2.RemovePolicyResponse:
        await self._backend.remove_policy(request.table, request.name)
        return policies_pb2.RemovePolicyResponse()

    async def Autopilot(self, request: policies_pb2.AutopilotRequest) -> policies_pb2.AutopilotResponse:
        found = await self._backend.autopilot(request.table, request.dry_run)
        return policies_pb2.AutopilotResponse(
            policies=map(m.policy_message, found.policies), left_out=dict(found.left_out), written=found.written
        )


class EventCalls(_Service):
    """Events that trigger policies."""

    async def Emit(self, request: events_pb2.EmitRequest) -> events_pb2.EmitResponse:
        found = await self._backend.emit(request.table, request.name, m.given(request, "event_id"))
        return events_pb2.EmitResponse(policies=found)


SERVICES: Mapping[str, type[_Service]] = MappingProxyType(
    {
        "Operations": OperationCalls,
        "Tables": TableCalls,
        "Behaviors": BehaviorCalls,
        "Nodes": NodeCalls,
        "Claims": ClaimCalls,
        "Policies": PolicyCalls,
        "Events": EventCalls,
    }
)
"""The calls of each service, by its name."""

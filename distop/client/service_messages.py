"""The values of the client as messages of distop's services, and back.

``…_message`` makes a message. The other functions read one; they raise InvalidArgument for a message that is not valid,
as they do for the values of any caller.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.actor_claims import Token
from distop.protocol.behavior_declaration import Declaration, Retry
from distop.protocol.json_codec import UNREADABLE, dumps, from_rfc3339, loads, rfc3339
from distop.protocol.keys import Keys
from distop.protocol.policy import Policy, PolicyState
from distop.protocol.records import History, Node, OperationRef, TableRecord
from distop.protocol.texts import shown
from distop.services.autopilot import Autopilot
from distop.services.claims import owned_jobs as claims
from distop.services.claims.types_without_code import TypeOptions
from distop.services.inspection.outcomes import JobResult
from distop.services.inspection.reasons import Code, Reason
from distop.services.inspection.status import ended_status
from distop.services.inspection.survey import Count
from distop.services.inspection.why import Why
from distop.services.operation_results import OperationResult, OperationStatus
from distop.services.policies import PolicyStatus
from distop.services.submission.option_values import After, Every, after_one
from distop.services.submission.start_options import StartOptions
from distop.v1 import behaviors_pb2, claims_pb2, json_pb2, nodes_pb2, operations_pb2, policies_pb2, tables_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

    from distop.services.inspection.history_filters import HistoryFilters

# -------------------------------------------------------------------------- JSON


def json_message(value: Any) -> json_pb2.Json:
    """The message of a JSON value."""
    return json_pb2.Json(text=dumps(value).decode())


def json_value(message: json_pb2.Json) -> Any:
    """The value of a message. Raises InvalidArgument."""
    try:
        return loads(message.text)
    except ValueError as error:
        raise InvalidArgument(f"a field has no valid JSON: {error}") from None
    except RecursionError:
        raise InvalidArgument("a field has JSON that is nested too deeply") from None


def _escaped(text: str) -> str:
    """A text without lone surrogates (of names that are not UTF-8), which a message cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def given(message: Message, name: str) -> Any:
    """The value of an optional field; None: absent."""
    return getattr(message, name) if message.HasField(name) else None


def given_json(message: Message, name: str) -> Any:
    """The value of an optional JSON field; None: absent."""
    return json_value(getattr(message, name)) if message.HasField(name) else None


def request_id_of(request: Any) -> str:
    """The id under which a request can be repeated; "": it has none."""
    options = getattr(request, "options", None)
    found = getattr(request, "request_id", "") or getattr(options, "request_id", "")
    found = found or getattr(request, "new_request_id", "")
    return found if isinstance(found, str) else ""


# ----------------------------------------------------------------------- options

_PLAIN = (
    *("request_id", "failure_policy", "retry_attempts", "time_limit", "submitter", "delay", "priority", "max_jobs"),
    *("max_jobs_per_executor", "id", "on_duplicate", "traceparent"),
)
"""Options with the same value in the message."""
_SCALARS = frozenset((*_PLAIN, "not_before", "max_failed"))


def options_message(options: StartOptions) -> operations_pb2.StartOptions:
    """The message of these options. Raises InvalidArgument for a wrong one."""
    options.checked()
    message = operations_pb2.StartOptions(one_off=options.one_off)
    for name in _PLAIN:
        if (value := getattr(options, name)) is not None:
            setattr(message, name, value)
    if options.partitions is not None:
        message.partitions.values.extend(options.partitions)
        message.partitions.SetInParent()
    for name in ("labels", "where"):
        if (value := getattr(options, name)) is not None:
            getattr(message, name).values.update(value)
            getattr(message, name).SetInParent()
    if options.not_before is not None:
        message.not_before = _time_text(options.not_before)
    if options.max_failed is not None:
        message.max_failed = str(options.max_failed)
    message.after.extend(after_message(one) for one in options.after or ())
    if options.every is not None:
        message.every.CopyFrom(_every_message(options.every))
    return message


def start_options(message: operations_pb2.StartOptions) -> StartOptions:
    """The options of a message."""
    # Most starts have few options.
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields() if field.name in _SCALARS}
    if message.HasField("partitions"):
        values["partitions"] = list(message.partitions.values)
    for name in ("labels", "where"):
        if message.HasField(name):
            values[name] = dict(getattr(message, name).values)
    if message.after:
        values["after"] = [after_value(one) for one in message.after]
    if message.HasField("every"):
        every = message.every
        names = ("jitter", "since", "on", "until", "times")
        values["every"] = Every(every.seconds, **{n: v for n in names if (v := given(every, n)) is not None})
    return StartOptions(one_off=message.one_off, **values)


def after_message(item: Any) -> operations_pb2.After:
    """The message of an operation to wait for. Raises InvalidArgument."""
    one = after_one(item)
    return operations_pb2.After(op=str(one.ref), on=one.on)


def after_value(message: operations_pb2.After) -> After:
    """The operation to wait for. Raises InvalidArgument."""
    return after_one(After(OperationRef.parse(message.op), message.on or "success"))


def _every_message(every: Every | float) -> operations_pb2.Every:
    one = every if isinstance(every, Every) else Every(every)
    until = None if one.until is None else _time_text(one.until)
    return operations_pb2.Every(
        seconds=one.seconds, jitter=one.jitter, since=one.since, on=one.on, until=until, times=one.times
    )


def _time_text(time: datetime | float | str) -> str:
    if isinstance(time, datetime):
        return time.isoformat()
    return time if isinstance(time, str) else rfc3339(time)


# -------------------------------------------------------------------- operations


def operation_message(status: OperationStatus) -> operations_pb2.Operation:
    """The message of a status."""
    record = status.to_json()
    jobs = {name: count for name, count in status.jobs.items() if count is not None}
    message = operations_pb2.Operation(
        op=status.op,
        state=status.state,
        stage=status.stage,
        jobs=operations_pb2.Jobs(**jobs),
        progress=status.progress,
        eta_seconds=status.eta_seconds,
        waiting_for=None if status.waiting_for is None else _escaped(status.waiting_for),
        labels=dict(status.labels),
        record=json_message(record),
    )
    for name in ("started", "finished"):
        if record.get(name):
            getattr(message, name).FromMilliseconds(round(from_rfc3339(record[name]) * 1000))
    return message


def result_message(result: OperationResult) -> operations_pb2.Operation:
    """The message of an ended operation."""
    return operation_message(ended_status(OperationRef.parse(result.op), History.decode(dumps(result.record))))


def history_message(history: History) -> operations_pb2.Operation:
    """The message of a history record."""
    return operation_message(ended_status(OperationRef.parse(history.op), history))


def history_of(message: operations_pb2.Operation) -> History:
    """The history record of an ended operation."""
    return History.decode(message.record.text.encode())


def history_request(table: str | None, limit: int, wanted: HistoryFilters) -> operations_pb2.ListHistoryRequest:
    """The message of a query of the history. Raises InvalidArgument."""
    wanted.query(Keys(), table, limit)
    states = (wanted.states,) if isinstance(wanted.states, str) else tuple(wanted.states or ())
    return operations_pb2.ListHistoryRequest(
        table=table,
        type=wanted.type,
        op=None if wanted.op is None else str(wanted.op),
        states=[str(one) for one in states],
        labels=dict(wanted.labels or {}),
        request_id=wanted.request_id,
        alarms=wanted.alarms,
        page_size=min(limit, 2**31 - 1),
        page_token=wanted.after,
        since=None if wanted.since is None else _time_text(wanted.since),
        until=None if wanted.until is None else _time_text(wanted.until),
    )


def operation_status(message: operations_pb2.Operation) -> OperationStatus:
    """The status of a message."""
    record = json_value(message.record)
    if record.get("finished"):
        return ended_status(OperationRef.parse(message.op), history_of(message))
    names = ("cancel", "exact", "failed", "request_id", "request_digest", "submitter", "work", "waiting_for")
    optional = ("failed_truncated", "rerun_of", "id", "by", "options", "labels")
    return OperationStatus(
        record["op"],
        record["state"],
        record["stage"],
        record["jobs"],
        record["started"],
        message.progress,
        given(message, "eta_seconds"),
        errors=tuple(record["errors"]),
        doing=tuple(record["doing"]),
        actions={name: record[name] for name in ("actions", "actions_dropped") if name in record},
        **{name: record[name] for name in names},
        **{name: record[name] for name in optional if name in record},
    )


def why_message(why: Why) -> operations_pb2.WhyResponse:
    """The message of the reasons why an operation waits."""
    return operations_pb2.WhyResponse(
        operation=operation_message(why.status),
        waiting=why.waiting,
        reasons=[
            operations_pb2.WhyResponse.Reason(
                code=str(one.code), text=_escaped(one.text), advice=_escaped(one.advice), stops=one.stops
            )
            for one in why.reasons
        ],
    )


def why_value(message: operations_pb2.WhyResponse) -> Why:
    """The reasons of a message. A newer service may know other codes."""
    status = operation_status(message.operation)
    known = {str(code): code for code in Code}
    reasons = (Reason(known.get(one.code, one.code), one.text, one.advice, one.stops) for one in message.reasons)  # type: ignore[arg-type]
    return Why(status.op, status, tuple(reasons))


def count_message(count: Count) -> operations_pb2.CountsResponse.Count:
    """The message of a count."""
    return operations_pb2.CountsResponse.Count(
        type=count.type,
        state=count.state,
        operations=count.operations,
        waiting=count.waiting,
        oldest_waiting=count.oldest_waiting,
    )


def count_value(message: operations_pb2.CountsResponse.Count) -> Count:
    """The count of a message."""
    oldest = given(message, "oldest_waiting")
    return Count(message.type, message.state, message.operations, message.waiting, oldest)


def job_message(job: JobResult) -> operations_pb2.ListJobsResponse.JobResult:
    """The message of a job's outcome. A result in a file is not sent: ``file`` names it."""
    return operations_pb2.ListJobsResponse.JobResult(
        partition=job.partition,
        name=_escaped(job.name),
        success=job.success,
        result=None if job.result is None else json_message(job.result),
        error=_escaped(job.error),
        executor=job.executor,
        attempt=job.attempt,
        started=job.started,
        finished=job.finished,
        file=None if job.file is None else json_message(job.file),
    )


def job_value(message: operations_pb2.ListJobsResponse.JobResult) -> JobResult:
    """The outcome of a message."""
    return JobResult(
        message.partition,
        message.name,
        message.success,
        given_json(message, "result"),
        message.error,
        message.executor,
        message.attempt,
        message.started,
        message.finished,
        given_json(message, "file"),
    )


# ------------------------------------------------- tables, nodes and behaviors


def table_message(table: TableRecord) -> tables_pb2.Table:
    """The message of a table."""
    return tables_pb2.Table(
        name=table.name, format=table.format, location=table.location, options=json_message(dict(table.options))
    )


def table_value(message: tables_pb2.Table) -> TableRecord:
    """The table of a message."""
    options = json_value(message.options) if message.options.text else {}
    if not isinstance(options, dict):
        raise InvalidArgument(f"the options of a table must be an object, not {shown(options)}")
    return TableRecord(message.name, message.format, message.location, options)


def node_message(incarnation: str, node: Node) -> nodes_pb2.Node:
    """The message of an executor."""
    return nodes_pb2.Node(
        incarnation=incarnation,
        executor=node.executor,
        host=node.host,
        slots=node.slots,
        state=str(node.state),
        behaviors=node.behaviors,
        labels=dict(node.labels),
        version=node.version,
        record=json_pb2.Json(text=node.encode().decode()),
    )


def node_value(message: nodes_pb2.Node) -> Node:
    """The executor of a message."""
    return Node.decode(message.record.text.encode())


def behavior_message(behavior: Declaration) -> behaviors_pb2.Behavior:
    """The message of a published type."""
    return behaviors_pb2.Behavior(
        type=behavior.type_name,
        description=behavior.description,
        arg_schema=json_message(dict(behavior.arg_schema)),
        result_schema=json_message(dict(behavior.result_schema)),
        report_schema=json_message(dict(behavior.report_schema)),
        declaration=json_pb2.Json(text=behavior.encode().decode()),
    )


def behavior_value(message: behaviors_pb2.Behavior) -> Declaration:
    """The type of a message."""
    return Declaration.decode(message.declaration.text.encode())


def type_options(message: behaviors_pb2.RegisterBehaviorRequest) -> TypeOptions:
    """The options of a type without code. Raises InvalidArgument."""
    values = given_json(message, "options") or {}
    if not isinstance(values, dict) or values.keys() - {one.name for one in fields(TypeOptions)}:
        raise InvalidArgument(
            "the options of a type must be an object with the names of docs/how-to/write-a-behavior.md"
        )
    if values.get("retry") is not None:
        try:
            values["retry"] = Retry.from_json(values["retry"])
        except UNREADABLE:
            raise InvalidArgument(f"{shown(values['retry'])} is no retry policy of a type") from None
    return TypeOptions(**values)


def registration_message(declaration: Declaration, replace: bool) -> behaviors_pb2.RegisterBehaviorRequest:
    """The message that declares a type without code."""
    options: dict[str, Any] = {
        "result_schema": dict(declaration.result_schema) or None,
        "object_field": declaration.object_field,
        "instances": declaration.instances,
        "conflicts_with": list(declaration.conflicts_with),
        "can_fail": declaration.can_fail,
        "retry": declaration.retry.to_json(),
        "lost": declaration.lost,
        "failure_policy": declaration.failure_policy,
        "description": declaration.description,
    }
    return behaviors_pb2.RegisterBehaviorRequest(
        type=declaration.type_name,
        arg_schema=json_message(dict(declaration.arg_schema)) if declaration.arg_schema else None,
        options=json_message(options),
        replace=replace,
    )


# ------------------------------------------------------------------------ claims


def offered_message(job: claims.OfferedJob) -> claims_pb2.Job:
    """The message of a job that could be claimed, or that is owned."""
    owned = {"token": job.token, "duration": job.duration} if isinstance(job, claims.OwnedJob) else {}
    return claims_pb2.Job(
        op=job.op,
        type=job.type,
        table=job.table,
        object=job.object,
        partition=job.partition,
        ordinal=job.ordinal,
        arg=json_message(job.arg),
        attempt=job.attempt,
        failures=job.failures,
        plan=json_message(dict(job.plan)),
        **owned,  # type: ignore[arg-type]
    )


def offered_value(message: claims_pb2.Job) -> claims.OfferedJob:
    """The job of a message."""
    return claims.OfferedJob(**_offered(message))


def owned_value(message: claims_pb2.Job) -> claims.OwnedJob:
    """The owned job of a message."""
    return claims.OwnedJob(**_offered(message), token=message.token, duration=message.duration)


def _offered(message: claims_pb2.Job) -> dict[str, Any]:
    names = ("op", "type", "table", "object", "partition", "ordinal", "attempt", "failures")
    plain = {name: getattr(message, name) for name in names}
    return {**plain, "arg": json_value(message.arg), "plan": json_value(message.plan)}


def limits_message(types: Mapping[str, int | None]) -> list[claims_pb2.TypeLimit]:
    """The messages of the maximum number of jobs of each type."""
    return [claims_pb2.TypeLimit(type=name, most=most) for name, most in types.items()]


def limits_value(messages: Any) -> dict[str, int | None]:
    """The maximum number of jobs of each type."""
    return {one.type: given(one, "most") for one in messages}


def return_message(token: str, outcome: claims.OwnedOutcome) -> claims_pb2.ReturnRequest:
    """The message that returns a job. Raises InvalidToken, and InvalidArgument for a wrong outcome."""
    message, found = claims_pb2.ReturnRequest(token=str(Token.parse(token))), claims.checked(outcome)
    if isinstance(found, claims.Complete):
        message.complete.SetInParent()
        _set_result(message.complete, found.result)
    elif isinstance(found, claims.Abort):
        message.abort.message = found.message
        message.abort.SetInParent()
        _set_result(message.abort, found.result)
    elif isinstance(found, claims.Retry):
        message.retry.error = found.error
        message.retry.SetInParent()
    else:
        message.release.SetInParent()
    return message


def outcome_value(message: claims_pb2.ReturnRequest) -> claims.OwnedOutcome:
    """The outcome in a message. Raises InvalidArgument."""
    kind = message.WhichOneof("outcome")
    if kind == "complete":
        return claims.Complete(given_json(message.complete, "result"))
    if kind == "abort":
        return claims.Abort(message.abort.message, given_json(message.abort, "result"))
    if kind == "retry":
        return claims.Retry(message.retry.error)
    if kind == "release":
        return claims.Release()
    raise InvalidArgument("a returned job needs an outcome: complete, abort, retry or release")


def _set_result(message: Any, result: Any) -> None:
    if result is not None:
        message.result.CopyFrom(json_message(result))


# ---------------------------------------------------------------------- policies


def policy_message(status: PolicyStatus) -> policies_pb2.Policy:
    """The message of a policy."""
    policy = status.policy
    return policies_pb2.Policy(
        table=status.table,
        name=status.name,
        state=status.stage,
        definition=None if policy is None else json_pb2.Json(text=policy.encode().decode()),
        evaluation=json_pb2.Json(text=status.state.encode().decode()),
        waiting_events=status.events,
        problem=status.problem,
    )


def policy_value(message: policies_pb2.Policy) -> PolicyStatus:
    """The policy of a message."""
    policy = Policy.decode(message.definition.text.encode()) if message.HasField("definition") else None
    state = PolicyState.decode(message.evaluation.text.encode())
    return PolicyStatus(message.table, message.name, policy, state, message.waiting_events, message.problem)


def policy_request(table: str, name: str, policy: Policy) -> policies_pb2.SetPolicyRequest:
    """The message that sets a policy."""
    return policies_pb2.SetPolicyRequest(
        table=table,
        name=name,
        start=policy.start,
        arg=json_message(dict(policy.arg)),
        every=f"{policy.every!r}s" if policy.every else None,
        on=policy.on,
        when=policy.when or None,
        **policy.options.to_json(),
    )


def autopilot_value(message: policies_pb2.AutopilotResponse) -> Autopilot:
    """The policies of an autopilot."""
    return Autopilot(tuple(map(policy_value, message.policies)), dict(message.left_out), message.written)

"""The permission that each call needs, and which parts of an answer a caller may see. A table that is executed."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distop.client.async_operation import parse_ref
from distop.client.service_messages import given, given_json, json_message, json_value, request_id_of
from distop.errors import InvalidArgument, PermissionDenied
from distop.protocol.actor_claims import Token
from distop.protocol.executor_nodes import JOIN
from distop.protocol.frozen import frozen
from distop.protocol.records import CLUSTER_TABLE
from distop.server import polycat
from distop.server.access import EVERYTHING, CallerRole, CallScope
from distop.server.limits import NewWork
from distop.server.long_running import op_of
from distop.services.submission import two_phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Scopes = Callable[[Any], Iterable[CallScope]]
    AnswerFilter = Callable[[Any, Callable[[CallScope], bool]], None]


@frozen
class CallRule:
    """What a call needs: a role for each of the scopes of its request.

    ``filter_list``: the call lists things of several tables; a scope of everything is not checked, but what the caller
    may not see is removed from the answer. ``filter_answer``: removes it from the answer of a call whose scope is
    checked.
    ``writes``: it may change something. ``waits``: it may take long, and is checked again before its answer.
    ``starts``: the operations that it starts, which limits of identities concern.
    """

    role: CallerRole
    scopes: Scopes
    writes: bool = False
    waits: bool = False
    filter_list: AnswerFilter | None = None
    filter_answer: Callable[[Any, Callable[[CallScope], bool], Any], None] | None = None
    starts: Callable[[Any], Iterable[NewWork]] | None = None


def _op(request: Any) -> list[CallScope]:
    return [scope_of(request.op)]


def scope_of(op: str) -> CallScope:
    """The scope of an operation. Raises InvalidArgument for a text that names none."""
    ref = parse_ref(op)
    return CallScope(ref.type, ref.table)


def _start(request: Any) -> list[CallScope]:
    return [CallScope(request.type, request.table), *_beside(request)]


def _beside(request: Any) -> list[CallScope]:
    """What a start names beside its own table."""
    return [*(scope_of(one.op) for one in request.options.after), *_referenced(request.type, request)]


def _referenced(type_name: str, request: Any) -> list[CallScope]:
    """The tables that an argument names as ``references`` (of validate), whose rows are read."""
    found: list[CallScope] = []
    if "references" not in request.arg.text and "\\u" not in request.arg.text:  # parsing each argument takes long
        return found
    left = [given_json(request, "arg")]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            target = one.get("references")
            if isinstance(target, dict) and isinstance(target.get("table"), str):
                found.append(CallScope(type_name, target["table"], CallerRole.VIEWER))
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return found


def _graph(request: Any) -> list[CallScope]:
    # The joins between the steps of a graph only wait for its other operations.
    joins = [(one.type, one.table) == (JOIN, CLUSTER_TABLE) for one in request.starts]
    if all(joins):
        return [EVERYTHING]
    return [
        scope
        for one, is_join in zip(request.starts, joins, strict=True)
        for scope in (_beside(one) if is_join else _start(one))
    ]


def _pairs(request: Any) -> list[CallScope]:
    return [scope_of(op) for pair in request.pairs for op in (pair.after.op, pair.run)] or [EVERYTHING]


def _confirmed(request: Any) -> list[CallScope]:
    return _op(request) if request.op else [EVERYTHING]


def _table(request: Any) -> list[CallScope]:
    return [CallScope(None, request.table)]


def _policy(request: Any) -> list[CallScope]:
    return [CallScope(request.start, request.table), *_referenced(request.start, request)]


def _named(request: Any) -> list[CallScope]:
    return [CallScope(None, request.name)]


def _added(request: Any) -> list[CallScope]:
    return [CallScope(None, request.table.name)]


def _type(request: Any) -> list[CallScope]:
    return [CallScope(request.type, None)]


def _types(request: Any) -> list[CallScope]:
    return [CallScope(one.type, None) for one in request.types] or [EVERYTHING]


def _tokens(request: Any) -> list[CallScope]:
    refs = [Token.parse(one).ref for one in request.tokens]
    return [CallScope(ref.type, ref.table) for ref in refs] or [EVERYTHING]


def _token(request: Any) -> list[CallScope]:
    ref = Token.parse(request.token).ref
    return [CallScope(ref.type, ref.table)]


def _pre_created(request: Any) -> list[CallScope]:
    return _start(polycat.prepare_request(request))


def _end_created(request: Any) -> list[CallScope]:
    return _op(polycat.confirm_request(request))


def _long_running(request: Any) -> list[CallScope]:
    return [scope_of(op_of(request.name))]


def _long_running_list(answer: Any, may: Callable[[CallScope], bool]) -> None:
    _keep(answer.operations, lambda one: may(scope_of(op_of(one.name))))


def _everything(_: Any) -> list[CallScope]:
    return [EVERYTHING]


def _counted(request: Any) -> list[CallScope]:
    return [CallScope(given(request, "type"), given(request, "table"))]


def _optional_table(request: Any) -> list[CallScope]:
    return [CallScope(None, request.table)] if request.HasField("table") else [EVERYTHING]


def _keep(items: Any, may: Callable[[Any], bool]) -> None:
    """Remove the items of a repeated field that may not be seen."""
    kept = [one for one in items if may(one)]
    del items[:]
    items.extend(kept)


def _operations(answer: Any, may: Callable[[CallScope], bool]) -> None:
    _keep(answer.operations, lambda one: may(scope_of(one.op)))


def _tables(answer: Any, may: Callable[[CallScope], bool]) -> None:
    _keep(answer.tables, lambda one: may(CallScope(None, one.name)))


def _policies(answer: Any, may: Callable[[CallScope], bool]) -> None:
    _keep(answer.policies, lambda one: may(_scope_of_policy(one)))


def _policy_of(answer: Any, may: Callable[[CallScope], bool], _request: Any) -> None:
    if not may(_scope_of_policy(answer)):
        raise PermissionDenied("this policy starts operations of a type that is none of yours")


def _scope_of_policy(policy: Any) -> CallScope:
    definition = given_json(policy, "definition") or {}
    return CallScope(definition.get("start"), policy.table)


def _counts(answer: Any, may: Callable[[CallScope], bool], request: Any) -> None:
    _keep(answer.counts, lambda one: may(CallScope(one.type, given(request, "table"))))


def _nodes(answer: Any, may: Callable[[CallScope], bool]) -> None:
    """Executors are visible to every identity with a grant, but not their work for operations of others."""
    for node in answer.nodes:
        record = json_value(node.record)
        for name in ("doing", "work", "refused", "skipped"):
            if name in record:
                record[name] = {op: value for op, value in record[name].items() if _may_see(op, may)}
        node.record.CopyFrom(json_message(record))


def _may_see(op: str, may: Callable[[CallScope], bool]) -> bool:
    try:
        return may(scope_of(op))
    except InvalidArgument:
        return may(EVERYTHING)  # it stands for all operations


def _prepared(answer: Any, may: Callable[[CallScope], bool]) -> None:
    if not may(scope_of(answer.op)):
        raise PermissionDenied("the operation that was prepared under this id is none of yours")


def _unfiltered(_answer: Any, _may: Callable[[CallScope], bool]) -> None:
    """Types are visible to every identity with a grant."""


def _new(message: Any, request_id: str) -> NewWork:
    """The operation of a message with an argument and options."""
    jobs = max(1, len(message.options.partitions.values))
    return NewWork(len(message.arg.text.encode()), jobs=jobs, request_id=request_id)


def _new_start(request: Any) -> list[NewWork]:
    return [_new(request, request_id_of(request))]


def _new_graph(request: Any) -> list[NewWork]:
    return [_new(one, request.request_id or request_id_of(one)) for one in request.starts]


def _new_prepared(request: Any) -> list[NewWork]:
    return [_new(request, two_phase.request_id(request.external_id))]


def _new_job(request: Any) -> list[NewWork]:
    return _new_prepared(polycat.prepare_request(request))


def _new_rerun(request: Any) -> list[NewWork]:
    return [NewWork(0, request_id=request.options.request_id)]


def _new_policy(request: Any) -> list[NewWork]:
    return [NewWork(len(request.arg.text.encode()), operations=0)]


_V, _S, _O, _A = CallerRole.VIEWER, CallerRole.SUBMITTER, CallerRole.OPERATOR, CallerRole.ADMIN

RULES: Mapping[str, CallRule] = MappingProxyType(
    {
        "Operations/Start": CallRule(_S, _start, writes=True, starts=_new_start),
        # Each of its starts is admitted as a call Start.
        "Operations/BatchStart": CallRule(_S, _everything, writes=True, filter_list=_unfiltered),
        "Operations/StartGraph": CallRule(_S, _graph, writes=True, starts=_new_graph),
        "Operations/AddDependencies": CallRule(_S, _pairs, writes=True),
        "Operations/Prepare": CallRule(_S, _start, writes=True, starts=_new_prepared),
        "Operations/Confirm": CallRule(_S, _confirmed, writes=True),
        "Operations/Abandon": CallRule(_S, _op, writes=True),
        "Operations/GetPrepared": CallRule(_V, _everything, filter_list=_prepared),
        "Operations/Get": CallRule(_V, _op),
        "Operations/List": CallRule(_V, _everything, filter_list=_operations),
        "Operations/ListHistory": CallRule(_V, _everything, filter_list=_operations),
        "Operations/Watch": CallRule(_V, _op),
        "Operations/Wait": CallRule(_V, _op, waits=True),
        "Operations/Cancel": CallRule(_O, _op, writes=True),
        "Operations/EndSeries": CallRule(_O, _op, writes=True),
        "Operations/Pause": CallRule(_O, _op, writes=True),
        "Operations/Resume": CallRule(_O, _op, writes=True),
        "Operations/Alter": CallRule(_O, _op, writes=True),
        "Operations/Rerun": CallRule(_O, _op, writes=True, starts=_new_rerun),
        "Operations/Why": CallRule(_V, _op),
        "Operations/Counts": CallRule(_V, _counted, filter_answer=_counts),
        "Operations/ListJobs": CallRule(_V, _op),
        "Operations/GetReport": CallRule(_V, _op),
        "Operations/GetCertificate": CallRule(_V, _op),
        "Operations/GetOperation": CallRule(_V, _long_running),
        "Operations/ListOperations": CallRule(_V, _everything, filter_list=_long_running_list),
        "Operations/WaitOperation": CallRule(_V, _long_running, waits=True),
        "Operations/CancelOperation": CallRule(_O, _long_running, writes=True),
        "PolyCat/PreCreateJob": CallRule(_S, _pre_created, writes=True, starts=_new_job),
        "PolyCat/EndCreateJob": CallRule(_S, _end_created, writes=True),
        "Tables/List": CallRule(_V, _everything, filter_list=_tables),
        "Tables/Get": CallRule(_V, _named),
        "Tables/Add": CallRule(_A, _added, writes=True),
        "Tables/Remove": CallRule(_A, _named, writes=True),
        "Tables/ListActions": CallRule(_V, _optional_table),
        "Behaviors/List": CallRule(_V, _everything, filter_list=_unfiltered),
        "Behaviors/Register": CallRule(_A, _type, writes=True),
        "Nodes/List": CallRule(_V, _everything, filter_list=_nodes),
        "Nodes/Drain": CallRule(_O, _everything, writes=True),
        "Nodes/Undrain": CallRule(_O, _everything, writes=True),
        "Claims/Offer": CallRule(_S, _types),
        "Claims/Own": CallRule(_S, _types, writes=True),
        "Claims/Extend": CallRule(_S, _tokens, writes=True),
        "Claims/Return": CallRule(_S, _token, writes=True),
        "Claims/WaitForJobs": CallRule(_V, _everything, filter_list=_unfiltered),
        "Policies/Set": CallRule(_A, _policy, writes=True, starts=_new_policy),
        "Policies/List": CallRule(_V, _optional_table, filter_list=_policies),
        "Policies/Get": CallRule(_V, _table, filter_answer=_policy_of),
        "Policies/Pause": CallRule(_A, _table, writes=True),
        "Policies/Resume": CallRule(_A, _table, writes=True),
        "Policies/Remove": CallRule(_A, _table, writes=True),
        "Policies/Autopilot": CallRule(_A, _table, writes=True),
        "Events/Emit": CallRule(_S, _table, writes=True),
    }
)
"""The rule of each call."""

"""Rules of shared keys: the counters of a table, and elections."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING
from urllib.parse import unquote

from auditing.content import HISTORY, STATE, Finding
from auditing.operation_rules import keeps_id
from auditing.records import id_key, operation_name, record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from auditing.content import Changes, Content
    from auditing.records import OperationName


def instance_numbers(content: Content, touched: Mapping[OperationName, Changes]) -> Iterator[Finding]:
    """The operations of a type on a table are numbered without gaps or repeats."""
    created: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name, changed in touched.items():
        if STATE in changed and changed[STATE].before is None:
            created[name.table, name.type].append(name.instance)
    for key, before in content.replaced.items():
        parts = key.split(".")
        if parts[0] == "distOp" and parts[-1] == "nextInstanceId":
            numbers = range(int(before or 1), int(content.others.get(key) or 1))
            started = sorted(created.pop((unquote(parts[1]), parts[2]), []))
            if started != list(numbers):
                yield Finding("instance numbers", key, f"counted {list(numbers)}, but {started} were started")
    for (table, type_), started in created.items():
        yield Finding("instance numbers", f"{table}/{type_}", f"{started} were started, but the counter did not move")


def running_operations(content: Content, touched: Mapping[OperationName, Changes]) -> Iterator[Finding]:
    """``runOps`` counts exactly the operations that are running, paused or cancelling."""
    keys = {unquote(key.split(".")[1]): key for key in content.others if key.endswith(".runOps")}
    tables = {name.table for name, changed in touched.items() if STATE in changed}
    tables |= {table for table, key in keys.items() if key in content.replaced}
    for table in tables:
        counted = record(content.others[keys[table]]) if table in keys else {}
        if +Counter(counted) != +content.active[table]:
            active = dict(+content.active[table])
            yield Finding("runOps", table, f"counts {counted}, but the active operations are {active}")


def elections(content: Content, touched: Mapping[OperationName, Changes]) -> Iterator[Finding]:
    """A live incarnation wins an election, and only from one that is not alive."""
    for key, former in content.replaced.items():
        elected = content.others.get(key)
        if not key.startswith(("distOpCoordinator.", "distOpPolicyEvaluator.")) or elected is None or elected == former:
            continue
        if former is not None and content.node_lived(former):
            yield Finding("elections", key, f"went from {former}, which is alive, to {elected}")
        if content.node(elected) is None:
            yield Finding("elections", key, f"was won by {elected}, which is not alive")


def watermarks(content: Content, touched: Mapping[OperationName, Changes]) -> Iterator[Finding]:
    """A watermark names an earlier revision, and its hour starts in the revision that writes it."""
    for key in content.watermarks & content.replaced.keys():
        upto, young = content.others.get(key), f"{key}.young"
        if upto is None:
            continue
        if int(upto) >= content.revision:
            yield Finding("watermarks", key, f"names revision {upto}, which was not there when its hour started")
        if young not in content.replaced or young not in content.others:
            yield Finding("watermarks", key, "was written without its young key")


def request_keys(content: Content, touched: Mapping[OperationName, Changes]) -> Iterator[Finding]:
    """The key of a request id names what the request started, as long as anything is known of that.

    A graph that was given up started nothing.
    """
    for key, former in content.replaced.items():
        now = content.others.get(key)
        if not key.startswith("distOpRequest.") or former is None or now == former:
            continue
        operation = content.operations.get(operation_name(former))
        if operation is None or (operation.state is None and HISTORY not in operation.keys):
            continue
        hold = operation.hold
        holds = [content.hold(hold, before=before) for before in (True, False)] if hold is not None else []
        if not operation.record(HISTORY).get("void") and all(one.get("state") != "denied" for one in holds):
            text = f"named {former}, which is still known, and names {now or 'nothing'}"
            yield Finding("one request, one operation", key, text)


def id_keys(content: Content, touched: Mapping[OperationName, Changes]) -> Iterator[Finding]:
    """The key of an id names an operation with this id that has not ended, and names it until its end.

    An operation of a series keeps its id beyond its end.
    """
    for key, former in content.replaced.items():
        now = content.others.get(key)
        if not key.startswith("distOpUnique.") or now == former:
            continue
        if now is not None:
            name = operation_name(now)
            operation = content.operations.get(name)
            if operation is None:
                yield Finding("one of an id", key, f"names {now}, which was never started")
            elif key != id_key(name, operation.spec.get("id") or ""):
                yield Finding("one of an id", key, f"names {now}, which has not this id")
            elif operation.ended and not keeps_id(operation):
                yield Finding("one of an id", key, f"names {now}, which has ended")
        elif former is not None:
            gone = content.operations.get(operation_name(former))
            if gone is not None and not gone.ended and gone.state is not None:
                yield Finding("one of an id", key, f"no longer names {former}, which has not ended")

"""The content of the views of tables and nodes. It comes from the calls of REST."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.cli.page.value_tree import tree
from distop.errors import NotFound, PermissionDenied
from distop.protocol.json_codec import parse_time
from distop.protocol.texts import shown
from distop.server.page.operation_context import ended_row, open_row
from distop.services.inspection import filters
from distop.services.inspection.history_filters import HistoryFilters
from distop.services.inspection.survey import Filter
from distop.v1 import nodes_pb2, policies_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.protocol.records import Node
    from distop.server.page.local_channel import LocalChannel
    from distop.services.operation_results import OperationResult
    from distop.services.policies import PolicyStatus

ENDED_READ = 250
"""Ended operations of a table of which versions, certificates, indexes and the chart are derived."""
CHART_BARS = 60


async def tables_context(channel: LocalChannel) -> dict[str, Any]:
    """All tables that the caller may see, with their policies and open operations."""
    backend = channel.backend()
    tables, open_ones = await backend.tables(), await backend.operations(Filter())
    policies = await _policies(channel, None)
    rows = []
    for table in sorted(tables, key=lambda one: one.name):
        mine = [one for one in open_ones if one.op.split("/")[0] == _part(table.name)]
        rows.append({
            "name": table.name, "format": table.format, "location": table.location,
            "policies": sum(one.table == table.name for one in policies),
            "open": len(mine),
            "waiting": sum(bool(one.waiting_for) for one in mine),
        })  # fmt: skip
    return {"tables": rows}


def _part(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


async def _policies(channel: LocalChannel, table: str | None) -> Sequence[PolicyStatus]:
    try:
        return await channel.backend().policies(table)
    except PermissionDenied:
        return ()


async def table_context(channel: LocalChannel, name: str) -> dict[str, Any]:
    """One table. Raises NotFound, PermissionDenied."""
    backend = channel.backend()
    filters.table_of(name)
    record = next((one for one in await backend.tables() if one.name == name), None)
    open_ones = await backend.operations(Filter(name))
    ended = list(await backend.history(name, ENDED_READ, HistoryFilters()))
    if record is None and not open_ones and not ended:
        raise NotFound(f"there is no table {shown(name)}")
    may = channel.may("Policies/Pause", policies_pb2.PausePolicyRequest(table=name, name="any"))
    return {
        "name": name,
        "record": record,
        "options": tree(dict(record.options)) if record is not None and record.options else None,
        "policies": [_policy_row(one, may) for one in await _policies(channel, name)],
        "open": [open_row(one) for one in sorted(open_ones, key=lambda one: one.started, reverse=True)],
        "ended": [ended_row(one) for one in ended[:20]],
        "ended_count": len(ended),
        "versions": _versions(ended),
        "certificates": [one for one in map(_certificate, ended) if one is not None][:20],
        "indexes": _indexes(ended),
        "chart": chart(ended),
    }


def _policy_row(one: PolicyStatus, may: bool) -> dict[str, Any]:
    policy, state = one.policy, one.state
    triggers = []
    if policy is not None:
        triggers = [f"every {policy.every:g} s"] if policy.every else []
        triggers += policy.on
    return {
        "name": one.name,
        "state": one.stage,
        "starts": policy.start if policy is not None else "",
        "triggers": ", ".join(triggers),
        "when": policy.when if policy is not None else "",
        "problem": one.problem,
        "events": one.events,
        "op": state.op,
        "evaluations": [
            {"time": each.time, "verdict": str(each.verdict), "why": each.why, "op": each.op}
            for each in reversed(state.kept[-5:])
        ],
        "may": may,
    }


def _versions(ended: Iterable[OperationResult]) -> list[dict[str, str]]:
    """The versions of the table that its operations have reported, the newest first."""
    found: dict[str, dict[str, str]] = {}
    for one in ended:
        report = one.report if isinstance(one.report, dict) else {}
        certificate = report.get("certificate")
        given = [report.get(name) for name in ("version", "table_version", "new_version", "snapshot")]
        given += [certificate.get("version")] if isinstance(certificate, dict) else []
        for version in given:
            if isinstance(version, str | int) and not isinstance(version, bool) and str(version):
                seen = {"version": str(version), "op": one.op, "time": str(one.record.get("finished") or "")}
                found.setdefault(str(version), seen)
    return list(found.values())[:20]


def _certificate(one: OperationResult) -> dict[str, Any] | None:
    report = one.report if isinstance(one.report, dict) else {}
    found = report.get("certificate")
    if not isinstance(found, dict):
        return None
    checks = found.get("checks")
    names = [str(check.get("name")) for check in checks if isinstance(check, dict)] if isinstance(checks, list) else []
    return {"op": one.op, "version": found.get("version"), "checks": names, "rows": found.get("rows"),
            "time": found.get("time") or one.record.get("finished")}  # fmt: skip


def _indexes(ended: Iterable[OperationResult]) -> list[dict[str, Any]]:
    """The indexes as their last builds have reported them, without those that were dropped since."""
    found: dict[str, dict[str, Any] | None] = {}
    for one in ended:
        report = one.report if isinstance(one.report, dict) else {}
        name = report.get("name")
        if not isinstance(name, str) or name in found or one.state != "success":
            continue
        if report.get("dropped") is True:
            found[name] = None
        elif "generation" in report and "columns" in report:
            columns = report["columns"] if isinstance(report["columns"], list) else []
            found[name] = {"name": name, "kind": report.get("kind"), "columns": ", ".join(map(str, columns)),
                           "generation": report.get("generation"), "version": report.get("table_version"),
                           "rows": report.get("rows"), "bytes": report.get("bytes"),
                           "unindexed": report.get("not_indexed_files"), "op": one.op}  # fmt: skip
    return [one for one in found.values() if one is not None]


def chart(ended: Sequence[OperationResult]) -> dict[str, Any] | None:
    """The last ended operations as bars of a chart: place, height in per cent, state and a text. None: fewer than 2."""
    shown_ones = [one for one in reversed(ended[:CHART_BARS]) if parse_time(str(one.record.get("finished") or ""))]
    if len(shown_ones) < 2:
        return None
    longest = max(one.seconds for one in shown_ones) or 1.0
    return {
        "longest": longest,
        "first": str(shown_ones[0].record.get("finished")),
        "last": str(shown_ones[-1].record.get("finished")),
        "bars": [
            {"x": n, "height": max(3.0, round(100 * one.seconds / longest, 1)), "state": one.state, "op": one.op,
             "seconds": one.seconds}
            for n, one in enumerate(shown_ones)
        ],
    }  # fmt: skip


async def nodes_context(channel: LocalChannel) -> dict[str, Any]:
    """The live executors, with what each does."""
    nodes, open_ones = await asyncio.gather(channel.backend().nodes(), channel.backend().operations(Filter()))
    rows = [_node_row(incarnation, node) for incarnation, node in nodes.items()]
    rows.sort(key=lambda one: (one["executor"], one["incarnation"]))
    return {
        "nodes": rows,
        "slots": sum(node.slots for node in nodes.values()),
        "running": sum(one.jobs.get("running") or 0 for one in open_ones),
        "may_drain": channel.may("Nodes/Drain", nodes_pb2.DrainRequest(executor="any")),
        "may_undrain": channel.may("Nodes/Undrain", nodes_pb2.UndrainRequest(executor="any")),
    }


def _node_row(incarnation: str, node: Node) -> dict[str, Any]:
    problems = [f"cannot run {name}: {why}" for name, why in node.unable.items()]
    problems += [f"etcd rejects writes of {op}: {why}" for op, why in node.refused.items()]
    problems += [f"skips {op}: {why}" for op, why in node.skipped.items()]
    problems += [node.spark] if node.spark else []
    problems += [f"its clock differs from etcd's by {node.clock} s"] if node.clock else []
    return {
        "incarnation": incarnation,
        "executor": node.executor,
        "host": node.host,
        "slots": node.slots,
        "state": str(node.state),
        "behaviors": node.behaviors,
        "labels": _labels(node.labels),
        "version": node.version,
        "doing": list(node.doing.items()),
        "problems": problems,
    }


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())

"""The content of two views: the list of operations, and one operation. It comes from the calls of REST."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from distop.cli.operation_text import action_rows, checks_of, committed_text, labelled, state_of, work_text
from distop.cli.page.checks import checks
from distop.cli.page.value_tree import tree
from distop.errors import DistopError, NotFound, Unavailable
from distop.protocol.identity import MADE
from distop.protocol.keys import Keys
from distop.protocol.user_actions import of_operation
from distop.server.page.operation_links import read_links
from distop.server.page.partition_states import PartitionStage
from distop.services.inspection import filters
from distop.services.inspection.history_filters import HistoryFilters
from distop.services.inspection.status import JobStates
from distop.services.inspection.survey import Filter, open_states
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.protocol.records import OperationRef
    from distop.server.page.local_channel import LocalChannel
    from distop.server.page.partition_reader import OperationPartitions
    from distop.services.operation_results import OperationResult, OperationStatus
    from distop.store.client import EtcdClient

OPEN_STATES = ("running", "pending", "paused", "cancelling")
ENDED_STATES = ("success", "failed", "cancelled")
ENDED_SHOWN = 50
"""Ended operations in a list; a link leads to the next ones."""
FAILED_SHOWN = 50
RETRIED_SHOWN = 20


# ------------------------------------------------------------------------- list


async def operations_context(channel: LocalChannel, query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The open and the ended operations that match the filters of a URL. Raises InvalidArgument."""
    table, type_name = _one(query, "table"), _one(query, "type")
    states = [one for one in query.get("state", ()) if one]
    backend = channel.backend()
    wanted = {"table": table, "type": type_name, "state": states}
    open_wanted = [one for one in states if one not in ENDED_STATES]
    ended_wanted = [one for one in states if one not in OPEN_STATES]
    found: list[OperationStatus] = []
    if not states or open_wanted:
        found = await backend.operations(
            Filter(filters.table_of(table), filters.type_of(type_name), open_states(open_wanted or None), None)
        )
    ended: Sequence[OperationResult] = ()
    after = None
    if not states or ended_wanted:
        given = HistoryFilters(type=type_name, states=ended_wanted or None, after=_one(query, "after"))
        given.query(Keys(), table, ENDED_SHOWN)  # wrong filters are refused
        page = await backend.history(table, ENDED_SHOWN, given)
        ended, after = page, page.after
    found.sort(key=lambda one: one.started, reverse=True)
    return {
        "wanted": wanted,
        "open": [open_row(one) for one in found],
        "counts": Counter(one.state for one in found),
        "ended": [ended_row(one) for one in ended],
        "after": after,
        "before": bool(_one(query, "after")),
        "states": (*OPEN_STATES, *ENDED_STATES),
    }


def _one(query: Mapping[str, Sequence[str]], name: str) -> str | None:
    values = [one for one in query.get(name, ()) if one]
    return values[-1] if values else None


def open_row(status: OperationStatus) -> dict[str, Any]:
    """One row of the list of open operations."""
    return {
        "op": status.op,
        "state": state_of(status),
        "base": status.state,
        "bar": bar_of(status.jobs, exact=status.exact),
        "done": (status.jobs.get("success") or 0) + (status.jobs.get("failed") or 0),
        "total": status.jobs.get("total"),
        "failed": status.jobs.get("failed") or 0,
        "progress": status.progress,
        "started": status.started,
        "eta": status.eta_seconds,
        "why": status.waiting_for or "",
        "doing": "; ".join(f"{one['executor']}: {one['text']}" for one in status.doing[:2]),
        "labels": labelled(status.labels) or "",
    }


def ended_row(result: OperationResult) -> dict[str, Any]:
    """One row of the list of ended operations."""
    return {
        "op": result.op,
        "state": result.state,
        "total": result.jobs.get("total"),
        "failed": result.jobs.get("failed") or 0,
        "seconds": result.seconds,
        "finished": str(result.record.get("finished") or ""),
        "why": result.sentence().partition(": ")[2] if result.state != "success" else "",
        "alarm": result.alarm,
    }


def bar_of(jobs: Mapping[str, int | None], *, exact: bool = True) -> list[tuple[str, float, float, int]]:
    """The parts of a progress bar: the state, where it starts and how wide it is in per cent, and the number."""
    total = jobs.get("total") or 0
    if not total:
        return []
    found, at = [], 0.0
    for name in ("success", "failed", "running", "waiting"):
        number = jobs.get(name) or 0
        if number:
            width = min(100.0 * number / total, 100.0 - at)
            found.append(("ended" if name == "success" and not exact else name, round(at, 2), round(width, 2), number))
            at += width
    return found


# ------------------------------------------------------------------- one operation


class OperationContext:
    """What the page of one operation shows. Parts that do not change are read once."""

    def __init__(
        self, channel: LocalChannel, etcd: EtcdClient, keys: Keys, ref: OperationRef, partitions: OperationPartitions
    ) -> None:
        self._channel = channel
        self._etcd, self._keys = etcd, keys
        self._ref = ref
        self._partitions = partitions
        self._seen = JobStates()
        self._failed: tuple[Any, dict[str, Any]] | None = None
        self._links: tuple[bool, Any] | None = None

    async def read(self) -> dict[str, Any]:
        """The variables of the templates of :data:`~distop.server.page.page_app.OPERATION`, from current data.

        Raises NotFound, PermissionDenied, Unavailable.
        """
        backend = self._channel.backend()
        status = await backend.status(self._ref, self._seen)
        reasons = []
        if not status.ended:
            reasons = [one.to_json() for one in (await backend.why(self._ref)).reasons]
        result = status.result
        jobs = self._jobs(status)
        report = result.report if result is not None else None
        checked = checks(report) if report is not None and checks_of(report) else None
        return {
            "op": str(self._ref),
            "ref": self._ref,
            "status": status,
            "state": result.state if result is not None else state_of(status),
            "ended": status.ended,
            "sentence": _sentence(result) if result is not None else "",
            "finished": str(result.record.get("finished") or "") if result is not None else "",
            "seconds": result.seconds if result is not None else None,
            "jobs": jobs,
            "bar": bar_of(jobs, exact=status.exact or self._partitions.complete),
            "facts": _facts(status),
            "reasons": reasons,
            "checked": checked,
            "rest": _rest(report, checked is not None),
            "errors": [] if jobs.get("failed") and self._partitions.complete else list(status.errors),
            "actions_done": action_rows(list(of_operation(status.to_json()))),
            "may": self._allowed(status),
            "failed": await self._failed_first(),
            "links": await self._linked(status.ended),
            "missing": self._partitions.missing,
        }

    def _jobs(self, status: OperationStatus) -> dict[str, int | None]:
        """The counts of jobs; exact ones once the partitions were read."""
        states = self._partitions.states
        found = dict(status.jobs)
        if states is not None and self._partitions.complete and not self._partitions.missing:
            totals = states.totals()
            found |= {
                "total": states.count,
                "success": totals[PartitionStage.SUCCESS],
                "failed": totals[PartitionStage.FAILED],
            }
            found |= {"running": totals[PartitionStage.RUNNING], "waiting": totals[PartitionStage.WAITING]}
        return found

    def _allowed(self, status: OperationStatus) -> dict[str, bool]:
        """The actions that make sense now, and whether the caller's roles allow them."""
        op, may = str(self._ref), self._channel.may
        if status.ended:
            return {"rerun": may("Operations/Rerun", operations_pb2.RerunRequest(op=op))}
        possible: dict[str, bool] = {}
        if status.state in ("running", "pending"):
            possible["pause"] = may("Operations/Pause", operations_pb2.PauseRequest(op=op))
        if status.state == "paused":
            possible["resume"] = may("Operations/Resume", operations_pb2.ResumeRequest(op=op))
        if status.state != "cancelling":
            possible["alter"] = may("Operations/Alter", operations_pb2.AlterRequest(op=op))
            possible["cancel"] = may("Operations/Cancel", operations_pb2.CancelRequest(op=op))
        return possible

    async def _failed_first(self) -> dict[str, Any]:
        """The failed partitions, then those that wait for a retry, then those that needed several attempts."""
        states = self._partitions.states
        if states is None:
            return {"rows": [], "left": 0, "problem": ""}
        failed = np.flatnonzero(states.stage == PartitionStage.FAILED)
        waiting = np.flatnonzero(states.stage == PartitionStage.WAITING)
        retried = (p for p, former in list(states.former.items()) if former.failures)
        apart = (PartitionStage.FAILED, PartitionStage.WAITING)
        several = np.array(sorted(p for p in retried if states.stage[p] not in apart), np.int64)
        wanted = [*failed[:FAILED_SHOWN], *waiting[:RETRIED_SHOWN], *several[:RETRIED_SHOWN]]
        left = failed.size + waiting.size + several.size - len(wanted)
        key = (tuple(wanted), left, int(states.changed[wanted].max()) if wanted else 0, len(states.former))
        if self._failed is None or self._failed[0] != key:
            try:
                rows = await self._partitions.details([int(one) for one in wanted])
                self._failed = key, {"rows": rows, "left": int(left), "problem": ""}
            except NotFound as error:
                self._failed = key, {"rows": [], "left": int(left), "problem": str(error)}
        return self._failed[1]

    async def _linked(self, ended: bool) -> Any:
        """The argument and the neighbours in the graph, without operations that the caller may not see."""
        if self._links is None or self._links[0] != ended:
            try:
                self._links = ended, await read_links(self._etcd, self._keys, self._ref)
            except Unavailable:
                raise
            except DistopError:
                return None
        found = self._links[1]
        get = operations_pb2.GetRequest
        return found.visible(lambda op: self._channel.may("Operations/Get", get(op=op)))


def _sentence(result: OperationResult) -> str:
    """Why it did not succeed; "" if it did."""
    text = result.sentence().removeprefix(result.op).strip()
    return "" if result.success else text[:1].upper() + text[1:]


def _facts(status: OperationStatus) -> list[tuple[str, str]]:
    request_id = "" if status.request_id.startswith(MADE) else status.request_id
    pairs = [
        ("submitter", status.submitter),
        ("by", status.by),
        ("request id", request_id),
        ("id", status.id),
        ("rerun of", status.rerun_of),
        ("labels", labelled(status.labels) or ""),
        ("options", ", ".join(f"{name} {value}" for name, value in status.options.items())),
        ("done", work_text(status.work) or ""),
        ("committed", committed_text(status.work) or ""),
        ("doing", "; ".join(f"{one['executor']}: {one['text']}" for one in status.doing)),
    ]
    return [(name, text) for name, text in pairs if text]


def _rest(report: Any, checked: bool) -> Any:
    if checked:
        report = {name: value for name, value in report.items() if name not in ("verdict", "rows", "checks")}
    return tree(report) if report not in (None, {}) else None

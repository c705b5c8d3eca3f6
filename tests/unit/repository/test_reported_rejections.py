"""Each handler in the source of daemons and clients that catches a rejected write reports it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parents[3] / "distop"
FOLDERS = ("client", "daemon", "services")
REJECTED = "MalformedRequest"
WIDE = {"DistopError", "EtcdRejected", "Exception", "BaseException", ""}
"""Exceptions that include a rejected write; "": a bare ``except``."""
RETURNS = "by_halves"
"""A function that catches a rejected write, and returns it."""

READS = "etcd is only read"
SMALL = "it writes only names, less than the node record, without which nothing runs"
ITSELF = "it is the node record: a rejection could not be reported in it"
DIVIDES = "a group is sent in smaller ones, and the caller reports the rejected item"
LOCAL = "nothing is sent"
NO_ETCD = "only object stores are asked"
ANSWERED = "the caller gets the error"
LOGGED = "it is logged, and the actor tries again: a limit of etcd may be raised"
ELSE_DAEMONS = "it writes only names; daemons do the same later"

EXCEPTED = {
    "finish_batches.Finishes._settle": READS,
    "finish_batches.Finishes._write": DIVIDES,
    "node_record.NodeRecord._publish": ITSELF,
    "process._run_repeatedly": "the incarnation is over",
    "executor_role.Executor._claim_fresh": DIVIDES,
    "claim_watch.ClaimWatch._run": READS,
    "claim_watch.ClaimWatch.reached": READS,
    "elections.Elections._commit_resignation": SMALL,
    "elections.Elections._look_up": READS,
    "elections.Elections._seek": SMALL,
    "evaluator_role.Evaluator._elect_all": SMALL,
    "evaluator_role.Evaluator._watch": "the incarnation ends with this error",
    "incarnation.Incarnation._start_watches": READS,
    "inputs.Inputs.facts": READS,
    "job_runs.Jobs._ended": LOCAL,
    "history_pruning.HistoryPruner._watermark": SMALL,
    "history_pruning.HistoryPruner.keep_young": SMALL,
    "reconciliation.Reconciler.look": READS,
    "reconciliation.Reconciler.sweep": READS,
    "coordinator_role.Coordinator._keep_arguments": LOCAL,
    "coordinator_role.Coordinator._watch": READS,
    "executor_role.Executor._announce_released": ITSELF,
    "result_sweeping.ResultSweeper.run": READS,
    "direct_backend.DirectBackend.watch": READS,
    "remote_starts.RemoteStarts._send": ANSWERED,
    "operation_end.OperationEnd._until_ended": READS,
    "async_worker.Worker._call": LOCAL,
    "async_worker.Worker._claim": LOGGED,
    "async_worker.Worker._extend_claims": LOGGED,
    "async_worker.Worker._finish": LOGGED,
    "blocking_operation._InThread._call": LOCAL,
    "doctor._space": READS,
    "doctor.check_cluster": READS,
    "done_callbacks.DoneCallbacks._call": LOCAL,
    "done_callbacks.DoneCallbacks._run": READS,
    "graph_start._Together._deny_hold": ELSE_DAEMONS,
    "insertion.Insertion._find_earlier": READS,
    "insertion.Insertion.read_predecessors": LOCAL,
    "job_owner.Owner._extend_page": "its caller raises it",
    "job_owner.Owner._round": "it is raised, or logged where other jobs were claimed",
    "job_owner.Owner.own": "an earlier error is raised, and the claim ends after its duration",
    "nearest_names.unknown_table": READS,
    "status.alarms": READS,
    "storage_doctor._conditional_writes": NO_ETCD,
    "storage_doctor._finding": NO_ETCD,
    "storage_doctor._others": NO_ETCD,
    "storage_doctor._tried": NO_ETCD,
    "submit.try_to_start": ANSWERED,
    "transactional_start._outcome": ELSE_DAEMONS,
}
"""Function → why its handler need neither raise nor report a rejected write."""
REPORTED_BY = {
    "claimer.Claimer._fail_lost": "executor_role.Executor._failed",
    "claimer.Claimer.claim.one": "executor_role.Executor._failed",
    "claimer.Claimer.revoke_lost": "executor_role.Executor._failed",
    "claimer.Claimer.claim_fresh": "executor_role.Executor._failed",
    "incarnation.Incarnation._rejection_logged": "abandoned_holds.HoldKeeper._write_one",
    "job_reports.Reporter._write": "job_reports.Reporter._insist",
    "executor_role.Executor._round": "executor_role.Executor._failed",
    "job_runs.Jobs._fail_after_cleanup.fail": "job_reports.Reporter._insist",
    "job_runs.Jobs._to_clean_for_sure": "job_reports.Reporter._insist",
    "job_reports.Reporter._insist": "job_reports.Reporter._insist",
    "executor_role.Executor._run": "executor_role.Executor._failed",
    "prepared_verification.Verifying._see_to": "prepared_verification.Verifying._write",
    "pending_starts.Waiters._begin_some": "pending_starts.Waiters._set_aside",
    "pending_starts.Waiters._end": "pending_starts.Waiters._set_aside",
    "pending_starts.Waiters._run": "pending_starts.Waiters._set_aside",
}
"""Function → the function that reports the rejected writes of the former."""


def names(kinds: list[ast.expr]) -> set[str]:
    """The classes that these expressions of a handler name."""
    flat = [one for kind in kinds for one in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    return {ast.unparse(one).rpartition(".")[2] for one in flat}


def silent(body: list[ast.stmt]) -> bool:
    """Whether a handler neither raises at its end nor reports a rejected write."""
    found = [node for statement in body for node in ast.walk(statement)]
    if isinstance(body[-1], ast.Raise) and not any(isinstance(one, ast.Return | ast.Continue) for one in found):
        return False
    return not any(is_report(one) for one in found)


def is_report(node: ast.AST) -> bool:
    """Whether a call puts a rejected write on the node record."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("rejected_writes.refused")


def catching(node: ast.AST) -> Iterator[bool]:
    """For each handler that a rejected write can reach, whether it is silent. A call of ``by_halves`` counts as one."""
    if isinstance(node, ast.Try):
        for handler in node.handlers:
            kinds = names([handler.type]) if handler.type is not None else {""}
            if kinds & WIDE or REJECTED in kinds:
                yield silent(handler.body)
            if REJECTED in kinds or kinds & {"DistopError", "EtcdRejected"}:
                return  # later handlers get none
    elif isinstance(node, ast.Call):
        if ast.unparse(node.func) == RETURNS:
            yield True
    elif isinstance(node, ast.With | ast.AsyncWith):
        for call in (item.context_expr for item in node.items):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("suppress"):
                yield bool(names(call.args) & (WIDE | {REJECTED}))


def functions(tree: ast.AST, where: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node, with the function that contains it."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        inner = f"{where}.{node.name}" if named else where  # type: ignore[attr-defined]
        yield inner, node
        yield from functions(node, inner)


def unreported(tree: ast.AST, where: str) -> Iterator[str]:
    """The functions that catch a rejected write and neither raise nor report it, once per place."""
    for inner, node in functions(tree, where):
        yield from (inner for is_silent in catching(node) if is_silent)


def test_each_handler_that_catches_a_rejected_write_reports_it() -> None:
    """A rejected write of a prepared hold was only logged: neither `why` nor `doctor` showed it."""
    paths = {folder: sorted((PACKAGE / folder).rglob("*.py")) for folder in FOLDERS}
    assert all(paths.values())
    trees = [(path.stem, ast.parse(path.read_text())) for files in paths.values() for path in files]
    found = Counter(name for stem, tree in trees for name in unreported(tree, stem))
    assert found == Counter([*EXCEPTED, *REPORTED_BY])
    reporting = {name for stem, tree in trees for name, node in functions(tree, stem) if is_report(node)}
    assert set(REPORTED_BY.values()) <= reporting


@pytest.mark.parametrize(
    ("handlers", "is_unreported"),
    [
        ("except DistopError as error: log.warning(error)", True),
        ("except (OSError, errors.EtcdRejected): pass", True),
        ("except: pass", True),
        ("except MalformedRequest: return None", True),
        ("except Exception: raise", False),
        ("except Exception as error:\n  if mine: return\n  raise", True),
        ("except SessionLost: return", False),
        ("except MalformedRequest as error: ctx.rejected_writes.refused(op, error)\nexcept DistopError: pass", False),
        ("except DistopError: raise\nexcept Exception: pass", False),
    ],
)
def test_silent_handlers_are_found(handlers: str, is_unreported: bool) -> None:
    text = f"try:\n  send()\n{handlers}"
    assert bool([*unreported(ast.parse(text), "module")]) is is_unreported
    for other in ("with suppress(DistopError): send()", "error = by_halves(group, send)"):
        assert [*unreported(ast.parse(other), "module")] == ["module"]

"""distop: resilient distributed operations on tables.

The public names, each loaded on first use, so that ``import distop`` costs nothing but this page::

    import distop
    client = distop.connect("127.0.0.1:2379")
    op = client.start_operation("validate", "nyc.flights", {"checks": [{"not_null": "dep_time"}]})
    result = op.wait(timeout=60)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from distop import aio, compat, errors
    from distop.client.blocking_client import Client, Operation, Worker, connect, start_operation
    from distop.client.graphs import Ended, Graph, Start, chain, chord, group
    from distop.errors import (
        DistopError,
        EtcdUnavailable,
        Incompatible,
        InvalidArgument,
        InvalidToken,
        JobFailed,
        NotAllowed,
        NotFound,
        OperationCancelled,
        OperationFailed,
        OperationStartError,
        OutcomeUnknown,
        Unavailable,
        UnknownBehavior,
        UsageError,
        WaitTimeout,
    )
    from distop.protocol.records import OperationRef, TableRecord
    from distop.services.claims.owned_jobs import Abort, Complete, OwnedJob, Release, Retry
    from distop.services.operation_results import OperationResult, OperationStatus
    from distop.services.submission.option_values import After, Every
    from distop.store.embedded import EmbeddedEtcd

_ERRORS = (
    "DistopError",
    "EtcdUnavailable",
    "Incompatible",
    "InvalidArgument",
    "InvalidToken",
    "JobFailed",
    "NotAllowed",
    "NotFound",
    "OperationCancelled",
    "OperationFailed",
    "OperationStartError",
    "OutcomeUnknown",
    "Unavailable",
    "UnknownBehavior",
    "UsageError",
    "WaitTimeout",
)
_CLAIMS = ("Abort", "Complete", "OwnedJob", "Release", "Retry")

_HOME = {
    **dict.fromkeys(_ERRORS, "distop.errors"),
    **dict.fromkeys(_CLAIMS, "distop.services.claims.owned_jobs"),
    **dict.fromkeys(("After", "Every"), "distop.services.submission.option_values"),
    **dict.fromkeys(("Ended", "Graph", "Start", "chain", "chord", "group"), "distop.client.graphs"),
    "Client": "distop.blocking",
    "Operation": "distop.blocking",
    "Worker": "distop.blocking",
    "connect": "distop.blocking",
    "start_operation": "distop.blocking",
    "OperationRef": "distop.protocol.records",
    "TableRecord": "distop.protocol.records",
    "OperationResult": "distop.services.operation_results",
    "OperationStatus": "distop.services.operation_results",
    "EmbeddedEtcd": "distop.store.embedded",
}
_MODULES = ("aio", "compat", "errors")

__all__ = ["__version__", *sorted(_HOME), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"distop.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'distop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

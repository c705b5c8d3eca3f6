"""The asyncio face: ``async with distop.aio.connect(...) as client``. Who only submits loads no worker loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.client import Client
from distop.connecting import connect
from distop.operation import Operation

if TYPE_CHECKING:
    from distop.workers import Job, Worker

__all__ = ["Client", "Job", "Operation", "Worker", "connect"]


def __getattr__(name: str) -> Any:
    if name in ("Job", "Worker"):
        from distop import workers

        return getattr(workers, name)
    raise AttributeError(f"module 'distop.aio' has no attribute {name!r}")

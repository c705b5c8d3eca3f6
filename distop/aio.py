"""The asyncio API: ``async with distop.aio.connect(...) as client``. The worker loop is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.client.async_client import Client
from distop.client.async_operation import Operation
from distop.client.connection import connect

if TYPE_CHECKING:
    from distop.client.async_worker import Job, Worker

__all__ = ["Client", "Job", "Operation", "Worker", "connect"]


def __getattr__(name: str) -> Any:
    if name in ("Job", "Worker"):
        from distop.client import async_worker

        return getattr(async_worker, name)
    raise AttributeError(f"module 'distop.aio' has no attribute {name!r}")

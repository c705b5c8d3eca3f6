"""The asyncio face: ``async with distop.aio.connect(...) as client``."""

from __future__ import annotations

from distop.client import Client, connect
from distop.operation import Operation
from distop.workers import Job, Worker

__all__ = ["Client", "Job", "Operation", "Worker", "connect"]

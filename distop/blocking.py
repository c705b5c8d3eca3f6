"""The blocking API: ``client = distop.blocking.connect(...)``.

It can be used from any thread and beside a running event loop.
"""

from __future__ import annotations

from distop.client.blocking_client import Client, connect, start_operation
from distop.client.blocking_operation import Operation
from distop.client.blocking_worker import Job, Worker

__all__ = ["Client", "Job", "Operation", "Worker", "connect", "start_operation"]

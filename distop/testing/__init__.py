"""The test kit for behaviors.

A fake context, a whole operation in one process, and a model of etcd.
"""

from __future__ import annotations

from distop.testing.fake_context import FakeContext, MemoryProgress
from distop.testing.model_store import ModelStore
from distop.testing.operation_run import OperationRun, run_operation

__all__ = ["FakeContext", "MemoryProgress", "ModelStore", "OperationRun", "run_operation"]

"""For tests of distop and of behaviors: an exact model of etcd in memory."""

from __future__ import annotations

from distop.testing.model_store import ModelStore

__all__ = ["ModelStore"]

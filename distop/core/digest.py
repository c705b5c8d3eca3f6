"""Digests: of a plan, which ties its chunks to it, of what a start asks for, and of two operations, for their edge."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from distop.core.codec import loads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.core.model import OperationRef


def plan_digest(chunks: Iterable[bytes]) -> str:
    """SHA-256 in hex over the chunks' bytes in order (invariant 13)."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def request_digest(arg: bytes, partitions: Iterable[str] | None) -> str:
    """SHA-256 in hex over the argument and the partitions asked for, whatever the order of fields and names."""
    names = sorted(partitions) if partitions is not None else None
    asked = json.dumps([loads(arg), names], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(asked.encode()).hexdigest()


def edge_id(before: OperationRef, after: OperationRef) -> str:
    """The name of the edge between two operations: 80 bits of SHA-256 in hex."""
    return hashlib.sha256(f"{before}\n{after}".encode()).hexdigest()[:20]

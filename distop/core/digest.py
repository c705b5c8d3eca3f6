"""The digest of a plan, which ties its chunks to it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def plan_digest(chunks: Iterable[bytes]) -> str:
    """SHA-256 in hex over the chunks' bytes in order (invariant 13)."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()

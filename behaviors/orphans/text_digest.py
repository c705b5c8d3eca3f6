"""A digest of a key or a path, which may have bytes that are not UTF-8. Pure."""

from __future__ import annotations

import hashlib


def text_digest(text: str, size: int) -> bytes:
    """The BLAKE2b hash of a text, of ``size`` bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=size).digest()

"""Bloom filters in blocks of 256 bits, as Parquet defines them: what is in them is found, and little else is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distop_behaviors.index.values import Numbers

BITS = 12
"""For each value: about one in 300 that are not there is taken to be."""
MAX_BYTES = 1 << 20
"""Of one filter: beyond some 700,000 values it errs more often."""

_SALT = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)


def made(values: Numbers) -> bytes:
    """The filter of some values, which are hashes: of numbers that are not, ``values.spread`` makes such."""
    import numpy as np

    blocks = max(1, min(len(values) * BITS // 256 + 1, MAX_BYTES // 32))
    words = np.zeros(blocks * 8, np.uint32)
    hashed = values.view(np.uint64)
    block = ((hashed >> np.uint64(32)) * np.uint64(blocks)) >> np.uint64(32)
    low = (hashed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    for n, salt in enumerate(_SALT):
        bit = np.uint32(1) << ((low * np.uint32(salt)) >> np.uint32(27))
        np.bitwise_or.at(words, block.astype(np.int64) * 8 + n, bit)
    return words.astype("<u4").tobytes()


def may_hold(data: bytes, value: int) -> bool:
    """Whether the value may be in the filter; False is certain. ``value``: 64 bits, with a sign."""
    hashed = value & 0xFFFFFFFFFFFFFFFF
    blocks = len(data) // 32
    start = ((hashed >> 32) * blocks >> 32) * 32
    low = hashed & 0xFFFFFFFF
    for n, salt in enumerate(_SALT):
        word = int.from_bytes(data[start + 4 * n : start + 4 * n + 4], "little")
        if not word >> ((low * salt & 0xFFFFFFFF) >> 27) & 1:
            return False
    return True

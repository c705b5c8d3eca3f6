"""A digest of a set of files that does not depend on their order, so that jobs add theirs up. Pure.

It is the sum, modulo 2 to the power of 128, of one BLAKE2b hash (16 bytes, big-endian) for each file. What is hashed
is the file's key below the table's folder, a NUL, and its size in bytes as a decimal number. No files: 32 zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop_behaviors.orphans.text_digest import text_digest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.storage.object_store import StoredObject

_BYTES = 16
_NUMBER_BYTES = 8
NOTHING = "0" * (2 * _BYTES)


def digest_of(files: Iterable[tuple[str, int]]) -> str:
    """The digest of files, given by key and size."""
    return _text(sum(_hash(f"{key}\0{size}") for key, size in files))


def added_up(digests: Iterable[str]) -> str:
    """The digest of the union of disjoint sets of files. "": no files."""
    return _text(sum(int(one, 16) for one in digests if one))


def fingerprint(file: StoredObject) -> int:
    """A hash of a stored file's key, size and version: equal fingerprints mean that the file is unchanged."""
    return int.from_bytes(text_digest(f"{file.key}\0{file.size}\0{file.stamp}", _NUMBER_BYTES), "big")


def _hash(text: str) -> int:
    return int.from_bytes(text_digest(text, _BYTES), "big")


def _text(number: int) -> str:
    return f"{number % (1 << (8 * _BYTES)):0{2 * _BYTES}x}"

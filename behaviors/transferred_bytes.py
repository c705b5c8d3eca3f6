"""Bytes that operations have read and written, as results and reports have them."""

from __future__ import annotations

from pydantic import BaseModel


class TransferredBytes(BaseModel):
    """Bytes of data files, without metadata: each read file counts once, although it may be read again to compare.

    Of attempts whose work is reused, and of those that have died, nothing counts.
    """

    bytes_read: int = 0
    bytes_written: int = 0

    def add_transferred(self, *, read: int, written: int) -> None:
        """Add these bytes."""
        self.bytes_read += read
        self.bytes_written += written

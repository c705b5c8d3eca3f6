"""Commands that a message proposes: written so that they can be pasted into a shell, whatever the names in them."""

from __future__ import annotations

import shlex


def command(*words: str) -> str:
    """``distop`` and these words, quoted where a shell would read them otherwise, between backticks."""
    return f"`{shlex.join(['distop', *words])}`"

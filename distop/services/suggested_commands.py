"""Suggestions in messages: shell commands that can be pasted."""

from __future__ import annotations

import shlex


def command(*words: str) -> str:
    """``distop`` and these words, quoted for a shell, between backticks."""
    return f"`{' '.join(map(_quoted, ['distop', *words]))}`"


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    text = word.encode("unicode_escape").decode().replace("'", "\\'")
    return f"$'{text}'"


def continues_text(op: str) -> str:
    """The message about an operation that continues after the wait for it."""
    return f"{op} continues: follow it with {command('watch', op)}, stop it with {command('cancel', op)}"


def may_have_begun(request_id: str) -> str:
    """The message about a start that was interrupted before etcd answered.

    No list shows for certain whether it was applied: the operation may have ended already, or start only later.
    """
    again = f"--request-id {shlex.quote(request_id)}"
    return (
        "interrupted before etcd answered, so the operation may have been started: run the same command with "
        f"`{again}`, which starts it at most once and reports its state"
    )

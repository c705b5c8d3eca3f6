"""Commands that a message proposes: written so that they can be pasted into a shell, whatever the names in them."""

from __future__ import annotations

import shlex


def command(*words: str) -> str:
    """``distop`` and these words, quoted where a shell would read them otherwise, between backticks."""
    return f"`{' '.join(map(_quoted, ['distop', *words]))}`"


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    text = word.encode("unicode_escape").decode().replace("'", "\\'")
    return f"$'{text}'"


def goes_on(op: str) -> str:
    """Of an operation that is no longer waited for."""
    return f"{op} goes on: follow it with {command('watch', op)}, stop it with {command('cancel', op)}"


def may_have_begun(request_id: str) -> str:
    """Of a start that etcd had not answered when it was interrupted. No list tells of it for certain: it may have ended
    by now, or begin only then.
    """
    again = f"--request-id {shlex.quote(request_id)}"
    return (
        "interrupted before etcd answered, so whether the operation began is not known: the same command with "
        f"`{again}` starts it only if it did not, and tells its state if it did"
    )

"""Formats errors as short, readable texts without secrets: the cause first, then the location."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING

from distop.errors import TableUnavailable, describe
from distop.protocol.json_codec import MAX_ERROR_TEXT
from distop.runtime import secret_settings

if TYPE_CHECKING:
    from pydantic import ValidationError

FRAMES = 6
_JAVA_ERROR = re.compile(r"^: ?((?:[a-z]\w*\.)+[A-Z][\w$]*(?:: .*)?)$", re.MULTILINE)


def explain(error: BaseException) -> str:
    """``Type: message`` and the last frames of the traceback, at most :data:`MAX_ERROR_TEXT` characters.

    For TableUnavailable the message alone: it is about files, not about code.
    """
    if isinstance(error, TableUnavailable):
        return secret_settings.shortened(describe(error), MAX_ERROR_TEXT)
    frames = traceback.extract_tb(error.__traceback__)
    # Leave out the worker's own frames.
    own = [f for f in frames if "/distop/worker/" not in f.filename.replace("\\", "/")] or list(frames)
    places = [f"  at {f.filename}:{f.lineno} in {f.name}: {(f.line or '').strip()}" for f in own[-FRAMES:]]
    text = "\n".join([headline(error), *places])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        text += f"\nafter {headline(cause)}"
    return secret_settings.shortened(text, MAX_ERROR_TEXT)


def headline(error: BaseException) -> str:
    """One line: the type and the first meaningful line of the message.

    Messages of Spark and the JVM continue with query plans and Java frames, which are in the log only.
    """
    message = describe(error)
    module = type(error).__module__
    if module.startswith("py4j") and (found := _JAVA_ERROR.search(message)):
        message = found[1]
    if module.startswith(("pyspark", "py4j")):
        message = next((line.strip() for line in message.splitlines() if line.strip()), "")
    name = type(error).__name__
    return name if message == name else f"{name}: {message}"


def explain_misfit(what: str, model: str, error: ValidationError) -> str:
    """One sentence about a value that its model rejects."""
    parts = [f"{'.'.join(str(p) for p in e['loc']) or what}: {e['msg'].rstrip('.')}" for e in error.errors()[:5]]
    more = error.error_count() - len(parts)
    rest = f"; and {more} more" if more > 0 else ""
    return secret_settings.shortened(f"{what} does not fit {model}: {'; '.join(parts)}{rest}", MAX_ERROR_TEXT)

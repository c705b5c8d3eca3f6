"""What py4j's and PySpark's errors say of Java's. Nothing of theirs is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_CAUSES = 20
"""One that is its own cause has no end."""


def thrown(error: Exception) -> Iterator[Any]:
    """What Java threw, and what caused it; nothing where PySpark itself raised the error. Raises what the connection to
    the JVM raises.
    """
    found: Any = getattr(error, "_origin", None) or getattr(error, "java_exception", None)
    for _ in range(_CAUSES):
        if found is None:
            return
        yield found
        found = found.getCause()

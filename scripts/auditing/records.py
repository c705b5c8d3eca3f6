"""Keys and values as docs/contract.md and docs/reference/keys.md describe them."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

FAMILIES = ("distOpOpen", "distOpPending", "distOpClaim", "distOpPermit", "distOpHistory", "distOp")
"""The families whose keys belong to operations."""

TERMINAL = ("success", "failed", "cancelled")
ACTIVE = ("running", "paused", "cancelling")
"""The states that ``runOps`` counts."""


def quoted(part: str) -> str:
    """A part of a name as in keys.

    It is percent-encoded, except letters, digits and ``_-=:@+``.
    """
    return quote(part, safe="_-=:@+").replace(".", "%2E").replace("~", "%7E")


class BadRecord(Exception):
    """A value that the contract does not allow."""


class OperationName(NamedTuple):
    """The decoded name of an operation.

    Keys and names percent-encode different characters.
    """

    table: str
    type: str
    object: str
    instance: int

    def __str__(self) -> str:
        """As ``distop`` prints it."""
        parts = [self.table, self.type, *([self.object] if self.object else []), str(self.instance)]
        return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


class KeyOf(NamedTuple):
    """A key of an operation: family, operation, and what follows the instance."""

    family: str
    operation: OperationName
    rest: str


def without_namespace(key: str, namespace: str) -> str | None:
    """The key without its namespace; None where it lies in another one."""
    if not namespace:
        return key if key.startswith("distOp") else None
    prefix = f"{namespace}/"
    return key.removeprefix(prefix) if key.startswith(prefix) else None


def operation_key(key: str) -> KeyOf | None:
    """The operation that a key belongs to; None for a key of a table, node or counter."""
    family, *parts = key.split(".")
    if family not in FAMILIES or len(parts) < 3:
        return None
    # The instance is the first component of digits alone after the type.
    for place in (2, 3):
        if place < len(parts) and parts[place].isdigit():
            object_ = unquote(parts[2]) if place == 3 else ""
            name = OperationName(unquote(parts[0]), parts[1], object_, int(parts[place]))
            return KeyOf(family, name, ".".join(parts[place + 1 :]))
    return None


def operation_name(text: str) -> OperationName:
    """The operation of this name, as records write it. Raises BadRecord otherwise."""
    parts = [unquote(part) for part in text.split("/")]
    if len(parts) not in (3, 4) or not parts[-1].isdigit():
        raise BadRecord(f"names no operation: {text!r}")
    return OperationName(parts[0], parts[1], parts[2] if len(parts) == 4 else "", int(parts[-1]))


def id_key(name: OperationName, identity: str) -> str:
    """The key of an id, for operations of the same table and type as this one."""
    return f"distOpUnique.{quoted(name.table)}.{name.type}.{quoted(identity)}"


_JOB = re.compile(r"(\d{6})\.(state|outcome|progress)")


def job_key(rest: str) -> tuple[int, str] | None:
    """(partition, "state", "outcome" or "progress") of a job's key, or None."""
    found = _JOB.fullmatch(rest)
    return (int(found[1]), found[2]) if found else None


def record(text: str) -> dict[str, Any]:
    """A JSON object. Raises BadRecord for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        raise BadRecord("is not JSON") from None
    if not isinstance(found, dict):
        raise BadRecord("is not a JSON object")
    return found

"""Finds orphan keys: keys in a listing that belong to no operation, or are not distop's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol import keys as K

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef


@dataclass(slots=True)
class _Seen:
    names: set[str] = field(default_factory=set)
    jobs: bool = False
    claims: bool = False
    gate: bool = False
    pending: bool = False


def orphans(keys: Keys, found: Iterable[str]) -> list[str]:
    """A sentence for each orphan, sorted. ``found``: all keys of the namespace at one revision."""
    wrong: list[str] = []
    seen: dict[OperationRef, _Seen] = {}
    for key in found:
        try:
            parsed = keys.parse(key)
        except (InvalidArgument, ValueError):
            wrong.append(f"the key {key} is not one of distop's")
            continue
        if parsed.ref is None or parsed.family == K.HISTORY:
            continue
        op = seen.setdefault(parsed.ref, _Seen())
        if parsed.family == K.OPEN:
            op.gate = True
        elif parsed.family == K.PENDING:
            op.pending = True
        elif parsed.family == K.CLAIM:
            op.claims = True
        elif parsed.family == K.PERMIT:
            op.names.add("permits")
        elif parsed.family == K.REMOVED_TABLE:
            op.names.add("removed table")
        elif parsed.partition >= 0:
            op.jobs = True
        else:
            op.names.add(parsed.name)
    for ref, op in seen.items():
        if "state" not in op.names:
            what = [w for w, there in (("jobs", op.jobs), ("claims", op.claims), ("a gate", op.gate)) if there]
            what += ["a pending key"] if op.pending else []
            what += sorted(f".{name}" for name in op.names)
            wrong.append(f"{ref} has {', '.join(what)}, but no state")
        elif op.gate == op.pending:
            both = "both a gate and a pending key" if op.gate else "neither a gate nor a pending key"
            wrong.append(f"{ref} has {both} (invariant 12)")
    return sorted(wrong)

"""How urgent an operation is, how much of it may run at once, and where; what ``alter`` changes.

What may change stands in ``<root>.options`` (absent: nothing was said). The gate repeats it, so that an executor knows
it before it reads anything else, and each claim compares it with the gate's mod revision: ``alter`` writes the gate
again.
"""

from __future__ import annotations

import re
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from distop.protocol.field_checks import checked, shown, within
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import SCHEMA_VERSION, dumps, loads

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_URGENT = 100
"""Priorities go from minus this to this: so aging reaches every operation."""
AGING = 10.0
"""Seconds of waiting that count as much as one step of priority."""
MAX_LIMIT = 100_000
_BUDGET = re.compile(r"|[0-9]{1,20}|[0-9]{0,20}\.?[0-9]{1,20}%|[0-9]{1,20}\.%")
"""What :func:`allowance` computes with; "": the failure policy says."""


def _budget(text: str) -> str:
    if not _BUDGET.fullmatch(text):
        raise ValueError(f"'max_failed' is {shown(text)}")
    return text


@frozen
class Options:
    """``<root>.options``. ``max_jobs``, ``max_jobs_per_executor``: of its jobs that run at once (0: no limit).
    ``max_failed``: of those that may fail before it is cancelled, a count or a share of all (``"5"``, ``"2%"``);
    "": the failure policy says.
    """

    priority: int = 0
    max_jobs: int = 0
    max_jobs_per_executor: int = 0
    max_failed: str = ""

    @property
    def limited(self) -> bool:
        """Its claims are counted, one way or the other."""
        return bool(self.max_jobs or self.max_jobs_per_executor)

    def to_json(self) -> dict[str, Any]:
        """What is not as if nothing had been said."""
        names = ("priority", "max_jobs", "max_jobs_per_executor", "max_failed")
        return {name: value for name in names if (value := getattr(self, name))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Options:
        return checked(
            cls(
                within(int(data.get("priority", 0)), -MOST_URGENT, MOST_URGENT, "priority"),
                within(int(data.get("max_jobs", 0)), 0, MAX_LIMIT, "max_jobs"),
                within(int(data.get("max_jobs_per_executor", 0)), 0, MAX_LIMIT, "max_jobs_per_executor"),
                _budget(str(data.get("max_failed", ""))),
            )
        )

    def encode(self) -> bytes:
        return dumps({"v": SCHEMA_VERSION, **self.to_json()})

    @classmethod
    def decode(cls, value: bytes) -> Options:
        return cls.from_json(loads(value))

    def altered(self, changes: Mapping[str, Any]) -> Options:
        """With these fields changed."""
        return replace(self, **changes)


DEFAULT = Options()


@frozen
class Terms:
    """What is said of an operation when its gate is written: the options, with the mod revision of their key (0: it is
    absent), the labels that an executor must have, and the tables that its jobs read besides its own.
    """

    options: Options = DEFAULT
    mod: int = 0
    where: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


def fits(where: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """A node with these labels may work for an operation with this selector: all of it is among them."""
    return all(labels.get(name) == value for name, value in where.items())


def allowance(max_failed: str, fail_fast: bool, total: int) -> int:
    """How many of so many jobs may fail before the operation is cancelled for it."""
    if not max_failed:
        return 0 if fail_fast else total
    if max_failed.endswith("%"):
        whole, _, part = max_failed[:-1].partition(".")
        scale: int = 10 ** (2 + len(part))
        return int(whole + part) * total // scale
    return int(max_failed)


def rank(priority: int, waited: float) -> int:
    """How urgent something is that has waited for so many seconds: the higher comes first."""
    return priority + int(max(0.0, waited) // AGING)


def usable_permits(most: int, held: Mapping[int, int], without: int) -> int:
    """Permits are numbered from 0; of which number on none may be taken. ``held``: permit → how many live claims have
    it (one, or none that counts); ``without``: live claims that have none, from before there was a limit.

    It is the largest k for which k and the live claims that have no permit below k are at most ``most``. That it holds
    of a k outlasts whatever claims, reports and releases follow behind the same gate: a claim below k is counted in k,
    and one beyond k is below another k' > k, of which it holds as well. So nothing but a new gate makes it wrong.
    """
    beyond = without + sum(held.values())
    if beyond > most:
        return 0
    k = 0
    while k < most and k + 1 + beyond - held.get(k, 0) <= most:
        beyond -= held.get(k, 0)
        k += 1
    return k

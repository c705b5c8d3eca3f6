"""Options of an operation: priority, limits, selector, and what ``alter`` changes.

The changeable ones are in ``<root>.options`` (absent: defaults). The gate repeats them, so that an executor knows them
before it reads anything else. Each claim compares the gate's mod revision, and ``alter`` writes the gate again.
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
"""Priorities range from minus this to this, so that aging reaches every operation."""
AGING = 10.0
"""Seconds of waiting that count as one step of priority."""
MAX_LIMIT = 100_000
_BUDGET = re.compile(r"|[0-9]{1,20}|[0-9]{0,20}\.?[0-9]{1,20}%|[0-9]{1,20}\.%")
"""What :func:`allowance` accepts; "": the failure policy decides."""


def _budget(text: str) -> str:
    if not _BUDGET.fullmatch(text):
        raise ValueError(f"'max_failed' is {shown(text)}")
    return text


@frozen
class Options:
    """``<root>.options``: the options that ``alter`` may change.

    ``max_jobs``, ``max_jobs_per_executor``: limits of jobs that run at once (0: no limit). ``max_failed``: how many
    jobs may fail before the operation is cancelled, a count or a share of all (``"5"``, ``"2%"``); "": the failure
    policy decides.
    """

    priority: int = 0
    max_jobs: int = 0
    max_jobs_per_executor: int = 0
    max_failed: str = ""

    @property
    def limited(self) -> bool:
        """Whether running jobs are limited in any way."""
        return bool(self.max_jobs or self.max_jobs_per_executor)

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from the defaults."""
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
        """The options with these fields changed."""
        return replace(self, **changes)


DEFAULT = Options()


@frozen
class Terms:
    """The terms of an operation that its gate contains.

    They are the options, the mod revision of their key (0: absent), the labels that an executor must have, and other
    tables that its jobs read.
    """

    options: Options = DEFAULT
    mod: int = 0
    where: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


def fits(where: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels may work for an operation with this selector."""
    return all(labels.get(name) == value for name, value in where.items())


def allowance(max_failed: str, fail_fast: bool, total: int) -> int:
    """How many of ``total`` jobs may fail before the operation is cancelled."""
    if not max_failed:
        return 0 if fail_fast else total
    if max_failed.endswith("%"):
        whole, _, part = max_failed[:-1].partition(".")
        scale: int = 10 ** (2 + len(part))
        return int(whole + part) * total // scale
    return int(max_failed)


def rank(priority: int, waited: float) -> int:
    """The urgency after ``waited`` seconds of waiting; higher values come first."""
    return priority + int(max(0.0, waited) // AGING)


def usable_permits(most: int, held: Mapping[int, int], without: int) -> int:
    """The number of permits that may be taken: only permits below it.

    ``held``: permit → number of live claims that have it (one, or none that counts). ``without``: live claims without a
    permit, from before there was a limit.

    It is the largest k for which k plus the live claims without a permit below k is at most ``most``. This stays valid
    whatever claims, reports and releases follow behind the same gate: a claim below k is counted in k, and a claim
    beyond k is below another valid k' > k. So only a new gate changes it.
    """
    beyond = without + sum(held.values())
    if beyond > most:
        return 0
    k = 0
    while k < most and k + 1 + beyond - held.get(k, 0) <= most:
        beyond -= held.get(k, 0)
        k += 1
    return k

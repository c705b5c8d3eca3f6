"""Cases of a test beyond the few that run at every change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def with_further(cases: Iterable[Any], first: int) -> list[Any]:
    """For ``parametrize``: the ``first`` run at every change, the further ones with ``scripts/test --slow``."""
    listed = list(cases)
    further = [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in listed[first:]
    ]
    return [*listed[:first], *further]

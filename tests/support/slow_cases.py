"""Parametrized test cases of which most run only with ``scripts/test --slow``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def mostly_slow(cases: Iterable[Any], always: int) -> list[Any]:
    """Cases for ``parametrize``: all but the first ``always`` ones are marked as slow."""
    listed = list(cases)
    slow = [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in listed[always:]
    ]
    return [*listed[:always], *slow]

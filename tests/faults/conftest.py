"""Real daemons under faults. After each test etcd's history is audited."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.conftest import etcd, group
from tests.support.behaviors import sample_env
from tests.support.writing import Journal

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["etcd", "group", "sample_env"]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Where the writing jobs write down what they do."""
    return Journal(tmp_path / "journal.jsonl")

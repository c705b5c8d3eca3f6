"""What an executor decides before it connects to anything."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from distop.daemon.process import check_system, stable_id
from distop.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def test_an_executor_runs_on_linux_only() -> None:
    check_system("linux")
    with pytest.raises(UsageError, match=r"^an executor runs on Linux only, and this is darwin"):
        check_system("darwin")


def test_an_id_is_made_once_and_kept(tmp_path: Path) -> None:
    made = stable_id(tmp_path, None)
    assert re.fullmatch(r"[A-Za-z0-9_-]+-[0-9a-f]{4}", made)
    assert stable_id(tmp_path, None) == made
    assert stable_id(tmp_path, "mine") == "mine"

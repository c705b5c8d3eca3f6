"""The start of an executor, before it connects to etcd."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from distop.daemon.process import check_system, stable_id
from distop.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def test_an_executor_runs_on_linux_only() -> None:
    check_system("linux")
    with pytest.raises(UsageError, match=r"^an executor needs Linux, but this is darwin"):
        check_system("darwin")


def test_the_executor_id_is_created_once_and_saved(tmp_path: Path) -> None:
    made = stable_id(tmp_path, None)
    assert re.fullmatch(r"[A-Za-z0-9_-]+-[0-9a-f]{4}", made)
    assert stable_id(tmp_path, None) == made
    assert stable_id(tmp_path, "mine") == "mine"


def test_the_actions_log_may_be_in_a_work_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    """It ended with exit code 2, after which service managers do not restart it."""
    work = tmp_path / "work"
    words = ["--etcd", "127.0.0.1:1", "--work-dir", str(work)]
    command = [sys.executable, "-P", "-m", "distop.cli", "executor", *words, "--actions-log", str(work / "actions")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as executor:
        deadline = time.monotonic() + 60
        while not (work / "actions").exists() and executor.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        executor.kill()
        assert executor.stderr is not None
        assert (work / "actions").exists(), executor.stderr.read()
    assert work.stat().st_mode & 0o777 == 0o700

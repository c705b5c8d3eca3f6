"""The committed protobuf code is what proto/ generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc_tools", reason="needs the dev extra")

ROOT = Path(__file__).parents[2]


def test_generated_code_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate-proto"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

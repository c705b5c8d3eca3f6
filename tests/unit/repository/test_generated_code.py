"""The committed protobuf code matches the output of proto/."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.support.needs import need

ROOT = Path(__file__).parents[3]


def test_generated_code_is_current() -> None:
    need(find_spec("grpc_tools"), "grpcio-tools, of the extra dev: pip install -e '.[dev]'")
    command = [sys.executable, str(ROOT / "scripts" / "generate-proto"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

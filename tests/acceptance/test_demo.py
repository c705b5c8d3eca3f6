"""The demo of the README, run as a new user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.localspark import FRUGAL

pytestmark = [pytest.mark.etcd, pytest.mark.spark, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def test_the_demo_finds_the_violations_and_survives_a_killed_executor() -> None:
    env = {**os.environ, "SPARK_SUBMIT_OPTS": f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} {FRUGAL}"}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts/demo.py")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=env,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2,512" in ran.stdout
    assert "kill -9 bob" in ran.stdout
    assert "Done in " in ran.stdout.splitlines()[-1]
    assert "Traceback" not in ran.stdout + ran.stderr

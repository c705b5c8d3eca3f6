"""docker/entrypoint: which exit codes end a container."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "docker" / "entrypoint"


def start(script: str, hold: str = "2 3 5") -> subprocess.Popen[str]:
    words = [str(PROGRAM), "sh", "-c", script]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/", "DISTOP_HOLD_EXIT_CODES": hold}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [0, 1, 4, 143])
def test_other_exit_codes_are_the_container_s(code: int) -> None:
    process = start(f"exit {code}")
    process.communicate(timeout=30)
    assert process.returncode == code


@pytest.mark.parametrize("code", [2, 3, 5])
def test_a_code_that_no_restart_mends_is_held_until_the_stop(code: int) -> None:
    process = start(f"exit {code}")
    assert process.stderr is not None
    assert f"exit code {code}, which a restart does not mend" in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == code


def test_without_the_variable_the_command_replaces_the_script() -> None:
    process = start("echo $$; exit 3", hold="")
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, int(out)) == (3, process.pid)


def test_a_stop_reaches_the_command_which_may_end_in_order() -> None:
    """Its exit code is not held: the container is being stopped."""
    process = start("trap 'echo stopping; exit 3' TERM; echo ready; while :; do read -r line; done")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (3, "stopping\n")

"""A daemon's etcd password is hidden from its jobs and from other processes of its user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.behaviors import sample_env  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemons

WITHOUT_CAPABILITIES = (sys.executable, "-m", "tests.integration.without_capabilities")
SECRET = "wasp-in-a-jar"
READ = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read(100_000))"


@pytest.fixture
def env(sample_env: dict[str, str]) -> dict[str, str]:  # noqa: F811
    return {**sample_env, "DISTOP_USER": "worker", "DISTOP_PASSWORD": SECRET}


@pytest.fixture
def bystander(env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user with the same environment, which does not protect it."""
    words = [*WITHOUT_CAPABILITIES, sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def read_as_other_process(file: str, env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Read a file from another process of the same user."""
    own = {"PYTHONPATH": env["PYTHONPATH"]}
    return subprocess.run([*WITHOUT_CAPABILITIES, sys.executable, "-c", READ, file], env=own, capture_output=True)


def descendants(pid: int) -> list[int]:
    """The pids of all descendants of a process."""
    found = [
        int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
    ]
    return found + [below for one in found for below in descendants(one)]


def test_other_processes_cannot_read_a_daemons_environment_and_memory(
    group: Daemons, env: dict[str, str], bystander: subprocess.Popen[bytes]
) -> None:
    assert SECRET.encode() in read_as_other_process(f"/proc/{bystander.pid}/environ", env).stdout, (
        "an unprotected environment is readable"
    )
    ann = group.spawn("ann", env=env, through=WITHOUT_CAPABILITIES)
    group.await_ready("ann")
    for name in ("environ", "mem", "maps"):
        ran = read_as_other_process(f"/proc/{ann.pid}/{name}", env)
        assert b"PermissionError" in ran.stderr, (name, ran)
        assert not ran.stdout
    below = descendants(ann.pid)
    assert len(below) >= 2, "the daemon has a guardian and a child"
    for pid in below:
        ran = read_as_other_process(f"/proc/{pid}/environ", env)
        assert b"DISTOP_CHILD=" in ran.stdout, "the environment of jobs is readable, so that they can be debugged"
        assert SECRET.encode() not in ran.stdout
    operation = group.client.start_operation("sample", "t", {"names": ["a"]})
    assert operation.wait(60).state == "success", group.tails()
    assert ann.stop() == 0
    assert SECRET not in ann.log.read_text()

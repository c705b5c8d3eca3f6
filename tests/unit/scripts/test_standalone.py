"""A Spark standalone cluster ends only its own processes, whatever its folder names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from standalone import MARKER, Size, Standalone

WAIT = (sys.executable, "-S", "-c", "import sys; print('up', flush=True); sys.stdin.read()")


def started(env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in its own session, and wait until it runs."""
    process = subprocess.Popen(
        WAIT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **env}, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_only_processes_of_the_cluster_are_ended(tmp_path: Path) -> None:
    cluster = Standalone(tmp_path)
    assert (cluster.parts(), cluster.url, cluster.down()) == ([], "", 0)
    record = {"url": "spark://127.0.0.1:1", "size": asdict(Size(workers=1))}
    with (
        started({}) as stranger,
        started({MARKER: f"{tmp_path}-other"}) as neighbour,
        started({MARKER: str(tmp_path)}) as own,
    ):
        for foreign in (stranger, neighbour):
            (tmp_path / "cluster.json").write_text(json.dumps(record))
            (tmp_path / "master.pid").write_text(str(own.pid) if own.poll() is None else "gone")
            (tmp_path / "worker-1.pid").write_text(str(foreign.pid))
            master, worker = cluster.parts()
            assert (master.pid, worker.pid) == (own.pid if own.poll() is None else 0, 0)
            assert cluster.down() == (1 if master.pid else 0)
            assert foreign.poll() is None
            assert own.wait(10) < 0
            assert cluster.parts() == []
        for foreign in (stranger, neighbour):
            foreign.kill()


def test_a_process_of_the_cluster_is_recognized_during_an_exec(tmp_path: Path) -> None:
    """/proc shows no environment then: the process counted as ended, and a cluster that came up as failed."""
    script, done = tmp_path / "execs", tmp_path / "done"
    script.write_text(f'#!/bin/sh\n[ "$1" -gt 0 ] && exec "$0" $(($1 - 1))\n: > "{done}"\nread -r line\n')
    script.chmod(0o755)
    (tmp_path / "cluster.json").write_text(json.dumps({"url": "spark://127.0.0.1:1", "size": asdict(Size(workers=1))}))
    command, env = [str(script), "300"], {**os.environ, MARKER: str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True) as process:
        (tmp_path / "master.pid").write_text(str(process.pid))
        cluster, seen = Standalone(tmp_path), set[int]()
        while not done.exists():
            seen.add(cluster.parts()[0].pid)
        assert process.stdin is not None
        process.stdin.close()
    assert seen == {process.pid}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("status",), 1, "no cluster was started: run scripts/cluster up"),
        (("down",), 0, "no process was running"),
        (("up", "--workers", "0"), 2, "at least one worker with at least one core is needed"),
    ],
)
def test_the_command_reports_the_state_of_the_cluster(
    tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    script = Path(__file__).parents[3] / "scripts" / "cluster.py"
    ran = subprocess.run(
        [sys.executable, str(script), "--folder", str(tmp_path / "none"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (code, "")
    assert message in ran.stderr
    assert not (tmp_path / "none").exists()

"""``scripts/bench peers``: systems that are not installed are left out, and what their programs print is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import peers


def environment(folder: Path, name: str, script: str, program: str = "") -> None:
    """An environment whose interpreter is a shell script."""
    there = folder / name / "bin"
    there.mkdir(parents=True)
    for file, text in (("python", script), (program, "exit 0")):
        if file:
            (there / file).write_text(f"#!/bin/sh\n{text}\n")
            (there / file).chmod(0o755)


def test_nothing_is_measured_without_installed_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.run(str(tmp_path)).rows == []
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].split()[0] for line in told] == list(peers.CASES)
    assert all("is left out: there is no" in line for line in told)


def test_a_system_needs_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    environment(tmp_path, "temporal", "exit 0")
    assert peers.missing(tmp_path, "temporal") == "there is no program temporal"
    environment(tmp_path, "celery", "exit 0", "redis-server")
    assert peers.missing(tmp_path, "celery") == ""


def test_the_last_line_of_a_program_has_its_figures(tmp_path: Path) -> None:
    environment(tmp_path, "dagster", """echo noise; test "$2" = '{"jobs": 3}' && echo '{"partitions": 1.5}'""")
    assert peers.measure(tmp_path, "dagster", jobs=3) == {"partitions": 1.5}


def test_a_program_that_fails_stops_the_measurement(tmp_path: Path) -> None:
    environment(tmp_path, "gx", "echo 'no such column' >&2; exit 3")
    with pytest.raises(RuntimeError, match="gx ended with 3: no such column"):
        peers.measure(tmp_path, "gx")


@pytest.mark.parametrize("name", peers.CASES)
def test_each_system_has_a_program(name: str) -> None:
    file = Path(peers.__file__).parent / "peer_programs" / f"{name}_peer.py"
    compile(file.read_text(), str(file), "exec")

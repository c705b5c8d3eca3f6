"""scripts/engine: its settings for builds, and what it says where it cannot run. No engine is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import distop
from scripts import container_engine
from scripts.container_engine import Places

ROOT = Path(__file__).parents[3]


@pytest.fixture
def at(tmp_path: Path) -> Places:
    return Places(tmp_path / "engine")


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_an_engine_that_is_down_is_named(at: Places) -> None:
    assert container_engine.process(at) is None
    assert container_engine.problem(at) == "scripts/engine is not up"


def test_the_number_of_another_process_is_not_taken_for_the_engine(at: Places) -> None:
    at.run.mkdir(parents=True)
    at.pid.write_text(str(os.getpid()))
    assert container_engine.process(at) is None


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (container_engine.IMAGES, None),
        ((), f"the engine of scripts/engine has no image {container_engine.PYTHON_BASE}: run scripts/engine up"),
    ],
)
def test_an_engine_without_images_is_named(at: Places, images: tuple[str, ...], expected: str | None) -> None:
    at.run.mkdir(parents=True)
    at.programs.mkdir()
    listed = "; ".join(f'[ "$4" = "{image}" ] && echo 0123' for image in images)
    program(at.programs / "bin", "docker", f'[ "$1" = info ] && exit 0; {listed or ":"}; exit 0')
    words = [sys.executable, "-c", "print('up', flush=True); input()", str(at.data)]  # in place of dockerd
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            at.pid.write_text(str(process.pid))
            assert container_engine.process(at) == process.pid
            assert container_engine.problem(at) == expected
        finally:
            process.kill()


def test_without_root_nothing_is_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(container_engine.os, "geteuid", lambda: 1000)
    assert container_engine.main(["up"]) == 1
    assert "needs root" in capsys.readouterr().err


def test_only_settings_about_the_origin_of_packages_reach_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    program(
        tmp_path / "bin",
        "apt-config",
        "echo 'Acquire::http::Proxy \"http://proxy.example:3128\";'; echo 'APT::Architecture \"amd64\";'",
    )
    program(tmp_path / "bin", "apt-get", "echo 'http://mirror.example/debian/ http://mirror.example/debian/'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    folder = tmp_path / "secrets"
    folder.mkdir()
    options = container_engine.write_secrets(folder)
    assert {option.partition(",")[0] for option in options} >= {f"--secret=id={n}" for n in ("pip_conf", "apt_conf")}
    pip, apt = (folder / "pip_conf").read_text(), (folder / "apt_conf").read_text()
    assert "https://index.example/simple\n" in pip
    assert "elsewhere" not in pip
    assert 'Acquire::http::Proxy "http://proxy.example:3128";' in apt
    assert "Architecture" not in apt
    assert (folder / "apt_sources").read_text() == "deb http://mirror.example/debian bookworm main\n"
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}, "for their owner alone"


def test_the_images_are_those_of_docker() -> None:
    assert f"ARG BASE={container_engine.PYTHON_BASE}\n" in (ROOT / "docker" / "Dockerfile").read_text()
    assert container_engine.ETCD_BASE in (ROOT / "docker" / "compose.yaml").read_text()
    assert container_engine.ETCD in container_engine.etcd_servers.VERSIONS


def test_the_version_is_that_of_distop() -> None:
    assert container_engine.version() == distop.__version__

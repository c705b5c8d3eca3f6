"""The bootstrap of scripts: a missing program is one sentence with the remedy, and no file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LOCK = ("requirements/build.txt", "requirements/run.txt", "requirements/dev.txt")
FILES = ("scripts/_bootstrap", "pyproject.toml", "setup.py", *LOCK)
TOOLS = ("bash", "cat", "chmod", "cksum", "dirname", "flock", "head", "mkdir", "sed", "tr")

# The interpreter of virtual environments in these tests: it runs, and its pip fails on request.
PYTHON = """\
#!/bin/sh
case "$*" in
    *sys.version_info*) exit {old} ;;
    *sys.version*) echo "3.12.0 (a fake)" ;;
    *ensurepip*) exit {without_venv} ;;
    "-m venv"*) mkdir -p "$4/bin" && cat "$0" >"$4/bin/python" && chmod +x "$4/bin/python" ;;
    *spark_archive.py*) exit {archive} ;;
    "-m pip"*) echo "pip $*" >>"$PIP_CALLS"; echo "pip's own reason" >&2; case "$*" in *{pip}*) exit 1 ;; esac ;;
esac
"""


class Clone:
    """A clone with only the script, on a machine with a few programs; Python and Java are fakes."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.folder = folder / "a clone"
        self.pip_calls = folder / "pip"
        for name in FILES:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.program("uname", "#!/bin/sh\necho Linux\n")
        self.python()
        self.java("17.0.2")

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def python(
        self,
        name: str = "python3",
        *,
        old: bool = False,
        without_venv: bool = False,
        pip: str = "none of these",
        archive: int = 0,
    ) -> None:
        """``pip``: a word in the calls of pip that fail."""
        pip = pip.replace(" ", "\\ ")
        self.program(name, PYTHON.format(old=int(old), without_venv=int(without_venv), pip=pip, archive=archive))

    def java(self, version: str) -> None:
        self.program("java", f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\n")

    def made(self) -> set[str]:
        """The files besides the script and the files that it reads."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()} - set(FILES)

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", "-c", "set -euo pipefail; source scripts/_bootstrap; bootstrap; echo ready, by $PATH"]
        settings = {"PATH": str(self.bin), "PIP_CALLS": str(self.pip_calls), **env}
        return subprocess.run(words, cwd=self.folder, env=settings, capture_output=True, text=True, timeout=60)

    def refusal(self, **env: str) -> str:
        """The sentence of a refusal, before any file was written."""
        ran = self.run(**env)
        assert (ran.returncode, ran.stdout) == (1, ""), ran
        assert ran.stderr.count("\n") == 1, ran.stderr
        assert ran.stderr.startswith("distop: "), ran.stderr
        assert self.made() == set()
        assert not self.pip_calls.exists()
        return ran.stderr.removeprefix("distop: ").rstrip("\n")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_link_to_an_environment_of_another_place_is_refused(clone: Clone, tmp_path: Path) -> None:
    others = tmp_path / "another clone" / ".venv"
    others.mkdir(parents=True)
    (others / "kept").touch()
    link = clone.folder / ".venv"
    link.symlink_to(others)
    assert clone.refusal() == f"{link} is a link to another environment: remove the link."
    assert [file.name for file in others.iterdir()] == ["kept"]


def test_a_failed_archive_for_spark_is_reported_and_the_bootstrap_continues(clone: Clone) -> None:
    clone.python(archive=1)
    ran = clone.run(SPARK_SUBMIT_OPTS="-Dmine=1")
    assert ran.returncode == 0, ran
    assert ran.stderr.endswith("distop: preparing the start of Spark failed; it starts more slowly\n")


NEEDS_JAVA = "Java 17 or newer is needed by Spark and "
GET_JAVA = "(Debian, Ubuntu: apt-get install openjdk-17-jre-headless) or set JAVA_HOME."


def test_missing_java_is_reported(clone: Clone) -> None:
    (clone.bin / "java").unlink()
    assert clone.refusal() == f"{NEEDS_JAVA}'java' does not run: install it {GET_JAVA}"


def test_an_invalid_java_home_is_reported(clone: Clone) -> None:
    """Java on PATH is not used instead: Spark would not use it either."""
    assert clone.refusal(JAVA_HOME="/nonexistent") == (
        f"{NEEDS_JAVA}'/nonexistent/bin/java' does not run: install it {GET_JAVA}"
    )


@pytest.mark.parametrize(("version", "major"), [("1.8.0_392", "8"), ("11.0.21", "11"), ("16-ea", "16")])
def test_a_java_that_is_too_old_is_reported(clone: Clone, version: str, major: str) -> None:
    clone.java(version)
    assert clone.refusal() == f"{NEEDS_JAVA}'java' is version {major}: install a newer one {GET_JAVA}"


@pytest.mark.parametrize("version", ["17", "17.0.2", "21-ea", "25.0.1"])
def test_a_java_that_is_new_enough_is_accepted(clone: Clone, version: str) -> None:
    clone.java(version)
    assert clone.run().returncode == 0


NEEDS_PYTHON = "Python 3.11 or newer is needed and not on PATH"
GET_PYTHON = ": install it (Debian, Ubuntu: apt-get install python3 python3-venv) or set PYTHON to it."


def test_a_python_that_is_too_old_is_reported(clone: Clone) -> None:
    clone.python(old=True)
    assert clone.refusal() == NEEDS_PYTHON + GET_PYTHON


def test_missing_python_is_reported(clone: Clone) -> None:
    (clone.bin / "python3").unlink()
    assert clone.refusal() == NEEDS_PYTHON + GET_PYTHON


def test_a_requested_python_that_is_too_old_is_reported(clone: Clone) -> None:
    """No other Python is used instead."""
    clone.python("python3.9", old=True)
    assert clone.refusal(PYTHON="python3.9") == f"{NEEDS_PYTHON} (PYTHON=python3.9 is not one){GET_PYTHON}"


def test_a_newer_python_beside_an_old_one_is_used(clone: Clone) -> None:
    clone.python(old=True)
    clone.python("python3.12")
    assert clone.run().returncode == 0


def test_a_python_without_venv_is_reported(clone: Clone) -> None:
    clone.python(without_venv=True)
    assert clone.refusal() == (
        f"{clone.bin / 'python3'} cannot create virtual environments: install its venv package "
        "(Debian, Ubuntu: apt-get install python3-venv) and run this again."
    )


def test_another_operating_system_is_refused(clone: Clone) -> None:
    clone.program("uname", "#!/bin/sh\necho Darwin\n")
    assert "run on Linux only" in clone.refusal()


@pytest.mark.parametrize("packages", ["build.txt", "run.txt", "dev.txt", "--editable"])
def test_a_failed_installation_is_reported_and_repeated(clone: Clone, packages: str) -> None:
    """For each step of the installation."""
    clone.python(pip=packages)
    ran = clone.run()
    assert (ran.returncode, ran.stdout) == (1, "")
    reason, sentence = ran.stderr.splitlines()[-2:]
    assert reason == "pip's own reason"
    assert sentence.startswith("distop: could not install the dependencies; see pip's error above")
    assert ".venv/.distop-stamp" not in clone.made()
    clone.python()
    assert clone.run().returncode == 0


def test_the_second_run_installs_nothing(clone: Clone) -> None:
    for _ in range(2):
        ran = clone.run()
        assert (ran.returncode, ran.stdout) == (0, f"ready, by {clone.folder / '.venv/bin'}{os.pathsep}{clone.bin}\n")
        assert len(clone.pip_calls.read_text().splitlines()) == 4
    clone.python(without_venv=True)
    (clone.folder / "requirements" / "dev.txt").write_text("other packages\n")
    assert clone.run().returncode == 0, "an existing environment is used"
    assert len(clone.pip_calls.read_text().splitlines()) == 8


def test_packages_are_installed_with_hashes_and_built_with_locked_packages(clone: Clone) -> None:
    """An editable installation has no hash: it is of the clone itself, and fetches nothing."""
    assert clone.run().returncode == 0
    calls = clone.pip_calls.read_text().splitlines()
    assert ["--require-hashes" in call for call in calls] == [True, True, True, False]
    assert ["--no-deps" in call for call in calls] == [False, False, False, True]
    assert [call for call in calls if "--no-build-isolation" not in call] == []
    assert [call.split("requirements/")[1].split(".txt")[0] for call in calls[:3]] == ["build", "run", "dev"]


def test_packages_of_the_image_are_installed_with_hashes() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    installs = [line for line in text.replace("\\\n", " ").split("&&") if re.search(r"\bpip (\S+ )*install\b", line)]
    # The last one installs this repository's own wheel, without dependencies and an index.
    assert ["--require-hashes" in line for line in installs] == [True, True, True, False]
    assert {"--no-deps", "--no-index"} <= set(installs[-1].split())

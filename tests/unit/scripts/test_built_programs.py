"""How the object stores of the tests are locked, found and built, with fake compilers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import built_programs

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "scripts/built_programs.py"
LOCKS = ROOT / "scripts/program-modules"
GO = """\
#!/bin/sh
if [ "$1" = version ]; then printf '\\tdep\\tx\\n\\tmod\\n\\t{module}\\tv{version}\\th1:x=\\n'; exit; fi
echo "$@" >>"{calls}"
{then}
printf 'program' >bin/versitygw
"""


class Machine:
    """A machine with its own cache, and maybe a Go."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        self.calls.touch()
        self.cache = folder / "cache" / "distop" / "programs"
        self.environment = {"PATH": str(self.bin), "XDG_CACHE_HOME": str(folder / "cache")}
        (self.bin / "sh").symlink_to(shutil.which("sh") or "/bin/sh")

    def go(self, *, version: str = "1.8.0", then: str = "") -> None:
        """Install a Go. ``version``: of the module in the built program. ``then``: commands before it is built."""
        source = built_programs.SOURCES["versitygw"]
        text = GO.format(calls=self.calls, module=source.module, version=version, then=then)
        (self.bin / "go").write_text(text)
        (self.bin / "go").chmod(0o755)

    def run(self, *words: str) -> tuple[int, str, str]:
        """The exit code, stdout and stderr."""
        command = [sys.executable, str(PROGRAM), *words]
        ran = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return ran.returncode, ran.stdout, ran.stderr

    def built(self) -> list[str]:
        """The entries of the cache, without locks."""
        there = self.cache.iterdir() if self.cache.is_dir() else ()
        return sorted(path.name for path in there if not path.name.endswith(".lock"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("name", built_programs.SOURCES)
def test_a_lock_has_the_version_and_hashes_and_no_address_of_a_registry(name: str) -> None:
    source = built_programs.SOURCES[name]
    if source.module:
        assert f"{source.module} v{source.version}" in (LOCKS / name / "go.mod").read_text()
        assert re.search(rf"^{re.escape(source.module)} v{re.escape(source.version)} h1:", _text(name, "go.sum"), re.M)
        return
    assert json.loads(_text(name, "package.json"))["dependencies"] == {name: source.version}
    packages = json.loads(_text(name, "package-lock.json"))["packages"]
    del packages[""]
    assert packages[f"node_modules/{name}"]["version"] == source.version
    assert [path for path, one in packages.items() if not one.get("integrity", "").startswith("sha512-")] == []
    assert [path for path, one in packages.items() if "resolved" in one] == []
    assert "://" not in _text(name, "package-lock.json")


def _text(name: str, file: str) -> str:
    return (LOCKS / name / file).read_text()


def test_a_server_is_built_once(machine: Machine) -> None:
    machine.go()
    for _ in range(2):
        code, out, _err = machine.run("versitygw")
        assert code == 0
        assert Path(out.strip()).parent == machine.cache
        assert (Path(out.strip()) / "versitygw").read_text() == "program"
    assert len(machine.calls.read_text().splitlines()) == 1
    assert "-mod=readonly" in machine.calls.read_text()


def test_a_build_that_fails_leaves_nothing(machine: Machine) -> None:
    machine.go(then="echo 'go: downloading x' >&2; echo 'hash differs' >&2; exit 1")
    code, _, error = machine.run("versitygw")
    assert (code, error.splitlines()[-1]) == (1, "distop: versitygw could not be built: hash differs")
    assert machine.built() == []


def test_a_build_of_another_version_is_refused(machine: Machine) -> None:
    machine.go(version="1.7.0")
    code, _, error = machine.run("versitygw")
    assert code == 1
    assert "the build of versitygw has another version than 1.8.0" in error
    assert machine.built() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("versitygw",), "go is not on PATH, and versitygw has to be built with it: install Go 1.26 or newer."),
        (("azurite",), "npm is not on PATH, and azurite has to be built with it: install Node 20 with npm or newer."),
        (("--check",), "go is not on PATH"),
        (("minio",), "there is no server minio: name one of versitygw, fake-gcs-server, azurite, helm."),
    ],
)
def test_what_is_missing_is_named(machine: Machine, words: tuple[str, ...], message: str) -> None:
    code, _, error = machine.run(*words)
    assert code == 1
    assert message in error


def test_a_turn_builds_its_server_and_continues_without_it(machine: Machine) -> None:
    """The tests of the missing server name what they need."""
    code, printed, error = machine.run("--for-tests", "--turn", "0")
    assert (code, printed) == (0, "")
    assert "go is not on PATH" in error
    assert machine.run("--for-tests", "--turn", "1") == (0, "", "")
    machine.go()
    assert machine.run("--for-tests", "--turn", "12")[0] == 0
    assert [name.partition("-")[0] for name in machine.built()] == ["versitygw"]


def test_a_test_names_its_needs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", machine.environment["XDG_CACHE_HOME"])
    assert built_programs.command("versitygw") is None
    wanted = "versitygw 1.8.0: run scripts/built-programs versitygw (with Go 1.26 or newer)"
    assert built_programs.needs("versitygw") == wanted

"""How the tests' etcd servers are found and built, with a fake compiler."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import etcd_servers

ROOT = Path(__file__).parents[3]
TOOLS = ("chmod", "cp", "sed", "sh", "sleep")
PROGRAM = ROOT / "scripts/etcd_servers.py"

# `go build -o bin/` with the version that go.mod requires; {calls} gets a line for each build.
GO = """\
#!/bin/sh
echo "$@" >>"{calls}"
version=$(sed -n 's/^.*go.etcd.io.etcd.server.v3 v\\([^ ]*\\).*/\\1/p' go.mod)
printf '#!/bin/sh\\necho "etcd Version: %s"\\n' "{version}" >bin/server
chmod +x bin/server
{then}
cp bin/server bin/etcdctl
"""


class Machine:
    """A machine with its own cache and, maybe, a Go."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        self.calls.touch()
        self.cache = folder / "cache" / "distop" / "etcd"
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.environment = {"PATH": str(self.bin), "XDG_CACHE_HOME": str(folder / "cache")}

    def go(self, *, version: str = "$version", then: str = "") -> None:
        """Install a Go. ``version``: the version that the built program prints.

        ``then``: commands that run half-way.
        """
        program = self.bin / "go"
        program.write_text(GO.format(calls=self.calls, version=version, then=then))
        program.chmod(0o755)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *words],
            cwd=ROOT,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **environment: str) -> tuple[int, str, str]:
        """The exit code, stdout and stderr."""
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def built(self) -> list[str]:
        """The entries of the cache, without locks."""
        there = self.cache.iterdir() if self.cache.is_dir() else ()
        return sorted(path.name for path in there if not path.name.endswith(".lock"))

    def folder(self, version: str) -> str:
        return f"{version}-{platform.machine()}"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_server_is_built_once_and_then_found(machine: Machine) -> None:
    machine.go()
    code, out, _ = machine.run("3.6.16")
    folder = machine.cache / machine.folder("3.6.16")
    assert (code, out) == (0, f"{folder}\n")
    assert {program.name for program in folder.iterdir()} == {"etcd", "etcdctl"}
    assert machine.run("3.6.16") == (0, out, "")
    assert len(machine.calls.read_text().splitlines()) == 1


def test_concurrent_runs_build_a_server_once(machine: Machine) -> None:
    machine.go()
    runs = [machine.start("3.6.16") for _ in range(4)]
    ends = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, ends
    assert len(machine.calls.read_text().splitlines()) == 1
    assert machine.built() == [machine.folder("3.6.16")]


def test_an_interrupted_build_is_never_used(machine: Machine) -> None:
    """It leaves a folder that does not count as a server; the next build removes it."""
    machine.go(then="kill -9 $PPID; sleep 0.1; exit 1")
    assert machine.run("3.6.16")[0] == -9
    assert machine.built() != []
    assert machine.folder("3.6.16") not in machine.built()
    machine.go()
    assert machine.run("3.6.16")[0] == 0
    assert machine.built() == [machine.folder("3.6.16")]


def test_a_failed_build_leaves_no_files_and_reports_the_reason(machine: Machine) -> None:
    machine.go(then="echo 'go: downloading x' >&2; echo 'go: no network' >&2; exit 1")
    code, out, err = machine.run("3.6.16")
    assert (code, out) == (1, "")
    assert err.endswith("distop: etcd 3.6.16 could not be built with Go: go: no network\n")
    assert machine.built() == []


def test_a_build_of_another_version_is_refused(machine: Machine) -> None:
    machine.go(version="3.6.15")
    code, _, err = machine.run("3.6.16")
    assert code == 1
    assert err.endswith("distop: the build of etcd 3.6.16 has another version: etcd Version: 3.6.15\n")
    assert machine.built() == []


WITHOUT_GO = "Go is not on PATH, and etcd 3.6.16 has to be built with it: install Go 1.26 or newer.\n"


def test_without_go_the_tests_use_the_packaged_server_and_report_it(machine: Machine) -> None:
    code, out, err = machine.run("--for-tests", "tests/integration")
    assert (code, out, err) == (0, "", f"distop: using etcd 3.5.1 in place of 3.6.16: {WITHOUT_GO}")


def test_without_go_ci_fails_at_once(machine: Machine) -> None:
    for words in (["--for-tests", "tests/integration"], ["3.6.16"]):
        assert machine.run(*words, CI="true") == (1, "", f"distop: {WITHOUT_GO}")
    assert machine.run("--check") == (1, "", f"distop: {WITHOUT_GO.replace('3.6.16', '3.5.33')}")


def test_with_go_the_check_builds_nothing(machine: Machine) -> None:
    machine.go()
    assert machine.run("--check") == (0, "", "")
    assert machine.built() == []


def test_a_requested_server_is_not_replaced_by_another(machine: Machine) -> None:
    code, _, err = machine.run("--for-tests", "tests/faults", DISTOP_TEST_ETCD="3.6.1")
    assert code == 1
    assert err == (
        "distop: there is no etcd 3.6.1: name one of 3.5.1, 3.5.33, 3.6.16, 3.7.3, or the path of an etcd program.\n"
    )


def test_a_server_can_be_given_by_its_path(machine: Machine, tmp_path: Path) -> None:
    program = tmp_path / "mine" / "etcd"
    program.parent.mkdir()
    program.touch()
    found = etcd_servers.find(str(program))
    assert found == etcd_servers.Server(str(program), program.parent)
    assert found.precede("/usr/bin") == f"{program.parent}:/usr/bin"
    assert machine.run("--for-tests", "tests/faults", DISTOP_TEST_ETCD=str(program)) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], etcd_servers.MATRIX),
        (["-x", "--slow"], etcd_servers.MATRIX),
        (["tests"], etcd_servers.MATRIX),
        (["tests/unit", "tests/conformance/test_watch.py::test_a"], etcd_servers.MATRIX),
        (["--numprocesses", "6", "--turn", "7"], (etcd_servers.DEFAULT, "3.5.33")),
        (["tests/integration", "--turn", "7"], (etcd_servers.DEFAULT,)),
        (["tests/integration", "-k", "x"], (etcd_servers.DEFAULT,)),
        (["tests/unit/scripts/test_etcd_servers.py::test_a", "tests/simulation", "-x"], ()),
    ],
)
def test_a_run_needs_only_its_servers(
    arguments: list[str], wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(etcd_servers.VARIABLE, raising=False)
    assert etcd_servers.wanted(arguments) == wanted
    monkeypatch.setenv(etcd_servers.VARIABLE, "3.7.3")
    assert etcd_servers.wanted(arguments) == (("3.7.3",) if wanted else ())


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/run-executors.md"])
def test_users_read_which_servers_are_tested(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [version for version in etcd_servers.MATRIX if version not in text] == []

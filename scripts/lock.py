"""Writes and checks the lock of all Python packages (scripts/lock); scripts/lint checks it without the network.

Each package is in one file of ``requirements/``: ``build`` (builds packages), ``run`` (distop's dependencies), or
``dev`` (further packages for development).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
FILES = ("build", "run", "dev")
LEAST_PYTHON = "3.11"
HEAD = "# Written by scripts/lock from pyproject.toml, for pip install --require-hashes. Do not edit.\n"
_ENTRY = re.compile(r"([A-Za-z0-9][\w.-]*)==([^\s;]+)((?: ; [^\\\n]+)?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


class Entry(NamedTuple):
    """A locked package: its canonical name, its version, and its text with marker and hashes."""

    name: str
    version: str
    text: str
    marker: str


def entries(text: str) -> list[Entry]:
    """The packages of a file. Raises ValueError for a line that is not a pinned version with its hashes."""
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    found, at = [], 0
    while at < len(body):
        match = _ENTRY.match(body, at)
        if match is None:
            raise ValueError(f"not a pinned version with SHA-256 hashes: {body[at:].splitlines()[0]!r}")
        found.append(Entry(canonicalize_name(match[1]), match[2], match[0], match[3]))
        at = match.end()
    return found


def path_of(root: Path, file: str) -> Path:
    return root / "requirements" / f"{file}.txt"


# ---- check


def problems(root: Path = ROOT) -> list[str]:
    """The differences between the lock, pyproject.toml and the installed packages, one sentence each."""
    locked: dict[str, Entry] = {}
    file_of: dict[str, str] = {}
    found_problems = []
    for file in FILES:
        try:
            found = entries(path_of(root, file).read_text())
        except (OSError, ValueError) as e:
            return [f"requirements/{file}.txt: {e}"]
        for entry in found:
            if entry.name in locked:
                found_problems.append(
                    f"{entry.name} is in requirements/{file}.txt and in requirements/{file_of[entry.name]}.txt"
                )
            locked[entry.name], file_of[entry.name] = entry, file
    project = tomllib.loads((root / "pyproject.toml").read_text())
    own = project["project"]
    extras = own.get("optional-dependencies", {})
    roots = {"build": project["build-system"]["requires"], "run": own["dependencies"], "dev": extras.get("dev", [])}
    reached: set[str] = set()
    for file in FILES:
        stated = [Requirement(text) for text in roots[file]]
        for requirement, of in _closure(stated, own["name"], extras):
            name = canonicalize_name(requirement.name)
            reached.add(name)
            if name not in locked:
                found_problems.append(f"{requirement} of {of} is not locked")
            elif not requirement.specifier.contains(locked[name].version, prereleases=True):
                found_problems.append(f"{name} is locked at {locked[name].version}, but {of} wants {requirement}")
            elif FILES.index(file_of[name]) > FILES.index(file):
                found_problems.append(f"{name} is in requirements/{file_of[name]}.txt, but {of} of {file}.txt needs it")
    for name, entry in locked.items():
        if name not in reached and not entry.marker:
            found_problems.append(f"{name} is locked, but no package needs it")
    return list(dict.fromkeys(found_problems))


def _closure(
    requirements: Iterable[Requirement], own: str, extras: dict[str, list[str]]
) -> Iterator[tuple[Requirement, str]]:
    """All requirements that apply to this machine, each with the package that states it."""
    left = [(requirement, "pyproject.toml") for requirement in requirements]
    done = set()
    while left:
        requirement, of = left.pop()
        if requirement.name == own:
            left += [(Requirement(text), of) for extra in requirement.extras for text in extras[extra]]
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}) or of.startswith("extra "):
            yield requirement, of.removeprefix("extra ")
        else:
            continue
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) in done:
                continue
            done.add((requirement.name, extra))
            try:
                stated = distribution(requirement.name).requires or ()
            except PackageNotFoundError:
                continue
            for text in stated:
                further = Requirement(text)
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    further.marker = None
                    left.append((further, requirement.name))


# ---- write


def write(arguments: Sequence[str], root: Path = ROOT) -> None:
    """Resolve and write all files. ``arguments``: ``--upgrade``, or none. Raises CalledProcessError."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        everything = folder / "all.txt"
        if "--upgrade" not in arguments:
            kept = [path_of(root, file) for file in FILES]
            everything.write_text("".join(path.read_text() for path in kept if path.exists()))
        builds = folder / "build.in"
        builds.write_text("\n".join(project["build-system"]["requires"]) + "\n")
        _compile(everything, ["--generate-hashes", "--all-extras", str(root / "pyproject.toml"), str(builds)])
        names: dict[str, set[str]] = {}
        for file, source in {"build": builds, "run": root / "pyproject.toml"}.items():
            some = folder / f"{file}.txt"
            _compile(some, ["--constraints", str(everything), str(source)])
            pinned = [line.partition("==")[0] for line in some.read_text().splitlines() if "==" in line]
            names[file] = {canonicalize_name(name) for name in pinned}
        locked = entries(everything.read_text())
    names["run"] -= names["build"]
    names["dev"] = {entry.name for entry in locked} - names["run"] - names["build"]
    for file in FILES:
        path_of(root, file).parent.mkdir(exist_ok=True)
        path_of(root, file).write_text(HEAD + "".join(entry.text for entry in locked if entry.name in names[file]))


def _compile(output: Path, arguments: list[str]) -> None:
    """Resolve for all systems and Python versions that distop supports, with the index of pip's configuration."""
    fixed = ["--universal", "--python-version", LEAST_PYTHON, "--no-header", "--no-annotate", "--no-emit-index-url"]
    command = ["uv", "pip", "compile", "--quiet", *fixed, "--output-file", str(output), *arguments]
    subprocess.run(command, env={**os.environ, **_index()}, stdout=subprocess.DEVNULL, check=True)


def _index() -> dict[str, str]:
    """pip's settings of index and certificates as variables of uv, unless uv's own variables are set."""
    ran = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = {}
    for setting, variable in (("index-url", "UV_DEFAULT_INDEX"), ("cert", "SSL_CERT_FILE")):
        values = re.findall(rf"^\S*\.{setting}='(.*)'$", ran.stdout, re.MULTILINE)
        if values and variable not in os.environ:
            found[variable] = values[-1]
    return found


def main(arguments: Sequence[str]) -> int:
    if arguments == ["--check"]:
        found = problems()
        for sentence in found:
            print(f"distop: {sentence}: run scripts/lock", file=sys.stderr)
        return 1 if found else 0
    if arguments not in ([], ["--upgrade"]):
        print(
            "usage: scripts/lock [--upgrade | --check]\n\n"
            "Writes requirements/ from pyproject.toml, with the hash of each file.\n\n"
            "  --upgrade  use the newest versions\n"
            "  --check    write nothing; exit 1 if requirements/ is outdated",
            file=sys.stderr,
        )
        return 2
    try:
        write(arguments)
    except subprocess.CalledProcessError as e:
        print(f"distop: the lock is unchanged: {e.cmd[0]} failed, see its output above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

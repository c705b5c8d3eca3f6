"""Builds and checks the wheel and the sdist, and uses the wheel outside of this clone.

    scripts/check-package                   all checks for a release, in a new environment, with pip's index
    scripts/check-package --quick           only the quickstart, with this environment's packages, without network
    scripts/check-package --release 0.1.0   all checks; changelog and version must match this release

``--keep DIR`` copies wheel and sdist to that folder.
"""

from __future__ import annotations

import argparse
import email
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from pages import PageError, environment, run_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "embedded,sql,server,etcd3"
ACTIVATE = "source .venv/bin/activate\n"
"""The README's line that activates the clone's environment; it is removed, since the wheel's environment is active."""
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
WITH_THE_SDIST = ("CHANGELOG.md", "LICENSE", "NOTICE", "README.md", "docs/tutorial.md", "examples/partition_size.py")


class Problem(Exception):
    """A problem of the package, in one sentence."""


def say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


def run(*words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command and return its output. Raises Problem with the output if it fails."""
    command = [str(word) for word in words]
    ran = subprocess.run(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ran.returncode:
        raise Problem(f"{' '.join(command)} ended with code {ran.returncode}:\n{ran.stdout}")
    return ran.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build and check the sdist of all files that git tracks or would add, and its wheel. Returns (wheel, sdist)."""
    say("build wheel and sdist")
    source = folder / "source"
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    dist = folder / "dist"
    # Not isolated: the build packages are locked (requirements/build.txt), and no network is needed.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    say("twine check")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    check_content(wheel, sdist)
    return wheel, sdist


def check_content(wheel: Path, sdist: Path) -> None:
    """Check the files of wheel and sdist. Raises Problem for a missing or an unknown file."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = email.message_from_bytes(opened.read(next(n for n in names if n.endswith(".dist-info/METADATA"))))
    version = own_version()
    if metadata["Version"] != version:
        raise Problem(f"the wheel says version {metadata['Version']}, distop.__version__ is {version}")
    tops = {name.partition("/")[0] for name in names}
    if strange := tops - {"distop", "distop_behaviors", f"distop-{version}.dist-info"}:
        raise Problem(f"the wheel has files that are no part of distop: {', '.join(sorted(strange))}")
    modules = {f"{package}/{path.relative_to(ROOT / folder).as_posix()}" for package, folder in PACKAGES.items()
               for path in (ROOT / folder).rglob("*.py")}  # fmt: skip
    if missing := sorted(modules - set(names)):
        raise Problem(f"the wheel lacks {', '.join(missing[:5])}")
    with tarfile.open(sdist) as packed:
        within = {name.partition("/")[2] for name in packed.getnames()}
    if missing := [name for name in WITH_THE_SDIST if name not in within]:
        raise Problem(f"the sdist lacks {', '.join(missing)}: add it to MANIFEST.in")


PACKAGES = {"distop": "distop", "distop_behaviors": "behaviors"}


def own_version() -> str:
    """The version in distop/__init__.py."""
    found = VERSION.search((ROOT / "distop" / "__init__.py").read_text())
    assert found is not None
    return found[1]


def check_release(version: str) -> None:
    """Raises Problem unless this clone is ready to be released as this version."""
    if own_version() != version:
        raise Problem(f"distop.__version__ is {own_version()}, not {version}: change distop/__init__.py")
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not headings or not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", headings[0]):
        first = headings[0] if headings else "none"
        raise Problem(f"the first heading of CHANGELOG.md is {first!r}: write '## {version} - YYYY-MM-DD'")
    if changed := run("git", "status", "--porcelain", cwd=ROOT):
        raise Problem(f"there are changes that are not committed:\n{changed}")


def installed(wheel: Path, folder: Path, *, quick: bool) -> dict[str, str]:
    """Install the wheel into a new environment without this clone. Returns the variables of its shell.

    ``quick``: the environment uses the packages of this one, and needs no network.
    """
    say("install the wheel into a new environment")
    venv = folder / "env"
    run(sys.executable, "-m", "venv", *(["--without-pip"] if quick else []), venv)
    env = environment()
    env["PATH"] = f"{venv / 'bin'}:{env['PATH']}"
    python = venv / "bin" / "python"
    if quick:
        # These paths come after the new environment's own. Packages in such a path cannot add further paths, as the
        # editable installation of this clone would.
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", env=env).strip())
        outer = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (site / "packages-of-the-clone.pth").write_text("\n".join(outer) + "\n")
        env |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0 sets pip's option --no-build-isolation
        run(python, "-m", "pip", "install", "--no-deps", wheel, env=env)
        pip = venv / "bin" / "pip"
        pip.write_text(f'#!/bin/sh\nexec "{python}" -m pip "$@"\n')
        pip.chmod(0o755)
    else:
        run(python, "-m", "pip", "install", f"{wheel}[{EXTRAS}]", env=env)
        run(python, "-m", "pip", "check", env=env)
    place = run(python, "-P", "-c", "import distop, distop_behaviors; print(distop.__file__)", env=env).strip()
    if not Path(place).is_relative_to(venv):
        raise Problem(f"distop is imported from {place}, not from the wheel")
    if (found := run(venv / "bin" / "distop", "--version", env=env).split()[-1]) != own_version():
        raise Problem(f"distop --version prints {found}, not {own_version()}")
    return env


def quickstart(env: Mapping[str, str], folder: Path) -> None:
    """Run the README's quickstart in an empty folder."""
    say("README: quickstart")
    folder.mkdir()
    page = (ROOT / "README.md").read_text()
    run_page(page.replace(ACTIVATE, ""), folder, env, section="Quickstart")


def tutorial(env: Mapping[str, str], folder: Path) -> None:
    """Run the tutorial in an empty folder."""
    say("docs/tutorial.md")
    folder.mkdir()
    run_page((ROOT / "docs" / "tutorial.md").read_text(), folder, env)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/check-package", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="run only the quickstart, without network")
    parser.add_argument("--release", metavar="VERSION", help="check that the clone is ready for this release")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="copy wheel and sdist to this folder")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="distop-package-") as made:
        folder = Path(made)
        try:
            if options.release:
                check_release(options.release)
            built = build(folder)
            env = installed(built[0], folder, quick=options.quick)
            quickstart(env, folder / "quickstart")
            if not options.quick:
                tutorial(env, folder / "tutorial")
        except (Problem, PageError, subprocess.TimeoutExpired) as error:
            print(f"distop: {error}", file=sys.stderr)
            return 1
        for one in built if options.keep else ():
            options.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy2(one, options.keep)
    say(f"distop {own_version()} can be installed and used")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

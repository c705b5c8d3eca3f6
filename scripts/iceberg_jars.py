"""Fetches Iceberg's jars for Spark once per user, and uses them only if their SHA-256 matches."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from distop.tables.iceberg.iceberg_jar import VERSION

GROUP = "org.apache.iceberg"
SHA256 = {
    "iceberg-spark-runtime-4.1_2.13-1.11.0.jar": "d6ea6c5d099288daeb7d5a92061bd3d7d8f296492632b42378e5f2f0e3066242",
    "iceberg-spark-runtime-4.0_2.13-1.11.0.jar": "63c3b812549dc232c1920865ff42436df8604a9bbacd693930985c06bd97e6dc",
}
"""File name → SHA-256. A new version of Iceberg needs new values here and in docs/reference/tables.md."""


class Unverified(Exception):
    """A file does not have the expected SHA-256."""


def verify(file: Path) -> Path:
    """Return the file. Raises Unverified if its SHA-256 differs from the expected one, or none is known."""
    expected = SHA256.get(file.name)
    if expected is None:
        raise Unverified(f"{file} is refused: no SHA-256 of this name is known (scripts/iceberg_jars.py).")
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != expected:
        raise Unverified(f"{file} is refused: its SHA-256 is {found}, not {expected}; remove it to fetch it again.")
    return file


def cache_folder() -> Path:
    """The user's cache of jars (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path("~/.cache").expanduser()) / "distop" / "jars"


def find(artifact: str, version: str = VERSION) -> Path | None:
    """A verified jar of Iceberg; None: it is missing and cannot be fetched. Raises Unverified."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{artifact}-{version}.jar"
    with (folder / ".lock").open("w") as lock:  # several test processes may fetch at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
                fetched = fetch(artifact, version, Path(scratch))
                if fetched is None:
                    return None
                verify(fetched).rename(file)
    return verify(file)


def fetch(artifact: str, version: str, folder: Path) -> Path | None:
    """Fetch a jar with Spark's own Ivy. Unlike Spark's ``--packages``, this loads no code of the jar."""
    spec = find_spec("pyspark")
    [ivy] = (Path(place).glob("jars/ivy-*.jar") for place in (spec.submodule_search_locations or ()) if spec)
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    command = [
        *(str(java), "-jar", str(next(ivy)), "-error", "-cache", str(folder / "ivy"), "-notransitive"),
        *("-dependency", GROUP, artifact, version, "-confs", "master", "-types", "jar"),
        *("-retrieve", str(folder / "[artifact]-[revision](-[classifier]).[ext]")),
    ]
    try:
        subprocess.run(command, capture_output=True, timeout=100, check=False)
    except subprocess.TimeoutExpired:
        return None
    file = folder / f"{artifact}-{version}.jar"
    return file if file.exists() else None


def main() -> int:
    """``scripts/iceberg-jar``: print the path of the tested jar."""
    artifact = "iceberg-spark-runtime-4.1_2.13"
    try:
        file = find(artifact)
    except Unverified as e:
        print(f"distop: {e}", file=sys.stderr)
        return 1
    if file is None:
        print(f"distop: {GROUP}:{artifact}:{VERSION} could not be fetched from Maven Central.", file=sys.stderr)
        return 1
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

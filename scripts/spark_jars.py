"""Fetches the jars of Iceberg, Delta and S3 for Spark once per user, and uses them only if their SHA-256 matches."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from distop.tables.delta import delta_jar
from distop.tables.iceberg import iceberg_jar


class Jar(NamedTuple):
    """A jar in Maven Central."""

    group: str
    artifact: str
    version: str

    @property
    def name(self) -> str:
        """The file name."""
        return f"{self.artifact}-{self.version}.jar"

    def __str__(self) -> str:
        return ":".join(self)


ICEBERG = Jar("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", iceberg_jar.VERSION)
DELTA = (
    Jar("io.delta", "delta-spark_4.1_2.13", delta_jar.VERSION),
    Jar("io.delta", "delta-storage", delta_jar.VERSION),
)
S3 = (
    Jar("org.apache.hadoop", "hadoop-aws", "3.4.2"),
    # It has the classes of Amazon's SDK, and is a tenth of the SDK's own bundle, which hadoop-aws names.
    Jar("org.apache.iceberg", "iceberg-aws-bundle", iceberg_jar.VERSION),
    # hadoop-aws needs it, and the bundle lacks it; of the bundle's version of the SDK.
    Jar("software.amazon.awssdk", "s3-transfer-manager", "2.44.4"),
)
TESTED = {"iceberg": (ICEBERG,), "delta": DELTA, "s3": S3}
"""The tested jars of each format, and of S3."""
SHA256 = {
    "iceberg-spark-runtime-4.1_2.13-1.11.0.jar": "d6ea6c5d099288daeb7d5a92061bd3d7d8f296492632b42378e5f2f0e3066242",
    "iceberg-spark-runtime-4.0_2.13-1.11.0.jar": "63c3b812549dc232c1920865ff42436df8604a9bbacd693930985c06bd97e6dc",
    "delta-spark_4.1_2.13-4.4.0.jar": "75a9400986853c061f5109f012547de2545a5759e5e752e5ef633dabe16a4f10",
    "delta-storage-4.4.0.jar": "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
    "hadoop-aws-3.4.2.jar": "d2d24e6b715b5656b9d238bf13b6682a07e2004dd36aad74a73aeb854319f4d9",
    "iceberg-aws-bundle-1.11.0.jar": "38f01da7e96850cdd05e6616d758b77b43314b712a8808e3f9a824d56976162f",
    "s3-transfer-manager-2.44.4.jar": "dbcad736b19f6eb8471f9edf027d9fffe994228f25f415894efd01fd80cb6c02",
}
"""File name → SHA-256. A new version needs new values here and in docs/reference/tables.md."""


class Unverified(Exception):
    """A file does not have the expected SHA-256."""


def verify(file: Path) -> Path:
    """Return the file. Raises Unverified if its SHA-256 differs from the expected one, or none is known."""
    expected = SHA256.get(file.name)
    if expected is None:
        raise Unverified(f"{file} is refused: no SHA-256 of this name is known (scripts/spark_jars.py).")
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != expected:
        raise Unverified(f"{file} is refused: its SHA-256 is {found}, not {expected}; remove it to fetch it again.")
    return file


def cache_folder() -> Path:
    """The user's cache of jars (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path("~/.cache").expanduser()) / "distop" / "jars"


def find(jar: Jar) -> Path | None:
    """A verified jar; None: it is missing and cannot be fetched. Raises Unverified."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / jar.name
    with (folder / ".lock").open("w") as lock:  # several test processes may fetch at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
                fetched = fetch(jar, Path(scratch))
                if fetched is None:
                    return None
                verify(fetched).rename(file)
    return verify(file)


def fetch(jar: Jar, folder: Path) -> Path | None:
    """Fetch a jar with Spark's own Ivy. Unlike Spark's ``--packages``, this loads no code of the jar."""
    spec = find_spec("pyspark")
    [ivy] = (Path(place).glob("jars/ivy-*.jar") for place in (spec.submodule_search_locations or ()) if spec)
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    command = [
        *(str(java), "-jar", str(next(ivy)), "-error", "-cache", str(folder / "ivy"), "-notransitive"),
        *("-dependency", *jar, "-confs", "master", "-types", "jar"),
        *("-retrieve", str(folder / "[artifact]-[revision](-[classifier]).[ext]")),
    ]
    try:
        subprocess.run(command, capture_output=True, timeout=100, check=False)
    except subprocess.TimeoutExpired:
        return None
    file = folder / jar.name
    return file if file.exists() else None


def main(arguments: list[str]) -> int:
    """``scripts/iceberg-jar``, ``delta-jars`` and ``s3-jars``: print the paths of tested jars for spark.jars."""
    found = []
    for jar in TESTED[arguments[0]]:
        try:
            file = find(jar)
        except Unverified as e:
            print(f"distop: {e}", file=sys.stderr)
            return 1
        if file is None:
            print(f"distop: {jar} could not be fetched from Maven Central.", file=sys.stderr)
            return 1
        found.append(str(file))
    print(",".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

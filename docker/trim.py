"""Removes from the image's packages what distop does not load: python docker/trim.py SITE_PACKAGES.

Programs for other systems and processors, tests, headers, symbols for debuggers, and parts of packages that nothing
here uses: Spark Connect's shell, pandas on Spark (there is no pandas), Arrow Flight and Substrait.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

UNUSED = (
    "numpy/**/tests",
    "pyarrow/*.pyx",
    "pyarrow/_flight*",
    "pyarrow/_substrait*",
    "pyarrow/include",
    "pyarrow/libarrow_flight*",
    "pyarrow/libarrow_python_flight*",
    "pyarrow/src",
    "pyarrow/tests",
    "pyspark/**/tests",
    "pyspark/examples",
    "pyspark/jars/*-osx-*.jar",
    "pyspark/jars/*-riscv64.jar",
    "pyspark/jars/*-windows-*.jar",
    "pyspark/jars/connect-repl",
    "pyspark/pandas",
    "pyspark/python/test_support",
    "zstandard/_cffi*",
)
"""Files and folders, as patterns below ``site-packages``."""
STRIPPED = ("obstore", "pyarrow", "pyroaring*.so", "zstandard")
"""Packages whose libraries lose their symbols. Numpy's are left: its build has moved their sections."""
ROCKSDB = {"x86_64": "linux64.so", "aarch64": "linux-aarch64.so"}
"""Processor → the library in RocksDB's jar, which has those of 14 systems."""


def remove_unused(packages: Path) -> None:
    """Remove what matches :data:`UNUSED`, and the jars of other processors."""
    other = "linux-aarch_64" if platform.machine() == "x86_64" else "linux-x86_64"
    for pattern in (*UNUSED, f"pyspark/jars/*-{other}.jar"):
        for path in sorted(packages.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def link_copies(folder: Path) -> None:
    """Replace ``libx.so`` and ``libx.so.1`` by links to ``libx.so.1.2.3``, of which they are copies."""
    for library in sorted(folder.glob("lib*.so.*.*.*")):
        for name in (library.name.split(".so")[0] + ".so", ".".join(library.name.split(".")[:3])):
            path = folder / name
            if path.is_file() and not path.is_symlink() and path.read_bytes() == library.read_bytes():
                path.unlink()
                path.symlink_to(library.name)


def shrink_rocksdb(jar: Path) -> None:
    """Leave RocksDB's library for this processor only."""
    wanted = ROCKSDB.get(platform.machine())
    if wanted is None:
        return
    new = jar.with_suffix(".new")
    with zipfile.ZipFile(jar) as old, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as kept:
        for entry in old.infolist():
            if not entry.filename.startswith("librocksdbjni-") or entry.filename.endswith(f"-{wanted}"):
                kept.writestr(entry, old.read(entry))
    new.replace(jar)


def main(packages: Path) -> None:
    """Trim the packages of this folder."""
    remove_unused(packages)
    link_copies(packages / "pyarrow")
    for jar in packages.glob("pyspark/jars/rocksdbjni-*.jar"):
        shrink_rocksdb(jar)
    found = [path for name in STRIPPED for path in packages.glob(name)]
    libraries = [file for path in found for file in ([path] if path.is_file() else sorted(path.rglob("*.so*")))]
    subprocess.run(["strip", "--strip-unneeded", *(file for file in libraries if not file.is_symlink())], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

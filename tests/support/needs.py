"""Skips tests whose requirements the machine does not meet."""

from __future__ import annotations

import pytest

from scripts.etcd_servers import in_ci

__all__ = ["in_ci", "need"]


def need(condition: object, what: str) -> None:
    """Skip the test unless ``condition`` holds; in CI, which has all requirements, fail it.

    ``what``: the requirement and how to get it, such as ``"Java 17 or newer: install openjdk-17-jre-headless"``.
    """
    if condition:
        return
    if in_ci():
        pytest.fail(f"needs {what}", pytrace=False)
    pytest.skip(f"needs {what}")

"""What a test needs from the machine, said in one place and in one form."""

from __future__ import annotations

import pytest

from scripts.etcd_servers import in_ci

__all__ = ["in_ci", "need"]


def need(condition: object, what: str) -> None:
    """Skip the test unless ``condition`` holds; in CI fail it, since CI has all that the tests need.

    ``what`` is what is missing and how to get it: ``"Java 17 or newer: install openjdk-17-jre-headless"``.
    """
    if condition:
        return
    if in_ci():
        pytest.fail(f"needs {what}", pytrace=False)
    pytest.skip(f"needs {what}")

"""The image of docker/Dockerfile: its size, labels and layers."""

from __future__ import annotations

import json
from typing import Any

import pytest

import distop
from tests.docker.engine import docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800), pytest.mark.rotating]

MOST = 1000**3
"""Bytes of the image."""
MOST_AFTER_AN_EDIT = 50 * 1000**2
"""Bytes of the layers that an edit of the source makes anew."""


@pytest.fixture
def inspected(image: str) -> Any:
    return json.loads(docker("image", "inspect", image))[0]


def test_the_image_is_small_and_has_labels_and_a_numeric_user(inspected: Any) -> None:
    assert inspected["Size"] <= MOST
    labels = inspected["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == distop.__version__
    assert labels["org.opencontainers.image.revision"] == "0123abc"
    user, _, group = inspected["Config"]["User"].partition(":")
    assert user.isdigit()
    assert user != "0"
    assert group == "0"


def test_an_edit_of_the_source_costs_a_small_layer(image: str) -> None:
    """The packages are in a layer of their own, below that of distop."""
    lines = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", image).splitlines()
    below = next(number for number, line in enumerate(lines) if "COPY /opt/distop " in line)
    sizes = [int(line.split()[0]) for line in lines]
    assert sizes[below] > 10 * MOST_AFTER_AN_EDIT
    assert sum(sizes[:below]) < MOST_AFTER_AN_EDIT


def test_no_setting_of_the_building_machine_is_in_the_image(image: str) -> None:
    """pip's and apt's settings and the certificates of the build were mounted, and are gone."""
    script = "ls -A /run/secrets /mnt /build 2>/dev/null; ls /etc/pip.conf /etc/apt/apt.conf /root/.config 2>/dev/null"
    listed = docker("run", "--rm", "--network=none", "--user=0", image, "sh", "-c", f"{script}; true")
    assert [line for line in listed.splitlines() if line and not line.endswith(":")] == []

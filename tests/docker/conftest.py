"""The image and the cluster of the tests, which all of a run share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import distop
from tests.docker import engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WRITE_TABLE = """
import pathlib, pyarrow as pa, pyarrow.parquet as pq
for day in range(1, 9):
    folder = pathlib.Path(f"/tables/t/day={day}")
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"id": [*range(99), None if day == 5 else 99]}), folder / "part-0.parquet")
"""


@pytest.fixture(scope="session")
def image() -> str:
    """The image of this clone."""
    engine.need_engine()
    engine.build("--build-arg=REVISION=0123abc")
    return engine.IMAGE


@pytest.fixture(scope="session")
def running(image: str) -> Iterator[None]:
    """The cluster, with the table ``t``: eight partitions of 100 rows, one NULL among them."""
    remove = ("down", "--volumes", "--timeout", "30")
    engine.compose(*remove)  # left by a killed run
    try:
        engine.up()
        engine.inside("python", "-c", WRITE_TABLE)
        engine.inside("distop", "table", "add", "t", "--format", "parquet", "--location", "/tables/t")
        yield
    finally:
        engine.compose(*remove)


@pytest.fixture
def cluster(running: None) -> None:
    """The cluster, all of it well: what a test has stopped is started again."""
    engine.up()


@pytest.fixture
def client(cluster: None, tmp_path: Path) -> Iterator[distop.Client]:
    """A client of the cluster's service."""
    folder = "/var/lib/distop/service"
    certificate = tmp_path / "cert.pem"
    certificate.write_text(engine.inside("cat", f"{folder}/cert.pem", service="service"))
    token = engine.inside("cat", f"{folder}/token", service="service")
    url = f"grpcs://{engine.address('service', 7781)}"
    with distop.connect(url, token=token, ca_cert=str(certificate)) as connected:
        yield connected

"""The cluster of docker/compose.yaml, brought up where a container engine answers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPOSE = Path(__file__).resolve().parents[2] / "docker" / "compose.yaml"
PROJECT = "distop-test"

# Building the image downloads a JRE and Spark.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

WRITE_TABLE = """
import pathlib, pyarrow as pa, pyarrow.parquet as pq
for day in range(1, 9):
    folder = pathlib.Path(f"/tables/t/day={day}")
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"id": [*range(99), None if day == 5 else 99]}), folder / "part-0.parquet")
"""


def engine_problem() -> str | None:
    """Why no container can be run here, or None."""
    if shutil.which("docker") is None:
        return "no docker command on PATH"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` does not answer"
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
            return f"`{' '.join(command)}` says: {lines[-1]}"
    return None


@pytest.fixture(scope="session")
def docker_compose_file() -> str:
    return str(COMPOSE)


@pytest.fixture(scope="session")
def docker_compose_project_name() -> str:
    return PROJECT


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    return ["up --build --detach --wait --wait-timeout 300"]


@pytest.fixture(scope="session")
def docker_cleanup() -> list[str]:
    return ["down --volumes --timeout 30"]


def compose(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = ["docker", "compose", "--file", str(COMPOSE), "--project-name", PROJECT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def inside(*command: str) -> subprocess.CompletedProcess[str]:
    return compose("exec", "--no-TTY", "executor-1", *command)


def distop(*arguments: str) -> Any:
    """The JSON document that the command prints; its exit code under ``code`` where that is an object."""
    done = inside("distop", *arguments, "--json")
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    if isinstance(document, dict):
        document["code"] = done.returncode
    return document


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """The cluster, up and well, with the table ``t``: eight partitions of 100 rows, one NULL among them."""
    reason = engine_problem()
    if reason is not None:
        pytest.skip(f"needs a container engine: {reason}")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DISTOP_ETCD_PORT", "0")  # any free one: another etcd may hold 2379
        request.getfixturevalue("docker_services")
        written = inside("python", "-c", WRITE_TABLE)
        assert written.returncode == 0, written.stderr
        added = inside("distop", "table", "add", "t", "--format", "parquet", "--location", "/tables/t")
        assert added.returncode == 0, added.stderr
        yield


def validate(argument: dict[str, Any]) -> Any:
    return distop("start", "validate", "t", "--arg", json.dumps(argument), "--wait", "--timeout", "240")


@pytest.mark.usefixtures("cluster")
def test_two_executors_validate_a_table_on_the_standalone_cluster() -> None:
    assert {node["executor"] for node in distop("nodes")} == {"executor-1", "executor-2"}
    record = validate({"checks": [{"not_null": "id"}], "statistics": "never"})
    assert record["code"] == 1
    assert record["state"] == "failed"
    assert record["report"]["rows"] == 800
    assert record["report"]["checks"][0]["violations"] == 1


@pytest.mark.usefixtures("cluster")
def test_operations_go_on_without_one_etcd_member_and_one_executor() -> None:
    killed = compose("kill", "etcd-2", "executor-2")
    assert killed.returncode == 0, killed.stderr
    record = validate({"checks": [{"range": {"column": "id", "min": 0, "max": 99}}]})
    assert record["code"] == 0
    assert record["state"] == "success"

"""docker/compose.yaml, read without an engine: what it refers to exists and what waits can be waited for."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
ETCD = {"etcd-1", "etcd-2", "etcd-3"}
SPARK = {"spark-master", "spark-worker-1", "spark-worker-2"}
EXECUTORS = {"executor-1", "executor-2"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document = yaml.safe_load(COMPOSE.read_text())
    assert isinstance(document, dict)
    return document


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_cluster_is_complete(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == ETCD | SPARK | EXECUTORS


def test_every_service_has_a_health_check(services: dict[str, dict[str, Any]]) -> None:
    assert [name for name, service in services.items() if "test" not in service.get("healthcheck", {})] == []


def test_what_is_waited_for_exists(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        for other, how in service.get("depends_on", {}).items():
            assert other in services
            assert how == {"condition": "service_healthy"}


def test_volumes_are_declared_and_used(compose: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    used = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert used == set(compose["volumes"])


def test_each_keeps_its_state_to_itself(services: dict[str, dict[str, Any]]) -> None:
    own = [v.partition(":")[0] for s in services.values() for v in s.get("volumes", []) if not v.startswith("tables:")]
    assert sorted(own) == sorted(ETCD | EXECUTORS)


def test_etcd_members_know_each_other(services: dict[str, dict[str, Any]]) -> None:
    for name in ETCD:
        environment = services[name]["environment"]
        members = dict(member.split("=", 1) for member in environment["ETCD_INITIAL_CLUSTER"].split(","))
        assert environment["ETCD_NAME"] == name
        assert set(members) == ETCD
        assert members[name] == environment["ETCD_INITIAL_ADVERTISE_PEER_URLS"]


def test_executors_name_the_etcd_members_the_master_and_themselves(services: dict[str, dict[str, Any]]) -> None:
    for name in EXECUTORS:
        service = services[name]
        command = service["command"]
        assert {endpoint.partition(":")[0] for endpoint in service["environment"]["DISTOP_ETCD"].split(",")} == ETCD
        assert option(command, "--id") == service["hostname"] == name
        master = services["spark-master"]["command"]
        assert option(command, "--spark-master") == f"spark://{option(master, '--host')}:{option(master, '--port')}"


def test_where_data_is_read_the_tables_are(services: dict[str, dict[str, Any]]) -> None:
    for name in EXECUTORS | (SPARK - {"spark-master"}):
        assert "tables:/tables" in services[name]["volumes"]


def test_the_image_is_built_from_the_allowed_files_only() -> None:
    lines = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        name
        for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for name in shlex.split(line)[1:-1]
    }
    assert copied == allowed
    assert [name for name in copied if not (ROOT / name).exists()] == []

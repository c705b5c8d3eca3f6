"""docker/compose.yaml, read without an engine: what it refers to exists and what waits can be waited for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import distop

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
ETCD = {"etcd-1", "etcd-2", "etcd-3"}
SPARK = {"spark-master", "spark-worker-1", "spark-worker-2"}
EXECUTORS = {"executor-1", "executor-2"}
OURS = SPARK | EXECUTORS | {"service"}
"""The services that run the image of docker/Dockerfile."""
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


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
    assert set(services) == ETCD | OURS


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
    assert sorted(own) == sorted(ETCD | OURS)


def test_etcd_members_know_each_other(services: dict[str, dict[str, Any]]) -> None:
    for name in ETCD:
        environment = services[name]["environment"]
        members = dict(member.split("=", 1) for member in environment["ETCD_INITIAL_CLUSTER"].split(","))
        assert environment["ETCD_NAME"] == name
        assert set(members) == ETCD
        assert members[name] == environment["ETCD_INITIAL_ADVERTISE_PEER_URLS"]


def test_clients_of_etcd_name_all_members(services: dict[str, dict[str, Any]]) -> None:
    for name in EXECUTORS | {"service"}:
        endpoints = services[name]["environment"]["DISTOP_ETCD"].split(",")
        assert {endpoint.partition(":")[0] for endpoint in endpoints} == ETCD


def test_executors_name_the_master_and_themselves(services: dict[str, dict[str, Any]]) -> None:
    for name in EXECUTORS:
        service = services[name]
        command = service["command"]
        assert option(command, "--id") == service["hostname"] == name
        master = services["spark-master"]["command"]
        assert option(command, "--spark-master") == f"spark://{option(master, '--host')}:{option(master, '--port')}"


def test_where_data_is_read_the_tables_are(services: dict[str, dict[str, Any]]) -> None:
    for name in EXECUTORS | (SPARK - {"spark-master"}):
        assert "tables:/tables" in services[name]["volumes"]


def test_one_service_builds_the_image_of_all(services: dict[str, dict[str, Any]]) -> None:
    """Otherwise each `up --build` would recreate those whose own build has another number."""
    assert [name for name, service in services.items() if "build" in service] == ["spark-master"]
    assert {services[name]["image"] for name in OURS} == {f"${{DISTOP_IMAGE:-distop:{distop.__version__}}}"}
    assert {services[name].get("pull_policy") for name in OURS - {"spark-master"}} == {"never"}
    assert set(services["spark-master"]["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_the_label_has_the_version_of_distop() -> None:
    assert f"\nARG VERSION={distop.__version__}\n" in DOCKERFILE


def test_every_service_has_limits_and_a_read_only_root(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert {"mem_limit", "pids_limit"} <= set(service), name
        assert {"max-size", "max-file"} == set(service["logging"]["options"]), name
        (tmp,) = service["tmpfs"]
        # Spark loads native libraries from there.
        assert "exec" in tmp.partition(":")[2].split(","), name


def test_the_image_and_its_services_have_a_numeric_user_of_group_0(services: dict[str, dict[str, Any]]) -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["1000:0"]
    assert {services[name]["user"] for name in OURS} == {"${DISTOP_UID:-1000}:0"}


def test_daemons_are_not_restarted_after_exit_codes_that_a_restart_does_not_mend(
    services: dict[str, dict[str, Any]],
) -> None:
    for name in EXECUTORS | {"service"}:
        assert services[name]["environment"]["DISTOP_HOLD_EXIT_CODES"] == "2 3 5"


def test_the_master_recovers_its_applications_after_a_restart(services: dict[str, dict[str, Any]]) -> None:
    options = services["spark-master"]["environment"]["SPARK_DAEMON_JAVA_OPTS"].split()
    folders = [volume.partition(":")[2] for volume in services["spark-master"]["volumes"]]
    assert "-Dspark.deploy.recoveryMode=FILESYSTEM" in options
    (place,) = [one.partition("=")[2] for one in options if one.startswith("-Dspark.deploy.recoveryDirectory=")]
    assert any(place.startswith(f"{folder}/") for folder in folders)


def test_the_image_is_built_from_the_allowed_files_only() -> None:
    lines = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        name
        for line in DOCKERFILE.splitlines()
        if line.startswith("COPY ") and "--from=" not in line
        for name in shlex.split(line)[1:-1]
    }
    assert copied == allowed
    assert [name for name in copied if not (ROOT / name).exists()] == []

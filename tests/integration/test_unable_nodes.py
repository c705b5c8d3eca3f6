"""Nodes without a requirement of a type (Java): other nodes run its jobs, and jobs fail only if no node can."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.records import OperationRef
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.command import distop_command  # noqa: F401
from tests.support.daemons import SPARK
from tests.support.needs import need
from tests.support.replay import Written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distop.protocol.records import Node
    from tests.support.command import Ran
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.timeout(300), pytest.mark.rotating]

TABLE = "t"
NO_JAVA = {"JAVA_HOME": "/nonexistent"}


def spark_jobs(*names: str) -> dict[str, Any]:
    return {"names": list(names), "does": dict.fromkeys(names, "spark")}


def node(group: Daemons, executor: str) -> Node:
    """The node record of a live executor."""
    return next(one for one in group.client.nodes().values() if one.executor == executor)


@pytest.mark.spark
@pytest.mark.parametrize("type_name", [pytest.param("sample", marks=pytest.mark.slow), "batches"])
def test_jobs_move_from_a_node_without_java_to_another(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
    distop_command: Callable[..., Ran],  # noqa: F811
    type_name: str,
) -> None:
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    group.start("ann", ttl=10, env={**sample_env, **NO_JAVA})
    group.start("bob", ttl=10, env=sample_env, options=SPARK)
    group.client.drain("bob", wait=True)
    operation = group.client.start_operation(type_name, TABLE, spark_jobs("a", "b", "c", "d"))
    group.eventually(lambda: node(group, "ann").unable, "ann reports that it is unable")
    assert "Java 17 or newer is needed: JAVA_HOME is /nonexistent" in node(group, "ann").unable[type_name]
    assert type_name not in node(group, "ann").behaviors
    group.client.undrain("bob")
    result = operation.wait(200)
    assert result.state == "success", group.tails()
    assert type_name in node(group, "bob").behaviors
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    claims = [json.loads(claim) for job in written.claims.values() for claim in job]
    assert {claim["executor"] for claim in claims} == {"ann", "bob"}
    assert all(claim["failures"] == 0 for claim in claims)
    doctor = distop_command("doctor", "--etcd", group.endpoint, "--json").json
    found = {check["name"]: check for check in doctor["checks"]}["executors"]
    assert found["status"] == "warning"
    assert f"ann cannot run {type_name}: Java 17 or newer is needed" in found["text"]


@pytest.mark.parametrize("type_name", [pytest.param("sample", marks=pytest.mark.slow), "batches"])
def test_an_operation_fails_with_the_reason_if_no_node_is_able(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
    type_name: str,
) -> None:
    """Both nodes fail at the same time, each while the other still counts as able."""
    group.start("ann", "bob", ttl=10, env={**sample_env, **NO_JAVA})
    operation = group.client.start_operation(type_name, TABLE, spark_jobs(*"abcdefgh"), failure_policy="collect_all")
    result = operation.wait(60)
    assert result.state == "failed"
    assert result.jobs["failed"] == 8
    assert all("Java 17 or newer is needed" in error["text"] for error in result.errors)


def test_a_job_on_the_only_node_without_java_fails_at_once(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    group.start("ann", ttl=10, env={**sample_env, **NO_JAVA})
    arg = {**spark_jobs("a"), "diary": str(tmp_path / "diary")}
    result = group.client.start_operation("sample", TABLE, arg).wait(60)
    assert result.state == "failed"
    assert "JAVA_HOME is /nonexistent" in result.errors[0]["text"]
    assert (tmp_path / "diary").read_text().splitlines().count("start a") == 1


@pytest.mark.spark
@pytest.mark.parametrize("call", ["plan", pytest.param("complete", marks=pytest.mark.slow)])
def test_planning_and_completion_move_to_another_node(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
    call: str,
) -> None:
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    (ann,) = group.start("ann", ttl=10, env={**sample_env, **NO_JAVA})
    group.start("bob", ttl=10, env=sample_env, options=SPARK)
    group.client.drain("bob", wait=True)
    operation = group.client.start_operation("sample", TABLE, {"names": ["a"], "does": {call: "spark-use"}})
    group.eventually(lambda: node(group, "ann").unable, "ann reports that it is unable")
    group.eventually(lambda: "Resigning as coordinator" in ann.log.read_text(), "ann resigns as coordinator")
    group.client.undrain("bob")
    assert operation.wait(200).state == "success", group.tails()


@pytest.mark.parametrize("call", ["plan", "complete"])
def test_planning_and_completion_fail_at_once_if_no_node_is_able(
    group: Daemons,
    sample_env: dict[str, str],  # noqa: F811
    call: str,
) -> None:
    group.start("ann", ttl=10, env={**sample_env, **NO_JAVA})
    result = group.client.start_operation("sample", TABLE, {"names": ["a"], "does": {call: "spark-use"}}).wait(60)
    assert result.state == "failed"
    assert "JAVA_HOME is /nonexistent" in result.errors[0]["text"]

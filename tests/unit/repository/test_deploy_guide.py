"""docs/how-to/run-executors.md: its commands are valid, and its manifests are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from distop.cli.command_context import take_globals
from distop.cli.commands import commands

DOCS = Path(__file__).resolve().parents[3] / "docs"
GUIDE, SECURITY = ((DOCS / name).read_text() for name in ("how-to/run-executors.md", "security.md"))


def blocks(language: str, page: str = GUIDE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    (text,) = blocks("yaml")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pod_of(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["StatefulSet"]["spec"]["template"]["spec"]
    return spec


def container_of(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod_of(manifests)["containers"]
    return dict(container)


def executors(manifests: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The arguments of each ``distop executor`` of the guide."""
    container = container_of(manifests)
    found = [[*container["command"], *container["args"]]]
    for text in blocks("sh"):
        found += [shlex.split(line) for line in text.replace("\\\n", "").splitlines() if "distop executor" in line]
    (unit,) = blocks("ini", SECURITY)
    found += [shlex.split(line.removeprefix("ExecStart=")) for line in unit.splitlines() if "ExecStart=" in line]
    return [words[words.index("executor") :] for words in found]


def settings_of(words: list[str]) -> dict[str, str]:
    """The Spark settings of a command."""
    text = " ".join(words).replace("--spark-conf ", "--spark-conf=")
    return dict(re.findall(r"--spark-conf=([^ =]+)=(\S+)", text))


def test_the_command_line_accepts_each_command_of_the_guide(manifests: dict[str, dict[str, Any]]) -> None:
    found = executors(manifests)
    assert len(found) == 4
    for words in found:
        _, (name, *rest) = take_globals(words)
        command: Any = typer.main.get_command(commands(name))
        with command.make_context("distop", [name, *rest]) as context:
            _, executor, left = command.resolve_command(context, [name, *rest])
            with executor.make_context(name, left, parent=context) as made:
                masters = [word for word in words if word.startswith(("spark:", "--spark-master=", "yarn"))]
                assert [word.removeprefix("--spark-master=") for word in masters] in ([], [made.params["spark_master"]])


def test_the_objects_that_the_stateful_set_names_exist(manifests: dict[str, dict[str, Any]]) -> None:
    service, whole = manifests["Service"], manifests["StatefulSet"]["spec"]
    pod, container = pod_of(manifests), container_of(manifests)
    labels = whole["template"]["metadata"]["labels"]
    assert whole["serviceName"] == service["metadata"]["name"]
    assert whole["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    volumes = {volume["name"] for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in whole["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes | claims
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert used <= {variable["name"] for variable in container["env"]}


def test_folders_and_ports_of_the_executor_match_the_pod(manifests: dict[str, dict[str, Any]]) -> None:
    container = container_of(manifests)
    given = dict(word.removeprefix("--").split("=", 1) for word in container["args"] if "spark-conf" not in word)
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    # The executor refuses the mount point itself, because fsGroup may write there.
    assert any(given["work-dir"].startswith(f"{path}/") for path in mounted)
    assert any(given["shared-dir"].startswith(f"{path}/") for path in mounted)
    spark = settings_of(container["args"])
    ports = {int(value) for name, value in spark.items() if name.endswith(".port")}
    assert ports == {port["port"] for port in manifests["Service"]["spec"]["ports"]}
    assert spark["spark.kubernetes.container.image"] == container["image"]
    volume = "spark.kubernetes.executor.volumes.persistentVolumeClaim.tables"
    (shared,) = (one for one in pod_of(manifests)["volumes"] if "persistentVolumeClaim" in one)
    assert spark[f"{volume}.options.claimName"] == shared["persistentVolumeClaim"]["claimName"]
    assert spark[f"{volume}.mount.path"] in mounted

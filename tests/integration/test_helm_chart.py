"""charts/distop: what Helm renders is valid for the API server, complete, and accepted by distop's command line."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from distop.cli.command_context import take_globals
from distop.cli.commands import commands
from scripts import built_programs
from tests.support.needs import need

pytestmark = pytest.mark.program("helm")

CHART = Path(__file__).resolve().parents[2] / "charts/distop"
LEAST = {"etcd": {"endpoints": ["https://etcd-0.etcd:2379"]}}
ALL: dict[str, Any] = {
    "image": {"repository": "registry.example/distop", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "settings": 'history-limit = 50\n[storage."s3://lake"]\nregion = "eu-1"\n',
    "etcd": {
        "endpoints": ["https://etcd-0:2379", "https://etcd-1:3379", "etcd-2"],
        "namespace": "prod",
        "user": "distop",
        "passwordSecret": "etcd-password",
        "tlsSecret": "etcd-tls",
        "clientCertificate": True,
    },
    "tables": {"existingClaim": "lake"},
    "executors": {
        "slots": 3,
        "ttl": 20,
        "poll": 60,
        "labels": {"zone": "a"},
        "types": ["compact", "validate"],
        "tables": ["sales.*"],
        "exportTo": ["s3://out/"],
        "certificateKeySecret": "certificate-key",
        "workVolume": {"storageClass": "fast"},
        "extraArgs": ["--history-limit=3"],
        "env": [{"name": "AWS_REGION", "value": "eu-1"}],
        "envFrom": [{"secretRef": {"name": "aws"}}],
        "nodeSelector": {"disk": "ssd"},
        "podAnnotations": {"team": "lake"},
        "priorityClassName": "high",
    },
    "spark": {"master": "kubernetes"},
    "service": {
        "enabled": True,
        "accessSecret": "access",
        "tlsSecret": "service-tls",
        "clientCertificates": True,
        "tolerations": [{"key": "service", "operator": "Exists"}],
    },
    "policies": [
        {
            "name": "small",
            "table": "a.b",
            "start": "compact",
            "every": "1h",
            "when": "files > 5",
            "arg": {"where": "a = 'x'"},
        },
        {"name": "check", "table": "a.b", "start": "validate", "triggers": ["version", "event:loaded"], "priority": -3},
    ],
    "networkPolicy": {"egress": [{"ports": [{"port": 443}]}]},
}
OWN_SECRETS = {"etcd-password", "etcd-tls", "certificate-key", "access", "service-tls"}


def helm(*words: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm on the chart. ``values``: read from its input."""
    program = built_programs.command("helm")
    need(program, built_programs.needs("helm"))
    assert program is not None
    command = [*program, *words, "--values", "-"]
    return subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60, check=False
    )


def rendered(values: dict[str, Any], version: str = "1.29") -> list[dict[str, Any]]:
    """The manifests of a release named lake."""
    ran = helm("template", "lake", str(CHART), "--namespace", "data", "--kube-version", version, values=values)
    assert ran.returncode == 0, ran.stderr
    return [one for one in yaml.safe_load_all(ran.stdout) if one is not None]


@pytest.fixture(scope="module", params=["least", "all"])
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(LEAST if request.param == "least" else ALL)


def of_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Name → manifest."""
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def pods(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pod templates."""
    return [one["spec"]["template"] for one in manifests if "template" in one.get("spec", {})]


def containers(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The containers of all pods."""
    specs = [pod["spec"] for pod in pods(manifests)]
    return [one for spec in specs for one in (*spec.get("initContainers", ()), *spec["containers"])]


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("values", [LEAST, ALL], ids=["least", "all"])
def test_the_schemas_of_the_api_accept_each_manifest(values: dict[str, Any], version: str) -> None:
    found = rendered(values, version)
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names)


def test_the_schemas_reject_an_unknown_field() -> None:
    """The check of the other tests can fail."""
    (account,) = of_kind(rendered(LEAST), "ServiceAccount").values()
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**account, "acount": 1}, "1.29", strict=True)


def test_helm_lint_finds_nothing() -> None:
    ran = helm("lint", str(CHART), "--strict", "--quiet", values=ALL)
    assert (ran.returncode, ran.stdout.strip()) == (0, "")


def test_the_command_line_accepts_each_command(manifests: list[dict[str, Any]]) -> None:
    for container in containers(manifests):
        program, name, *rest = [*container["command"], *container.get("args", ())]
        assert program == "distop"
        _, words = take_globals([name, *rest])
        command: Any = typer.main.get_command(commands(name))
        context = command.make_context("distop", words)
        while hasattr(command, "resolve_command"):
            word, command, words = command.resolve_command(context, words)
            context = command.make_context(word, words, parent=context)


def test_what_pods_name_exists(manifests: list[dict[str, Any]]) -> None:
    secrets, configs, claims, accounts = set(), set(), set(), set()
    for pod in pods(manifests):
        spec = pod["spec"]
        accounts.add(spec["serviceAccountName"])
        secrets |= {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
        configs |= {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume}
        claims |= {
            one["persistentVolumeClaim"]["claimName"] for one in spec["volumes"] if "persistentVolumeClaim" in one
        }
    assert secrets <= OWN_SECRETS
    assert configs == set(of_kind(manifests, "ConfigMap"))
    assert claims - {"lake"} == set(of_kind(manifests, "PersistentVolumeClaim"))
    assert accounts == set(of_kind(manifests, "ServiceAccount"))
    for binding in of_kind(manifests, "RoleBinding").values():
        assert binding["roleRef"]["name"] in of_kind(manifests, "Role")
        assert {subject["name"] for subject in binding["subjects"]} == accounts


def test_mounts_have_volumes_and_arguments_have_variables_and_mounts(manifests: list[dict[str, Any]]) -> None:
    templates = {one["metadata"]["name"] for one in _claim_templates(manifests)}
    for pod in pods(manifests):
        spec = pod["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) <= volumes | templates
            text = " ".join(container.get("args", ()))
            assert set(re.findall(r"\$\((\w+)\)", text)) <= {one["name"] for one in container["env"]}
            files = re.findall(
                r"/etc/distop/[^ ]*", text + " " + " ".join(str(one.get("value")) for one in container["env"])
            )
            assert all(any(file.startswith(f"{path}/") for path in mounts.values()) for file in files)


def _claim_templates(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (executors,) = of_kind(manifests, "StatefulSet").values()
    return list(executors["spec"]["volumeClaimTemplates"])


def test_selectors_select_the_pods_of_one_workload(manifests: list[dict[str, Any]]) -> None:
    labels = {
        json.dumps(pod["metadata"]["labels"], sort_keys=True): pod["metadata"]["labels"] for pod in pods(manifests)
    }
    selecting = [one for one in manifests if one["kind"] in {"Service", "NetworkPolicy", "PodDisruptionBudget"}]
    assert selecting
    for one in selecting:
        spec = one["spec"]
        selector = spec["selector"] if one["kind"] == "Service" else spec.get("selector", spec.get("podSelector"))
        wanted = selector.get("matchLabels", selector)
        assert len([some for some in labels.values() if wanted.items() <= some.items()]) == 1


def test_pods_have_no_rights_but_those_they_need(manifests: list[dict[str, Any]]) -> None:
    for pod in pods(manifests):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        driver = any("--spark-master=k8s" in word for one in pod["spec"]["containers"] for word in one.get("args", ()))
        assert pod["spec"]["automountServiceAccountToken"] is driver
    for container in containers(manifests):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
    assert bool(of_kind(manifests, "Role")) is any("Binding" in one["kind"] for one in manifests)


def test_the_name_of_a_driver_resolves_before_it_is_ready() -> None:
    found = rendered(ALL)
    (executors,) = of_kind(found, "StatefulSet").values()
    service = of_kind(found, "Service")[executors["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    args = executors["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--spark-conf=spark.driver.host=$(POD).{service['metadata']['name']}.$(NAMESPACE).svc" in args
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert f"--spark-conf=spark.driver.port={ports['driver']}" in args
    assert f"--spark-conf=spark.blockManager.port={ports['blocks']}" in args


def test_the_folders_of_executors_are_below_mounts() -> None:
    for values in (LEAST, ALL):
        (executors,) = of_kind(rendered(values), "StatefulSet").values()
        spec = executors["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        given = dict(word.removeprefix("--").split("=", 1) for word in container["args"] if "spark-conf" not in word)
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        # The executor refuses the mount point itself, because fsGroup may write there.
        assert any(given["work-dir"].startswith(f"{path}/") for path in paths)
        assert any(given["shared-dir"].startswith(f"{path}/") for path in paths)


def test_pods_of_spark_have_the_image_and_the_tables_of_their_driver() -> None:
    (executors,) = of_kind(rendered(ALL), "StatefulSet").values()
    spec = executors["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    spark = dict(re.findall(r"--spark-conf=([^ =]+)=(\S+)", " ".join(container["args"])))
    assert spark["spark.kubernetes.container.image"] == container["image"]
    volume = "spark.kubernetes.executor.volumes.persistentVolumeClaim.tables"
    (shared,) = (one for one in spec["volumes"] if "persistentVolumeClaim" in one)
    assert spark[f"{volume}.options.claimName"] == shared["persistentVolumeClaim"]["claimName"]
    assert {"name": "tables", "mountPath": spark[f"{volume}.mount.path"]} in container["volumeMounts"]


def test_limited_egress_has_dns_and_the_ports_of_etcd() -> None:
    for one in of_kind(rendered(ALL), "NetworkPolicy").values():
        assert one["spec"]["policyTypes"] == ["Ingress", "Egress"]
        ports = [port["port"] for rule in one["spec"]["egress"] for port in rule.get("ports", ())]
        assert ports == [53, 53, 2379, 3379, 443]


def test_a_change_of_the_settings_restarts_the_pods() -> None:
    def stamps(settings: str) -> list[str]:
        return [
            pod["metadata"]["annotations"]["distop/settings"] for pod in pods(rendered({**LEAST, "settings": settings}))
        ]

    assert stamps("ttl = 5") == stamps("ttl = 5") != stamps("ttl = 6")


def test_tables_are_kept_when_the_release_is_removed() -> None:
    (claim,) = of_kind(rendered(LEAST), "PersistentVolumeClaim").values()
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "etcd/endpoints"),
        ({**LEAST, "ectd": {}}, "additional properties 'ectd' not allowed"),
        ({**LEAST, "service": {"enabled": True}}, "service.accessSecret: name the secret with access.toml"),
        ({**LEAST, "service": {"enabled": True, "accessSecret": "a"}}, "service.tlsSecret: name the secret"),
        ({"etcd": {**LEAST["etcd"], "user": "u"}}, "etcd.passwordSecret: name the secret"),
        ({**LEAST, "image": {"digest": "latest"}}, "image/digest"),
        ({**LEAST, "tables": {"enabled": False}}, "sharedDir: name a folder or URL"),
        ({**LEAST, "executors": {"terminationGracePeriodSeconds": 5}}, "terminationGracePeriodSeconds"),
        ({**LEAST, "policies": [{"name": "a", "table": "b", "start": "compact"}]}, "policies/0"),
        ({**LEAST, "spark": {"master": "yarn"}}, "spark/master"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    ran = helm("template", "lake", str(CHART), "--kube-version", "1.29", values=values)
    assert ran.returncode != 0
    assert message in ran.stderr

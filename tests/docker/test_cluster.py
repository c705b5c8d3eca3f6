"""The cluster of docker/compose.yaml on a container engine, as a user that the image does not know."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import distop
from distop.errors import NotIdentified, OutcomeUnknown, Unavailable
from distop.protocol.records import OperationRef
from tests.docker.engine import (
    IMAGE,
    PROJECT,
    USER,
    address,
    compose,
    container,
    docker,
    executor,
    inside,
    run,
    up,
)
from tests.docker.engine import distop as command
from tests.support.behaviors import install
from tests.support.daemons import eventually
from tests.support.replay import Written, violations

if TYPE_CHECKING:
    from collections.abc import Callable

# Building the image downloads a JRE and Spark.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800), pytest.mark.rotating]

PATIENCE = 120
"""Seconds for a change of the cluster."""
PARALLEL = 3
"""Threads of the load."""
ORDER = ("executor-1", "executor-2", "service", "spark-master", "etcd-1", "etcd-2", "etcd-3")
"""The order of a rolling restart."""


def nodes() -> set[str]:
    return {node["executor"] for node in command("nodes")}


def validate(argument: dict[str, Any]) -> Any:
    return command("start", "validate", "t", "--arg", json.dumps(argument), "--wait", "--timeout", "240")


def start_noop(jobs: int, sleep: float) -> str:
    return str(command("start", "noop", "t", "--arg", json.dumps({"jobs": jobs, "sleep": sleep}))["op"])


def has_claims(op: str, node: str) -> bool:
    """Whether an executor has claimed jobs of an operation."""
    claims = Written(etcd(), OperationRef.parse(op)).claims.values()
    return any(f'"{node}"' in claim for found in claims for claim in found)


def ended(op: str) -> Any:
    """The record of an operation, once it has ended."""
    eventually(lambda: command("show", op)["state"] != "running", f"{op} has ended", seconds=2 * PATIENCE)
    return command("show", op)


def etcd() -> str:
    return address("etcd-1", 2379)


def audit() -> list[str]:
    return violations(etcd())


@pytest.mark.usefixtures("cluster")
def test_two_executors_validate_a_table_on_the_standalone_cluster() -> None:
    assert nodes() == {"executor-1", "executor-2"}
    record = validate({"checks": [{"not_null": "id"}], "statistics": "never"})
    assert record["code"] == 1
    assert record["state"] == "failed"
    assert record["report"]["rows"] == 800
    assert record["report"]["checks"][0]["violations"] == 1


@pytest.mark.usefixtures("cluster")
def test_operations_go_on_without_one_etcd_member_and_one_executor() -> None:
    compose("kill", "etcd-2", "executor-2")
    record = validate({"checks": [{"range": {"column": "id", "min": 0, "max": 99}}]})
    assert record["code"] == 0
    assert record["state"] == "success"


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("service", ["executor-1", "spark-worker-1", "spark-master", "service"])
def test_containers_run_as_any_user_and_write_only_the_stated_places(service: str) -> None:
    places = "/ /opt/distop /home/distop /var/lib /tmp /var/lib/distop"
    script = f"id -u; id -g; for p in {places}; do test -w $p && echo $p; done; true"
    user, group, *writable = inside("sh", "-c", script, service=service).split()
    assert (user, group) == (USER, "0")
    assert writable == ["/tmp", "/var/lib/distop"]


@pytest.mark.usefixtures("cluster")
def test_the_service_answers_with_a_token_alone(client: distop.Client, tmp_path: Path) -> None:
    assert {node.executor for node in client.nodes().values()} == {"executor-1", "executor-2"}
    url = f"grpcs://{address('service', 7781)}"
    with (
        pytest.raises(NotIdentified),
        distop.connect(url, token="x" * 32, ca_cert=str(tmp_path / "cert.pem")) as stranger,
    ):
        stranger.nodes()


@pytest.mark.usefixtures("running")
def test_an_exit_code_that_no_restart_mends_leaves_an_unhealthy_container() -> None:
    """The work directory of the mount point itself is refused with exit code 2."""
    holding = ("--env", "DISTOP_HOLD_EXIT_CODES=2 3 5", "--restart", "unless-stopped")
    name = f"{PROJECT}-held"
    refused = ("distop", "executor", "--id", "held", "--work-dir", "/var/lib/distop")
    docker("run", "--detach", "--name", name, "--network", "none", "--init", *holding, IMAGE, *refused)
    try:
        eventually(
            lambda: "waiting to be stopped" in run("docker", "logs", name).stderr,
            "the entry point waits",
            seconds=PATIENCE,
        )
        state = json.loads(docker("inspect", name, "--format", "{{json .}}"))
        assert state["State"]["Running"]
        assert state["RestartCount"] == 0
        docker("stop", name)
        assert docker("inspect", name, "--format", "{{.State.ExitCode}}") == "2"
    finally:
        docker("rm", "--force", name)


@pytest.fixture
def behaviors(tmp_path: Path) -> tuple[str, ...]:
    """Options of a container in which the type ``greedy`` is installed, from a folder of this machine."""
    install(tmp_path, "greedy", "[distop.behaviors]\ngreedy = greedy:Greedy\n")
    (tmp_path / "greedy.py").write_text((Path(__file__).parent / "greedy.py").read_text())
    for path in (tmp_path, *tmp_path.rglob("*"), *list(tmp_path.parents)[:3]):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
    return (f"--volume={tmp_path}:/behaviors:ro", "--env=PYTHONPATH=/behaviors")


def greedy(name: str, **argument: int) -> Any:
    where = ("--where", f"name={name}", "--retry-attempts", "2")
    return command("start", "greedy", "t", "--arg", json.dumps(argument), *where, "--wait", "--timeout", "240")


@pytest.mark.slow  # three starts of Spark
@pytest.mark.usefixtures("cluster")
def test_a_kill_for_lack_of_memory_is_named_and_the_executor_recovers(behaviors: tuple[str, ...]) -> None:
    limits = ("--memory=900m", "--memory-swap=900m")
    with executor(*limits, *behaviors, spark=("spark.driver.memory=3g",)) as name:
        eventually(lambda: name in nodes(), "the executor is ready", seconds=PATIENCE)
        failed = greedy(name, megabytes=2048)
        (error,) = failed["errors"]
        for attempt in error["attempts"]:
            assert "the kernel killed 1 process of this executor's control group for lack of memory" in attempt["text"]
        assert [attempt["attempt"] for attempt in error["attempts"]] == [1, 2], "each kill is an attempt"
        assert greedy(name)["state"] == "success"
        assert docker("inspect", name, "--format", "{{.State.Running}} {{.RestartCount}}") == "true 0"


@pytest.mark.slow  # a start of Spark
@pytest.mark.usefixtures("cluster")
def test_an_executor_survives_its_limit_of_processes(behaviors: tuple[str, ...]) -> None:
    with executor("--pids-limit=150", *behaviors) as name:
        eventually(lambda: name in nodes(), "the executor is ready", seconds=PATIENCE)
        failed = greedy(name, threads=500)
        assert "can't start new thread" in failed["errors"][0]["text"]
        assert greedy(name)["state"] == "success"
        assert docker("inspect", name, "--format", "{{.State.Running}} {{.RestartCount}}") == "true 0"


def cut_off(how: str) -> None:
    if how == "pause":
        docker("pause", container("executor-2"))
    else:
        docker("network", "disconnect", f"{PROJECT}_default", container("executor-2"))


def bring_back(how: str) -> None:
    if how == "pause":
        docker("unpause", container("executor-2"))
    else:
        docker("network", "connect", "--alias", "executor-2", f"{PROJECT}_default", container("executor-2"))


@pytest.mark.slow  # the time to live of a session
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("how", ["pause", "network"])
def test_jobs_of_an_executor_that_is_cut_off_run_elsewhere(how: str) -> None:
    op = start_noop(jobs=8, sleep=4)
    eventually(lambda: has_claims(op, "executor-2"), "executor-2 has jobs", seconds=PATIENCE)
    cut_off(how)
    try:
        eventually(lambda: nodes() == {"executor-1"}, "executor-2 is gone", seconds=PATIENCE)
        record = ended(op)
        assert (record["state"], record["jobs"]["success"]) == ("success", 8)
    finally:
        bring_back(how)
    eventually(lambda: nodes() == {"executor-1", "executor-2"}, "executor-2 is back", seconds=PATIENCE)
    assert audit() == []


@pytest.mark.slow  # waits for etcd
@pytest.mark.usefixtures("cluster")
def test_operations_wait_for_a_quorum_of_etcd() -> None:
    op = start_noop(jobs=8, sleep=2)
    eventually(lambda: has_claims(op, "executor-1"), "jobs run", seconds=PATIENCE)
    compose("kill", "etcd-2", "etcd-3")
    refused = run("docker", "exec", container("executor-1"), "distop", "ls", check=False)
    assert refused.returncode == 3, refused.stderr
    up()
    record = ended(op)
    assert (record["state"], record["jobs"]["success"]) == ("success", 8)
    assert audit() == []


class Load:
    """Threads that start operations through the service, one after the other, and wait for their results."""

    def __init__(self, client: distop.Client) -> None:
        self.client = client
        self.results: dict[str, tuple[str, str, int]] = {}
        """Request id → operation, state, and successful jobs."""
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(PARALLEL)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive(), "an operation does not end"

    def wait_for_more(self, count: int) -> None:
        """Wait until this many more operations have ended."""
        with self._changed:
            wanted = len(self.results) + count
            assert self._changed.wait_for(lambda: len(self.results) >= wanted or self.errors, 240), "the load stands"
        assert not self.errors

    def _run(self, thread: int) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                self._start(f"load-{thread}-{number}")
                number += 1
        except BaseException as error:
            with self._changed:
                self.errors.append(error)
                self._changed.notify_all()
            raise

    def _start(self, request_id: str) -> None:
        argument, deadline = {"jobs": 4, "sleep": 0.2}, time.monotonic() + 200
        while True:
            try:
                op = self.client.start_operation("noop", "t", argument, request_id=request_id, labels={"part": "load"})
                break
            except (OutcomeUnknown, Unavailable):
                assert time.monotonic() < deadline
        result = op.wait(timeout=200)
        with self._changed:
            self.results[request_id] = (result.op, result.state, result.jobs["success"])
            self._changed.notify_all()


def applications() -> set[str]:
    """The ids of the applications that the Spark master knows."""
    script = "import urllib.request as u; print(u.urlopen('http://spark-master:8080/json/').read().decode())"
    return {app["id"] for app in json.loads(inside("python", "-c", script, service="spark-master"))["activeapps"]}


@pytest.mark.slow  # restarts all
def test_a_rolling_restart_under_load_loses_and_doubles_nothing(
    client: distop.Client, record_property: Callable[[str, object], None]
) -> None:
    began, took = time.monotonic(), {}
    with Load(client) as load:
        load.wait_for_more(5)
        for service in ORDER:
            if service == "spark-master":
                assert validate({"checks": [{"not_null": "id"}], "statistics": "never"})["report"]["rows"] == 800
                known = applications()
                assert known
            at = time.monotonic()
            compose("restart", service)
            up()
            load.wait_for_more(5)
            took[service] = f"{time.monotonic() - at:.0f} s"
            if service == "spark-master":
                assert applications() == known, "the master has recovered its applications"
                record = validate({"checks": [{"not_null": "id"}], "statistics": "never"})
                assert record["report"]["rows"] == 800
    results = load.results.values()
    assert {(state, jobs) for _, state, jobs in results} == {("success", 4)}
    refs = {op for op, _, _ in results}
    assert len(refs) == len(results), "each start is an operation of its own"
    found = client.history("t", limit=1000, labels={"part": "load"})
    assert {result.op for result in found} == refs, "no start began another operation"
    assert audit() == []
    record_property("figures", f"{len(refs)} operations in {time.monotonic() - began:.0f} s; restarts took {took}")

"""The container engine of the tests: that of ``scripts/engine``, or one that has the images."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import container_engine
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
PROJECT = "distop-test"
IMAGE = "distop:test"
USER = "54321"
"""A user that the image does not know."""


class Engine(NamedTuple):
    """The environment of programs that use the engine; ``problem``: why no test can use it, or ""."""

    environment: dict[str, str]
    problem: str = ""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@functools.cache
def engine() -> Engine:
    """That of ``scripts/engine`` if it is up, else that of ``docker`` on ``PATH``."""
    at = container_engine.places()
    # Another etcd may have 2379. The ports stay the same when a container is restarted.
    ports = {name: free_port() for name in ("DISTOP_ETCD_PORT", "DISTOP_SERVICE_PORT")}
    environment = {**os.environ, **ports, "DISTOP_IMAGE": IMAGE, "DISTOP_UID": USER}
    if container_engine.process(at) is not None:
        return Engine(container_engine.environment(at, environment), container_engine.problem(at) or "")
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
        except subprocess.TimeoutExpired:
            return Engine(environment, f"`{' '.join(command)}` does not answer, and scripts/engine is not up")
        except OSError:
            return Engine(environment, "there is no docker command on PATH, and scripts/engine is not up")
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
            return Engine(environment, f"`{' '.join(command)}` says: {lines[-1]}; and scripts/engine is not up")
    for image in container_engine.IMAGES:
        if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode != 0:
            return Engine(environment, f"the engine has no image {image}: pull it, or run scripts/engine up")
    return Engine(environment)


def need_engine() -> None:
    """Skip the test if there is no engine, or if it has no images."""
    if engine().problem:
        pytest.skip(f"needs a container engine: {engine().problem}")


def run(*words: str, timeout: float = 300, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command with the engine. Its errors are in the exception."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False, env=engine().environment)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done


def docker(*words: str, timeout: float = 300, check: bool = True) -> str:
    """The output of a docker command."""
    return run("docker", *words, timeout=timeout, check=check).stdout.strip()


def compose(*words: str, timeout: float = 300, check: bool = True) -> str:
    """The output of a compose command on the cluster of the tests."""
    return docker("compose", "--file", str(COMPOSE), "--project-name", PROJECT, *words, timeout=timeout, check=check)


def build(*options: str) -> None:
    """Build the image of the tests."""
    container_engine.build(container_engine.places(), ROOT, IMAGE, *options, env=engine().environment)


def up() -> None:
    """Start what does not run, and wait until all of it is well."""
    compose("up", "--detach", "--wait", "--wait-timeout", "300", timeout=330)


def container(service: str) -> str:
    """The name of a service's container."""
    return f"{PROJECT}-{service}-1"


def address(service: str, port: int) -> str:
    """Where this machine reaches a port of a service."""
    return compose("port", service, str(port)).splitlines()[0]


def inside(*words: str, service: str = "executor-1", check: bool = True) -> str:
    """The output of a command in a container of the cluster."""
    return compose("exec", "--no-TTY", service, *words, check=check)


def distop(*words: str) -> Any:
    """The JSON document that the command prints; its exit code under ``code`` where that is an object."""
    done = run(
        *("docker", "exec", container("executor-1"), "distop", *words, "--json"),
        check=False,
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    if isinstance(document, dict):
        document["code"] = done.returncode
    return document


@contextmanager
def executor(*options: str, spark: tuple[str, ...] = (), mounts: tuple[str, ...] = ()) -> Iterator[str]:
    """A third executor, with a Spark of its own and these options of ``docker run``; yields its name.

    Its label ``name`` is its name.
    """
    name = f"{PROJECT}-{uuid.uuid4().hex[:8]}"
    words = ["run", "--detach", "--name", name, "--network", f"{PROJECT}_default", "--init", "--read-only"]
    words += ["--user", f"{USER}:0", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"]
    words += ["--tmpfs", "/tmp:exec,mode=1777", "--tmpfs", "/var/lib/distop:exec,mode=1777"]
    words += ["--volume", f"{PROJECT}_tables:/tables", *(f"--volume={mount}" for mount in mounts)]
    words += ["--env", "DISTOP_ETCD=etcd-1:2379,etcd-2:2379,etcd-3:2379", *options, IMAGE]
    command = ["distop", "executor", "--id", name, "--label", f"name={name}", "--work-dir", "/var/lib/distop/work"]
    command += ["--spark-master", "local[1]", *(f"--spark-conf={one}" for one in spark)]
    docker(*words, *command)
    try:
        yield name
    finally:
        print(docker("logs", name, check=False), file=sys.stderr)
        docker("rm", "--force", "--volumes", name)

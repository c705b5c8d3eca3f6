"""``distop dev``: an embedded etcd with one executor, whose data survives restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

import distop
from distop.daemon.process import locked
from tests.support.command import distop_command
from tests.support.daemons import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.command import Ran

__all__ = ["distop_command"]

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

LIMIT = 60


@contextmanager
def dev(folder: Path, *options: str, current: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running ``distop dev`` and its endpoint."""
    command = [sys.executable, "-P", "-m", "distop.cli", "dev", "--data-dir", str(folder), "--slots", "1", *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DISTOP_")}
    with (
        open(folder / "log", "a") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            cwd=current,
            # Tests in the background ignore SIGHUP, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        ) as running,
    ):
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            assert line.startswith("export DISTOP_ETCD=127.0.0.1:")
            yield running, line.strip().partition("=")[2]
        finally:
            if running.poll() is None:
                running.send_signal(signal.SIGTERM)
            running.wait(LIMIT)


def test_it_serves_the_page_and_prints_its_url(tmp_path: Path) -> None:
    with dev(tmp_path) as (running, _):
        log = tmp_path / "log"
        eventually(lambda: "the page is at http://127.0.0.1:" in log.read_text(), "the URL is printed")
        url = log.read_text().partition("the page is at ")[2].split()[0]

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return "<h1>Operations</h1>" in httpx.get(f"{url}operations").text
            return False

        eventually(answers, "the page is served", tail=log.read_text)
        running.send_signal(signal.SIGINT)
        assert running.wait(LIMIT) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_restart_has_the_previous_data(tmp_path: Path, distop_command: Callable[..., Ran]) -> None:
    ended = []
    for round_number in (1, 2):
        with dev(tmp_path) as (running, endpoint), distop.connect(endpoint) as client:
            while not client.nodes():
                pass  # the executor has not joined yet
            result = client.start_operation("noop", "@cluster").wait(timeout=LIMIT)
            ended.append(result.raise_for_state().op)
            assert len(client.history()) == round_number
            if round_number == 1:
                second = distop_command("dev", "--data-dir", str(tmp_path))
                assert (second.code, "another `distop dev` uses" in second.sentence) == (5, True)
            running.send_signal(signal.SIGINT)
            assert running.wait(LIMIT) == 0
    assert ended == ["@cluster/noop/1", "@cluster/noop/2"]


FILE = """
from pydantic import BaseModel
from distop.behavior import Behavior
from beside import ANSWER

class Arg(BaseModel):
    pass

class Answer(Behavior):
    type_name = "answer"
    Arg = Arg

    def start_or_resume_job(self, arg, partition, ctx):
        return ANSWER
"""


def test_hole_9_modules_beside_a_served_file_replace_no_installed_module(tmp_path: Path) -> None:
    data, current = tmp_path / "data", tmp_path / "current"
    data.mkdir()
    current.mkdir()
    (current / "answer.py").write_text(FILE)
    (current / "beside.py").write_text("ANSWER = 42\n")
    planted = ("ctypes", "json", "queue", "typer", "grpc", "pydantic", "distop")
    for name in planted:
        (current / f"{name}.py").write_text(f"open('imported-{name}', 'w')\n")
    options = ("--behavior", "./answer.py:Answer")
    with dev(data, *options, current=current) as (running, endpoint), distop.connect(endpoint) as client:
        eventually(client.nodes, "the executor has joined")
        operation = client.start_operation("answer", "@cluster")
        operation.wait(timeout=LIMIT).raise_for_state()
        assert [job.result for job in operation.results()] == [42]
        running.send_signal(signal.SIGINT)
        assert running.wait(LIMIT) == 0
    assert f"serving answer from {current}/answer.py:Answer" in (data / "log").read_text()
    assert not list(current.glob("imported-*"))


def test_after_a_kill_it_waits_for_the_previous_executor(tmp_path: Path, distop_command: Callable[..., Ran]) -> None:
    """The previous executor ends by itself after a while. Here the test holds its lock instead."""
    (tmp_path / "executor").mkdir()
    log = tmp_path / "log"
    log.touch()
    with contextlib.ExitStack() as previous:
        previous.enter_context(locked(tmp_path / "executor"))

        def release() -> None:
            eventually(lambda: "waiting for the executor of a killed" in log.read_text(), "it logs that it waits")
            previous.close()

        releasing = threading.Thread(target=release, daemon=True)
        releasing.start()
        with dev(tmp_path) as (running, endpoint), distop.connect(endpoint) as client:
            releasing.join(LIMIT)
            eventually(client.nodes, "the executor has joined")
            assert log.read_text().count("waiting for the executor of a killed") == 1
            running.send_signal(signal.SIGHUP)
            assert running.wait(LIMIT) == 0


def test_hole_4_a_folder_that_others_can_write_is_refused(
    tmp_path: Path, distop_command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared folder such as /tmp, the user who creates `.distop` first would own etcd's data."""
    planted = tmp_path / ".distop"
    (planted / "executor").mkdir(parents=True)
    planted.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    ran = distop_command("dev")
    assert (ran.code, ran.sentence.count("\n")) == (2, 0)
    assert f"the folder {planted} cannot be used: {planted} is writable by its group or by others" in ran.sentence
    assert [path.name for path in planted.rglob("*")] == ["executor"]


def test_a_port_in_use_is_reported(tmp_path: Path, distop_command: Callable[..., Ran]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = distop_command("dev", "--data-dir", str(tmp_path), "--port", str(port))
    assert (ran.code, f"the port {port} is in use" in ran.sentence) == (2, True)

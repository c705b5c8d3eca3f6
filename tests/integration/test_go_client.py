"""The Go client in clients/go: its own tests, its example against a service, and its generated code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_service import Service
from tests.integration.test_service_access import (  # noqa: F401
    ETL,
    access,
    certificates,
    grants,
    service,
)
from tests.support.needs import need

if TYPE_CHECKING:
    from tests.support.certificates import Certificates
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.direct, pytest.mark.rotating, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
MODULE = ROOT / "clients" / "go"
BUILD_LIMIT = 500.0


def go(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the go command in the client's module."""
    program = shutil.which("go")
    need(program, "Go")
    assert program is not None
    environment = {**os.environ, "GOWORK": "off", "GO111MODULE": "on", "GOFLAGS": "-mod=readonly"}
    return subprocess.run(
        [program, *arguments],
        cwd=MODULE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT,
        check=False,
    )


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """The built example, after the tests of the client have passed."""
    tested = go("test", "./...")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    program = tmp_path / "start"
    built = go("build", "-o", str(program), "./examples/start")
    assert built.returncode == 0, built.stderr
    return program


def test_the_program_of_the_guide_compiles(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "how-to" / "use-from-go.md").read_text()
    source = tmp_path / "guide.go"
    source.write_text(guide.partition("```go\n")[2].partition("```")[0])
    built = go("build", "-o", str(tmp_path / "guide"), str(source))
    assert built.returncode == 0, built.stderr


def test_the_go_example_starts_an_operation_watches_it_and_prints_its_report(
    group: Daemons,
    service: Service,  # noqa: F811
    certificates: Certificates,  # noqa: F811
    access: Path,  # noqa: F811
    start: Path,
) -> None:
    group.start("e1")
    limited = grants().replace("[identities.root]", "calls_per_second = 1\n[identities.root]")
    new = access.with_suffix(".new")
    new.write_text(limited)
    new.chmod(0o600)
    new.rename(access)

    def run(*arguments: str, token: str = ETL, ca: str = certificates.ca) -> subprocess.CompletedProcess[str]:
        url = f"grpcs://127.0.0.1:{service.port}"
        return subprocess.run(
            [start, "-service", url, "-ca", ca, "-table", "t", "-timeout", "60s", *arguments],
            env={**os.environ, "DISTOP_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    # The service allows a call a second, so the example has to wait and repeat calls.
    given = ("-type", "noop", "-arg", '{"jobs": 3, "sleep": 0.3}', "-request-id", "once")
    first, again = run(*given), run(*given)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "success: 100 % of the jobs have ended" in first.stderr
    assert first.stderr.splitlines()[0] == "t/noop/1 (already started: false)"
    assert again.stderr.splitlines()[0] == "t/noop/1 (already started: true)"
    record = json.loads(first.stdout)
    assert (record["state"], record["jobs"]["success"], record["submitter"]) == ("success", 3, "etl")
    assert json.loads(again.stdout) == record

    failed = run("-arg", '{"jobs": 2, "fail": ["1"]}')
    assert (failed.returncode, json.loads(failed.stdout)["state"]) == (1, "failed"), failed.stderr
    timed_out = run("-arg", '{"sleep": 60}', "-timeout", "3s")
    assert timed_out.returncode == 6, timed_out.stderr
    for refused, words in (
        (run(token="of-somebody-else-00000"), "Unauthenticated"),
        (run("-arg", '{"jobs": -1}'), "InvalidArgument"),
        (run("-arg", "{"), "the argument"),
        (run("-timeout", "3s", ca=certificates.other_ca), "certificate"),
    ):
        assert (refused.returncode in (2, 6), words in refused.stderr) == (True, True), refused.stderr


def test_the_generated_go_code_is_current() -> None:
    need(shutil.which("go"), "Go")
    command = [sys.executable, str(ROOT / "scripts" / "generate-proto"), "--check-go"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT, check=False)
    assert done.returncode == 0, done.stderr

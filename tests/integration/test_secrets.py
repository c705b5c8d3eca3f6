"""No secret from an executor's settings is readable by others, from its start with Spark to its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import struct
import sys
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from distop.protocol.records import TableRecord
from distop.runtime.secret_settings import REPLACEMENT
from distop.worker import spark_settings
from tests.support.behaviors import sample_env  # noqa: F401
from tests.support.daemons import distop_process
from tests.support.icebergrest import RestCatalogServer
from tests.support.localspark import FRUGAL
from tests.support.needs import need
from tests.support.processes import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.store.embedded import EmbeddedEtcd
    from tests.support.daemons import Daemons


SECONDS = 10.0
"""Time limit for an answer."""
_LISTENS = "0A"


def listening_ports(pid: int) -> list[int]:
    """The TCP ports on which this process listens."""
    own = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(descriptor.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and f"socket:[{inode}]" in own:
                found.add(int(local.rpartition(":")[2], 16))
    return sorted(found)


def request_block(port: int, block: str = "broadcast_0_piece0") -> bytes:
    """Send a request of Spark's block transfer without authentication, and return the answer, or b""."""

    def text(what: str) -> bytes:
        return struct.pack(">i", len(what)) + what.encode()

    opened = b"\x00" + text("app") + text("driver") + struct.pack(">i", 1) + text(block)
    request = b"\x03" + struct.pack(">qi", 1, len(opened))
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(struct.pack(">q", 8 + len(request) + len(opened)) + request + opened)
        while len(answer) < 8 or len(answer) < struct.unpack(">q", answer[:8])[0]:
            if not (part := connection.recv(1 << 16)):
                break
            answer += part
    return answer


pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

WITHOUT_CAPABILITIES = (sys.executable, "-P", "-m", "tests.integration.without_capabilities")
SETTING = "spark.hadoop.fs.s3a.secret.key"
TOKEN = "PYICEBERG_CATALOG__PROD__TOKEN"
VARIABLE = "AWS_SECRET_ACCESS_KEY"
STRING = "AZURE_STORAGE_CONNECTION_STRING"
DEFAULT = "spark.my.api.key"
SECRETS = {
    "setting": 'wasp-in-a-"jar"',
    "password": "hornet-in-a-box",
    "token": "bee-in-a-bonnet",
    "variable": "Cricket/0123456789+In-A-Matchbox.ABCDEF",
    "string": "Katydid+0123456789/In-A-Matchbox==",
    "file": "moth/in+a-cloth",
    "default": "ladybird/in+a-box",
}
FORMS = {name: {secret.encode(), json.dumps(secret)[1:-1].encode()} for name, secret in SECRETS.items()}
"""The forms of each secret to search for: plain, and escaped for JSON."""
_PART = 10
INHERITED = ("variable", "string")
"""Secrets in inherited variables. All their parts count, since a text that quotes one may be shortened within it."""
for _name in INHERITED:
    FORMS[_name] = {SECRETS[_name][n : n + _PART].encode() for n in range(len(SECRETS[_name]) - _PART + 1)}
for _name in ("string", "file", "default"):
    FORMS[_name] |= {quote(SECRETS[_name], safe="").encode()}
TRIMMED = "  kept as it is  "
QUOTED = {
    "setting": ("spark-quote", {"read": SETTING}),
    "default": ("spark-quote", {"read": DEFAULT}),
    "variable": ("spark-quote-variable", {"read": SETTING, "variable": VARIABLE}),
    "string": ("spark-quote-variable", {"read": SETTING, "variable": STRING}),
}
"""Secret → the job's action that quotes it in a Spark error, a log and a status, and where the job finds it."""
SHOWN = (("--html", "-"), ("--json",), ())


class ProcessScanner(threading.Thread):
    """Scans the arguments and environments of all processes repeatedly.

    ``found``: the places of secrets. ``programs``: the programs seen below the daemon.
    """

    def __init__(self, daemon: int, work_dir: Path) -> None:
        super().__init__(daemon=True)
        self._daemon = Path(f"/proc/{daemon}")
        self.found: set[str] = set()
        self.programs: set[str] = set()
        self.modes: set[int] = set()
        self._file = work_dir / spark_settings.FILE
        self._searched: dict[str, tuple[bytes, bytes]] = {}
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            for folder in Path("/proc").glob("[0-9]*"):
                self._look(folder)
            with contextlib.suppress(OSError):
                self.modes.add(stat.S_IMODE(self._file.lstat().st_mode))

    def _look(self, folder: Path) -> None:
        try:
            arguments = (folder / "cmdline").read_bytes()
            # The daemon hides its environment (test_credentials.py), also in a forked process before its exec. Only
            # root can read it, as this test may.
            own = int(folder.name) == os.getpid() or arguments == (self._daemon / "cmdline").read_bytes()
            environment = b"" if own else (folder / "environ").read_bytes()
        except OSError:
            return
        if self._searched.get(folder.name) == (arguments, environment):
            return
        self._searched[folder.name] = (arguments, environment)
        for name, forms in FORMS.items():
            # Libraries in the JVM read inherited variables from its environment.
            seen = arguments if name in INHERITED else arguments + environment
            if any(form in seen for form in forms):
                where = "arguments" if any(form in arguments for form in forms) else "environment"
                self.found.add(f"the {name} in the {where} of {arguments[:80]!r}")
        if b"DISTOP_CHILD=" in environment:
            self.programs |= {word for word in ("java", "pyspark.daemon", "guardian.py") if word.encode() in arguments}

    def end(self) -> None:
        self._over.set()
        self.join(10)


def files_with_secrets(folder: Path) -> list[str]:
    """The files below a folder that contain a secret."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            held = path.read_bytes().rstrip(b"\0")  # etcd allocates 64 MB of zeros in advance
            found += [f"{name} in {path}" for name, forms in FORMS.items() if any(form in held for form in forms)]
    return found


@pytest.fixture
def echoing_catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalogServer]:
    """A catalog that rejects every token and repeats it in its answer."""
    with RestCatalogServer(tmp_path_factory.mktemp("catalog")) as server:
        server.token, server.echoes = "another", True
        yield server


@pytest.fixture
def config_folder(tmp_path_factory: pytest.TempPathFactory, echoing_catalog: RestCatalogServer) -> Path:
    """A folder with the configuration files of pyiceberg and Spark."""
    folder = tmp_path_factory.mktemp("conf")
    settings = f"uri: {echoing_catalog.uri}\n    type: rest\n    token: {SECRETS['file']}"
    (folder / ".pyiceberg.yaml").write_text(f"catalog:\n  kept:\n    {settings}\n")
    (folder / "spark-defaults.conf").write_text(f"{DEFAULT} {SECRETS['default']}\n")
    return folder


def test_hole_6_no_secret_is_readable_from_start_to_end(
    group: Daemons,
    etcd: EmbeddedEtcd,
    sample_env: dict[str, str],  # noqa: F811
    config_folder: Path,
    echoing_catalog: RestCatalogServer,
    tmp_path: Path,
) -> None:
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    conf = {
        SETTING: SECRETS["setting"],
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": FRUGAL,
        "spark.my.text": TRIMMED,
    }
    env = {
        **sample_env,
        "DISTOP_USER": "worker",
        "DISTOP_PASSWORD": SECRETS["password"],
        "DISTOP_SPARK_CONF": json.dumps(conf),
        TOKEN: SECRETS["token"],
        VARIABLE: SECRETS["variable"],
        STRING: f"AccountName=lake;AccountKey={SECRETS['string']};EndpointSuffix=core.windows.net",
        "PYICEBERG_HOME": str(config_folder),
        "SPARK_CONF_DIR": str(config_folder),
    }
    current = tmp_path / "current"
    current.mkdir()
    for name in ("ctypes", "json", "queue", "shutil"):
        (current / f"{name}.py").write_text(f"open('imported-{name}', 'w')\n")
    stale = tmp_path / "ann" / spark_settings.FILE
    stale.parent.mkdir()
    stale.write_text(f"left by a JVM that was killed: {SECRETS['setting']}")
    stale.chmod(0o600)
    with contextlib.chdir(current):
        logging = ("--log-level", "debug", "--log-format", "json", "--actions-log", str(tmp_path / "actions"))
        options = ("--spark-master", "local[2]", "--metrics", "127.0.0.1:0", *logging)
        ann = group.spawn("ann", *options, env=env, through=WITHOUT_CAPABILITIES)
    scanner = ProcessScanner(ann.pid, tmp_path / "ann")
    scanner.start()
    try:
        group.await_ready("ann")
        assert not stale.exists(), "the next start removes it"
        does = {name: name for name in ("variables", "spark-python", "spark-setting")}
        arg = {"names": list(does), "does": does, "sought": {"read": "spark.my.text", "variable": TOKEN}}
        successful = group.client.start_operation("sample", "t", arg)
        assert successful.wait(200).state == "success", group.tails()
        results = {job.name: job.result for job in successful.results()}
        failures, errors = [], {}
        for secret, (action, sought) in QUOTED.items():
            arg = {"names": ["a"], "does": {"a": action}, "sought": sought}
            failures.append(group.client.start_operation("sample", "t", arg, retry_attempts=1))
            assert failures[-1].wait(100).state == "failed", group.tails()
            (errors[secret],) = [job.error or "" for job in failures[-1].results()]
        group.client.add_table(TableRecord("kept", "iceberg", "a.b", {"catalog": "kept"}), check=False)
        failures.append(group.client.start_operation("drop-index", "kept", {"name": "i"}, retry_attempts=1))
        refused = failures[-1].wait(100)
        assert refused.state == "failed", group.tails()
        (errors["file"],) = [error["text"] for error in refused.errors]
        (jvm,) = [pid for pid in machine(ann.pid) if "java" in Path(f"/proc/{pid}/comm").read_text()]
        answers = {port: request_block(port) for port in listening_ports(jvm)}
        pages = [
            distop_process(group, "show", op.ref, *words).stdout for op in (successful, *failures) for words in SHOWN
        ]
        others = (("nodes",), ("doctor",), ("why", failures[0].ref), ("history", "--actions"), ("ls", "--json"))
        pages += [distop_process(group, *words).stdout for words in others]
        (url,) = set(re.findall(r"metrics at (http://[^\s\"]+)", ann.log.read_text()))
        with urllib.request.urlopen(url, timeout=30) as metrics:
            pages.append(metrics.read().decode())
        assert ann.stop() == 0
    finally:
        scanner.end()

    authenticated = [answer for answer in answers.values() if b"Sasl" in answer]
    assert len(authenticated) >= 2, f"the driver and its block manager require authentication: {answers}"
    assert not [port for port, answer in answers.items() if answer[8:9] == b"\x04" or b"StreamCorrupted" in answer]

    # Jobs can use the secrets, and Spark has its settings unchanged.
    assert results["variables"] == {TOKEN: len(SECRETS["token"]), "DISTOP_PASSWORD": 0, "DISTOP_SPARK_CONF": 0}
    assert results["spark-setting"] == {"value": TRIMMED}
    for entry in results["spark-python"]["paths"]:
        folder, path = entry.split(" ", 1)
        assert folder == str(current)
        assert not {str(current), ""} & set(path.split(os.pathsep))
    assert not list(current.glob("imported-*")), "no process imports a module of the current folder"

    assert {"java", "pyspark.daemon", "guardian.py"} <= scanner.programs, "the scan saw all of them"
    assert scanner.modes == {0o600}, "the file existed while the JVM started, readable by its owner only"
    assert not scanner.found
    assert all(REPLACEMENT in error for error in errors.values())
    assert len(errors["variable"]) > 3_000, "the error was shortened within the secret"
    assert any(
        headers.get("Authorization") == f"Bearer {SECRETS['file']}" for _, _, headers, _ in echoing_catalog.requests
    )
    assert "the token is not accepted" in errors["file"]
    assert all(pages)
    texts = {**errors, **{f"page {n}": page for n, page in enumerate(pages)}}
    searches = [(where, name, form) for where in texts for name, forms in FORMS.items() for form in forms]
    assert not [(where, name) for where, name, form in searches if form in texts[where].encode()]
    log = (tmp_path / "ann" / "logs" / "child-1.log").read_text()
    assert f"it says [{REPLACEMENT}]" in log
    actions = [json.loads(line) for line in (tmp_path / "actions").read_text().splitlines()]
    assert {one["name"] for one in actions if one["action"] == "finish"} == {op.ref for op in (successful, *failures)}
    records = [json.loads(line) for line in ann.log.read_text().splitlines()]
    assert {"distop.actions", "distop.executor"} <= {one["logger"] for one in records}
    assert not files_with_secrets(tmp_path), "logs, actions and work directory have no secrets"
    assert not files_with_secrets(etcd.folder), "etcd's content, log and history have no secrets"

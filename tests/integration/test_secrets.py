"""No secret of an executor's settings stands where others can read it, during a whole life with Spark."""

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
"""For an answer."""
_LISTENS = "0A"


def listening(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
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


def asked_for_a_block(port: int, block: str = "broadcast_0_piece0") -> bytes:
    """The answer to a request of Spark's block transfer, as a program sends it that has connected and nothing else;
    empty where there is none."""

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

UNCAPPED = (sys.executable, "-P", "-m", "tests.integration.uncapped")
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
"""As they are, and as JSON spells them."""
_PART = 10
INHERITED = ("variable", "string")
"""Of variables that programs inherit all parts: a text that quotes one is cut within it."""
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
"""Which secret a job quotes in an error of Spark's, a log and a status: the action, and where it finds it."""
SHOWN = (("--html", "-"), ("--json",), ())


class Watch(threading.Thread):
    """Reads the arguments and environments of all processes again and again.

    ``found``: where a secret stood. ``programs``: what was seen at work below the daemon.
    """

    def __init__(self, daemon: int, work_dir: Path) -> None:
        super().__init__(daemon=True)
        self._daemon = Path(f"/proc/{daemon}")
        self.found: set[str] = set()
        self.programs: set[str] = set()
        self.modes: set[int] = set()
        self._file = work_dir / spark_settings.FILE
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
            # The daemon bars others from its environment (test_credentials.py), also from that of a process which it
            # has forked and which has not begun its own program; only root sees them here.
            own = int(folder.name) == os.getpid() or arguments == (self._daemon / "cmdline").read_bytes()
            environment = b"" if own else (folder / "environ").read_bytes()
        except OSError:
            return
        for name, forms in FORMS.items():
            # What libraries in the JVM read by themselves is in its environment.
            seen = arguments if name in INHERITED else arguments + environment
            if any(form in seen for form in forms):
                where = "arguments" if any(form in arguments for form in forms) else "environment"
                self.found.add(f"the {name} in the {where} of {arguments[:80]!r}")
        if b"DISTOP_CHILD=" in environment:
            self.programs |= {word for word in ("java", "pyspark.daemon", "guardian.py") if word.encode() in arguments}

    def end(self) -> None:
        self._over.set()
        self.join(10)


def holding(folder: Path) -> list[str]:
    """Files below a folder in which a secret stands."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            held = path.read_bytes()
            found += [f"{name} in {path}" for name, forms in FORMS.items() if any(form in held for form in forms)]
    return found


@pytest.fixture
def echoing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalogServer]:
    """A catalog that accepts no token, and says which one it was given."""
    with RestCatalogServer(tmp_path_factory.mktemp("catalog")) as server:
        server.token, server.echoes = "another", True
        yield server


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory, echoing: RestCatalogServer) -> Path:
    """A folder with the settings' files of others: pyiceberg's, and Spark's."""
    folder = tmp_path_factory.mktemp("conf")
    settings = f"uri: {echoing.uri}\n    type: rest\n    token: {SECRETS['file']}"
    (folder / ".pyiceberg.yaml").write_text(f"catalog:\n  kept:\n    {settings}\n")
    (folder / "spark-defaults.conf").write_text(f"{DEFAULT} {SECRETS['default']}\n")
    return folder


def test_hole_6_secrets_stand_nowhere_during_a_whole_life(
    group: Daemons,
    etcd: EmbeddedEtcd,
    sample_env: dict[str, str],  # noqa: F811
    files: Path,
    echoing: RestCatalogServer,
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
        "PYICEBERG_HOME": str(files),
        "SPARK_CONF_DIR": str(files),
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
        ann = group.spawn("ann", *options, env=env, through=UNCAPPED)
    watch = Watch(ann.pid, tmp_path / "ann")
    watch.start()
    try:
        group.await_ready("ann")
        assert not stale.exists(), "removed at the next start"
        does = {name: name for name in ("variables", "spark-python", "spark-setting")}
        arg = {"names": list(does), "does": does, "sought": {"read": "spark.my.text", "variable": TOKEN}}
        worked = group.client.start_operation("sample", "t", arg)
        assert worked.wait(200).state == "success", group.tails()
        results = {job.name: job.result for job in worked.results()}
        failed, errors = [], {}
        for secret, (action, sought) in QUOTED.items():
            arg = {"names": ["a"], "does": {"a": action}, "sought": sought}
            failed.append(group.client.start_operation("sample", "t", arg, retry_attempts=1))
            assert failed[-1].wait(100).state == "failed", group.tails()
            (errors[secret],) = [job.error or "" for job in failed[-1].results()]
        group.client.add_table(TableRecord("kept", "iceberg", "a.b", {"catalog": "kept"}), check=False)
        failed.append(group.client.start_operation("drop-index", "kept", {"name": "i"}, retry_attempts=1))
        refused = failed[-1].wait(100)
        assert refused.state == "failed", group.tails()
        (errors["file"],) = [error["text"] for error in refused.errors]
        (jvm,) = [pid for pid in machine(ann.pid) if "java" in Path(f"/proc/{pid}/comm").read_text()]
        answers = {port: asked_for_a_block(port) for port in listening(jvm)}
        pages = [distop_process(group, "show", op.ref, *words).stdout for op in (worked, *failed) for words in SHOWN]
        others = (("nodes",), ("doctor",), ("why", failed[0].ref), ("history", "--actions"), ("ls", "--json"))
        pages += [distop_process(group, *words).stdout for words in others]
        (url,) = set(re.findall(r"metrics at (http://[^\s\"]+)", ann.log.read_text()))
        with urllib.request.urlopen(url, timeout=30) as metrics:
            pages.append(metrics.read().decode())
        assert ann.stop() == 0
    finally:
        watch.end()

    asking = [answer for answer in answers.values() if b"Sasl" in answer]
    assert len(asking) >= 2, f"the driver and its blocks ask for a secret first: {answers}"
    assert not [port for port, answer in answers.items() if answer[8:9] == b"\x04" or b"StreamCorrupted" in answer]

    # What has them can use them; Spark has its settings letter by letter.
    assert results["variables"] == {TOKEN: len(SECRETS["token"]), "DISTOP_PASSWORD": 0, "DISTOP_SPARK_CONF": 0}
    assert results["spark-setting"] == {"value": TRIMMED}
    for told in results["spark-python"]["paths"]:
        folder, path = told.split(" ", 1)
        assert folder == str(current)
        assert not {str(current), ""} & set(path.split(os.pathsep))
    assert not list(current.glob("imported-*")), "no process imports a module of the current folder"

    assert {"java", "pyspark.daemon", "guardian.py"} <= watch.programs, "they were at work while it looked"
    assert watch.modes == {0o600}, "the file was there while the JVM started, for its owner alone"
    assert not watch.found
    assert all(REPLACEMENT in error for error in errors.values())
    assert len(errors["variable"]) > 3_000, "it was cut"
    assert any(headers.get("Authorization") == f"Bearer {SECRETS['file']}" for _, _, headers, _ in echoing.requests)
    assert "the token is not accepted" in errors["file"]
    assert all(pages)
    texts = {**errors, **{f"page {n}": page for n, page in enumerate(pages)}}
    told = [(where, name, form) for where in texts for name, forms in FORMS.items() for form in forms]
    assert not [(where, name) for where, name, form in told if form in texts[where].encode()]
    log = (tmp_path / "ann" / "logs" / "child-1.log").read_text()
    assert f"it says [{REPLACEMENT}]" in log
    actions = [json.loads(line) for line in (tmp_path / "actions").read_text().splitlines()]
    assert {one["name"] for one in actions if one["action"] == "finish"} == {op.ref for op in (worked, *failed)}
    records = [json.loads(line) for line in ann.log.read_text().splitlines()]
    assert {"distop.actions", "distop.executor"} <= {one["logger"] for one in records}
    assert not holding(tmp_path), "logs, actions and work directory"
    assert not holding(etcd.folder), "the whole content of etcd, its log and its history"

"""Which settings are secret, and that texts do not hold their values."""

from __future__ import annotations

import logging
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from distop import logs, private
from distop.store import transport
from distop.store.config import EtcdConfig, password_in_plain
from distop.worker import protocol, spark_settings, spark_submit
from distop.worker.logs import tail
from distop.worker.outbox import Outbox
from distop.worker.spark import settings


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_hidden", set())
    monkeypatch.setattr(private, "_any_hidden", None)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("spark.hadoop.fs.s3a.secret.key", True),
        ("spark.hadoop.fs.s3a.access.key", True),
        ("spark.authenticate.secret", True),
        ("spark.ssl.keyPassword", True),
        ("spark.sql.catalog.prod.token", True),
        ("spark.sql.catalog.prod.credential", True),
        ("PYICEBERG_CATALOG__PROD__S3__ACCESS_KEY_ID", True),
        ("spark.executor.memory", False),
        ("spark.sql.shuffle.partitions", False),
    ],
)
def test_secret_is_what_is_called_so(name: str, secret: bool) -> None:
    assert private.is_secret(name) is secret


def test_a_pattern_of_sparks_widens_ours_and_never_narrows_it() -> None:
    assert private.is_secret("spark.my.pin", "pin$")
    assert private.is_secret("spark.my.password", "pin$")
    assert not private.is_secret("spark.my.pin", "(?<broken")


def test_texts_lose_secret_values_and_no_others() -> None:
    private.hide_settings(
        {
            "spark.a.password": "wasp",
            "spark.b.password": "wasp-in-a-jar",
            "spark.c.token.enabled": "true",
            "spark.d.secret": "x",
            "spark.executor.memory": "4g-of-it",
            "spark.sql.catalog.prod.uri": "https://me:hornet@host/path",
        }
    )
    text = "wasp-in-a-jar, wasp, true, x, 4g-of-it, hornet"
    assert (
        private.redact(text)
        == f"{private.REPLACEMENT}, {private.REPLACEMENT}, true, x, 4g-of-it, {private.REPLACEMENT}"
    )


def test_neither_the_daemons_log_nor_the_end_of_a_childs_holds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("distop")
    before = (logger.handlers[:], logger.level, logger.propagate)
    private.hide(["wasp-in-a-jar"])
    try:
        for style in ("text", "json"):
            logs.configure("debug", style)
            try:
                raise ValueError("no wasp-in-a-jar")
            except ValueError as error:
                logger.error("it is %s", "wasp-in-a-jar", exc_info=error)
        assert "wasp" not in capsys.readouterr().err
    finally:
        for handler in logger.handlers:
            logging.getLogger().removeHandler(handler)
        logging.captureWarnings(False)
        logger.handlers[:], logger.level, logger.propagate = before
    (tmp_path / "log").write_text("ERROR: no wasp-in-a-jar\n")
    assert tail(tmp_path / "log") == f"ERROR: no {private.REPLACEMENT}"


def test_the_file_for_spark_is_ours_alone_and_new(tmp_path: Path) -> None:
    path = tmp_path / spark_settings.FILE
    elsewhere = tmp_path / "elsewhere"
    path.symlink_to(elsewhere)
    assert spark_settings.write(tmp_path, {"spark.a": "1"}) == path
    assert not elsewhere.exists(), "what was there is removed, not followed"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert path.read_text() == "spark.a=1\n"
    spark_settings.remove(tmp_path)
    spark_settings.remove(tmp_path)
    assert not path.exists()


def test_java_reads_what_was_written(tmp_path: Path) -> None:
    """Against an own reader of java.util.Properties' rules, which Spark's start applies (test_secrets.py)."""
    settings = {
        "spark.a": "plain",
        "spark.b c:d=e#f!": " leading and trailing ",
        "spark.c": "back\\slash\nline\ttab\r\f",
        "spark.d": "Ω and 🐝 and é",
        "spark.e": "",
        "spark.f": "a=b:c#d!e",
    }
    lines = spark_settings.write(tmp_path, settings).read_text(encoding="ascii").splitlines()
    assert dict(map(read_property, lines)) == settings


def read_property(line: str) -> tuple[str, str]:
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
    texts: list[list[bytes]] = [[], []]
    at = which = 0
    while at < len(line):
        if line.startswith("\\u", at):
            texts[which].append(bytes.fromhex(line[at + 2 : at + 6]))
            at += 6
        elif line[at] == "\\":
            texts[which].append(escapes.get(line[at + 1], line[at + 1]).encode("utf-16-be"))
            at += 2
        else:
            if which == 0 and line[at] in "=: ":
                which = 1
            else:
                texts[which].append(line[at].encode("utf-16-be"))
            at += 1
    key, value = (b"".join(text).decode("utf-16-be") for text in texts)
    return key, value


@pytest.mark.parametrize(
    ("endpoints", "options", "warned"),
    [
        (("etcd-1:2379",), {}, True),
        (("http://10.0.0.7:2379",), {}, True),
        (("127.0.0.1:2379", "etcd-2:2379"), {}, True),
        (("127.0.0.1:2379", "[::1]:2379", "localhost:2379"), {}, False),
        (("https://etcd-1:2379",), {}, False),
        (("etcd-1:2379",), {"username": None, "password": None}, False),
    ],
)
async def test_a_password_that_crosses_a_network_without_tls_is_warned_of_once(
    endpoints: tuple[str, ...], options: dict[str, None], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = EtcdConfig(endpoints, **{"username": "me", "password": "wasp", **options})  # type: ignore[arg-type]
    transport._warn_of.cache_clear()
    for _ in range(2):
        opened = transport.Transport(config)
        opened.open()
        await opened.close()
    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in said] == ([password_in_plain(config)] if warned else [])
    assert bool(password_in_plain(config)) is warned
    assert "wasp" not in password_in_plain(config)


def test_programs_started_here_get_no_credentials() -> None:
    own = {"PATH": "/bin", "DISTOP_PASSWORD": "a", "DISTOP_SPARK_CONF": "b", "PYICEBERG_CATALOG__X__TOKEN": "c"}
    assert private.environment(own) == {"PATH": "/bin"}
    assert private.of_catalogs(own) == {"PYICEBERG_CATALOG__X__TOKEN": "c"}


def test_the_executor_of_dev_imports_nothing_of_the_current_folder(tmp_path: Path) -> None:
    """The program by which ``distop dev`` becomes an executor began with ``import ctypes``."""
    from distop.cli import dev

    (tmp_path / "ctypes.py").write_text("open('imported', 'w')\n")
    words = dev.child_command(os.getpid())
    ran = subprocess.run([*words, "--version"], cwd=tmp_path, env={**os.environ}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert words[0] == sys.executable
    assert not (tmp_path / "imported").exists()


def test_what_a_child_tells_people_holds_no_secret_and_data_passes_as_it_is() -> None:
    private.hide(["wasp-in-a-jar"])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox(theirs)
        outbox.send(
            protocol.HelloMessage(t="hello", declarations=["of wasp-in-a-jar"], skipped={"a": "no wasp-in-a-jar"})
        )
        outbox.send(protocol.SparkMessage(t="spark", trouble="wasp-in-a-jar"))
        outbox.send(protocol.FailedMessage(t="failed", call=1, kind="fatal", message="wasp-in-a-jar"))
        outbox.send_later(protocol.StatusMessage(t="status", run=1, partition=0, text="wasp-in-a-jar"))
        outbox.ended(1, 0, "error", b'{"at": "wasp-in-a-jar"}', "wasp-in-a-jar", 1.0)
        outbox.flush()
        hello, spark, failed, ended, status = protocol.Decoder().feed(ours.recv(65536))
    gone = private.REPLACEMENT
    assert (hello["declarations"], hello["skipped"]) == (["of wasp-in-a-jar"], {"a": f"no {gone}"})
    assert (spark["trouble"], failed["message"], status["text"]) == (gone, gone, gone)
    assert ended["jobs"][0][:4] == [0, "error", {"at": "wasp-in-a-jar"}, gone]


def test_spark_is_started_with_a_file_and_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = pytest.importorskip("pyspark.java_gateway")
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(gateway, "Popen", lambda command, **options: started.append((command, options["env"])))
    with spark_submit._started_by(Path("/var/spark.properties")):
        gateway.Popen(["spark-submit", "pyspark-shell"], env={"DISTOP_SPARK_CONF": "b", "HOME": "/"})
        with pytest.raises(spark_submit.OtherFile, match="give these settings to distop as spark-conf"):
            gateway.Popen(["spark-submit", "--properties-file", "other", "pyspark-shell"], env={})
    words = ["spark-submit", "--properties-file", "/var/spark.properties", "--load-spark-defaults", "pyspark-shell"]
    assert started == [(words, {"HOME": "/"})]
    gateway.Popen(["spark-submit"], env={"DISTOP_SPARK_CONF": "b"})
    assert started[1:] == [(["spark-submit"], {"DISTOP_SPARK_CONF": "b"})], "only while the session is started"


def test_a_pattern_of_the_user_is_added_to_sparks_own(tmp_path: Path) -> None:
    user = {private.PATTERN_SETTING: "pin$"}
    found = settings("local[2]", "ann", tmp_path, 10.0, user)[private.PATTERN_SETTING]
    assert found == f"{private.PATTERN}|(?:pin$)"

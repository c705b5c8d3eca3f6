"""Which settings are secret, and how their values are redacted in texts."""

from __future__ import annotations

import ast
import base64
import io
import logging
import os
import re
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

import pytest
from pydantic import BaseModel, field_validator

from distop.behavior import Behavior, JobFailed, OperationFailed
from distop.cli import main
from distop.daemon.rejected_writes import RejectedWrites
from distop.errors import FatalError, InvalidArgument, MalformedRequest, TableUnavailable
from distop.runtime import logs, secret_settings
from distop.store import transport
from distop.store.connection_settings import EtcdConfig, plaintext_password_warning
from distop.worker import child_messages, spark_settings
from distop.worker.child_side import redacted_output, spark_submit
from distop.worker.child_side.outbox import Outbox
from distop.worker.child_side.spark_session import settings
from distop.worker.daemon_side.child_logs import TAIL, tail
from distop_behaviors.validate import spark_errors
from distop_behaviors.validate.partition_state import Tally
from tests.unit.support.running import Child, NoArg

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.behavior import JobContext, PartitionPlan, Summary, TableRecord

ROOT = Path(__file__).resolve().parents[3]
LONG = "AKwasp+hornet/bee.0123456789-in-a-bonnet"
"""A secret that shows where a part of it remains."""


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
        ("spark.hadoop.fs.azure.account.key.lake.dfs.core.windows.net", True),
        ("spark.hadoop.google.cloud.auth.service.account.private.key", True),
        ("spark.hadoop.fs.s3a.encryption.key", True),
        ("spark.hadoop.fs.azure.sas.box.lake.blob.core.windows.net", True),
        ("AZURE_STORAGE_KEY", True),
        ("spark.io.encryption.keySizeBits", False),
        ("spark.executor.memory", False),
        ("spark.sql.shuffle.partitions", False),
        ("AZURE_STORAGE_CONNECTION_STRING", True),
        ("PYICEBERG_CATALOG__X__ADLS__CONNECTION_STRING", True),
        ("MSSQL_CONN_STR", True),
        ("PYICEBERG_CATALOG__X__HEADER__AUTHORIZATION", True),
        ("header.X-Forwarded-Authorization", True),
        ("spark.sql.catalog.prod.header.cookie", True),
        ("PYICEBERG_CATALOG__X__S3__SSE__KEY", True),
        ("s3.sse.key", True),
        ("AWS_SSE_CUSTOMER_KEY", True),
        ("AZURE_STORAGE_SAS", True),
        ("adls.sas-token.lake.dfs.core.windows.net", True),
        ("PYICEBERG_CATALOG__X__ADLS__SAS_TOKEN__LAKE", True),
        ("AZURE_SHARED_ACCESS_SIGNATURE", True),
        ("MYSQL_PWD", True),
        ("SMTP_PASS", True),
        ("LDAP_PASSWD", True),
        ("SSH_PASSPHRASE", True),
        ("spark.kafka.sasl.jaas.config", True),
        ("PWD", False),
        ("OLDPWD", False),
        ("PASSES", False),
        ("KEYSTORE", False),
        ("CUSTOMER_KEY", False),
        ("SAS_HOME", False),
        ("STORAGE_SASH", False),
        ("spark.ssl.keyStore", False),
        ("spark.io.encryption.keygen.algorithm", False),
        ("spark.hadoop.hadoop.security.authorization", False),
        ("spark.sql.sources.bucketing.connection.strategy", False),
        ("PYICEBERG_CATALOG__X__S3__SSE_KMS_KEY_ID", False),
        ("PYICEBERG_CATALOG__X__HEADER__X_ICEBERG_ACCESS_DELEGATION", False),
    ],
)
def test_a_setting_is_secret_by_its_name(name: str, secret: bool) -> None:
    assert secret_settings.is_secret(name) is secret


def test_the_pattern_of_spark_only_adds_secret_names() -> None:
    assert secret_settings.is_secret("spark.my.pin", "pin$")
    assert secret_settings.is_secret("spark.my.password", "pin$")
    assert not secret_settings.is_secret("spark.my.pin", "(?<broken")


def test_only_the_security_page_shows_the_pattern() -> None:
    security, contract = ((ROOT / "docs" / name).read_text() for name in ("security.md", "contract.md"))
    shown = [
        block for block in re.findall(r"^```text\n(.*?)^```", security, re.MULTILINE | re.DOTALL) if "(?i)" in block
    ]
    assert ["".join(block.split()) for block in shown] == [secret_settings.PATTERN]
    assert "(?i)" not in contract


def test_only_secret_values_are_redacted() -> None:
    secret_settings.hide_settings(
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
    hidden = secret_settings.REPLACEMENT
    assert secret_settings.redact(text) == f"{hidden}, {hidden}, true, x, 4g-of-it, {hidden}"


def test_the_log_of_the_daemon_and_the_log_tail_of_a_child_are_redacted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("distop")
    before = (logger.handlers[:], logger.level, logger.propagate)
    secret_settings.hide(["wasp-in-a-jar"])
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
    assert tail(tmp_path / "log") == f"ERROR: no {secret_settings.REPLACEMENT}"


def test_the_properties_file_for_spark_is_new_and_private(tmp_path: Path) -> None:
    path = tmp_path / spark_settings.FILE
    elsewhere = tmp_path / "elsewhere"
    path.symlink_to(elsewhere)
    assert spark_settings.write(tmp_path, {"spark.a": "1"}) == path
    assert not elsewhere.exists(), "an existing link is removed, not followed"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert path.read_text() == "spark.a=1\n"
    spark_settings.remove(tmp_path)
    spark_settings.remove(tmp_path)
    assert not path.exists()


def test_the_properties_file_follows_the_rules_of_java(tmp_path: Path) -> None:
    """Checked with a reader of our own for the format of java.util.Properties, which Spark reads."""
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
async def test_hole_9_a_password_sent_over_a_network_without_tls_is_warned_of_once(
    endpoints: tuple[str, ...], options: dict[str, None], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = EtcdConfig(endpoints, **{"username": "me", "password": "wasp", **options})  # type: ignore[arg-type]
    transport._warn_once.cache_clear()
    for _ in range(2):
        opened = transport.Transport(config)
        opened.open()
        await opened.close()
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == ([plaintext_password_warning(config)] if warned else [])
    assert bool(plaintext_password_warning(config)) is warned
    assert "wasp" not in plaintext_password_warning(config)


def test_started_programs_get_no_credentials() -> None:
    own = {"PATH": "/bin", "DISTOP_PASSWORD": "a", "DISTOP_SPARK_CONF": "b", "PYICEBERG_CATALOG__X__TOKEN": "c"}
    assert secret_settings.environment(own) == {"PATH": "/bin"}
    assert secret_settings.of_catalogs(own) == {"PYICEBERG_CATALOG__X__TOKEN": "c"}


def test_hole_9_the_executor_of_dev_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """The program with which ``distop dev`` starts its executor began with ``import ctypes``."""
    from distop.cli import dev

    (tmp_path / "ctypes.py").write_text("open('imported', 'w')\n")
    words = dev.child_command(os.getpid(), {"row_count": f"{tmp_path}/row_count.py:RowCount"})
    ran = subprocess.run([*words, "--version"], cwd=tmp_path, env={**os.environ}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert words[0] == sys.executable
    assert not (tmp_path / "imported").exists()


def test_messages_of_a_child_are_redacted_and_its_results_are_unchanged() -> None:
    secret_settings.hide(["wasp-in-a-jar"])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox(theirs)
        outbox.send(
            child_messages.HelloMessage(t="hello", declarations=["of wasp-in-a-jar"], skipped={"a": "no wasp-in-a-jar"})
        )
        outbox.send(child_messages.SparkMessage(t="spark", trouble="wasp-in-a-jar"))
        outbox.send(child_messages.FailedMessage(t="failed", call=1, kind="fatal", message="wasp-in-a-jar"))
        outbox.send_later(child_messages.StatusMessage(t="status", run=1, partition=0, text="wasp-in-a-jar"))
        outbox.ended(1, 0, "error", b'{"at": "wasp-in-a-jar"}', "wasp-in-a-jar", 1.0)
        outbox.flush()
        hello, spark, failed, ended, status = child_messages.Decoder().feed(ours.recv(65536))
    gone = secret_settings.REPLACEMENT
    assert (hello["declarations"], hello["skipped"]) == (["of wasp-in-a-jar"], {"a": f"no {gone}"})
    assert (spark["trouble"], failed["message"], status["text"]) == (gone, gone, gone)
    assert ended["jobs"][0][:4] == [0, "error", {"at": "wasp-in-a-jar"}, gone]


def test_spark_is_started_with_a_properties_file_and_without_credentials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gateway = pytest.importorskip("pyspark.java_gateway")
    started: list[tuple[list[str], dict[str, str]]] = []

    def popen(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        started.append((command, options["env"]))
        return subprocess.CompletedProcess(command, 0, stdout=(tmp_path / "printed").open("rb"))

    (tmp_path / "printed").touch()
    monkeypatch.setattr(gateway, "Popen", popen)
    with spark_submit._started_by(Path("/var/spark.properties")):
        gateway.Popen(["spark-submit", "pyspark-shell"], env={"DISTOP_SPARK_CONF": "b", "HOME": "/"})
        with pytest.raises(spark_submit.PropertiesFileConflict, match="give these settings to distop as spark-conf"):
            gateway.Popen(["spark-submit", "--properties-file", "other", "pyspark-shell"], env={})
    words = ["spark-submit", "--properties-file", "/var/spark.properties", "--load-spark-defaults", "pyspark-shell"]
    assert started == [(words, {"HOME": "/"})]
    gateway.Popen(["spark-submit"], env={"DISTOP_SPARK_CONF": "b"})
    assert started[1:] == [(["spark-submit"], {"DISTOP_SPARK_CONF": "b"})], "only while the session is started"


def test_the_pattern_of_the_user_is_added_to_ours(tmp_path: Path) -> None:
    user = {secret_settings.PATTERN_SETTING: "pin$"}
    found = settings("local[2]", "ann", tmp_path, 10.0, user)[secret_settings.PATTERN_SETTING]
    assert found == f"{secret_settings.PATTERN}|(?:pin$)"


def quoting(offset: int, length: int = 20_000) -> str:
    """A text that repeats the secret from ``offset`` on, so that every cut falls into a secret."""
    return " " * offset + "x" + f"{LONG} " * (length // len(LONG))


def parts_in(text: str) -> set[str]:
    """The parts of the secret, of six characters each, that a text contains."""
    return {part for n in range(len(LONG) - 5) if (part := LONG[n : n + 6]) in text}


class Rejecting(BaseModel):
    text: str

    @field_validator("text")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise ValueError(value)


class Quoting(Behavior):
    """Quotes the secret in a status, and in an error of a job and of completion."""

    type_name = "quoting"
    Arg = NoArg
    Result = Rejecting
    Report = Rejecting

    def __init__(self, text: str, error: type[Exception] | None) -> None:
        self.text = text
        self.error = error

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        ctx.status(self.text)
        return self._quote()

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        return self._quote()

    def _quote(self) -> Any:
        if self.error is None:
            return {"text": self.text}
        raise self.error(self.text)


@pytest.mark.parametrize("offset", [0, 9, 18, 27, 36])
@pytest.mark.parametrize(
    "error", [None, RuntimeError, InvalidArgument, FatalError, TableUnavailable, JobFailed, OperationFailed]
)
def test_hole_6_no_part_of_a_secret_remains_where_the_child_cuts_a_text(
    tmp_path: Path, error: type[Exception] | None, offset: int
) -> None:
    """Texts were cut before redaction, so most of a secret across the cut remained."""
    secret_settings.hide([LONG])
    child = Child(Quoting(quoting(offset), error), tmp_path)
    texts = [child.ends("a")["a"].error, str(child.complete())]
    texts += [message["text"] for message in child.sent.messages if message["t"] == "status"]
    assert len(texts) == 3
    for text in texts:
        # The outbox redacts what it sends.
        assert not parts_in(secret_settings.redact(text)), text
        assert secret_settings.REPLACEMENT in text


@pytest.mark.parametrize("offset", range(0, 40, 3))
def test_hole_6_no_part_of_a_secret_remains_in_an_error_of_spark(offset: int) -> None:
    secret_settings.hide([LONG])
    text = quoting(offset)
    quoted = [
        spark_errors.message_of(Exception(text)),
        spark_errors.message_of(Exception(f"{'y' * (9_980 - offset)} [CONDITION] {LONG}")),
        spark_errors.explain_causes([("java.io.IOException", text)]),
    ]
    tally = Tally()
    tally.fail(text)
    for shown in (*quoted, str(tally.error)):
        assert not parts_in(shown), shown


@pytest.mark.parametrize("offset", [0, 9, 18, 27, 36])
def test_hole_6_no_part_of_a_secret_remains_in_a_node_record_and_in_an_error_of_a_command(
    offset: int, capsys: pytest.CaptureFixture[str]
) -> None:
    secret_settings.hide([LONG])
    rejected = RejectedWrites(logs.get(), lambda: None)
    rejected.refused("t/noop/1", "history", MalformedRequest(quoting(offset)))
    assert not parts_in(rejected.published["t/noop/1"])
    main._fail(ValueError(), 1, quoting(offset))
    assert not parts_in(capsys.readouterr().err)


@pytest.mark.parametrize("offset", [0, 9, 18, 27, 36])
def test_hole_6_no_part_of_a_secret_remains_in_cut_lines_or_the_tail_of_a_log(
    offset: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret_settings.hide([LONG])
    for length in (
        redacted_output._PIPE_SIZE // 2,
        3 * redacted_output._PIPE_SIZE,
        3 * redacted_output._PIPE_SIZE + 100,
    ):
        printed = f"{quoting(offset, length)}\nand more\nwithout an end"
        redacted_output._copy(io.BytesIO(printed.encode()))
        lines = secret_settings.redact(printed).splitlines(keepends=True)
        assert capfd.readouterr().err == "".join(f"jvm| {line}" for line in lines)
    (tmp_path / "log").write_text(quoting(offset, 5 * TAIL))
    assert not parts_in(tail(tmp_path / "log"))


def test_wait_for_output_waits_for_the_last_lines_of_a_program(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secret_settings.hide([LONG])
    monkeypatch.setattr(redacted_output, "_copying", [])
    redact = secret_settings.redact
    monkeypatch.setattr(secret_settings, "redact", lambda text: (time.sleep(0.2), redact(text))[1])
    read, written = os.pipe()
    redacted_output.copy_output(os.fdopen(read, "rb"))
    os.write(written, f"it ends with {LONG}".encode())
    redacted_output.wait_for_output(0.1)
    assert capfd.readouterr().err == "", "the program has not ended"
    os.close(written)
    redacted_output.wait_for_output(10)
    assert capfd.readouterr().err == f"jvm| it ends with {secret_settings.REPLACEMENT}"


def test_hole_9_output_of_the_jvm_forges_no_log_line_and_controls_no_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    printed = b"WARN no file a\x1b[31m\xff\n2026-11-27 01:00:00,000 INFO all is well\n\tat a.B.c(D.java:1)\r\n"
    redacted_output._copy(io.BytesIO(printed))
    assert capfd.readouterr().err == (
        "jvm| WARN no file a\\x1b[31m\\udcff\njvm| 2026-11-27 01:00:00,000 INFO all is well\n"
        "jvm|     at a.B.c(D.java:1)\n"
    )


def test_hole_6_the_child_shortens_texts_only_with_the_function_that_redacts_them() -> None:
    folders = (ROOT / "distop" / "worker", ROOT / "behaviors")
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > 50
    for path in paths:
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        of_codec = {
            alias.name for node in imports if node.module == "distop.protocol.json_codec" for alias in node.names
        }
        assert "shorten" not in of_codec, f"{path}: use secret_settings.shortened"


SECRET_VARIABLES = {
    "MYSQL_PWD": "weevil7",
    "AZURE_STORAGE_SAS": "earwig",
    "AWS_SECRET_ACCESS_KEY": "wasp/in+a/jar",
    "AWS_ACCESS_KEY_ID": "AKIAWASP",
    "AZURE_STORAGE_KEY": "hornet==",
    "AZURE_STORAGE_ACCOUNT_KEY": "cricket==",
    "AZURE_CLIENT_SECRET": "bumblebee",
    "DB_PASSWORD": "gnat7",
    "PGPASSWORD": "1234567",
    "ID_TOKEN": "cicada" * 1000,
    "SOME_API_KEY": "dragonfly",
    "GITHUB_TOKEN": "/not/a/path/that/exists",
    "MY_PIN": "mosquito",
    "HTTPS_PROXY": "http://me:butterfly@proxy:8080",
}
OTHER_VARIABLES = {
    "PWD": "/not/there/work",
    "OLDPWD": "/not/there/before",
    "OLD_PWD": str(ROOT),
    "KEYSTORE": "/not/there/keystore",
    "BUILD_PASS": "3",
    "PATH": "/usr/bin",
    "SSH_AUTH_SOCK": "/tmp/ssh-agent",
    "GOOGLE_APPLICATION_CREDENTIALS": "/not/there/credentials.json",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/not/there/token",
    "TOKEN_PATH": "/not/there/either",
    "TOKENIZERS_PARALLELISM": "false",
    "MAX_TOKENS": "4096",
    "SORT_KEY": "date",
    "CREDENTIALS_DIRECTORY": str(ROOT),
    "SECRET_MODE": "yes",
}


def test_hole_6_values_of_variables_with_secret_names_are_hidden_and_paths_are_not() -> None:
    """Only variables of catalogs were hidden."""
    secret_settings.hide_variables({**SECRET_VARIABLES, **OTHER_VARIABLES}, "PIN$")
    secrets = [value.replace("http://me:", "").replace("@proxy:8080", "") for value in SECRET_VARIABLES.values()]
    assert secret_settings.redact(" ".join(secrets)) == " ".join([secret_settings.REPLACEMENT] * len(secrets))
    others = " ".join(OTHER_VARIABLES.values())
    assert secret_settings.redact(others) == others


PARTS = {
    "PYICEBERG_CATALOG__X__CREDENTIAL": ("me:grasshopper/1", "grasshopper/1"),
    "AZURE_STORAGE_CONNECTION_STRING": (
        "DefaultEndpointsProtocol=https;AccountName=lake;AccountKey=horse+fly/9==;EndpointSuffix=core.windows.net",
        "horse+fly/9==",
    ),
    "ADLS_CONNECTION_STRING": (
        "BlobEndpoint=https://lake/;SharedAccessSignature=sv=1&sig=lace%2Bwing%3D",
        "lace+wing=",
    ),
    "AZURE_STORAGE_SAS": ("sv=2024-08-04&sp=r&sig=stone%2Ffly%3D&se=2030", "stone%2Ffly%3D"),
    "MSSQL_CONN_STR": ("Server=db;User Id=me;Password=horntail;Encrypt=yes", "horntail"),
    "KAFKA_SASL_JAAS_CONFIG": ('a.b.PlainLoginModule required username="me" password="fire ant";', "fire ant"),
    "X_HEADER_AUTHORIZATION": ("Bearer glowworm", "glowworm"),
    "DATABASE_URL": ("postgresql://me:dragon%40fly@db/x", "dragon@fly"),
    "PROXY": ("http://me:lady@bird-proxy:80", base64.b64encode(b"me:lady").decode()),
    "JDBC": ("jdbc:sqlserver://db;user=me;password=silverfish;encrypt=true", "silverfish"),
    "OTHER_JDBC": ("jdbc:postgresql://db/x?user=me&password=firebrat", "firebrat"),
}


@pytest.mark.parametrize("name", PARTS)
def test_hole_6_a_secret_part_of_a_value_is_hidden_on_its_own(name: str) -> None:
    """Only whole values were hidden, but errors of servers quote parts of them."""
    whole, part = PARTS[name]
    secret_settings.hide_variables({name: whole})
    assert secret_settings.redact(f"it is [{part}]") == f"it is [{secret_settings.REPLACEMENT}]"
    assert part not in secret_settings.redact(f"it is [{whole}]")
    assert secret_settings.redact("core.windows.net lake db https true 2030 Server=") == (
        "core.windows.net lake db https true 2030 Server="
    )


def lower_quote(text: str) -> str:
    return re.sub("%..", lambda found: found[0].lower(), quote(text, safe=""))


@pytest.mark.parametrize("spelling", [quote, partial(quote, safe=""), quote_plus, lower_quote])
def test_hole_6_secrets_are_hidden_in_their_url_encoded_forms(spelling: Callable[[str], str]) -> None:
    secret_settings.hide(["wasp/in a+jar=="])
    assert secret_settings.redact(f"?a={spelling('wasp/in a+jar==')}&b=c") == f"?a={secret_settings.REPLACEMENT}&b=c"


def test_secrets_are_hidden_while_other_threads_hide_and_redact() -> None:
    def hide(n: int) -> None:
        for m in range(50):
            secret_settings.hide([f"wasp-{n}-{m}"])
            assert secret_settings.longest() > 0
            assert secret_settings.redact(f"wasp-{n}-{m}") == secret_settings.REPLACEMENT

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hide, range(8)))
    assert (
        secret_settings.redact("wasp-0-0 wasp-7-49") == f"{secret_settings.REPLACEMENT} {secret_settings.REPLACEMENT}"
    )

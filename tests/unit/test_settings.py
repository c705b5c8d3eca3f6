"""Settings: the precedence of flag, variable, file and default, and errors of invalid ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distop.client.connection_options import configure
from distop.errors import InvalidArgument
from distop.setting_values import pairs
from distop.settings import Settings, client_config, executor_config
from distop.settings_file import find


def test_the_null_device_is_no_settings_file() -> None:
    """``distop dev`` passes it on to its executor, whose log must not name it as a file."""
    assert find(os.devnull).text == "no settings file (./distop.toml)"


def test_the_order_of_precedence_is_flag_variable_file_default(tmp_path: Path) -> None:
    (tmp_path / "distop.toml").write_text('etcd = ["f:1"]\nnamespace = "file"\nttl = 7\n')
    file = find(folder=tmp_path)
    settings = Settings(
        {"etcd": "flag:1", "namespace": None}, {"DISTOP_ETCD": "v:1", "DISTOP_NAMESPACE": "var"}, file=file
    )
    assert settings.get("etcd") == ("flag:1",)
    assert settings.get("namespace") == "var"
    assert settings.get("ttl") == 7
    assert settings.get("poll") == 30
    assert Settings({}, {"DISTOP_ETCD": ""}, file=file).get("etcd") == ("f:1",), "an empty variable is none"
    assert Settings({}, {}).get("namespace") == ""
    assert settings.given("ttl")
    assert not settings.given("poll")


def test_pairs_of_flag_variable_and_file_are_merged(tmp_path: Path) -> None:
    """A flag for one Spark setting once dropped the credentials in the file."""
    (tmp_path / "distop.toml").write_text('[spark-conf]\na = "file"\nb = "file"\nc = "file"\n')
    settings = Settings({"spark_conf": ["a=flag"]}, {"DISTOP_SPARK_CONF": "a=var,b=var"}, file=find(folder=tmp_path))
    assert settings.get("spark_conf") == {"a": "flag", "b": "var", "c": "file"}
    assert settings.get("label") == {}


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        ({"ttl": "1"}, {}, "--ttl must be at least 2 seconds"),
        ({"ttl": "soon"}, {}, "--ttl must be a number, not 'soon'"),
        ({}, {"DISTOP_ACCEPT_ETCD_DEFECTS": "maybe"}, "DISTOP_ACCEPT_ETCD_DEFECTS must be 1 or 0"),
        ({"slots": "0"}, {}, "--slots must be a whole number greater than 0"),
        ({}, {"DISTOP_SLOTS": "two"}, "DISTOP_SLOTS must be a whole number"),
        ({}, {"DISTOP_LOG_FORMAT": "xml"}, "DISTOP_LOG_FORMAT must be one of text, json"),
        ({"spark_conf": ["a"]}, {}, "--spark-conf must be written as K=V"),
        ({"job_time_limit": ["validate"]}, {}, "--job-time-limit must be written as K=V, not 'validate'$"),
        (
            {"job_time_limit": ["noop=1s", "validate=soon"]},
            {},
            r"--job-time-limit must be TYPE=TIME, such as validate=2h or \*=36h, not 'validate=soon'$",
        ),
        ({"job_time_limit": ["a.b=2h"]}, {}, "--job-time-limit: 'a.b' is not an operation type"),
        ({}, {"DISTOP_JOB_TIME_LIMIT": "*=0s"}, "DISTOP_JOB_TIME_LIMIT must be TYPE=TIME"),
        ({"label": '{"a"'}, {}, "--label must be K=V pairs"),
        ({"namespace": "a/b"}, {}, "not a namespace"),
        ({"etcd": "nowhere"}, {}, "not an etcd endpoint"),
        ({"user": "me"}, {}, "user name and password belong together"),
        ({"password_file": "/no/such/file"}, {}, "password file /no/such/file cannot be read: No such file"),
        ({"password_file": "/"}, {}, "password file / cannot be read: Is a directory$"),
        ({"poll": "inf"}, {}, "--poll must be a number greater than 0"),
        ({"id": "\ud800"}, {}, "--id: .*lone surrogate"),
    ],
)
def test_the_error_names_the_invalid_setting(
    flags: dict[str, object], variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        executor_config(Settings(flags, variables, file=find(folder=tmp_path)), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("etcd =", "is not valid TOML"),
        ("etdc = 'x:1'", r"an unknown setting: etdc \(did you mean 'etcd'\?\); known: "),
        ("slots = true", "slots in .*distop.toml must be a whole number"),
        ("log-level = 'loud'", "log_level in .*must be one of debug"),
        ("etcd = 5", "must be one endpoint or a list"),
        ("spark_conf = 5", "spark_conf in .*must be K=V pairs or a table$"),
        ("spark-conf = [5]", "must be written as K=V"),
        ("[job-time-limit]\nvalidate = true", "job_time_limit in .*must be TYPE=TIME.*, not 'validate=true'$"),
        ("label = true", "label in .*must be K=V pairs or a table"),
    ],
)
def test_the_error_names_the_invalid_setting_of_a_file(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "distop.toml").write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        executor_config(Settings({}, {}, file=find(folder=tmp_path)), {})


def test_the_configuration_of_an_executor_combines_all_sources(tmp_path: Path) -> None:
    (tmp_path / "distop.toml").write_text('[spark-conf]\n"spark.ui.enabled" = false\n"spark.driver.memory" = "2g"\n')
    (tmp_path / "secret").write_text("pass word\n")
    flags = {"id": "e1", "label": ["zone=a", "rack=1=2"], "user": "me", "password_file": str(tmp_path / "secret")}
    settings = Settings(flags, {"DISTOP_ETCD": "a:1, b:2"}, file=find(folder=tmp_path))
    config = executor_config(settings, {"XDG_STATE_HOME": str(tmp_path)})
    assert config.etcd.endpoints == ("a:1", "b:2")
    assert config.etcd.password == "pass word"
    assert "pass word" not in repr(config)
    assert config.etcd.read_timeout is None, "a daemon has no read time-out"
    assert config.work_dir == tmp_path / "distop" / "e1"
    assert config.spark_conf == {"spark.ui.enabled": "false", "spark.driver.memory": "2g"}
    assert config.labels == {"zone": "a", "rack": "1=2"}
    assert config.slots >= 1


def test_hole_9_each_operation_type_has_a_job_time_limit(tmp_path: Path) -> None:
    def limits(settings: Settings) -> tuple[float, float]:
        config = executor_config(settings)
        return config.job_time_limit("validate"), config.job_time_limit("noop")

    assert limits(Settings({}, {})) == (86_400, 86_400), "there is a limit by default"
    assert limits(Settings({"job_time_limit": ["validate=2h"]}, {})) == (7_200, 86_400)
    assert limits(Settings({}, {"DISTOP_JOB_TIME_LIMIT": "*=7d,noop=1.5s"})) == (604_800, 1.5)
    (tmp_path / "distop.toml").write_text('[job-time-limit]\n"*" = "6h"\nvalidate = 90\n')
    assert limits(Settings({}, {}, file=find(folder=tmp_path))) == (90, 21_600)


def test_the_connect_timeout_of_a_client_also_limits_reads() -> None:
    config = client_config(Settings({"connect_timeout": "0.5", "namespace": "n"}, {}))
    assert (config.etcd.connect_timeout, config.etcd.read_timeout, config.namespace) == (0.5, 0.5, "n")


def test_pairs_are_read_from_text_json_and_lists() -> None:
    assert pairs("a=1,b=2") == {"a": "1", "b": "2"}
    assert pairs('{"a": "x,y", "b": true}') == {"a": "x,y", "b": "true"}
    assert pairs(["a=x,y"]) == {"a": "x,y"}


def test_the_error_of_an_invalid_password_does_not_show_it() -> None:
    with pytest.raises(InvalidArgument, match="password must be a text$"):
        configure("a:1", username="me", password=b"secret")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"endpoints": 5}, "the endpoints must be a text or a list of texts, not 5"),
        ({"endpoints": [5]}, "endpoints must be one endpoint or a list"),
        ({"namespace": 5}, "namespace must be a text"),
        ({"username": 5}, "username must be a text"),
        ({"ca_cert": 5}, "ca_cert must be a text"),
        ({"connect_timeout": "soon"}, "connect_timeout must be a number, not 'soon'"),
        ({"client": 5}, "int is not an etcd3.Etcd3Client"),
    ],
)
def test_a_client_configuration_of_wrong_type_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        configure(**arguments)  # type: ignore[arg-type]
    assert "--" not in str(caught.value), "a Python call has no options"


def test_the_error_shows_the_invalid_one_of_several_pairs() -> None:
    with pytest.raises(InvalidArgument, match="^--label must be written as K=V, not 'foo'$"):
        Settings({"label": ["zone=a", "foo"]}, env={}).get("label")


def test_the_error_of_a_spark_setting_without_a_value_does_not_show_it() -> None:
    """It may be the rest of a secret that contains a comma."""
    with pytest.raises(InvalidArgument, match="^DISTOP_SPARK_CONF must be written as K=V$"):
        Settings({}, env={"DISTOP_SPARK_CONF": "spark.a.password=1,foo"}).get("spark_conf")


REMOTE = "spark://h:7077"
OWN = ["spark.executor.heartbeatInterval=200ms", "spark.executor.heartbeat.maxFailures=2"]


def test_a_ttl_too_short_for_spark_on_other_nodes_is_refused(tmp_path: Path) -> None:
    flags = {"work_dir": str(tmp_path), "spark_master": REMOTE}
    with pytest.raises(InvalidArgument, match=r"with the Spark master spark://h:7077 a ttl of 5 s is too short"):
        executor_config(Settings({**flags, "ttl": "5"}, {}))
    assert executor_config(Settings({**flags, "ttl": "6"}, {})).ttl == 6
    # With both heartbeat settings given, the ttl is not checked.
    with pytest.raises(InvalidArgument, match="too short"):
        executor_config(Settings({**flags, "ttl": "2", "spark_conf": OWN[:1]}, {}))
    assert executor_config(Settings({**flags, "ttl": "2", "spark_conf": OWN}, {})).ttl == 2
    assert executor_config(Settings({**flags, "ttl": "2", "spark_master": "local[4]"}, {})).ttl == 2


def test_a_secret_spark_setting_is_refused_on_the_command_line_only(tmp_path: Path) -> None:
    name = "spark.hadoop.fs.s3a.secret.key"
    with pytest.raises(InvalidArgument, match=rf"^--spark-conf {name}=… may be a secret") as caught:
        executor_config(Settings({"spark_conf": ["spark.ui.enabled=true", f"{name}=wasp"]}, {}))
    assert "wasp" not in str(caught.value)
    (tmp_path / "distop.toml").write_text(f'[spark-conf]\n"{name}" = "wasp"\n')
    for settings in (
        Settings({}, {"DISTOP_SPARK_CONF": f"{name}=wasp"}),
        Settings({}, {}, file=find(folder=tmp_path)),
    ):
        config = executor_config(settings)
        assert config.spark_conf == {name: "wasp"}
        assert "wasp" not in repr(config)

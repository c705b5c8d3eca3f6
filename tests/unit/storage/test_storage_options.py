"""One configuration of a bucket for obstore, pyarrow and Spark."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from distop.errors import InvalidArgument
from distop.runtime import secret_settings
from distop.settings import Settings
from distop.settings_file import SettingsFile
from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.storage.storage_access import storage_access_for
from distop.storage.storage_options import StorageOptions, read_settings
from distop.storage.store_errors import ObjectMissing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distop.storage.storage_access import StorageAccess

ENDPOINT = "https://s3.example.com:9000"
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret-of-environment"}
BUCKET = "spark.hadoop.fs.s3a.bucket.lake"


@pytest.fixture(autouse=True)
def _configuration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    yield
    storage_options.configure({})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws").mkdir()
    return tmp_path


def access(url: str, table: dict[str, Any] | None = None, **environment: str) -> StorageAccess:
    scheme = url.partition("://")[0]
    storage_options.configure(read_settings({f"{scheme}://": table or {}}))
    return storage_access_for(url, {"HOME": "/nonexistent", **environment})


def arguments(found: StorageAccess) -> dict[str, Any]:
    """What pyarrow's file system is made with: it can be pickled as a call with these."""
    filesystem, _ = found.pyarrow()
    _, (given,) = filesystem.__reduce__()
    return dict(given)


# ---- the settings file


def test_the_tables_of_the_settings_file() -> None:
    table = {
        "s3a://lake/": {"endpoint": f"{ENDPOINT}/", "path-style": False, "request_timeout": 7},
        "gcs://": {"anonymous": True},
        "abfss://c@acct.dfs.core.windows.net": {"time_limit": 9.5},
    }
    assert Settings(file=SettingsFile("f", {"storage": table})).get("storage") == {
        "s3://lake": StorageOptions(endpoint=ENDPOINT, path_style=False, request_timeout=7.0),
        "gs://": StorageOptions(anonymous=True),
        "abfs://c@acct": StorageOptions(time_limit=9.5),
    }


def test_the_variable_has_tables_as_json() -> None:
    settings = Settings(env={"DISTOP_STORAGE": '{"s3://lake": {"region": "eu-1"}}'})
    assert settings.get("storage") == {"s3://lake": StorageOptions(region="eu-1")}
    assert Settings(env={}).get("storage") == {}
    with pytest.raises(InvalidArgument, match="DISTOP_STORAGE must be tables"):
        Settings(env={"DISTOP_STORAGE": "s3://lake"}).get("storage")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"s3://b": {"enpoint": "x"}}, r"has an unknown setting 'enpoint' \(did you mean 'endpoint'\?"),
        ({"abfsss://b": {}}, r"such as s3://lake \(did you mean 'abfss'"),
        ({"s4://b": {}}, r"\[storage.'s4://b'\] must name a scheme or a bucket, such as s3://lake \(known: s3,"),
        ({"lake": {}}, "must name a scheme or a bucket"),
        ({"hdfs://n": {}}, "must name a scheme or a bucket"),
        ({"s3://b/folder": {}}, "names a folder: name its bucket, because Spark has no options for a folder"),
        ({"s3://b": 1}, "must be a table of settings"),
        ({"s3://b": {"endpoint": 1}}, "endpoint in .* must be a text, not 1"),
        ({"s3://b": {"endpoint": "s3.example.com"}}, "must be a URL with a host and no path"),
        ({"s3://b": {"endpoint": "https://h/path"}}, "must be a URL with a host and no path"),
        ({"s3://b": {"endpoint": "https://h:x"}}, "has credentials in it|must be a URL"),
        ({"s3://b": {"endpoint": "http://h"}}, "would send everything unencrypted: write https, or set allow_http"),
        ({"s3://b": {"path_style": "yes"}}, "path_style in .* must be true or false, not 'yes'"),
        ({"s3://b": {"time_limit": 0}}, "time_limit in .* must be a number of seconds greater than 0, not 0"),
        ({"s3://b": {"time_limit": True}}, "must be a number of seconds"),
        ({"gs://b": {"region": "x"}}, "has 'region', which is a setting of S3 only"),
        ({"abfss://c@a.dfs.core.windows.net": {"profile": "x"}}, "has 'profile', which is a setting of S3 only"),
        ({"abfss://c": {}}, "names the host or the account 'c', which is not allowed"),
        ({"s3://user:password@b": {}}, "must not have a password"),
    ],
)  # fmt: skip
def test_refused_tables(table: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_settings(table)


@pytest.mark.parametrize(
    "key",
    ["access_key", "access-key-id", "secret", "secret_access_key", "session_token", "token", "account_key", "sas",
     "sas_token", "password", "key", "username", "client_secret", "credentials", "aws_secret_access_key"],
)  # fmt: skip
def test_credentials_in_the_settings_file_are_refused_by_name(key: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        read_settings({"s3://b": {key: "the-value"}})
    assert f"has {key!r}, a credential: remove it; credentials come from the environment" in str(error.value)
    assert "the-value" not in str(error.value)


def test_credentials_in_an_endpoint_are_refused() -> None:
    with pytest.raises(InvalidArgument) as error:
        read_settings({"s3://b": {"endpoint": "https://me:the-value@s3.example.com"}})
    assert "endpoint in [storage.'s3://b'] has credentials in it: remove them" in str(error.value)
    assert "the-value" not in str(error.value)


def test_a_bucket_comes_before_its_scheme() -> None:
    tables = {"s3://": {"region": "all"}, "s3://lake": {"region": "one"}}
    storage_options.configure(read_settings(tables))
    regions = {url: storage_access_for(url, {}).region for url in ("s3://lake/a", "s3a://lake", "s3://lake2/a")}
    assert regions == {"s3://lake/a": "one", "s3a://lake": "one", "s3://lake2/a": "all"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/local", "is not a URL of an object store"),
        ("hdfs:///a", "is not a URL of an object store"),
        ("s3:///a", "names no bucket: write it as s3://NAME/FOLDER"),
        ("abfss:///a", "must name a container and an account"),
        ("s3://b?endpoint_override=evil", "has parameters"),
        ("s4://b", "which is not known"),
    ],
)
def test_refused_urls(url: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        storage_access_for(url, {})


# ---- S3


def test_s3_at_an_endpoint_of_its_own() -> None:
    table = {"endpoint": ENDPOINT, "region": "eu-1", "connect_timeout": 2, "request_timeout": 3, "time_limit": 4}
    found = access("s3://lake/a/b", table, **KEYS)
    assert found.obstore_config() == {
        "conditional_put": "etag",
        "copy_if_not_exists": "multipart",
        "endpoint": ENDPOINT,
        "region": "eu-1",
        "skip_signature": False,
        "virtual_hosted_style_request": False,
    }
    store = found.obstore()
    assert store.client_options["connect_timeout"] in (timedelta(seconds=2), "2s")
    assert store.retry_config["max_retries"] == 0
    given = arguments(found)
    assert (given["endpoint_override"], given["scheme"], given["region"]) == ("s3.example.com:9000", "https", "eu-1")
    assert (given["connect_timeout"], given["force_virtual_addressing"]) == (2.0, False)
    assert found.pyarrow()[1] == "lake/a/b"
    assert found.spark() == {
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        f"{BUCKET}.endpoint": ENDPOINT,
        f"{BUCKET}.endpoint.region": "eu-1",
        f"{BUCKET}.path.style.access": "true",
        f"{BUCKET}.connection.ssl.enabled": "true",
        f"{BUCKET}.connection.establish.timeout": "15000ms",
        f"{BUCKET}.connection.timeout": "3000ms",
        f"{BUCKET}.aws.credentials.provider": (
            "software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider,"
            "software.amazon.awssdk.auth.credentials.WebIdentityTokenFileCredentialsProvider,"
            "org.apache.hadoop.fs.s3a.auth.IAMInstanceCredentialsProvider"
        ),
    }


def test_s3_of_aws() -> None:
    found = access("s3://lake/a", {"region": "eu-west-1"})
    assert "endpoint" not in found.obstore_config()
    assert found.obstore_config()["virtual_hosted_style_request"] is True
    assert arguments(found)["endpoint_override"] == ""
    assert f"{BUCKET}.endpoint" not in found.spark()
    assert found.spark()[f"{BUCKET}.path.style.access"] == "false"
    assert f"{BUCKET}.connection.timeout" not in found.spark()
    dotted = access("s3://my.lake/a", {"region": "eu-west-1"})
    assert dotted.obstore_config()["virtual_hosted_style_request"] is False


def test_the_bucket_in_the_host_of_an_endpoint() -> None:
    found = access("s3://lake/a", {"endpoint": ENDPOINT, "path_style": False})
    assert found.obstore_config()["endpoint"] == "https://lake.s3.example.com:9000"
    assert arguments(found)["force_virtual_addressing"] is True
    assert found.spark()[f"{BUCKET}.path.style.access"] == "false"
    assert found.spark()[f"{BUCKET}.endpoint"] == ENDPOINT


def test_s3_from_the_environment() -> None:
    variables = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_DEFAULT_REGION": "eu-2", "AWS_ALLOW_HTTP": "true"}
    found = access("s3://lake/a", **variables)
    assert (found.options.endpoint, found.region) == ("http://127.0.0.1:9000", "eu-2")
    assert found.obstore_config()["endpoint"] == "http://127.0.0.1:9000"
    assert arguments(found)["scheme"] == "http"
    assert found.spark()[f"{BUCKET}.connection.ssl.enabled"] == "false"
    first = access("s3://lake/a", {"region": "file"}, **variables, AWS_REGION="eu-3", AWS_ENDPOINT_URL_S3="https://h")
    assert (first.options.endpoint, first.region) == ("https://h", "file")
    assert access("s3://lake/a", **{**variables, "AWS_REGION": "eu-3"}).region == "eu-3"
    with pytest.raises(InvalidArgument, match="the environment has the endpoint http://127.0.0.1:9000"):
        access("s3://lake/a", AWS_ENDPOINT_URL="http://127.0.0.1:9000")


def test_anonymous_s3() -> None:
    found = access("s3://lake/a", {"anonymous": True, "region": "eu-1"}, **KEYS)
    assert found.obstore_config()["skip_signature"] is True
    assert arguments(found)["anonymous"] is True
    provider = found.spark()[f"{BUCKET}.aws.credentials.provider"]
    assert provider == "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"


# ---- profiles


def profiles(home: Path, credentials: str, config: str = "") -> None:
    (home / ".aws" / "credentials").write_text(credentials)
    (home / ".aws" / "config").write_text(config)


KEYED = "aws_access_key_id = id-{0}\naws_secret_access_key = secret-of-{0}\n"


def test_the_keys_of_a_profile(home: Path) -> None:
    profiles(
        home, f"[team]\n{KEYED.format('team')}aws_session_token = token-of-team\n", "[profile team]\nregion = eu-7\n"
    )
    found = access("s3://lake/a", {"profile": "team"}, HOME=str(home), **KEYS)
    keys = found.profile_keys()
    assert (keys["access_key_id"], keys["secret_access_key"]) == ("id-team", "secret-of-team")
    assert (keys["token"], found.obstore_config()["region"]) == ("token-of-team", "eu-7")
    assert "-of-team" not in repr(found.obstore_config())
    given = arguments(found)
    assert (given["access_key"], given["secret_key"]) == ("id-team", "secret-of-team")
    assert (given["session_token"], given["region"]) == ("token-of-team", "eu-7")
    spark = found.spark()
    assert spark[f"{BUCKET}.aws.credentials.provider"].endswith(".auth.ProfileAWSCredentialsProvider")
    assert spark[f"{BUCKET}.auth.profile.name"] == "team"
    assert not [value for value in spark.values() if "-of-team" in value]
    assert "secret-of-team" not in repr(found.profile)
    assert "secret-of-team" not in secret_settings.redact("a text with secret-of-team")


def test_which_profile_is_used(home: Path) -> None:
    profiles(home, f"[default]\n{KEYED.format('default')}[team]\n{KEYED.format('team')}[file]\n{KEYED.format('file')}")

    def used(table: dict[str, Any] | None = None, **environment: str) -> str:
        found = access("s3://lake/a", table, HOME=str(home), **environment)
        return str(found.profile_keys()["access_key_id"]) if found.profile is not None else "none"

    assert used() == "id-default"
    assert used(AWS_PROFILE="team") == "id-team"
    assert used({"profile": "file"}, AWS_PROFILE="team", **KEYS) == "id-file"
    assert used(AWS_PROFILE="team", **KEYS) == "none"  # obstore reads the environment itself
    assert used(AWS_DEFAULT_PROFILE="team") == "id-team"
    assert used(AWS_DEFAULT_PROFILE="", AWS_PROFILE="team") == "id-team"
    assert used(AWS_DEFAULT_PROFILE="file", AWS_PROFILE="team") == "id-file"  # as boto3 does
    assert used({"profile": "file"}, AWS_DEFAULT_PROFILE="team") == "id-file"
    assert used(AWS_DEFAULT_PROFILE="team", **KEYS) == "none"
    assert used(AWS_WEB_IDENTITY_TOKEN_FILE="/token") == "none"
    assert used({"anonymous": True}) == "none"


@pytest.mark.parametrize(
    "endpoint",
    [
        "endpoint_url = http://127.0.0.1:9000",
        "services = local\n[services local]\nsts =\n  region = eu-1\ns3 =\n  endpoint_url = http://127.0.0.1:9000",
    ],
    ids=["profile", "services"],
)
@pytest.mark.parametrize("name", ["default", "team"])
def test_an_endpoint_in_a_profile_is_not_ignored(home: Path, name: str, endpoint: str) -> None:
    config = "[default]" if name == "default" else f"[profile {name}]"
    profiles(home, f"[{name}]\n{KEYED.format(name)}", f"{config}\n{endpoint}\n")
    environment = {"HOME": str(home), "AWS_PROFILE": "" if name == "default" else name}
    for make in (lambda found: found.obstore(), lambda found: found.pyarrow(), lambda found: found.spark()):
        with pytest.raises(InvalidArgument, match=f"profile '{name}' has an endpoint_url, .* in .storage.'s3://lake'"):
            make(access("s3://lake/a", **environment))
        make(access("s3://lake/a", {"endpoint": ENDPOINT}, **environment))
        make(access("s3://lake/a", **environment, AWS_IGNORE_CONFIGURED_ENDPOINT_URLS="true"))
    access("s3://lake/a", **{**environment, **KEYS}).obstore()  # no profile is used


def test_the_endpoint_of_another_service_is_ignored(home: Path) -> None:
    services = "services = local\n[services local]\ndynamodb =\n  endpoint_url = http://127.0.0.1:9000\n"
    profiles(home, f"[team]\n{KEYED.format('team')}", f"[profile team]\n{services}")
    environment = {"HOME": str(home), "AWS_PROFILE": "team"}
    assert "endpoint" not in access("s3://lake/a", **environment).obstore_config()
    with pytest.raises(InvalidArgument, match="there is no AWS profile 'services local' .known: team"):
        access("s3://lake/a", {"profile": "services local"}, HOME=str(home)).obstore()


def test_other_files_of_profiles(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(f"[team]\n{KEYED.format('other')}")
    found = access("s3://lake/a", {"profile": "team"}, HOME=str(home), AWS_SHARED_CREDENTIALS_FILE=str(other))
    assert found.profile_keys()["access_key_id"] == "id-other"


def test_the_renewed_keys_of_a_profile(home: Path) -> None:
    profiles(home, f"[team]\n{KEYED.format('team')}aws_session_token = token-of-team\n")
    found = access("s3://lake/a", {"profile": "team"}, HOME=str(home))
    assert found.profile_keys()["token"] == "token-of-team"
    profiles(home, f"[team]\n{KEYED.format('new')}aws_session_token = token-of-new\n")
    assert found.profile_keys()["token"] == "token-of-new"
    assert found.profile_keys()["expires_at"] > datetime.now(UTC)
    profiles(home, "[team]\naws_access")  # another program is writing it
    assert found.profile_keys()["token"] == "token-of-team"


class SignedRequests(BaseHTTPRequestHandler):
    """Answers that there is no object, and records the headers of requests."""

    seen: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.parametrize("token", ["", "token-of-team"])
def test_no_token_of_the_environment_is_sent_with_the_keys_of_a_profile(
    home: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    profiles(home, f"[team]\n{KEYED.format('team')}" + (f"aws_session_token = {token}\n" if token else ""))
    for name, value in {"HOME": str(home), **KEYS, "AWS_SESSION_TOKEN": "token-of-environment"}.items():
        monkeypatch.setenv(name, value)
    SignedRequests.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), SignedRequests) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        table = {"endpoint": f"http://127.0.0.1:{server.server_port}", "allow_http": True, "profile": "team"}
        storage_options.configure(read_settings({"s3://": table}))
        with pytest.raises(ObjectMissing):
            open_store("s3://lake/a").get("b", limit=1)
        server.shutdown()
    [headers] = SignedRequests.seen
    assert "Credential=id-team/" in headers["authorization"]
    assert headers.get("x-amz-security-token", "") == token


@pytest.mark.parametrize(
    ("credentials", "config", "message"),
    [
        ("[team]\naws_access_key_id = x\naws_secret_access_key = y\n", "", "no AWS profile 'tea' .did you mean 'team'"),
        ("", "[profile tea]\nregion = x\n", "the AWS profile 'tea' has no credentials"),
        (
            "no section = the-value\n",
            "",
            "cannot read the file .*credentials of AWS profiles: it is not a valid INI file",
        ),
    ],
)
def test_a_profile_that_cannot_be_used(home: Path, credentials: str, config: str, message: str) -> None:
    profiles(home, credentials, config)
    found = access("s3://lake/a", {"profile": "tea"}, HOME=str(home))
    with pytest.raises(InvalidArgument, match=message) as error:
        found.obstore()
    assert "the-value" not in str(error.value)


# ---- GCS and Azure


def test_gcs() -> None:
    found = access("gs://lake/a", {"endpoint": "http://127.0.0.1:4443", "allow_http": True, "time_limit": 7})
    assert found.obstore_config() == {"base_url": "http://127.0.0.1:4443", "skip_signature": False}
    given = arguments(found)
    assert (given["endpoint_override"], given["scheme"]) == ("127.0.0.1:4443", "http")
    assert given["retry_time_limit"] == timedelta(seconds=7)
    assert found.pyarrow()[1] == "lake/a"
    assert access("gs://lake/a").obstore_config() == {"skip_signature": False}
    for anonymous in (access("gs://lake/a", {"anonymous": True}), access("gs://anonymous@lake/a")):
        assert anonymous.obstore_config()["skip_signature"] is True
        assert arguments(anonymous)["anonymous"] is True
        assert anonymous.pyarrow()[1] == "lake/a"
    with pytest.raises(InvalidArgument, match="configures no Spark for 'gs://lake'"):
        found.spark()


AZURE = "abfss://lake@acct.dfs.core.windows.net/a"


def test_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"}
    plain = access(AZURE, **key)
    assert plain.obstore_config() == {"account_name": "acct", "skip_signature": False}
    assert arguments(plain)["account_key"] == "c2VjcmV0"
    assert plain.pyarrow()[1] == "lake/a"
    emulator = access(AZURE, {"endpoint": "http://127.0.0.1:10000", "allow_http": True}, **key)
    assert emulator.obstore_config()["endpoint"] == "http://127.0.0.1:10000/acct"
    assert arguments(emulator)["blob_storage_authority"] == "127.0.0.1:10000"
    assert arguments(emulator)["blob_storage_scheme"] == "http"
    china = access(AZURE, {"endpoint": "https://acct.blob.core.chinacloudapi.cn"}, **key)
    assert china.obstore_config()["endpoint"] == "https://acct.blob.core.chinacloudapi.cn"
    assert arguments(china)["blob_storage_authority"] == ".blob.core.chinacloudapi.cn"
    assert arguments(access(AZURE, AZURE_STORAGE_SAS_TOKEN="sv=1&sig=x"))["sas_token"] == "sv=1&sig=x"
    with pytest.raises(InvalidArgument, match="pyarrow .* 'abfs://lake@acct' anonymously"):
        access(AZURE, {"anonymous": True}).pyarrow()
    with pytest.raises(InvalidArgument, match="configures no Spark"):
        plain.spark()

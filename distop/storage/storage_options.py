"""How to reach a bucket: one configuration for obstore, pyarrow and Spark.

It is in the settings file, for all buckets of a scheme or for one bucket::

    [storage."s3://lake"]
    endpoint = "https://s3.example.com"
    region = "eu-1"

What the file leaves out comes from the usual variables (``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_PROFILE``).
Credentials come from the environment, a profile, the instance or a web identity, never from the file.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import did_you_mean, shown
from distop.runtime import secret_settings
from distop.storage.storage_urls import check_place, holds_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FAMILIES = {
    **dict.fromkeys(("s3", "s3a", "s3n"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs"), "abfs"),
}
"""Scheme of a URL → the main one of equivalent schemes. Storage of other schemes is read through pyarrow alone."""
_S3_ONLY = ("region", "profile", "path_style")
_CREDENTIALS = frozenset({"key", "keys", "user", "username", "sas", "secret", "login", "auth", "account_key"})
"""Names of credentials that the pattern of secret names lacks."""
_CREDENTIAL_SOURCES = (
    "credentials come from the environment (AWS_ACCESS_KEY_ID and the like), a profile, the instance or a web identity"
)
_TRUE_TEXTS = ("1", "true", "yes")


@frozen
class StorageOptions:
    """The configuration of a bucket, or of a scheme. Times are in seconds; None: the default."""

    endpoint: str = ""
    region: str = ""
    profile: str = ""
    path_style: bool | None = None
    anonymous: bool = False
    allow_http: bool = False
    connect_timeout: float | None = None
    request_timeout: float | None = None
    time_limit: float | None = None


NAMES = tuple(one.name for one in fields(StorageOptions))


@frozen
class StorageBucket:
    """The place of a URL: its scheme's family, its bucket or container, its account (Azure), and the path in it."""

    family: str
    name: str
    account: str = ""
    path: str = ""
    anonymous: bool = False

    @property
    def prefix(self) -> str:
        """The key of its configuration, in its normal form."""
        return f"{self.family}://{self.name}{f'@{self.account}' if self.account else ''}"


# ---- the settings


def read_settings(value: Any) -> dict[str, StorageOptions]:
    """The options below ``storage`` in the settings file, by their normalized prefix. Raises InvalidArgument."""
    if not isinstance(value, dict):
        raise ValueError('tables such as [storage."s3://bucket"]')
    return {_prefix(prefix): _options(prefix, table) for prefix, table in value.items()}


def _prefix(prefix: str) -> str:
    scheme, separator, rest = prefix.partition("://")
    if not separator or scheme.lower() not in FAMILIES:
        near = did_you_mean(scheme, FAMILIES, "known")
        raise InvalidArgument(f"[storage.{shown(prefix)}] must name a scheme or a bucket, such as s3://lake{near}")
    family = FAMILIES[scheme.lower()]
    if not rest.rstrip("/"):
        return f"{family}://"
    found = bucket_of(prefix)
    if found.path:
        raise InvalidArgument(
            f"[storage.{shown(prefix)}] names a folder: name its bucket, because Spark has no options for a folder"
        )
    return found.prefix


def as_prefix(prefix: str) -> str:
    """The normal form of a prefix as it may be in a settings file."""
    family, _, rest = prefix.partition("://")
    return f"{prefix}.dfs.core.windows.net" if family == "abfs" and rest else prefix


def as_given(options_by_prefix: Mapping[str, StorageOptions]) -> dict[str, Any]:
    """The configuration as in the settings file, for :func:`read_settings` of another process. It holds no secrets."""
    default = StorageOptions()
    return {
        as_prefix(prefix): {
            name: getattr(options, name) for name in NAMES if getattr(options, name) != getattr(default, name)
        }
        for prefix, options in options_by_prefix.items()
    }


def _options(prefix: str, table: Any) -> StorageOptions:
    where = f"[storage.{shown(prefix)}]"
    if not isinstance(table, dict):
        raise InvalidArgument(f"{where} must be a table of settings")
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _READERS:
            if secret_settings.is_secret(name) or name.lower() in _CREDENTIALS:
                raise InvalidArgument(f"{where} has {key!r}, a credential: remove it; {_CREDENTIAL_SOURCES}")
            near = did_you_mean(name, NAMES, "known")
            raise InvalidArgument(f"{where} has an unknown setting {shown(key)}{near}")
        if name in _S3_ONLY and not prefix.lower().startswith("s3"):
            raise InvalidArgument(f"{where} has {key!r}, which is a setting of S3 only")
        try:
            found[name] = _READERS[name](value)
        except ValueError as error:
            raise InvalidArgument(f"{key} in {where} must be {error}, not {shown(value)}") from None
        except InvalidArgument as error:
            raise InvalidArgument(f"{key} in {where} {error}") from None
    options = StorageOptions(**found)
    _check_http(where, options.endpoint, options.allow_http)
    return options


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value.strip()


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError("a number of seconds greater than 0")
    return float(value)


def _endpoint(value: Any) -> str:
    text = _text(value)
    if holds_secret(text):
        raise InvalidArgument(f"has credentials in it: remove them; {_CREDENTIAL_SOURCES}")
    parts = urlsplit(text)
    try:
        named = parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        named = False
    if parts.scheme not in ("http", "https") or not named or parts.path not in ("", "/") or parts.query:
        raise ValueError("a URL with a host and no path, such as https://s3.example.com:9000")
    return text.rstrip("/")


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "endpoint": _endpoint,
    **dict.fromkeys(("region", "profile"), _text),
    **dict.fromkeys(("path_style", "anonymous", "allow_http"), _boolean),
    **dict.fromkeys(("connect_timeout", "request_timeout", "time_limit"), _seconds),
}


def _check_http(where: str, endpoint: str, allowed: bool) -> None:
    if endpoint.startswith("http:") and not allowed:
        raise InvalidArgument(
            f"{where} has the endpoint {endpoint}, which would send everything unencrypted: write https, or set "
            "allow_http = true"
        )


# ---- the options of a URL

_AZURE = re.compile(r"([^@]+)@([a-z0-9]+)\.")
_configured: Mapping[str, StorageOptions] = {}


def configure(options_by_prefix: Mapping[str, StorageOptions]) -> None:
    """Set the configuration of this process, as :func:`read_settings` returns it."""
    global _configured
    _configured = dict(options_by_prefix)


def configuration() -> Mapping[str, StorageOptions]:
    """The configuration of this process: options by prefix."""
    return _configured


def configured(bucket: StorageBucket, environment: Mapping[str, str]) -> StorageOptions:
    """The configuration of a bucket, else of its scheme, completed by the environment. Raises InvalidArgument."""
    found = _configured.get(bucket.prefix) or _configured.get(f"{bucket.family}://") or StorageOptions()
    given = {name: getattr(found, name) for name in NAMES}
    given["anonymous"] = found.anonymous or bucket.anonymous
    if bucket.family == "s3":
        endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        given["endpoint"] = found.endpoint or _first(environment, *endpoints).rstrip("/")
        given["region"] = found.region or _first(environment, "AWS_REGION", "AWS_DEFAULT_REGION")
        given["allow_http"] = found.allow_http or _first(environment, "AWS_ALLOW_HTTP").lower() in _TRUE_TEXTS
        _check_http("the environment", given["endpoint"], given["allow_http"])
    return StorageOptions(**given)


def in_object_store(path: str) -> bool:
    """Whether a location or a file is in a store that distop opens by obstore."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.strip().lower() in FAMILIES


def bucket_of(url: str) -> StorageBucket:
    """The place of a URL. Raises InvalidArgument for a URL that is not allowed, or of no object store."""
    check_place("the URL", url)
    scheme, separator, rest = url.partition("://")
    family = FAMILIES.get(scheme.strip().lower()) if separator else None
    if family is None:
        raise InvalidArgument(
            f"{shown(url)} is not a URL of an object store: write s3://BUCKET/PATH, or gs:// or abfss://"
        )
    authority, _, path = rest.partition("/")
    path = path.strip("/")
    if family == "abfs":
        parts = _AZURE.match(authority)
        if parts is None:
            raise InvalidArgument(
                f"{shown(url)} must name a container and an account: abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"
            )
        return StorageBucket(family, parts[1], parts[2], path)
    anonymous = authority.startswith("anonymous@")
    name = authority.removeprefix("anonymous@")
    if not name:
        raise InvalidArgument(f"{shown(url)} names no bucket: write it as {scheme}://NAME/FOLDER")
    return StorageBucket(family, name, "", path, anonymous)


def _first(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")

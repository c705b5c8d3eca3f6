"""How obstore, pyarrow and Spark reach a bucket: :func:`storage_access_for` builds the same access for all three."""

from __future__ import annotations

import hashlib
import logging
import os
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distop.clock import time
from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.storage import aws_profile, storage_options
from distop.storage.storage_options import StorageBucket, StorageOptions, bucket_of, configured

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("distop.storage")

CONNECT_TIMEOUT, REQUEST_TIMEOUT, TIME_LIMIT = 5.0, 30.0, 120.0
"""Default seconds for a connection, for one request, and for a call with its retries."""
_KEYS_READ_EVERY = 300.0
"""Seconds between two readings of a profile's keys."""
_MIN_CONNECT_TIMEOUT = 15.0
"""Seconds: S3A accepts no shorter time."""
_S3A = "org.apache.hadoop.fs.s3a"
_SDK = "software.amazon.awssdk.auth.credentials"
_PROVIDERS = ",".join(
    (
        f"{_SDK}.EnvironmentVariableCredentialsProvider",
        f"{_SDK}.WebIdentityTokenFileCredentialsProvider",
        f"{_S3A}.auth.IAMInstanceCredentialsProvider",
    )
)
"""The sources of credentials, the same as obstore's. The connector's own list lacks the web identity."""
_SPARK_SETTINGS_PROVIDERS = f"{_S3A}.TemporaryAWSCredentialsProvider,{_S3A}.SimpleAWSCredentialsProvider"
"""Credentials in the settings of Spark. The connector tries them first, as without distop."""
_CREDENTIAL_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
"""Starts of the names of variables from which obstore reads credentials."""
_CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables of credentials that come before the default profile."""


class StorageAccess:
    """How this process reaches a bucket. Builds clients; sends nothing."""

    def __init__(self, bucket: StorageBucket, options: StorageOptions, environment: Mapping[str, str]) -> None:
        self.bucket = bucket
        self.options = options
        self._environment = environment

    @property
    def time_limit(self) -> float:
        """Seconds for a call with its retries."""
        return self.options.time_limit or TIME_LIMIT

    @cached_property
    def profile(self) -> aws_profile.AwsProfile | None:
        """The AWS profile with the credentials; None: they come from elsewhere. Raises InvalidArgument."""
        if self.options.anonymous or self.bucket.family != "s3":
            return None
        if self.options.profile:
            return self._checked(aws_profile.required(self.options.profile, self._environment))
        if any(self._environment.get(name) for name in _CREDENTIAL_VARIABLES):
            return None
        if named := aws_profile.chosen(self._environment):
            return self._checked(aws_profile.required(named, self._environment))
        found = aws_profile.find(aws_profile.DEFAULT, self._environment)
        if found is not None:
            self._checked(found)
        return found if found is not None and (found.access_key or found.session is not None) else None

    def _checked(self, found: aws_profile.AwsProfile) -> aws_profile.AwsProfile:
        """The profile. Raises InvalidArgument if it has an endpoint and the settings have none: AWS would be asked."""
        ignored = self._environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
        if found.endpoint and not self.options.endpoint and not ignored:
            raise InvalidArgument(
                f"the AWS profile {shown(found.name)} has an endpoint_url, which distop does not read: set it as "
                f"endpoint in [storage.{shown(self.bucket.prefix)}] of the settings file"
            )
        return found

    @cached_property
    def region(self) -> str:
        """The region of an S3 bucket; "": unknown."""
        if self.options.region:
            return self.options.region
        if self.profile is not None and self.profile.region:
            return self.profile.region
        return "us-east-1" if self.options.endpoint else ""

    @property
    def path_style(self) -> bool:
        """Whether the bucket is in the path of S3's URLs, not in the host.

        It is by default at an endpoint of its own, and if its name has a dot, which no certificate of AWS covers.
        """
        given = self.options.path_style
        return bool(self.options.endpoint) or "." in self.bucket.name if given is None else given

    def credentials_id(self) -> str:
        """Changes when the environment gives other credentials."""
        given = sorted(
            (name, value) for name, value in self._environment.items() if name.startswith(_CREDENTIAL_PREFIXES)
        )
        return hashlib.sha256(repr(given).encode(errors="surrogatepass")).hexdigest()

    # ---- obstore

    def obstore(self, *, retries: int = 0) -> Any:
        """A store of obstore. ``retries``: of requests that may be repeated blindly."""
        from obstore.store import AzureStore, GCSStore, S3Store

        common: dict[str, Any] = {
            "client_options": {
                "allow_http": self.options.allow_http,
                "connect_timeout": timedelta(seconds=self.options.connect_timeout or CONNECT_TIMEOUT),
                "timeout": timedelta(seconds=self.options.request_timeout or REQUEST_TIMEOUT),
            },
            "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=self.time_limit)},
        }
        kind = {"s3": S3Store, "gs": GCSStore, "abfs": AzureStore}[self.bucket.family]
        if self.profile is not None:
            if self.profile.session is not None:
                from obstore.auth.boto3 import Boto3CredentialProvider

                common["credential_provider"] = Boto3CredentialProvider(self.profile.session)
            else:
                # As configuration, the keys would be completed by the session token of the environment.
                common["credential_provider"] = self.profile_keys
        return kind(self.bucket.name, config=self.obstore_config(), **common)

    def obstore_config(self) -> dict[str, Any]:
        """The configuration of obstore's store, without secrets."""
        options = self.options
        if self.bucket.family == "gs":
            found: dict[str, Any] = {"base_url": options.endpoint} if options.endpoint else {}
        elif self.bucket.family == "abfs":
            found = {"account_name": self.bucket.account}
            if options.endpoint:
                found["endpoint"] = self._azure_endpoint()
        else:
            found = {
                "conditional_put": "etag",
                "copy_if_not_exists": "multipart",
                "virtual_hosted_style_request": not self.path_style,
            }
            if options.endpoint:
                found["endpoint"] = options.endpoint if self.path_style else self._virtual_endpoint()
            if self.region:
                found["region"] = self.region
        return found | {"skip_signature": options.anonymous}

    def profile_keys(self) -> dict[str, Any]:
        """The keys of the profile, in obstore's form. Their file is read anew, because other programs renew them."""
        if self.profile is None:
            raise ValueError("there is no profile")
        try:
            found = aws_profile.required(self.profile.name, self._environment)
        except InvalidArgument:
            found = self.profile  # the file is being written
        access, secret, token = found.keys()
        expires = datetime.fromtimestamp(time.time() + _KEYS_READ_EVERY, UTC)
        return {"access_key_id": access, "secret_access_key": secret, "token": token or None, "expires_at": expires}

    def _virtual_endpoint(self) -> str:
        parts = urlsplit(self.options.endpoint)
        return f"{parts.scheme}://{self.bucket.name}.{parts.netloc}"

    def _azure_endpoint(self) -> str:
        """An emulator has the account in the path, other endpoints in the host."""
        endpoint, account = self.options.endpoint, self.bucket.account
        return endpoint if self._azure_suffix() else f"{endpoint}/{account}"

    def _azure_suffix(self) -> str:
        """The host after the account's name; "": the account is not in the host."""
        host = urlsplit(self.options.endpoint).netloc
        account = self.bucket.account
        return host.removeprefix(account) if host.startswith(f"{account}.") else ""

    # ---- pyarrow

    def pyarrow(self) -> tuple[Any, str]:
        """A file system of pyarrow, and the path in it. Raises InvalidArgument."""
        from pyarrow import fs

        make = {"s3": self._s3_arguments, "gs": self._gcs_arguments, "abfs": self._azure_arguments}
        kind = {"s3": "S3FileSystem", "gs": "GcsFileSystem", "abfs": "AzureFileSystem"}[self.bucket.family]
        path = "/".join(filter(None, (self.bucket.name, self.bucket.path)))
        return getattr(fs, kind)(**make[self.bucket.family]()), path

    def _s3_arguments(self) -> dict[str, Any]:
        options, found = self.options, self._arrow_endpoint()
        if self.region:
            found["region"] = self.region
        if options.anonymous:
            found["anonymous"] = True
        elif self.profile is not None:
            access, secret, token = self.profile.keys()
            found |= {"access_key": access, "secret_key": secret} | ({"session_token": token} if token else {})
        if not self.path_style:
            found["force_virtual_addressing"] = True
        found["connect_timeout"] = options.connect_timeout or CONNECT_TIMEOUT
        found["request_timeout"] = options.request_timeout or REQUEST_TIMEOUT
        return found

    def _gcs_arguments(self) -> dict[str, Any]:
        found = {**self._arrow_endpoint(), "retry_time_limit": timedelta(seconds=self.time_limit)}
        return found | ({"anonymous": True} if self.options.anonymous else {})

    def _azure_arguments(self) -> dict[str, Any]:
        if self.options.anonymous:
            raise InvalidArgument(f"pyarrow cannot read {shown(self.bucket.prefix)} anonymously: give credentials")
        found: dict[str, Any] = {"account_name": self.bucket.account}
        if self.options.endpoint:
            parts = urlsplit(self.options.endpoint)
            authority = self._azure_suffix() or parts.netloc
            for service in ("blob", "dfs"):
                found |= {f"{service}_storage_authority": authority, f"{service}_storage_scheme": parts.scheme}
        for argument, names in _AZURE_SECRETS.items():
            value = next((self._environment[name] for name in names if self._environment.get(name)), "")
            if value:
                return found | {argument: value}
        return found

    def _arrow_endpoint(self) -> dict[str, Any]:
        parts = urlsplit(self.options.endpoint)
        return {"scheme": parts.scheme, "endpoint_override": parts.netloc} if parts.netloc else {}

    # ---- Spark

    def spark(self) -> dict[str, str]:
        """Settings of Spark for an S3 bucket, without secrets. Raises InvalidArgument for other stores.

        Without a bucket's name: for all buckets.
        """
        if self.bucket.family != "s3":
            raise InvalidArgument(
                f"distop configures no Spark for {shown(self.bucket.prefix)}: set the connector's options in spark-conf"
            )
        options, name = self.options, self.bucket.name
        start = f"spark.hadoop.fs.s3a.bucket.{name}" if name else "spark.hadoop.fs.s3a"
        found = {
            "spark.hadoop.fs.s3.impl": f"{_S3A}.S3AFileSystem",
            f"{start}.path.style.access": _java(self.path_style),
        }
        provider = _PROVIDERS
        if options.endpoint:
            found[f"{start}.endpoint"] = options.endpoint
            found[f"{start}.connection.ssl.enabled"] = _java(options.endpoint.startswith("https:"))
        if self.region:
            found[f"{start}.endpoint.region"] = self.region
        if options.anonymous:
            provider = f"{_S3A}.AnonymousAWSCredentialsProvider"
        elif self.profile is not None:
            provider = f"{_S3A}.auth.ProfileAWSCredentialsProvider"
            found[f"{start}.auth.profile.name"] = self.profile.name
        found[f"{start}.aws.credentials.provider"] = provider if name else f"{_SPARK_SETTINGS_PROVIDERS},{provider}"
        if options.connect_timeout:
            seconds = max(options.connect_timeout, _MIN_CONNECT_TIMEOUT)
            found[f"{start}.connection.establish.timeout"] = f"{seconds * 1000:.0f}ms"
        if options.request_timeout:
            found[f"{start}.connection.timeout"] = f"{options.request_timeout * 1000:.0f}ms"
        return found


_AZURE_SECRETS = {
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY"),
    "sas_token": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
}
"""Argument of pyarrow → the variables that obstore reads it from."""


def storage_access_for(url: str, environment: Mapping[str, str] | None = None) -> StorageAccess:
    """The access to the bucket of a URL. Raises InvalidArgument."""
    bucket = bucket_of(url)
    own = os.environ if environment is None else environment
    return StorageAccess(bucket, configured(bucket, own), own)


def spark_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings of Spark for S3: for all buckets, and for each configured one. They have no secrets.

    A bucket whose profile cannot be read is left out and logged: planning reports the error for each of its tables.
    """
    own = os.environ if environment is None else environment
    found: dict[str, str] = {}
    known = storage_options.configuration()
    for prefix in ("s3://", *(one for one in known if one.startswith("s3://") and one != "s3://")):
        bucket = StorageBucket("s3", prefix.removeprefix("s3://"))
        try:
            found |= StorageAccess(bucket, configured(bucket, own), own).spark()
        except InvalidArgument as error:
            if prefix in known:
                log.warning("Cannot configure Spark for the storage of %s; its settings are ignored: %s", prefix, error)
    return {"spark.hadoop.fs.s3.impl": f"{_S3A}.S3AFileSystem", **found}


def _java(value: bool) -> str:
    return "true" if value else "false"

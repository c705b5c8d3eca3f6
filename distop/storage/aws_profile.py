"""Reads a profile of AWS's configuration files, because obstore reads none.

A profile with an access key is read here. One with another source (a role, SSO, a program) needs boto3. Secrets are
registered in :mod:`distop.runtime.secret_settings`, which removes them from logs, before they are used.
"""

from __future__ import annotations

import configparser
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import did_you_mean, shown
from distop.runtime import secret_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT = "default"
_FILES = {"AWS_CONFIG_FILE": "config", "AWS_SHARED_CREDENTIALS_FILE": "credentials"}
"""Variable with the path of a file → its name in the folder ``.aws``."""


@frozen
class AwsProfile:
    """A profile. Without an access key its credentials come from ``session``, a session of boto3."""

    name: str
    region: str = ""
    endpoint: str = ""
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    session: Any = field(default=None, repr=False)

    def keys(self) -> tuple[str, str, str]:
        """Access key, secret key and session token, as they are now. Raises InvalidArgument if there are none."""
        if self.session is None:
            return self.access_key, self.secret_key, self.token
        found = self.session.get_credentials()
        if found is None:
            raise _no_credentials(self.name)
        frozen_now = found.get_frozen_credentials()
        keys = frozen_now.access_key, frozen_now.secret_key, frozen_now.token or ""
        secret_settings.hide(keys[1:])
        return keys


def find(name: str, environment: Mapping[str, str]) -> AwsProfile | None:
    """The profile of this name; None if there is none. Raises InvalidArgument for files that cannot be read."""
    sections = _sections(environment)
    if name not in sections:
        return None
    values = sections[name]
    region, endpoint = values.get("region", ""), _endpoint(values, environment)
    access, secret = values.get("aws_access_key_id", ""), values.get("aws_secret_access_key", "")
    if access and secret:
        token = values.get("aws_session_token", "")
        secret_settings.hide([secret, token])
        return AwsProfile(name, region, endpoint, access, secret, token)
    if set(values) <= {"region", "output", "endpoint_url", "services"}:
        return AwsProfile(name, region, endpoint)
    return AwsProfile(name, region, endpoint, session=_session(name))


def chosen(environment: Mapping[str, str]) -> str:
    """The profile that the environment names; "" if it names none.

    AWS_DEFAULT_PROFILE comes before AWS_PROFILE, as in boto3.
    """
    return environment.get("AWS_DEFAULT_PROFILE") or environment.get("AWS_PROFILE") or ""


def required(name: str, environment: Mapping[str, str]) -> AwsProfile:
    """The profile of this name, which has credentials. Raises InvalidArgument."""
    found = find(name, environment)
    if found is None:
        near = did_you_mean(name, _sections(environment), "known")
        raise InvalidArgument(
            f"there is no AWS profile {shown(name)}{near}: add it to ~/.aws/credentials, or name another profile"
        )
    if not found.access_key and found.session is None:
        raise _no_credentials(name)
    return found


def _no_credentials(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"the AWS profile {shown(name)} has no credentials: add aws_access_key_id and aws_secret_access_key to it in "
        "~/.aws/credentials, or name another profile"
    )


def _session(name: str) -> Any:
    try:
        from boto3 import Session  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise InvalidArgument(
            f"the AWS profile {shown(name)} has no access key, and its credentials come from a role, SSO or a program: "
            "install boto3 beside distop, or give the credentials in the environment"
        ) from None
    return Session(profile_name=name)


def _endpoint(values: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The endpoint of S3 in a profile: of the section that its ``services`` names, else its own; "" if it has none."""
    if values.get("services"):
        for section, services in _parsed(_file("AWS_CONFIG_FILE", environment)).items():
            kind, _, own = section.partition(" ")
            if kind == "services" and own.strip() == values["services"]:
                # The settings of a service are the lines of one value.
                for line in services.get("s3", "").splitlines():
                    setting, _, value = line.partition("=")
                    if setting.strip() == "endpoint_url" and value.strip():
                        return value.strip()
    return values.get("endpoint_url", "")


def _sections(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The values of each profile; those of the credentials file win."""
    found: dict[str, dict[str, str]] = {}
    for variable in _FILES:
        for section, values in _parsed(_file(variable, environment)).items():
            if variable == "AWS_CONFIG_FILE" and section != DEFAULT:
                if not section.startswith("profile "):
                    continue
                section = section.removeprefix("profile ").strip()
            found.setdefault(section, {}).update(values)
    return found


def _file(variable: str, environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("HOME") or Path.home()) / ".aws"
    return Path(environment.get(variable) or home / _FILES[variable]).expanduser()


def _parsed(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(default_section="")
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidArgument(f"cannot read the file {path} of AWS profiles: {error.strerror}") from None
    except (configparser.Error, UnicodeDecodeError):
        # The parser's own error quotes a line of the file.
        raise InvalidArgument(f"cannot read the file {path} of AWS profiles: it is not a valid INI file") from None
    return {section: dict(parser.items(section)) for section in parser.sections()}

"""Reads the values of settings from texts, or from the types of the settings file.

Each reader raises ValueError with what the value must be, such as "a number greater than 0", or InvalidArgument.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from distop.decide import verifier_urls
from distop.errors import InvalidArgument, UnsafePath
from distop.protocol import executor_nodes
from distop.protocol.behavior_declaration import LONGEST_TIME_LIMIT
from distop.protocol.keys import check_type_name, encode
from distop.protocol.texts import shown
from distop.runtime import spark_rules
from distop.storage import export_targets
from distop.storage.files import local_path
from distop.storage.storage_options import bucket_of, read_settings
from distop.store.connection_settings import split_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.storage.storage_options import StorageOptions

ALL_TYPES = "*"
"""Stands for all types without a job time limit of their own."""
SHORTEST_HISTORY_AGE = 3600.0
"""Seconds."""
SHORTEST_TTL = 2.0
"""Seconds; etcd grants no shorter lease with its default timings (L7)."""
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def shared_dir(value: Any) -> str:
    """A local path, or the URL of a folder in an object store."""
    found = text(value)
    if local_path(found) is None:
        bucket_of(found)
    return found


def export_places(value: Any) -> tuple[str, ...]:
    """Places to export to: a list, or one text with commas between."""
    places = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(places, list | tuple) or not all(isinstance(one, str) for one in places):
        raise ValueError("a folder or a URL, or a list of them, such as s3://exports/lake")
    try:
        return tuple(export_targets.checked(one) for one in places if one)
    except UnsafePath as error:
        raise ValueError(f"a safe place ({error})") from None


def http_url(value: Any) -> str:
    """The URL of an HTTP server, without user, query and fragment."""
    found = text(value)
    try:
        parts = urlsplit(found)
        wrong = parts.port == 0 or parts.username is not None or parts.query or parts.fragment
    except ValueError:
        wrong, parts = True, urlsplit("")
    if wrong or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL such as http://127.0.0.1:4318")
    return found


def number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("a number")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a number") from None
    if not 0 < found < float("inf"):
        raise ValueError("a number greater than 0")
    return found


def count(value: Any) -> int:
    if isinstance(value, bool) or not str(value).strip().isascii() or not str(value).strip().isdigit():
        raise ValueError("a whole number greater than 0")
    if int(value) < 1:
        raise ValueError("a whole number greater than 0")
    return int(value)


def port(value: Any) -> int:
    try:
        found = count(value)
    except ValueError:
        found = 0
    if not 0 < found < 65536:
        raise ValueError("a number from 1 to 65535")
    return found


def ttl(value: Any) -> float:
    seconds = number(value)
    if seconds < SHORTEST_TTL:
        raise ValueError(f"at least {SHORTEST_TTL:g} seconds (etcd grants no shorter lease)")
    return seconds


def duration(value: Any) -> float:
    """Seconds (more than 0), given as a number or as a text such as ``90s``, ``15m``, ``36h``, ``30d``."""
    text = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        seconds = float(text[1]) * _UNITS[text[2]] if text is not None else number(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError("a time such as 90s, 15m, 36h or 30d")
    return seconds


def history_age(value: Any) -> float:
    seconds = duration(value)
    if seconds < SHORTEST_HISTORY_AGE:
        raise ValueError("at least 1h: the request ids in it tell whether an unanswered start had won")
    return seconds


def address(value: Any) -> tuple[str, int]:
    host, colon, port = str(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise ValueError("HOST:PORT, such as 127.0.0.1:9464 (port 0: any that is free)")
    return host, int(port)


def endpoints(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
        return split_endpoints(value)
    raise ValueError("one endpoint or a list of them")


def verifier_prefixes(value: Any) -> tuple[str, ...]:
    """Prefixes of URLs: a list, or one text with commas between."""
    urls = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(urls, list | tuple) or not all(isinstance(one, str) for one in urls):
        raise ValueError("a URL prefix or a list of them, such as https://orders:8443/confirmed")
    for one in filter(None, urls):
        verifier_urls.parse(one, "a prefix")
    return tuple(filter(None, urls))


def _names(value: Any, what: str) -> tuple[str, ...]:
    """A list, or one text with commas between; at least one name. ``what``: what it must be."""
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(one, str) and one for one in names):
        raise ValueError(what)
    return tuple(dict.fromkeys(names))


def types(value: Any) -> tuple[str, ...]:
    names = _names(value, "an operation type or a list of them, such as validate,build-index")
    for type_name in names:
        check_type_name(type_name)
    return names


def tables(value: Any) -> tuple[str, ...]:
    """Names of tables, and namespaces: ``sales.*``."""
    names = _names(value, "a table, a namespace or a list of them, such as sales.orders,hr.*")
    for table in names:
        exact = table.removesuffix(executor_nodes.NAMESPACE)
        if not exact or "*" in exact or (exact != table and exact.endswith(".")):
            raise InvalidArgument(
                f"{shown(table)} is neither a table nor a namespace: write each name in full, or a namespace as sales.*"
            )
        encode(exact)
    return names


def spark_catalogs(value: Any) -> tuple[str, ...]:
    names = _names(value, "the name of a catalog of Spark or a list of them, such as lake,archive")
    return tuple(map(spark_rules.check_name, names))


def switch(value: Any) -> bool:
    if str(value).lower() not in ("1", "true", "yes", "0", "false", "no"):
        raise ValueError("1 or 0")
    return str(value).lower() in ("1", "true", "yes")


def one_of(names: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        found = str(value).lower()
        if found not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return found

    return read


def name(value: Any) -> str:
    found = text(value)
    encode(found)
    return found


class WrongPair(ValueError):
    """One of several pairs is invalid: the message shows that one, not all of them."""

    def __init__(self, item: object, what: str = "written as K=V") -> None:
        super().__init__(what)
        self.item = item


def pairs(value: Any) -> dict[str, str]:
    """``K=V`` texts (a list, or one text with commas between), a JSON object, or a mapping, as a mapping.

    Raises ValueError for anything else.
    """
    if isinstance(value, str):
        if value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except ValueError:
                raise ValueError("K=V pairs with commas between, or a JSON object") from None
        else:
            value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, dict):
        # Spark wants "true", not Python's "True".
        return {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in value.items()}
    if not isinstance(value, list | tuple):
        raise ValueError("K=V pairs or a table")
    found: dict[str, str] = {}
    for item in value:
        key, equals, rest = item.partition("=") if isinstance(item, str) else ("", "", "")
        if not equals or not key.strip():
            raise WrongPair(item)
        found[key.strip()] = rest
    return found


def storage(value: Any) -> dict[str, StorageOptions]:
    """Bucket or scheme → its configuration: tables, or a JSON object of them."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    return read_settings(value)


def job_time_limits(value: Any) -> dict[str, float]:
    """Operation type, or :data:`ALL_TYPES` → seconds."""
    found: dict[str, float] = {}
    for type_name, limit in pairs(value).items():
        if type_name != ALL_TYPES:
            check_type_name(type_name)
        try:
            found[type_name] = min(duration(limit), LONGEST_TIME_LIMIT)
        except ValueError:
            raise WrongPair(f"{type_name}={limit}", "TYPE=TIME, such as validate=2h or *=36h") from None
    return found

"""Settings: a flag, else ``DISTOP_<NAME>``, else the settings file, else the default.

One table, :data:`SETTINGS`, says of each setting how its text is read and what it defaults to. In the file the
settings stand at the top level under the same names (``spark-master`` or ``spark_master``)::

    etcd = ["etcd1:2379", "etcd2:2379"]
    namespace = "prod"
    [spark-conf]
    "spark.driver.memory" = "4g"
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.decide import verifier_urls
from distop.errors import InvalidArgument
from distop.protocol import executor_nodes
from distop.protocol.behavior_declaration import LONGEST_TIME_LIMIT
from distop.protocol.frozen import frozen
from distop.protocol.keys import check_namespace, check_type_name, encode
from distop.protocol.size_limits import DEFAULT, Limits
from distop.protocol.texts import did_you_mean, shown
from distop.runtime import secret_settings, spark_rules
from distop.settings_file import NO_FILE
from distop.store.connection_settings import DEFAULT_ENDPOINT, EtcdConfig, split_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.settings_file import SettingsFile

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS = ("text", "json")
SHORTEST_HISTORY_AGE = 3600.0
"""Seconds."""
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
ALL_TYPES = "*"
"""Stands for all types without a job time limit of their own."""
DEFAULT_JOB_TIME_LIMIT = 86_400.0
"""Seconds. A job is one partition: one without an end must not hold a slot for ever."""
SHORTEST_TTL = 2.0
"""Seconds; etcd grants no shorter lease with its default timings (L7)."""


@frozen
class ClientConfig:
    """Where etcd is, who we are there, and the namespace of distop's keys in it."""

    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    namespace: str = ""
    shared_dir: str = ""
    """The executors' shared directory, in which large results are; "": ``_distop/`` under each table's location."""


@frozen
class ExecutorConfig:
    """What an executor daemon is told.

    ``executor_id`` None: made from the host's name, and kept in the work directory. ``shared_dir`` "": ``_distop/``
    under each table's location. ``slots``: jobs, or batches of one operation's jobs, at a time. ``ttl``: seconds
    until a silent daemon counts as gone. ``poll``: seconds between the listings behind the watches of gates, nodes
    and elections (claims and jobs: 300, or ``poll`` where it is longer). ``history_limit``: history records kept per
    table. ``history_age``: seconds for which they are kept; None: as long as the limit lets them. ``metrics``: host and
    port on which metrics are served; None: nowhere. ``call_limit``: seconds for planning, and for completion.
    ``job_time_limits``: operation type → seconds for one attempt of a job at most; ``*``: of all other types.
    ``verifier_urls``: prefixes of the URLs at which it may ask whether the transaction of a prepared operation was
    completed. ``trusted_spark_catalogs``: catalogs of Spark whose server or code may choose classes, hosts and where
    credentials are sent. ``serves``: the types and tables that it works for. ``source``: which settings file was used,
    for people. ``limits``: no setting; the simulator gives others. ``behaviors``: no setting either; ``distop dev``
    gives those that are not installed (type → place of its class, see :mod:`distop.behavior_source`).
    """

    etcd: EtcdConfig
    work_dir: Path
    namespace: str = ""
    executor_id: str | None = None
    shared_dir: str = ""
    slots: int = 1
    spark_master: str = "local[*]"
    spark_conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    ttl: float = 10.0
    poll: float = 30.0
    labels: Mapping[str, str] = field(default_factory=dict)
    log_level: str = "info"
    log_format: str = "text"
    history_limit: int = 1000
    history_age: float | None = None
    metrics: tuple[str, int] | None = None
    call_limit: float = 3600.0
    job_time_limits: Mapping[str, float] = field(default_factory=dict)
    verifier_urls: tuple[str, ...] = ()
    trusted_spark_catalogs: tuple[str, ...] = ()
    serves: executor_nodes.Serves = executor_nodes.ALL
    certificate_key: bytes = field(default=b"", repr=False)
    """With it this executor signs the reports that it writes to history, and takes none for a certificate's that is not
    signed so; empty: neither.
    """
    actions_log: str | None = None
    """A file with a line for each action."""
    source: str = ""
    limits: Limits = DEFAULT
    behaviors: Mapping[str, str] = field(default_factory=dict)

    def job_time_limit(self, type_name: str) -> float:
        """Seconds for one attempt of a job of this type at most."""
        limits = self.job_time_limits
        return limits.get(type_name, limits.get(ALL_TYPES, DEFAULT_JOB_TIME_LIMIT))


# ------------------------------------------------------------- reading values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a number") from None
    if not 0 < number < float("inf"):
        raise ValueError("a number greater than 0")
    return number


def _count(value: Any) -> int:
    if isinstance(value, bool) or not str(value).strip().isascii() or not str(value).strip().isdigit():
        raise ValueError("a whole number greater than 0")
    if int(value) < 1:
        raise ValueError("a whole number greater than 0")
    return int(value)


def _port(value: Any) -> int:
    try:
        number = _count(value)
    except ValueError:
        number = 0
    if not 0 < number < 65536:
        raise ValueError("a number from 1 to 65535")
    return number


def _ttl(value: Any) -> float:
    number = _number(value)
    if number < SHORTEST_TTL:
        raise ValueError(f"at least {SHORTEST_TTL:g} seconds (etcd grants no shorter lease)")
    return number


def duration(value: Any) -> float:
    """Seconds, given as a number or as a text such as ``90s``, ``15m``, ``36h``, ``30d``. Raises ValueError for
    anything else, and for what is not greater than 0.
    """
    said = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        number = float(said[1]) * _UNITS[said[2]] if said is not None else _number(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError("a time such as 90s, 15m, 36h or 30d")
    return number


def _history_age(value: Any) -> float:
    number = duration(value)
    if number < SHORTEST_HISTORY_AGE:
        raise ValueError("at least 1h: the request ids in it tell whether an unanswered start had won")
    return number


def _address(value: Any) -> tuple[str, int]:
    host, colon, port = str(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise ValueError("HOST:PORT, such as 127.0.0.1:9464 (port 0: any that is free)")
    return host, int(port)


def _endpoints(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
        return split_endpoints(value)
    raise ValueError("one endpoint or a list of them")


def _verifier_urls(value: Any) -> tuple[str, ...]:
    """Prefixes: a list, or one text with commas between."""
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


def _types(value: Any) -> tuple[str, ...]:
    names = _names(value, "an operation type or a list of them, such as validate,build-index")
    for name in names:
        check_type_name(name)
    return names


def _tables(value: Any) -> tuple[str, ...]:
    """Names of tables, and namespaces: ``sales.*``."""
    names = _names(value, "a table, a namespace or a list of them, such as sales.orders,hr.*")
    for name in names:
        exact = name.removesuffix(executor_nodes.NAMESPACE)
        if not exact or "*" in exact or (exact != name and exact.endswith(".")):
            raise InvalidArgument(
                f"{shown(name)} is neither a table nor a namespace: write each name in full, or a namespace as sales.*"
            )
        encode(exact)
    return names


def _spark_catalogs(value: Any) -> tuple[str, ...]:
    names = _names(value, "the name of a catalog of Spark or a list of them, such as lake,archive")
    return tuple(spark_rules.check_name(name) for name in names)


def _yes(value: Any) -> bool:
    if str(value).lower() not in ("1", "true", "yes", "0", "false", "no"):
        raise ValueError("1 or 0")
    return str(value).lower() in ("1", "true", "yes")


def _one_of(names: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        text = str(value).lower()
        if text not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text

    return read


def _name(value: Any) -> str:
    text = _text(value)
    encode(text)
    return text


class _WrongPair(ValueError):
    """One of several pairs is wrong: that one is shown, not all of them."""

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
        key, equals, text = item.partition("=") if isinstance(item, str) else ("", "", "")
        if not equals or not key.strip():
            raise _WrongPair(item)
        found[key.strip()] = text
    return found


def _job_time_limits(value: Any) -> dict[str, float]:
    """Operation type, or :data:`ALL_TYPES` → seconds."""
    found: dict[str, float] = {}
    for name, text in pairs(value).items():
        if name != ALL_TYPES:
            check_type_name(name)
        try:
            found[name] = min(duration(text), LONGEST_TIME_LIMIT)
        except ValueError:
            raise _WrongPair(f"{name}={text}", "TYPE=TIME, such as validate=2h or *=36h") from None
    return found


@frozen
class Setting:
    """How one setting is read. ``read`` raises ValueError with what the value must be. A secret is never shown."""

    read: Callable[[Any], Any]
    default: Any = None
    secret: bool = False


SETTINGS: Mapping[str, Setting] = {
    "etcd": Setting(_endpoints, (DEFAULT_ENDPOINT,)),
    "namespace": Setting(_text, ""),
    "user": Setting(_text),
    "password": Setting(_text, secret=True),
    "password_file": Setting(_text),
    "cacert": Setting(_text),
    "cert": Setting(_text),
    "key": Setting(_text),
    "connect_timeout": Setting(_number, 10.0),
    "request_timeout": Setting(_number, 5.0),
    "accept_etcd_defects": Setting(_yes, False),
    "log_level": Setting(_one_of(LOG_LEVELS), "info"),
    "log_format": Setting(_one_of(LOG_FORMATS), "text"),
    "id": Setting(_name),
    "work_dir": Setting(_text),
    "shared_dir": Setting(_text, ""),
    "slots": Setting(_count),
    "spark_master": Setting(_text, "local[*]"),
    "spark_conf": Setting(pairs, {}, secret=True),
    "ttl": Setting(_ttl, 10.0),
    "poll": Setting(_number, 30.0),
    "label": Setting(pairs, {}),
    "history_limit": Setting(_count, 1000),
    "history_age": Setting(_history_age),
    "metrics": Setting(_address),
    "call_limit": Setting(duration, 3600.0),
    "job_time_limit": Setting(_job_time_limits, {}),
    "verifier_url": Setting(_verifier_urls, ()),
    "trusted_spark_catalogs": Setting(_spark_catalogs, ()),
    "types": Setting(_types),
    "tables": Setting(_tables),
    "certificate_key_file": Setting(_text),
    "actions_log": Setting(_text),
    "data_dir": Setting(_text, ".distop"),
    "port": Setting(_port),
}
"""Every setting, by its name in Python; a flag's name has ``-`` for ``_``."""


class Settings:
    """The settings of one run. ``flags``: those given, by Python name (None: not given). ``file``: the settings file; a
    library reads none. ``names``: what flags are called where they are no options of a command line.

    Raises InvalidArgument where the file has a setting that is not known.
    """

    def __init__(
        self,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        *,
        file: SettingsFile = NO_FILE,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._flags = {k: v for k, v in (flags or {}).items() if v is not None}
        self._env = os.environ if env is None else env
        self._names = names or {}
        self.file = file
        self._values = {key.replace("-", "_"): value for key, value in file.values.items()}
        unknown = sorted(key for key in file.values if key.replace("-", "_") not in SETTINGS)
        if unknown:
            named = ", ".join(f"{key}{did_you_mean(key.replace('-', '_'), SETTINGS)}" for key in unknown)
            what = "an unknown setting" if len(unknown) == 1 else "unknown settings"
            raise InvalidArgument(f"{file.path} has {what}: {named}; known: {', '.join(sorted(SETTINGS))}")

    def get(self, name: str) -> Any:
        """The value of a setting: of the flag, else the variable, else the file, else its default. A setting of pairs
        has those of all three: for one key the same order decides. Raises InvalidArgument, which says where the wrong
        value stands.
        """
        setting, variable = SETTINGS[name], f"DISTOP_{name.upper()}"
        sources = (
            (self._flags.get(name), self._names.get(name, f"--{name.replace('_', '-')}")),
            (self._env.get(variable) or None, variable),
            (self._values.get(name), f"{name} in {self.file.path}"),
        )
        found = (self._read(setting, value, where) for value, where in sources if value is not None)
        if isinstance(setting.default, dict):
            return {key: value for one in reversed(list(found)) for key, value in one.items()}
        return next(found, setting.default)

    def given(self, name: str) -> bool:
        """The setting stands somewhere, and so is not the default."""
        return bool(name in self._flags or self._env.get(f"DISTOP_{name.upper()}") or name in self._values)

    def by_flag(self, name: str) -> bool:
        """The setting stands in the command line."""
        return name in self._flags

    @staticmethod
    def _read(setting: Setting, value: Any, where: str) -> Any:
        try:
            return setting.read(value)
        except ValueError as error:
            wrong = error.item if isinstance(error, _WrongPair) else value
            told = "" if setting.secret else f", not {shown(wrong)}"
            raise InvalidArgument(f"{where} must be {error}{told}") from None
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from None


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read, for people: without the error's number, and without what stands in the file."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else "it is not UTF-8"


# ---------------------------------------------------------------- the records


def cores() -> int:
    """The processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _password(settings: Settings) -> str | None:
    path = settings.get("password_file")
    if path is None:
        password: str | None = settings.get("password")
        return password
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the password file {path} cannot be read: {_reason(error)}") from None


SHORTEST_KEY, LONGEST_KEY = 32, 4096
"""Bytes of a certificate key."""


def _certificate_key(path: str | None) -> bytes:
    """Raises InvalidArgument, which repeats nothing of the file."""
    if path is None:
        return b""
    what = f"the file {path} of certificate-key-file"
    try:
        # A pipe would hold up who opens it.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(LONGEST_KEY + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise InvalidArgument(f"{what} cannot be read: {_reason(error)}") from None
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{what} is no regular file")
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o077:
        raise InvalidArgument(f"{what} must belong to this user, and be closed to all others: chmod 600 {path}")
    if key.lstrip().startswith(b"-----BEGIN"):
        raise InvalidArgument(
            f"{what} is a key or certificate in PEM, such as TLS needs: make another key for signatures of reports "
            "(head -c 32 /dev/urandom)"
        )
    if not SHORTEST_KEY <= len(key) <= LONGEST_KEY:
        raise InvalidArgument(
            f"{what} must have {SHORTEST_KEY} to {LONGEST_KEY} bytes: head -c 32 /dev/urandom > {path}"
        )
    return key


def etcd_config(settings: Settings, *, for_ever: bool = False) -> EtcdConfig:
    """The etcd part. ``for_ever``: reads are repeated without end, as daemons want it; else for the connect timeout."""
    return EtcdConfig(
        endpoints=settings.get("etcd"),
        username=settings.get("user"),
        password=_password(settings),
        ca_cert=settings.get("cacert"),
        cert=settings.get("cert"),
        key=settings.get("key"),
        namespace=check_namespace(settings.get("namespace")),
        connect_timeout=settings.get("connect_timeout"),
        request_timeout=settings.get("request_timeout"),
        accept_defects=settings.get("accept_etcd_defects"),
        read_timeout=None if for_ever else settings.get("connect_timeout"),
    )


def client_config(settings: Settings) -> ClientConfig:
    """What a client is told. Raises InvalidArgument."""
    etcd = etcd_config(settings)
    return ClientConfig(etcd, etcd.namespace, settings.get("shared_dir"))


def default_work_dir(executor_id: str | None, env: Mapping[str, str]) -> Path:
    """``$XDG_STATE_HOME/distop/<executor>``: it outlives a restart and is this user's own."""
    state = env.get("XDG_STATE_HOME")
    home = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return home / "distop" / encode(executor_id or socket.gethostname() or "executor")


def check_heartbeats(master: str, ttl: float, spark_conf: Mapping[str, str]) -> None:
    """Refuse sessions that end before Spark executors on other nodes notice. Raises InvalidArgument."""
    own = {"spark.executor.heartbeatInterval", "spark.executor.heartbeat.maxFailures"} <= spark_conf.keys()
    if not master.startswith("local") and ttl < spark_rules.LEAST_TTL and not own:
        raise InvalidArgument(
            f"with the Spark master {master} a ttl of {ttl:g} s is too short: at least {spark_rules.LEAST_TTL:g} s, so "
            "that Spark executors on other nodes stop before their jobs are run by another executor"
        )


def check_arguments(settings: Settings) -> None:
    """Refuse secrets among Spark's settings on the command line. Raises InvalidArgument."""
    for name in settings.get("spark_conf") if settings.by_flag("spark_conf") else ():
        if secret_settings.is_secret(name):
            raise InvalidArgument(
                f"--spark-conf {name}=… may be a secret, and all users of this machine can read a command line: "
                "give it as spark-conf in the file of --config, or in DISTOP_SPARK_CONF"
            )


def executor_config(settings: Settings, env: Mapping[str, str] | None = None) -> ExecutorConfig:
    """What an executor daemon is told. Raises InvalidArgument."""
    check_arguments(settings)
    executor_id = settings.get("id")
    work_dir = settings.get("work_dir")
    check_heartbeats(settings.get("spark_master"), settings.get("ttl"), settings.get("spark_conf"))
    path = Path(work_dir) if work_dir else default_work_dir(executor_id, os.environ if env is None else env)
    return ExecutorConfig(
        etcd=etcd_config(settings, for_ever=True),
        work_dir=path.absolute(),
        namespace=check_namespace(settings.get("namespace")),
        executor_id=executor_id,
        shared_dir=settings.get("shared_dir"),
        slots=settings.get("slots") or cores(),
        spark_master=settings.get("spark_master"),
        spark_conf=settings.get("spark_conf"),
        ttl=settings.get("ttl"),
        poll=settings.get("poll"),
        labels=settings.get("label"),
        log_level=settings.get("log_level"),
        log_format=settings.get("log_format"),
        history_limit=settings.get("history_limit"),
        history_age=settings.get("history_age"),
        metrics=settings.get("metrics"),
        call_limit=settings.get("call_limit"),
        job_time_limits=settings.get("job_time_limit"),
        verifier_urls=settings.get("verifier_url"),
        trusted_spark_catalogs=settings.get("trusted_spark_catalogs"),
        serves=executor_nodes.Serves(settings.get("types"), settings.get("tables")),
        certificate_key=_certificate_key(settings.get("certificate_key_file")),
        actions_log=settings.get("actions_log"),
        source=settings.file.text,
    )

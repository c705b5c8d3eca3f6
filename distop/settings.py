"""Settings: a flag, else ``DISTOP_<NAME>``, else the settings file, else the default.

One table, :data:`SETTINGS`, has for each setting the reader of its value, its default, and its option on the command
line. In the file, settings are at the top level under the same names (``spark-master`` or ``spark_master``)::

    etcd = ["etcd1:2379", "etcd2:2379"]
    namespace = "prod"
    [spark-conf]
    "spark.driver.memory" = "4g"
"""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop import setting_values as v
from distop.errors import InvalidArgument
from distop.protocol import executor_nodes
from distop.protocol.frozen import frozen
from distop.protocol.keys import check_namespace, encode
from distop.protocol.size_limits import DEFAULT, Limits
from distop.protocol.texts import did_you_mean, shown
from distop.runtime import secret_settings, spark_rules
from distop.setting_values import ALL_TYPES
from distop.settings_file import NO_FILE
from distop.store.connection_settings import DEFAULT_ENDPOINT, EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.settings_file import SettingsFile
    from distop.storage.storage_options import StorageOptions

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS = ("text", "json")
DEFAULT_JOB_TIME_LIMIT = 86_400.0
"""Seconds. A job is one partition: one without an end must not hold a slot for ever."""


@frozen
class ClientConfig:
    """The settings of a client: etcd, its user, and the namespace of distop's keys."""

    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    namespace: str = ""
    shared_dir: str = ""
    """The executors' shared directory, in which large results are; "": ``_distop/`` under each table's location."""
    storage: Mapping[str, StorageOptions] = field(default_factory=dict)
    """How this process reaches buckets (:func:`distop.storage.storage_options.configure`)."""
    service: str = ""
    """The URL of a service, through which all calls go; "": the client calls etcd itself.

    The TLS files and the connect time-out of ``etcd`` are then those for the service.
    """
    token: str = field(default="", repr=False)
    """The bearer token for the service."""


@frozen
class ExecutorConfig:
    """The settings of an executor daemon.

    ``executor_id`` None: made from the host's name, and kept in the work directory. ``shared_dir`` "": ``_distop/``
    under each table's location. ``storage``: how to reach buckets. ``slots``: jobs, or batches of one operation's jobs,
    at a time. ``ttl``: seconds
    until a silent daemon counts as gone. ``poll``: seconds between the listings behind the watches of gates, nodes
    and elections (claims and jobs: 300, or ``poll`` where it is longer). ``history_limit``: history records kept per
    table. ``history_age``: seconds for which they are kept; None: as long as the limit lets them. ``metrics``: host and
    port on which metrics are served; None: nowhere. ``call_limit``: seconds for planning, and for completion.
    ``job_time_limits``: operation type → seconds for one attempt of a job at most; ``*``: of all other types.
    ``verifier_urls``: prefixes of the URLs at which it may ask whether the transaction of a prepared operation was
    completed. ``trusted_spark_catalogs``: catalogs of Spark whose server or code may choose classes, hosts and where
    credentials are sent. ``export_to``: the places below which tables may be exported. ``serves``: the types and tables
    that it works for. ``source``: which settings file was used, for people. ``limits``: no setting; the simulator gives
    others. ``behaviors``: no setting either; ``distop dev`` gives those that are not installed (type → place of its
    class, see :mod:`distop.behavior_source`).
    """

    etcd: EtcdConfig
    work_dir: Path
    namespace: str = ""
    executor_id: str | None = None
    shared_dir: str = ""
    storage: Mapping[str, StorageOptions] = field(default_factory=dict)
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
    telemetry: str | None = None
    call_limit: float = 3600.0
    job_time_limits: Mapping[str, float] = field(default_factory=dict)
    verifier_urls: tuple[str, ...] = ()
    trusted_spark_catalogs: tuple[str, ...] = ()
    export_to: tuple[str, ...] = ()
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


@frozen
class Setting:
    """How one setting is read. ``read`` raises ValueError with what the value must be. A secret is never shown.

    ``metavar`` and ``help``: of its option on the command line. Without a metavar it has none. ``repeatable``: the
    option may be given several times.
    """

    read: Callable[[Any], Any]
    default: Any = None
    metavar: str = ""
    help: str = ""
    repeatable: bool = False
    secret: bool = False


SETTINGS: Mapping[str, Setting] = {
    "etcd": Setting(v.endpoints, (DEFAULT_ENDPOINT,), "ENDPOINTS", "host:port, several with commas between."),
    "namespace": Setting(v.text, "", "NS", "Prefix of all of distop's keys in etcd."),
    "user": Setting(v.text, None, "NAME", "etcd's user; the password: DISTOP_PASSWORD."),
    "password": Setting(
        v.text,
        help="The password of `user`. It has no flag: all users of a machine can read a command line.",
        secret=True,
    ),
    "password_file": Setting(v.text, None, "FILE", "A file that holds the password."),
    "cacert": Setting(v.text, None, "FILE", "CA certificate of etcd (PEM)."),
    "cert": Setting(v.text, None, "FILE", "TLS client certificate (PEM)."),
    "key": Setting(v.text, None, "FILE", "Its private key (PEM)."),
    "connect_timeout": Setting(v.number, 10.0, "S", "Seconds to wait for etcd (10)."),
    "request_timeout": Setting(v.number, 5.0, help="Seconds until a request to etcd is given up and sent again."),
    "accept_etcd_defects": Setting(
        v.switch, False, help="1: work with an etcd version that is refused for its defects. For tests only."
    ),
    "log_level": Setting(v.one_of(LOG_LEVELS), "info", "LEVEL", "debug, info, warning, error, critical."),
    "log_format": Setting(v.one_of(LOG_FORMATS), "text", "F", "text or json; always on stderr."),
    "id": Setting(v.name, None, "NAME", "The executor's name (the host's, and kept)."),
    "work_dir": Setting(v.text, None, "DIR", "Folder for local files of one cluster; kept between starts."),
    "shared_dir": Setting(v.shared_dir, "", "DIR", "Folder or URL shared by all executors (<location>/_distop)."),
    "slots": Setting(v.count, None, "N", "Jobs or batches at a time (the cores)."),
    "spark_master": Setting(v.text, "local[*]", "URL", "Spark's master (local[*])."),
    "spark_conf": Setting(v.pairs, {}, "K=V", "A Spark setting (repeatable).", repeatable=True, secret=True),
    "ttl": Setting(v.ttl, 10.0, "S", "Time to live in seconds of a daemon's session (10)."),
    "poll": Setting(
        v.number,
        30.0,
        "S",
        "Seconds between two polls of gates, nodes and elections, in addition to their watches (30); claims and jobs "
        "are polled each 300 s, or less often with a larger value.",
    ),
    "label": Setting(v.pairs, {}, "K=V", "For `start --where` (repeatable).", repeatable=True),
    "history_limit": Setting(v.count, 1000, "N", "History records kept per table (1000)."),
    "history_age": Setting(v.history_age, None, "T", "How long history records are kept: 30d, 36h (no limit)."),
    "metrics": Setting(v.address, None, "HOST:PORT", "Serve Prometheus metrics here (none)."),
    "telemetry": Setting(
        v.http_url, None, "URL", "Export traces and metrics over OTLP to here, such as http://127.0.0.1:4318 (none)."
    ),
    "listen": Setting(v.address, ("127.0.0.1", 7781), "HOST:PORT", "Where the service listens (127.0.0.1:7781)."),
    "http": Setting(v.address, None, "HOST:PORT", "Serve REST here, too (none)."),
    "access": Setting(v.text, None, "FILE", "Who may call the service (nobody is identified)."),
    "audit_log": Setting(v.text, None, "FILE", "A line of JSON for each call that writes or is refused (none)."),
    "service_cert": Setting(v.text, None, "FILE", "The service's certificate (PEM): serve with TLS."),
    "service_key": Setting(v.text, None, "FILE", "Its private key (PEM)."),
    "client_ca": Setting(v.text, None, "FILE", "CA of the certificates that callers have to show (PEM)."),
    "call_limit": Setting(
        v.duration, 3600.0, "T", "Time limit for planning an operation, and for its completion code (1h)."
    ),
    "job_time_limit": Setting(
        v.job_time_limits,
        {},
        "TYPE=T",
        "Time limit of one attempt of a job (repeatable; *: all other types; *=24h).",
        repeatable=True,
    ),
    "verifier_url": Setting(
        v.verifier_prefixes,
        (),
        "URL",
        "Allow verifiers at URLs below this one (repeatable; none by default).",
        repeatable=True,
    ),
    "trusted_spark_catalogs": Setting(
        v.spark_catalogs,
        (),
        "NAME,…",
        "Spark catalogs that may choose classes, hosts and where credentials go, such as REST catalogs (none).",
    ),
    "export_to": Setting(
        v.export_places,
        (),
        "PLACE",
        "Allow exports to this folder or URL, and below it (repeatable; none by default).",
        repeatable=True,
    ),
    "types": Setting(v.types, None, "TYPE,…", "Serve operations of these types only (all)."),
    "tables": Setting(v.tables, None, "TABLE,…", "Serve these tables only; sales.* matches a prefix (all)."),
    "certificate_key_file": Setting(
        v.text, None, "FILE", "HMAC key that signs validation reports; not a TLS key (none)."
    ),
    "actions_log": Setting(v.text, None, "FILE", "Append one line of JSON for each action: who did what."),
    "storage": Setting(
        v.storage,
        {},
        help='How to reach buckets: a table for each bucket or scheme, such as `[storage."s3://lake"]`.',
        secret=True,  # a refused value may have a credential
    ),
    "data_dir": Setting(v.text, ".distop", "DIR", "Folder for all data (./.distop)."),
    "port": Setting(v.port, None, "N", "etcd's port (2379, or a free one)."),
}
"""Every setting, by its name in Python; a flag's name has ``-`` for ``_``."""


class Settings:
    """The settings of one run. Raises InvalidArgument for an unknown setting in the file.

    ``flags``: the given settings, by Python name (None: not given). ``file``: the settings file; a library reads none.
    ``names``: the names of flags in messages, if they are not options of a command line.
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
        """The value of a setting: of the flag, else the variable, else the file, else its default.

        A setting of pairs has the pairs of all three, in the same order of precedence for each key. Raises
        InvalidArgument, which names the source of the invalid value.
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
        """Whether the setting was given anywhere, so that it is not the default."""
        return bool(name in self._flags or self._env.get(f"DISTOP_{name.upper()}") or name in self._values)

    def by_flag(self, name: str) -> bool:
        """Whether the setting was given on the command line."""
        return name in self._flags

    @staticmethod
    def _read(setting: Setting, value: Any, where: str) -> Any:
        try:
            return setting.read(value)
        except ValueError as error:
            wrong = error.item if isinstance(error, v.WrongPair) else value
            value_text = "" if setting.secret else f", not {shown(wrong)}"
            raise InvalidArgument(f"{where} must be {error}{value_text}") from None
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from None


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read, without the error's number and without the file's content."""
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
    """The settings of a client. Raises InvalidArgument."""
    etcd = etcd_config(settings)
    return ClientConfig(etcd, etcd.namespace, settings.get("shared_dir"), settings.get("storage"))


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
    """The settings of an executor daemon. Raises InvalidArgument."""
    check_arguments(settings)
    executor_id = settings.get("id")
    work_dir = settings.get("work_dir")
    check_heartbeats(settings.get("spark_master"), settings.get("ttl"), settings.get("spark_conf"))
    path = Path(work_dir) if work_dir else default_work_dir(executor_id, os.environ if env is None else env)
    same = (
        *("shared_dir", "spark_master", "spark_conf", "ttl", "poll", "log_level", "log_format", "history_limit"),
        *(
            "history_age",
            "metrics",
            "telemetry",
            "call_limit",
            "trusted_spark_catalogs",
            "export_to",
            "actions_log",
            "storage",
        ),
    )
    return ExecutorConfig(
        etcd=etcd_config(settings, for_ever=True),
        work_dir=path.absolute(),
        namespace=check_namespace(settings.get("namespace")),
        executor_id=executor_id,
        slots=settings.get("slots") or cores(),
        labels=settings.get("label"),
        job_time_limits=settings.get("job_time_limit"),
        verifier_urls=settings.get("verifier_url"),
        serves=executor_nodes.Serves(settings.get("types"), settings.get("tables")),
        certificate_key=_certificate_key(settings.get("certificate_key_file")),
        source=settings.file.text,
        **{name: settings.get(name) for name in same},
    )

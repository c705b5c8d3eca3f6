"""What all runs and calls of one child share: settings, connection, Spark session, behaviors, deadline."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, load, registered
from distop.behavior_source import BehaviorSource
from distop.errors import NotServed
from distop.protocol.executor_nodes import Serves, refusal
from distop.protocol.records import OperationRef
from distop.runtime import spark_rules
from distop.worker.child_side.spark_session import SparkHolder
from distop.worker.child_side.table_folders import TableFolders
from distop.worker.guardian import boottime

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from distop.behavior import Loadable, TableRecord
    from distop.worker.child_side.outbox import Outbox


class Environment:
    """The shared state of one child: settings, connection, Spark session, loaded behaviors."""

    def __init__(self, config: Mapping[str, Any], work_dir: Path, outbox: Outbox) -> None:
        self.work_dir = work_dir
        self.shared_dir: str = config["shared_dir"]
        self.verifier_urls: tuple[str, ...] = tuple(config["verifier_urls"])
        self.serves = Serves.from_json(config["serves"])
        self.space: str = config["space"]
        self.executor: str = config["executor"]
        self.outbox = outbox
        # Overrides the Spark setting, so that the list of trusted catalogs has one source.
        trusted = {spark_rules.CONF: ",".join(config["trusted_spark_catalogs"])}
        self.spark = SparkHolder(
            config["spark_master"], config["executor"], work_dir, config["ttl"], {**config["spark_conf"], **trusted}
        )
        self.log = logging.getLogger("distop.child")
        self.stuck = False
        """Cancelled work does not stop: no job starts in this process any more."""
        self.stopping = False
        """The child is stopping: errors of jobs are no longer the jobs' own."""
        self.deadline = 0.0
        """The session's last renewed deadline (seconds of CLOCK_BOOTTIME), for all runs; 0: not renewed yet."""
        named = {name: BehaviorSource.parse(text) for name, text in config["behaviors"].items()}
        found: dict[str, Loadable] = {**registered(), **named}
        self.installed = {name: entry for name, entry in found.items() if not refusal(self.serves, name, ())}
        """The installed behaviors by type name, of the types that this executor serves, at the start of this child."""
        self.table_folders = TableFolders()
        self._behaviors: dict[str, Behavior] = {}
        self._lock = threading.Lock()

    def refuse_unserved(self, op: str, type_name: str | None, tables: Iterable[TableRecord | str | None]) -> None:
        """Raises NotServed if this executor does not serve an operation's type, its table, or one of ``tables``.

        ``type_name`` None: no code of the type is needed. The daemon has checked the same; this is the last check
        before anything is imported or opened.
        """
        ref = OperationRef.parse(op)
        wanted = [ref.table]
        wanted += [one if isinstance(one, str) else one.name for one in tables if one is not None]
        # The requested type selects the code, and the record selects the table: check both besides the names in ``op``.
        types = (None,) if type_name is None else (ref.type, type_name)
        for name in types:
            if why := refusal(self.serves, name, wanted):
                raise NotServed(f"executor {self.executor} refuses {op}: {why}")

    def behavior(self, type_name: str) -> Behavior:
        """The behavior of a type, loaded on first use. Raises UnknownBehavior, and the errors of its import."""
        with self._lock:
            if type_name not in self._behaviors:
                self._behaviors[type_name] = load(type_name, self.installed)
            return self._behaviors[type_name]


class SessionDeadline:
    """The session's deadline for one request of the daemon.

    If a request arrives in time, the renewed deadline counts for all that it starts later, such as the halves of a
    batch. A request that arrives late stays late, despite later renewals. ``deadline``: see RunMessage.
    """

    def __init__(self, env: Environment, deadline: float) -> None:
        self._env = env
        self._deadline = deadline
        self._arrived_late = False
        self._arrived_late = self.passed()

    def passed(self) -> bool:
        """Whether the deadline has passed, so that the request must start nothing more."""
        if not self._deadline:
            return False
        return self._arrived_late or boottime() >= max(self._deadline, self._env.deadline)
